"""Encode records as tokenized documents with a loss mask."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from meshwright.plugin import IGNORE_INDEX, DataError

from .chat_template import AnswerExtractor, ChatTemplate
from .config import BaseFormat, TooLongAction
from .conversations import ASSISTANT, FieldReader, LossOn, Message, MessageReader, check_text
from .prompt_template import ALPACA, CHAT, NONE, fill_template, get_placeholders
from .sources import Record
from .tokenizer import Document, DocumentTokenizer, choose_token_dtype, disable_tokenizer_threads, get_vocab_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokensAndMask = tuple[np.ndarray, np.ndarray | None]
"""Tokens and loss mask, (T,) each."""
ResultT = TypeVar("ResultT")
ParseRecord = Callable[[Record], Sequence[Document] | Sequence[TokensAndMask]]


@dataclass(frozen=True)
class Example:
    """A tokenized document: tokens and loss mask (None: all supervised), (T,); columns: a number, or T numbers."""

    tokens: np.ndarray
    loss_mask: np.ndarray | None = None
    columns: dict[str, float | int | list[float]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def count_supervised(self) -> int:
        """Return the number of supervised tokens. The first token never counts, since nothing precedes it."""
        return max(len(self) - 1, 0) if self.loss_mask is None else int(np.count_nonzero(self.loss_mask[1:]))

    def get_slice(self, start: int, stop: int) -> Example:
        loss_mask = None if self.loss_mask is None else self.loss_mask[start:stop]
        columns = {
            name: values[start:stop] if isinstance(values, list) else values for name, values in self.columns.items()
        }
        return Example(self.tokens[start:stop], loss_mask, columns)


@dataclass(frozen=True)
class EncodingCounts:
    """Counts of encoded records; two instances can be added.

    `truncated`, `dropped` and `split` count documents that were too long; `unsupervised` counts documents or pieces
    that are left out because nothing in them is supervised; `trailing_turns` counts turns after the last answer of a
    conversation, which are left out.
    """

    records: int = 0
    documents: int = 0
    tokens: int = 0
    supervised: int = 0
    truncated: int = 0
    dropped: int = 0
    split: int = 0
    unsupervised: int = 0
    trailing_turns: int = 0

    def __add__(self, other: EncodingCounts) -> EncodingCounts:
        return EncodingCounts(
            *(getattr(self, each.name) + getattr(other, each.name) for each in fields(EncodingCounts))
        )


class Encoder:
    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        source_format: BaseFormat = "text",
        *,
        loss_on: LossOn = "answers",
        chat_template: str | None = None,
        template: str = NONE,
        too_long: TooLongAction | None = None,
        seq_len: int | None = None,
        fields: Mapping[str, str] | None = None,
        columns: Sequence[str] = (),
    ) -> None:
        """Check the options, which are those of `SourceConfig` and `DataConfig`; `chat_template` is its text."""
        self._is_preference = source_format == "preference"
        self._too_long: TooLongAction = too_long or ("split" if source_format in ("text", "tokens") else "error")
        self._seq_len, self._columns = seq_len, tuple(columns)
        self._fields = FieldReader(fields or {})
        self._writer = DocumentTokenizer(tokenizer)
        self._parse = _build_parser(source_format, tokenizer, self._fields, loss_on, chat_template, template)

    def encode(
        self, records: Sequence[Record], errors: list[DataError] | None = None
    ) -> tuple[list[list[Example]], EncodingCounts]:
        """Return the examples of each record, and counts. An error is raised, or appended to `errors` if given; the
        record then has no examples."""
        parsed = [self._try_or_keep(self._parse_and_check, record, errors) for record in records]
        untokenized = [each for documents in parsed for each in documents or () if isinstance(each, Document)]
        trailing = sum(document.num_trailing_turns for document in untokenized)
        counts = EncodingCounts(records=len(records), trailing_turns=trailing)
        with disable_tokenizer_threads():
            tokenized = iter(self._writer.tokenize(untokenized))
        encoded: list[list[Example]] = []
        for record, documents in zip(records, parsed, strict=True):
            arrays = [next(tokenized) if isinstance(each, Document) else each for each in documents or ()]
            found = None
            if documents is not None:
                found = self._try_or_keep(functools.partial(self._build_examples, arrays), record, errors)
            kept, own = found or ([], EncodingCounts())
            encoded.append(kept)
            counts += own
        return encoded, counts

    def _try_or_keep(
        self, function: Callable[[Record], ResultT], record: Record, errors: list[DataError] | None
    ) -> ResultT | None:
        try:
            return function(record)
        except DataError as error:
            # Every example might take until the time limit.
            if errors is None or isinstance(error.__cause__, TimeoutError):
                raise
            errors.append(error)
            return None

    def _parse_and_check(self, record: Record) -> Sequence[Document] | Sequence[TokensAndMask]:
        if record.error is not None:
            raise record.error
        documents = self._parse(record)
        for document in documents:
            if isinstance(document, Document):
                check_text(document.text, record.location, "the text")
        return documents

    def _build_examples(self, arrays: Sequence[TokensAndMask], record: Record) -> tuple[list[Example], EncodingCounts]:
        columns = self._read_columns(record, [len(tokens) for tokens, _ in arrays])
        examples = [Example(*each, values) for each, values in zip(arrays, columns, strict=True)]
        return self._fit_to_length(examples, record)

    def _read_columns(self, record: Record, lengths: list[int]) -> list[dict[str, Any]]:
        columns: list[dict[str, Any]] = [{} for _ in lengths]
        for name in self._columns:
            value = self._fields.require(record, name)
            values = value if self._is_preference and isinstance(value, list | tuple) else [value] * len(lengths)
            if len(values) != len(lengths):
                self._fields.raise_invalid(record, name, value, "must hold one number, or two, for chosen and rejected")
            for entries, each, length in zip(columns, values, lengths, strict=True):
                # `build_record` has rejected values that are not numbers.
                if isinstance(each, list) and len(each) != length:
                    rule = f"a column must hold a number, or a list of numbers, one for each of {length} tokens"
                    self._fields.raise_invalid(record, name, each, rule)
                entries[name] = each
        return columns

    def _fit_to_length(self, documents: Sequence[Example], record: Record) -> tuple[list[Example], EncodingCounts]:
        """Return documents of at most `seq_len` tokens with supervised tokens; of a pair, both or none."""
        kept: list[Example] = []
        counts = EncodingCounts()
        for document in documents:
            pieces, own = self._split_by_length(document, record.location)
            supervised = [piece for piece in pieces if piece.count_supervised()]
            counts += own + EncodingCounts(unsupervised=len(pieces) - len(supervised))
            kept += supervised
        if self._is_preference and len(kept) < len(documents):
            reason = "dropped" if counts.dropped else "unsupervised"
            counts, kept = EncodingCounts(**{reason: len(documents)}), []
        totals = EncodingCounts(
            documents=len(kept),
            tokens=sum(map(len, kept)),
            supervised=sum(document.count_supervised() for document in kept),
        )
        return kept, counts + totals

    def _split_by_length(self, document: Example, where: str) -> tuple[list[Example], EncodingCounts]:
        length, seq_len = len(document), self._seq_len
        if seq_len is None or length <= seq_len:
            return [document], EncodingCounts()
        if self._too_long == "truncate":
            return [document.get_slice(0, seq_len)], EncodingCounts(truncated=1)
        if self._too_long == "drop":
            return [], EncodingCounts(dropped=1)
        if self._too_long == "split":
            parts = [document.get_slice(start, min(start + seq_len, length)) for start in range(0, length, seq_len)]
            return parts, EncodingCounts(split=1)
        raise DataError(
            f"{where}: {length:,} tokens, but seq_len={seq_len:,}. Set seq_len to at least {length}, or set too_long "
            "for longer examples: truncate keeps the beginning, split makes several examples, drop leaves them out."
        )


def _build_parser(
    source_format: BaseFormat,
    tokenizer: PreTrainedTokenizerBase,
    fields: FieldReader,
    loss_on: LossOn,
    chat_template: str | None,
    template: str,
) -> ParseRecord:
    if source_format == "text":
        return lambda record: [Document(fields.read_text(record, "text"), add_bos=True, add_eos=True)]
    if source_format == "tokens":
        return _build_token_parser(fields, tokenizer)
    chat = _ChatParser(tokenizer, fields, loss_on, chat_template, template)
    if source_format == "messages" or template == CHAT:
        _ = chat.answers  # raises for a tokenizer without a template
    if source_format == "messages":
        return chat.parse_messages
    return chat.parse_completion if source_format == "prompt_completion" else chat.parse_preference


def _build_token_parser(fields: FieldReader, tokenizer: PreTrainedTokenizerBase) -> ParseRecord:
    """Return a parser of pretokenized documents; nothing is added to them."""
    vocab_size, dtype = get_vocab_size(tokenizer), choose_token_dtype(tokenizer)

    def integers(record: Record, field: str, rule: str) -> np.ndarray:
        value = fields.require(record, field)
        try:
            values = np.asarray(value)
        except ValueError:  # nested lists of different lengths
            fields.raise_invalid(record, field, value, rule)
        if values.ndim != 1 or (values.dtype.kind not in "iub" and len(values)):
            fields.raise_invalid(record, field, value, rule)
        return values.astype(np.int64)

    def parse(record: Record) -> list[TokensAndMask]:
        ids = integers(record, "input_ids", "must hold a list of token ids")
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if len(outside):
            raise DataError(
                f"{record.location}: token {outside[0]} is not in the tokenizer's vocabulary of {vocab_size:,}. Set "
                "tokenizer to the one that made these tokens."
            )
        labelled = np.ones(len(ids), bool)
        for name, read in (("labels", _mask_from_labels), ("loss_mask", _mask_from_loss_mask)):
            if fields.get(record, name) is not None:
                values = integers(record, name, "must hold a list of integers, one for each token")
                if len(values) != len(ids):
                    raise DataError(
                        f"{record.location}: field {fields.get_source_name(name)!r} holds {len(values)} values for "
                        f"{len(ids)} tokens. It must hold one per token."
                    )
                labelled &= read(record, ids, values)
        return [(ids.astype(dtype), labelled)]

    return parse


def _mask_from_labels(record: Record, ids: np.ndarray, labels: np.ndarray) -> np.ndarray:
    wrong = np.flatnonzero((labels != IGNORE_INDEX) & (labels != ids))
    if len(wrong):
        index = wrong[0]
        raise DataError(
            f"{record.location}: label {labels[index]} of token {index} is neither {IGNORE_INDEX} (not supervised) "
            f"nor the token itself, {ids[index]}. Labels must not be shifted by one: the model's loss does that."
        )
    return labels != IGNORE_INDEX


def _mask_from_loss_mask(record: Record, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    wrong = mask[(mask != 0) & (mask != 1)]
    if len(wrong):
        raise DataError(
            f"{record.location}: loss_mask holds {wrong[0]}, but must hold 1 for supervised tokens and 0 for others."
        )
    return mask != 0


class _ChatParser:
    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        fields: FieldReader,
        loss_on: LossOn,
        chat_template: str | None,
        template: str,
    ) -> None:
        self._tokenizer, self._fields, self._chat_template = tokenizer, fields, chat_template
        self._loss_on: LossOn = loss_on
        self._template = template
        self._reader = MessageReader(fields)

    @cached_property
    def answers(self) -> AnswerExtractor:
        """Create the extractor when it is needed: plain-text prompts and answers need no template."""
        return AnswerExtractor(ChatTemplate(self._tokenizer, self._chat_template), self._loss_on)

    def parse_messages(self, record: Record) -> list[Document]:
        messages = self._reader.read_messages(record, "messages")
        if self._fields.has_source_name("system") and self._fields.get(record, "system"):
            messages.insert(0, {"role": "system", "content": self._fields.read_text(record, "system")})
        return self.answers.build_documents(self._reader.build_conversation(record, messages))

    def parse_completion(self, record: Record) -> list[Document]:
        if self._is_text(record, "completion") and self._has_text_prompt(record):
            return self._build_text_documents(record, "completion")
        prompt, completion = (self._reader.read_messages(record, field) for field in ("prompt", "completion"))
        return self.answers.build_documents(
            self._reader.build_conversation(record, [*prompt, *completion], num_prompt_messages=len(prompt))
        )

    def parse_preference(self, record: Record) -> list[Document]:
        if self._is_text(record, "chosen") and self._is_text(record, "rejected"):
            return [each for field in ("chosen", "rejected") for each in self._build_text_documents(record, field)]
        sides = [self._reader.read_messages(record, field) for field in ("chosen", "rejected")]
        prompt = self._find_prompt(record, sides)
        documents = []
        for name, side in zip(("chosen", "rejected"), sides, strict=True):
            messages = side if side[: len(prompt)] == prompt and len(side) > len(prompt) else [*prompt, *side]
            side_documents = self.answers.build_documents(
                self._reader.build_conversation(record, messages, num_prompt_messages=len(prompt))
            )
            if len(side_documents) > 1:
                raise DataError(
                    f"{record.location}: {name} has several answers, and the chat template renders earlier ones "
                    "differently as the conversation continues, so no single text contains them all. Set "
                    "loss_on=last_answer."
                )
            documents += side_documents
        return documents

    def _find_prompt(self, record: Record, sides: Sequence[list[Message]]) -> list[Message]:
        """Return the messages before the answers: `prompt`, or the common beginning of both sides."""
        given = self._fields.get(record, "prompt")
        common = 0
        while common < min(map(len, sides)) - 1 and sides[0][common] == sides[1][common]:
            common += 1
        if given is not None and not isinstance(given, str):
            return self._reader.read_messages(record, "prompt")
        if common and given in (None, sides[0][0]["content"], sides[0][common - 1]["content"]):
            return sides[0][:common]
        if given is not None and not common:
            return [{"role": "user", "content": given}]
        raise DataError(
            f"{record.location}: the prompt of chosen and rejected is unknown: "
            + (
                "they do not start with the same messages, and there is no field 'prompt'. Add one, or give its name "
                "in the source under `fields`."
                if given is None
                else "`prompt` is not the first or last of the messages that both start with. Remove one of the two."
            )
        )

    def _is_text(self, record: Record, field: str) -> bool:
        value = self._fields.require(record, field)
        if value is None:
            self._fields.raise_invalid(record, field, value, "must hold a text or a list of messages")
        return isinstance(value, str)

    def _has_text_prompt(self, record: Record) -> bool:
        names = get_placeholders(self._template)
        return "prompt" not in names or self._is_text(record, "prompt")

    def _build_text_documents(self, record: Record, field: str) -> list[Document]:
        """Return the documents of a prompt and an answer that are both text."""
        values = {name: self._fields.read_text(record, name) for name in get_placeholders(self._template)}
        takes_input = self._template == ALPACA or self._fields.has_source_name("input")
        if takes_input and self._fields.get(record, "input") is not None:
            values["input"] = self._fields.read_text(record, "input")
        prompt, answer = fill_template(self._template, values), self._fields.read_text(record, field)
        if not answer:
            raise DataError(
                f"{record.location}: empty answer: field {self._fields.get_source_name(field)!r} has no text. "
                "Remove such records."
            )
        if self._template == CHAT:
            turns: list[Message] = [{"role": "user", "content": prompt}, {"role": ASSISTANT, "content": answer}]
            return self.answers.build_documents(self._reader.build_conversation(record, turns, num_prompt_messages=1))
        text = prompt + answer
        span = None if self._loss_on == "all" else ((len(prompt), len(text)),)
        return [Document(text, span, add_bos=True, add_eos=True)]
