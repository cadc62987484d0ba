"""Records of texts and of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...base.errors import DataError
from ..reading.records import Record
from ..tokenizer import token_dtype, vocab_size_of
from .drafts import Draft
from .fields import Fields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokens = tuple[np.ndarray, np.ndarray | None]
"""Tokens and which of them are learnt, (T,) each."""
Parse = Callable[[Record], Sequence[Draft] | Sequence[Tokens]]

_IGNORED = -100


def text_of(fields: Fields) -> Parse:
    """Texts of which everything is learnt."""

    def parse(record: Record) -> list[Draft]:
        text = fields.text(record, "text")
        return [Draft(text, opened=True, closed=True)]

    return parse


def tokens_of(fields: Fields, tokenizer: PreTrainedTokenizerBase) -> Parse:
    """Documents that were tokenized before, to which nothing is added; all is learnt but what they say is not."""
    vocab_size = vocab_size_of(tokenizer)
    dtype = token_dtype(tokenizer)

    def integers(record: Record, field: str, rule: str) -> np.ndarray:
        value = fields.need(record, field)
        try:
            found = np.asarray(value)
        except ValueError:  # lists of several lengths in a list
            fields.refuse(record, field, value, rule)
        if found.ndim != 1 or (found.dtype.kind not in "iub" and len(found)):
            fields.refuse(record, field, value, rule)
        return found.astype(np.int64)

    def parse(record: Record) -> list[Tokens]:
        ids = integers(record, "input_ids", "must hold a list of token ids")
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if len(outside):
            raise DataError(
                f"{record.where}: token {outside[0]} is none of the tokenizer, which has {vocab_size:,}. Set tokenizer "
                "to the one that made these tokens."
            )
        labelled = np.ones(len(ids), bool)
        for field in ("labels", "loss_mask"):
            if fields.find(record, field) is not None:
                values = integers(record, field, "must hold a list of integers, one for each token")
                if len(values) != len(ids):
                    raise DataError(
                        f"{record.where}: field {fields.name(field)!r} holds {len(values)} values for {len(ids)} "
                        "tokens. It must hold one for each."
                    )
                labelled &= _learnt_by_labels(record, ids, values) if field == "labels" else _flags(record, values)
        return [(ids.astype(dtype), labelled)]

    return parse


def _learnt_by_labels(record: Record, ids: np.ndarray, labels: np.ndarray) -> np.ndarray:
    learnt = labels != _IGNORED
    wrong = np.flatnonzero(learnt & (labels != ids))
    if len(wrong):
        place = wrong[0]
        raise DataError(
            f"{record.where}: label {labels[place]} of token {place} is neither {_IGNORED}, not to be learnt, nor the "
            f"token itself, {ids[place]}. Labels are not moved by one: the model's loss does that."
        )
    return learnt


def _flags(record: Record, values: np.ndarray) -> np.ndarray:
    wrong = values[(values != 0) & (values != 1)]
    if len(wrong):
        raise DataError(f"{record.where}: loss_mask holds {wrong[0]}; 1 is for tokens to be learnt, 0 for others.")
    return values.astype(bool)
