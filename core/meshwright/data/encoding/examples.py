"""From records to tokenized documents, of which some tokens are learnt.

An `Encoder` is made anew in each process that tokenizes, from a tokenizer and plain values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...base.errors import ConfigError
from ..config import FIELDS, Format, TooLong
from ..reading.records import Record
from ..tokenizer import no_tokenizer_threads
from .chat import Conversations
from .conversations import LossOn
from .drafts import Draft, DraftWriter
from .fields import Fields, check_text
from .formats import Parse, text_of, tokens_of
from .lengths import Counts, Example, fitted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Counts", "Encoder", "Example"]


class Encoder:
    """Makes tokenized documents of the records of one source."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        source_format: Format = "text",
        *,
        loss_on: LossOn = "answers",
        chat_template: str | None = None,
        too_long: TooLong | None = None,
        seq_len: int | None = None,
        fields: Mapping[str, str] | None = None,
        columns: Sequence[str] = (),
    ) -> None:
        """Check what a run file says of a source.

        Args:
            tokenizer: with an eos token.
            source_format: see docs/conversations.md.
            loss_on: which tokens are learnt, in all formats but `text` and `tokens`.
            chat_template: text of a Jinja template; None: the tokenizer's own.
            too_long: see `DataConfig.too_long`, which says what None stands for.
            seq_len: tokens of the longest document; None: any number.
            fields: see `SourceConfig.fields`.
            columns: see `SourceConfig.columns`.

        Raises:
            ConfigError: they do not go together.
        """
        taken = set(columns) & set(FIELDS[source_format])
        if taken:
            raise ConfigError(f"columns: {', '.join(sorted(taken))} is what format={source_format} reads by itself.")
        self._together = source_format == "preference"
        self._too_long: TooLong = too_long or ("split" if source_format in ("text", "tokens") else "error")
        if self._too_long == "split" and self._together:
            raise ConfigError(
                "too_long=split is not for format=preference: pieces of two answers are no pairs. Set too_long to "
                "error, cut or drop."
            )
        self._seq_len = seq_len
        self._fields = Fields(source_format, fields or {}, tuple(columns))
        self._columns = tuple(columns)
        self._writer = DraftWriter(tokenizer)
        self._parse = _parser(source_format, tokenizer, self._fields, loss_on, chat_template)

    def encode(self, records: Sequence[Record]) -> tuple[list[list[Example]], Counts]:
        """Make documents of records.

        Returns:
            For each record its documents: mostly one; two for preferences; several where one is split, or where a chat
            template writes earlier turns otherwise as a conversation goes on; none where it is left out.

        Raises:
            DataError: a record is not what it should be, or longer than `seq_len` where that is an error.
        """
        parsed = [self._parse(record) for record in records]
        drafts: list[Draft] = []
        counts = Counts(records=len(records))
        for record, documents in zip(records, parsed, strict=True):
            for draft in documents:
                if isinstance(draft, Draft):
                    check_text(draft.text, record.where, "the text")
                    drafts.append(draft)
                    counts += Counts(unanswered=draft.unanswered)
        with no_tokenizer_threads():
            written = iter(self._writer.write(drafts))
        found: list[list[Example]] = []
        for record, documents in zip(records, parsed, strict=True):
            made = [next(written) if isinstance(each, Draft) else each for each in documents]
            columns = self._values(record, [len(tokens) for tokens, _ in made])
            kept, own = fitted(
                [Example(tokens, labelled, values) for (tokens, labelled), values in zip(made, columns, strict=True)],
                where=record.where,
                too_long=self._too_long,
                seq_len=self._seq_len,
                together=self._together,
            )
            found.append(kept)
            counts += own
        return found, counts

    def _values(self, record: Record, lengths: list[int]) -> list[dict[str, Any]]:
        """The columns of each document of a record."""
        found: list[dict[str, Any]] = [{} for _ in lengths]
        for name in self._columns:
            value = self._fields.need(record, name)
            values = value if self._together and isinstance(value, list | tuple) else [value] * len(lengths)
            if len(values) != len(lengths):
                self._fields.refuse(record, name, value, "must hold a number, or two: of chosen and rejected")
            for entries, each, length in zip(found, values, lengths, strict=True):
                entries[name] = self._checked(record, name, each, length)
        return found

    def _checked(self, record: Record, name: str, value: Any, length: int) -> Any:
        if isinstance(value, bool | int | float):
            return value
        is_list = isinstance(value, list) and all(isinstance(each, bool | int | float) for each in value)
        if not is_list or len(value) != length:
            self._fields.refuse(
                record,
                name,
                value,
                f"a column must hold a number, or a list of numbers, one for each of {length} tokens",
            )
        return list(value)


def _parser(
    source_format: Format,
    tokenizer: PreTrainedTokenizerBase,
    fields: Fields,
    loss_on: LossOn,
    chat_template: str | None,
) -> Parse:
    if source_format == "text":
        return text_of(fields)
    if source_format == "tokens":
        return tokens_of(fields, tokenizer)
    conversations = Conversations(tokenizer, fields, loss_on, chat_template)
    if source_format == "messages":
        conversations.check_template()
        return conversations.whole
    return conversations.completed if source_format == "prompt_completion" else conversations.preferred
