"""From records to the tokens of documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.errors import DataError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .config import SourceConfig
    from .records import Record


def text_of(record: Record, config: SourceConfig) -> str:
    """The text of a record.

    Raises:
        DataError: it has none.
    """
    field = config.fields.get("text", "text")
    value, where = record.value, record.where
    if field not in value:
        fields = ", ".join(sorted(value)) or "none"
        raise DataError(
            f"{where}: no field {field!r}. Fields of this line: {fields}.{nearest(field, value)} "
            "Set text_field to the one that holds the document."
        )
    text = value[field]
    if not isinstance(text, str):
        raise DataError(
            f"{where}: field {field!r} holds {text!r:.80}, a {type(text).__name__}, but must hold a string."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: field {field!r} holds half of a surrogate pair, {text[error.start]!r}, at character "
            f"{error.start}; that is no text. Remove or repair it."
        ) from None
    return text


@dataclass(frozen=True)
class Example:
    """The tokens of one document, (S,), which of them are learnt (None: all), and further values by name."""

    tokens: np.ndarray
    labelled: np.ndarray | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Counts:
    """What became of records: `documents` of `tokens`, of which `labelled` are learnt; records cut, dropped, split."""

    documents: int = 0
    tokens: int = 0
    labelled: int = 0
    cut: int = 0
    dropped: int = 0
    split: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})


class Encoder:
    """Makes examples of records."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        source_format: str,
        *,
        loss_on: str = "answers",
        chat_template: str | None = None,
        too_long: str | None = None,
        seq_len: int | None = None,
        fields: Mapping[str, str] | None = None,
        columns: Sequence[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._columns = tuple(columns)
        self._field = (fields or {}).get("text", "text")
        self._backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        if self._backend is not None:
            # A tokenizer saved with a maximum length would cut documents.
            self._backend.no_truncation()
            self._backend.no_padding()

    def encode(self, records: list[Record]) -> tuple[list[list[Example]], Counts]:
        """For each record its documents."""
        texts = [record.value[self._field] for record in records]
        if self._backend is not None:
            ids = [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        else:
            ids = [self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
        found, counts = [], Counts()
        for record, document in zip(records, ids, strict=True):
            tokens = np.array([*document, self._tokenizer.eos_token_id], np.uint32)
            columns = {name: record.value[name] for name in self._columns}
            found.append([Example(tokens, None, columns)])
            counts += Counts(documents=1, tokens=len(tokens), labelled=len(tokens))
        return found, counts
