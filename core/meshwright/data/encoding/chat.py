"""Records of conversations, of prompts and answers, and of preferences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from ...base.errors import DataError
from ..reading.records import Record
from .answers import Answers
from .chat_template import ChatTemplate
from .conversations import LossOn, Message, MessageReader
from .drafts import Draft
from .fields import Fields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Conversations:
    """Makes drafts of records that hold conversations, or prompts and answers."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, fields: Fields, loss_on: LossOn, chat_template: str | None
    ) -> None:
        self._tokenizer = tokenizer
        self._fields = fields
        self._loss_on: LossOn = loss_on
        self._chat_template = chat_template
        self._reader = MessageReader(fields)

    @cached_property
    def _answers(self) -> Answers:
        # Prompts and answers of plain text do without a template.
        return Answers(ChatTemplate(self._tokenizer, self._chat_template), self._loss_on)

    def check_template(self) -> None:
        """Raise ConfigError where there is no chat template."""
        _ = self._answers

    def whole(self, record: Record) -> list[Draft]:
        """Documents of a conversation in `messages`."""
        return self._answers.drafts(self._reader.conversation(record, self._reader.messages(record, "messages")))

    def completed(self, record: Record) -> list[Draft]:
        """Documents of `prompt` and `completion`, both texts or both messages."""
        if isinstance(self._fields.need(record, "prompt"), str) and self._is_text(record, "completion"):
            return [self._joined(record, "completion")]
        prompt, completion = (self._reader.messages(record, field) for field in ("prompt", "completion"))
        return self._answers.drafts(self._reader.conversation(record, [*prompt, *completion], given=len(prompt)))

    def preferred(self, record: Record) -> list[Draft]:
        """Two documents, of what was chosen and rejected after the same prompt."""
        if self._is_text(record, "chosen") and self._is_text(record, "rejected"):
            return [self._joined(record, field) for field in ("chosen", "rejected")]
        sides = [self._reader.messages(record, field) for field in ("chosen", "rejected")]
        prompt = self._prompt(record, sides)
        found = []
        for field, side in zip(("chosen", "rejected"), sides, strict=True):
            messages = side if side[: len(prompt)] == prompt and len(side) > len(prompt) else [*prompt, *side]
            drafts = self._answers.drafts(self._reader.conversation(record, messages, given=len(prompt)))
            if len(drafts) > 1:
                raise DataError(
                    f"{record.where}: {field} has several answers, and the chat template writes the earlier ones "
                    "otherwise as the conversation goes on, so no single text holds them all. Set loss_on=last_answer."
                )
            found += drafts
        return found

    def _prompt(self, record: Record, sides: Sequence[list[Message]]) -> list[Message]:
        """The messages before the answers: `prompt`, or what both sides begin with."""
        given = self._fields.find(record, "prompt")
        common = 0
        while common < min(map(len, sides)) - 1 and sides[0][common] == sides[1][common]:
            common += 1
        if given is not None and not isinstance(given, str):
            return self._reader.messages(record, "prompt")
        if common and given in (None, sides[0][0]["content"], sides[0][common - 1]["content"]):
            return sides[0][:common]
        if given is not None and not common:
            return [{"role": "user", "content": given}]
        raise DataError(
            f"{record.where}: it cannot be told what chosen and rejected answer: "
            + (
                "they do not begin with the same messages, and there is no field 'prompt'. Add one, or say under "
                "`fields` what the source calls it."
                if given is None
                else "`prompt` is not the first or last of the messages that both begin with. Remove it, or them."
            )
        )

    def _is_text(self, record: Record, field: str) -> bool:
        return isinstance(self._fields.need(record, field), str)

    def _joined(self, record: Record, field: str) -> Draft:
        """A prompt and an answer, both plain text, one behind the other."""
        prompt, answer = self._fields.text(record, "prompt"), self._fields.text(record, field)
        if not answer:
            raise DataError(
                f"{record.where}: an answer of no tokens: field {self._fields.name(field)!r} is empty. Leave such "
                "records out."
            )
        text = prompt + answer
        span = None if self._loss_on == "all" else ((len(prompt), len(text)),)
        return Draft(text, span, opened=True, closed=True)
