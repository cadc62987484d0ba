"""Which parts of a rendered conversation are learnt: each answer once, in the text that the model is given before it.

A template that marks answers (`{% generation %}`) says so itself. For others each answer is looked at on its own: what
the template writes of the turns before, when it asks for an answer, must be the beginning of what it writes of these
turns with the answer. What follows is the answer, up to the token that ends the turn. Many templates write earlier
turns otherwise as a conversation goes on (without what was thought, say). Then no single text holds all answers as the
model is to give them, so the conversation becomes several documents: the whole one, with the answers that are in it as
they were given, and one up to each of the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...base.errors import DataError
from .chat_template import ChatTemplate
from .conversations import ANSWERS, REASONING, Conversation, LossOn
from .drafts import Draft, Span

_THOUGHT = "</think>"


@dataclass(frozen=True)
class _Answer:
    """What a template writes of the turns up to an answer, and where the answer is in it.

    Attributes:
        is_open: nothing of the template ends the answer, so that only an eos token behind it can.
    """

    text: str
    span: Span
    is_open: bool


class Answers:
    """Makes drafts of conversations under one template."""

    def __init__(self, template: ChatTemplate, loss_on: LossOn) -> None:
        self._template = template
        self._loss_on = loss_on

    def drafts(self, conversation: Conversation) -> list[Draft]:
        """The documents of a conversation.

        Raises:
            DataError: nothing in it is to be learnt, or the template leaves out a part of it.
        """
        if self._loss_on == "all":
            text = self._template.write(conversation)
            self._check_turns(conversation, text)
            return [self._draft(text, None)]
        answers = conversation.answers()
        if not answers:
            roles = ", ".join(message["role"] for message in conversation.messages)
            raise DataError(
                f"{conversation.where}: there is no answer to learn: no turn of the assistant after one of the user "
                f"(roles: {roles}). Add one, leave the record out, or set loss_on=all."
            )
        if self._loss_on == "last_answer":
            answers = answers[-1:]
        # What stands behind the last answer is neither learnt nor read, but counted.
        whole = conversation.until(answers[-1] + 1)
        found = [self._marked(whole, answers[0])] if self._template.marks(whole) else [*self._unfolded(whole, answers)]
        return [*found[:-1], replace(found[-1], unanswered=len(conversation.messages) - len(whole.messages))]

    def _draft(self, text: str, spans: tuple[Span, ...] | None) -> Draft:
        # Where nothing of the template ends a turn, the eos token does.
        return Draft(text, spans, closed=not self._template.ends(text))

    def _marked(self, conversation: Conversation, first: int) -> Draft:
        text, spans = self._template.write_marked(conversation)
        self._check_turns(conversation, text)
        before = sum(message["role"] == ANSWERS for message in conversation.messages[:first])
        if before:
            spans = spans[len(self._template.write_marked(conversation.until(first))[1]) :]
        kept = tuple((start, stop) for start, stop in spans if stop > start)
        if not kept:
            raise DataError(
                f"{conversation.where}: an answer of no tokens: the chat template writes nothing of it inside of its "
                "{% generation %} marks. Correct the template, or the record."
            )
        return self._draft(text, kept)

    def _unfolded(self, conversation: Conversation, answers: list[int]) -> Iterator[Draft]:
        """See the module's docstring; the whole conversation comes last."""
        left = [self._answer(conversation, index) for index in answers]
        documents = []
        while left:
            text = left[-1].text
            inside = [each for each in left[:-1] if not each.is_open and text.startswith(each.text[: each.span[1]])]
            inside.append(left[-1])
            documents.append(self._draft(text, tuple(each.span for each in inside)))
            left = [each for each in left if each not in inside]
        return reversed(documents)

    def _answer(self, conversation: Conversation, index: int) -> _Answer:
        until = conversation.until(index + 1)
        asked = self._template.write(conversation.until(index), ask=True)
        text = self._template.write(until)
        if not text.startswith(asked):
            place = _common(asked, text)
            raise DataError(
                f"{conversation.where}: it cannot be told where the answer of turn {index + 1} begins: where the chat "
                f"template asks for it, it writes {asked[place:][:60]!r}, but where it is given {text[place:][:60]!r}. "
                "Set chat_template to one that has answers inside of {% generation %} marks, or, if this one has a "
                "switch for it, chat_template_kwargs in the records."
            )
        self._check_turns(until, text)
        stop = self._end(until, text, len(asked))
        self._check_answer(until, text[len(asked) : stop])
        said = conversation.messages[index].get("content", "").strip()
        is_open = bool(said) and text.rstrip().endswith(said) and not self._template.ends(text)
        return _Answer(text, (len(asked), stop), is_open)

    def _end(self, conversation: Conversation, text: str, start: int) -> int:
        """Where an answer ends that begins at `start`: behind the token that ends the turn, if there is one."""
        for tokens in (self._template.special, self._template.added):
            tail = re.search(rf"(?:(?:{tokens})\s*)+\Z", text[start:])
            if tail is None:
                continue
            ends = [start + tail.start() + found.end() for found in re.finditer(tokens, tail.group())]
            if len(ends) > 1:
                # Some templates end a text with a token more than a turn.
                going_on = self._template.write(conversation, ask=True)
                common = _common(text, going_on)
                ends = [end for end in ends if end <= common] or ends[:1]
            return ends[-1]
        return len(text)

    def _check_answer(self, conversation: Conversation, written: str) -> None:
        """Refuse a template that leaves out a part of an answer."""
        number, message = len(conversation.messages), conversation.messages[-1]
        if not re.sub(self._template.special, "", written).strip():
            raise DataError(
                f"{conversation.where}: turn {number}: an answer of no tokens: the chat template writes nothing of it."
            )
        parts = {"content": message.get("content", "")}
        if _THOUGHT in parts["content"]:
            thought, _, said = parts["content"].partition(_THOUGHT)
            parts = {"content": said, "thoughts (before </think>)": thought.replace("<think>", "")}
        for name in REASONING:
            if isinstance(message.get(name), str):
                parts[name] = message[name]
        for call in message.get("tool_calls", ()):
            parts["tool_calls"] = str((call.get("function") or call).get("name", ""))
        for name, value in parts.items():
            if value.strip() not in written:
                raise _left_out(conversation, f"the {name} of turn {number}")

    def _check_turns(self, conversation: Conversation, text: str) -> None:
        """Refuse a template that leaves out tools, or turns that are no answers; and turns with an end of their own."""
        for tool in conversation.tools:
            name = str((tool.get("function") or tool).get("name", ""))
            if name not in text:
                raise _left_out(conversation, f"the tool {name!r}")
        for number, message in enumerate(conversation.messages, start=1):
            content = message.get("content", "").strip()
            # Some templates write results of tools as JSON.
            if message["role"] != ANSWERS and content not in text and json.dumps(content)[1:-1] not in text:
                raise _left_out(conversation, f"the content of turn {number} ({message['role']})")
            ended = rf"{re.escape(content)}\s*(?:{self._template.special})"
            if self._template.ends(content) and re.search(ended, text):
                raise DataError(
                    f"{conversation.where}: turn {number} ends with {content[-20:]!r}, but the chat template writes "
                    "what ends a turn itself. Remove such tokens from the records: they hold what was said alone."
                )


def _left_out(conversation: Conversation, what: str) -> DataError:
    return DataError(
        f"{conversation.where}: the chat template leaves out {what}. Remove it from the record, or set chat_template "
        "to one that writes it."
    )


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
