"""From a text in which spans are learnt to tokens of which some are learnt.

[Note: edges] A span begins where a prompt ends. When the model answers, it is given the tokens of the prompt alone, so
no token may lie across that edge in training either. The text is tokenized whole, and cut at an edge only where its
tokens up to there are not those of the text up to there. Mostly they are, since a special token stands before an edge:
nothing on one side of it changes the tokens on the other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..tokenizer import token_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]

_ANCHORS = ("\n", "a", ".")


@dataclass(frozen=True)
class Draft:
    """A document before it is tokenized.

    Attributes:
        text: with the special tokens that a template writes.
        learnt: spans of characters, in order and apart; None: all of it.
        opened: begin with what the tokenizer puts before a text.
        closed: end with what it puts after a text, and an eos token, learnt where what stands before them is.
        unanswered: turns of the conversation that are left out of it and of the drafts before it, behind the last
            answer.
    """

    text: str
    learnt: tuple[Span, ...] | None = None
    opened: bool = False
    closed: bool = False
    unanswered: int = 0


@dataclass(frozen=True)
class _Encoded:
    """Tokens of a text and the characters of each; no offsets where a tokenizer cannot tell them."""

    ids: list[int]
    offsets: list[Span]


class DraftWriter:
    """Tokenizes drafts, with special tokens around them as the tokenizer's model was trained.

    Attributes:
        dtype: of tokens.
        before: what `tokenizer("x")` puts before a text: a bos token, or nothing.
        after: what it puts after a text, and an eos token at the end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        if self._backend is not None:
            # A tokenizer saved with a maximum length would cut documents.
            self._backend.no_truncation()
            self._backend.no_padding()
        self._added = frozenset(tokenizer.added_tokens_decoder)
        self.dtype = token_dtype(tokenizer)
        self.before, self.after = self._around()
        # Some tokenizers put a space before a text.
        self._is_same_anywhere = self._ids("\na") == self._ids("\n") + self._ids("a")

    def write(self, drafts: Sequence[Draft]) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """Tokens of each draft, (T,) of `dtype`, and which are learnt, (T,) bool; None: all."""
        whole = iter(self._batch([draft.text for draft in drafts if draft.learnt is None]))
        return [
            self._finished(draft, next(whole), None)
            if draft.learnt is None
            else self._finished(draft, *self._cut_up(draft))
            for draft in drafts
        ]

    def _finished(
        self, draft: Draft, ids: list[int], places: Mapping[int, int] | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Put around the tokens of a draft what they lack: nothing is there twice."""
        before = self.before if draft.opened and ids[: len(self.before)] != self.before else []
        after = self.after if draft.closed and ids[-1:] != self.after[-1:] else []
        tokens = np.array([*before, *ids, *after], self.dtype)
        if draft.learnt is None or places is None:
            return tokens, None
        labelled = np.zeros(len(tokens), bool)
        for start, stop in draft.learnt:
            labelled[len(before) + places[start] : len(before) + places[stop]] = True
        if draft.learnt and draft.learnt[-1][1] == len(draft.text):
            labelled[len(before) + len(ids) :] = True
        return tokens, labelled

    def _cut_up(self, draft: Draft) -> tuple[list[int], dict[int, int]]:
        return self._cut(draft.text, sorted({edge for span in draft.learnt or () for edge in span}), continues=False)

    def _cut(self, text: str, edges: list[int], continues: bool) -> tuple[list[int], dict[int, int]]:
        """Tokens of a text, and how many of them stand before each edge; see [Note: edges]."""
        whole = self._encoded(text, continues)
        added = [index for index in range(len(whole.offsets)) if whole.ids[index] in self._added]
        places: dict[int, int] = {}
        for number, edge in enumerate(edges):
            place = self._place(text, edge, whole, added, continues)
            if place is None:
                left, left_places = self._cut(text[:edge], edges[:number], continues)
                right, right_places = self._cut(text[edge:], [each - edge for each in edges[number + 1 :]], True)
                moved = {each + edge: place + len(left) for each, place in right_places.items()}
                return left + right, {**left_places, edge: len(left), **moved}
            places[edge] = place
        return whole.ids, places

    def _place(self, text: str, edge: int, whole: _Encoded, added: list[int], continues: bool) -> int | None:
        """How many tokens of a text stand before an edge; None where the text up to the edge has others."""
        if edge in (0, len(text)):
            return len(whole.ids) if edge else 0
        start = index = 0
        before = bisect_right(added, edge, key=lambda each: whole.offsets[each][1])
        if before:
            index = added[before - 1]
            start, stop = whole.offsets[index]
            if stop == edge:
                return index + 1
        prefix = self._encoded(text[start:edge], continues and start == 0).ids
        return index + len(prefix) if whole.ids[index : index + len(prefix)] == prefix else None

    def _encoded(self, text: str, continues: bool) -> _Encoded:
        """Tokenize a text, which may continue another one."""
        if continues and not self._is_same_anywhere:
            for anchor in _ANCHORS:
                alone = len(self._ids(anchor))
                both = self._encoded(anchor + text, continues=False)
                if both.ids[:alone] == self._ids(anchor):
                    shift = len(anchor)
                    return _Encoded(both.ids[alone:], [(a - shift, b - shift) for a, b in both.offsets[alone:]])
        if self._backend is None:
            return _Encoded(self._ids(text), [])
        encoding = self._backend.encode(text, add_special_tokens=False)
        return _Encoded(encoding.ids, encoding.offsets)

    def _ids(self, text: str) -> list[int]:
        return self._batch([text])[0]

    def _batch(self, texts: list[str]) -> list[list[int]]:
        if self._backend is not None:
            return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        return [list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in texts]

    def _around(self) -> tuple[list[int], list[int]]:
        """What `tokenizer("x")` puts before and after a text, and an eos token if it puts none at the end."""
        inner = self._ids("x")
        whole = list(self._tokenizer("x", verbose=False)["input_ids"])
        starts = [start for start in range(len(whole)) if whole[start : start + len(inner)] == inner]
        start = starts[0] if starts else 0
        after = whole[start + len(inner) :] if starts else []
        eos = self._tokenizer.eos_token_id
        return whole[:start], after if after[-1:] == [eos] else [*after, eos]
