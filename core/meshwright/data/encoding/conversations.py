"""Conversations as records hold them: what is in a message, and which role may follow which."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

from ...base.errors import DataError
from ..reading.records import Record
from .fields import Fields

LossOn = Literal["answers", "last_answer", "all"]
ANSWERS = "assistant"
"""The role whose turns are learnt."""
_SYSTEM = ("system", "developer")
_TOOL = ("tool", "function", "ipython")
ROLES = (*_SYSTEM, "user", ANSWERS, *_TOOL)
_OTHER_NAMES = {"human": "user", "gpt": ANSWERS, "model": ANSWERS}
"""Of roles, in collections that are older than chat templates."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Under what an answer keeps what was thought before it, as transformers knows it."""

Message = dict[str, Any]
Refuse = Callable[[str], NoReturn]
"""Raises DataError for a message."""


@dataclass(frozen=True)
class Conversation:
    """Messages, each with a role and, mostly, a content, and what else a chat template is given.

    Attributes:
        messages: as a template reads them.
        tools: JSON schemas.
        variables: further variables of the template.
        where: the record.
        given: so many messages at the beginning are a prompt, none of which is learnt.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    variables: Mapping[str, Any]
    where: str
    given: int = 0

    def until(self, stop: int) -> Conversation:
        """The first `stop` messages."""
        return replace(self, messages=self.messages[:stop])

    def answers(self) -> list[int]:
        """Which messages are to be learnt: those of the assistant that answer something."""
        asked = [index for index, message in enumerate(self.messages) if message["role"] in ("user", *_TOOL)]
        first = max(self.given, asked[0] if asked else len(self.messages))
        return [index for index in range(first, len(self.messages)) if self.messages[index]["role"] == ANSWERS]

    def check(self) -> None:
        """Raise DataError where roles do not follow each other as they must."""
        before = None
        for number, message in enumerate(self.messages, start=1):
            role = message["role"]
            if reason := _disorder(role, before):
                raise DataError(
                    f"{self.where}: roles out of order: turn {number} is of {role!r}{reason}. Expected: system or "
                    "developer first, if at all; then user and assistant in turn; tool after an assistant or a tool."
                )
            before = role


def _disorder(role: str, before: str | None) -> str:
    """Why a role cannot stand behind another one; empty where it can."""
    after = "and opens the conversation" if before is None else f"after one of {before!r}"
    if role in _SYSTEM:
        return "" if before in (None, *_SYSTEM) else f", {after}"
    if role in _TOOL:
        return "" if before in (ANSWERS, *_TOOL) else f", {after}"
    return f", {after}: join the two" if role == before else ""


class MessageReader:
    """Reads conversations from the fields of records."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self._role, self._content = fields.name("role"), fields.name("content")

    def conversation(self, record: Record, messages: Sequence[Message], given: int = 0) -> Conversation:
        """The conversation of a record whose messages have been read.

        Raises:
            DataError: `tools` or `chat_template_kwargs` is of another type, or roles are out of order.
        """
        found = Conversation(
            tuple(messages),
            tuple(self._fields.list_of_mappings(record, "tools") or ()),
            self._fields.mapping(record, "chat_template_kwargs"),
            record.where,
            given,
        )
        found.check()
        return found

    def messages(self, record: Record, field: str) -> list[Message]:
        """The messages of a field.

        Raises:
            DataError: it is missing or empty, or a message is not one.
        """
        self._fields.need(record, field)
        value = self._fields.from_json(record, field)
        if isinstance(value, Mapping):
            value = [value]
        if not isinstance(value, list | tuple):
            self._fields.refuse(record, field, value, "must hold a list of messages")
        if not value:
            raise DataError(
                f"{record.where}: field {self._fields.name(field)!r} holds an empty conversation. It must hold at "
                "least one message; leave such records out."
            )
        return [self._message(record, field, number, each) for number, each in enumerate(value, start=1)]

    def _message(self, record: Record, field: str, number: int, value: Any) -> Message:
        def refuse(problem: str) -> NoReturn:
            raise DataError(f"{record.where}: field {self._fields.name(field)!r}, turn {number}: {problem}")

        if not isinstance(value, Mapping):
            refuse(f"holds {value!r:.80}, but a message is an object with {self._role!r} and {self._content!r}.")
        # Tables write a null for what other messages have.
        message = {str(key): each for key, each in value.items() if each is not None}
        if not isinstance(message.get(self._role), str):
            refuse(
                f"has no {self._role!r} that is a text. Its fields: {', '.join(sorted(message)) or 'none'}. Say under "
                f"`fields` what the source calls it, {{role: its name, content: its name}}."
            )
        role = message.pop(self._role)
        role = _OTHER_NAMES.get(role, role)
        if role not in ROLES:
            refuse(f"role {role!r} is none of {', '.join(ROLES)}.")
        content = _content(message.pop(self._content, None), refuse)
        message = {"role": role, **({} if content is None else {"content": content}), **message}
        if "tool_calls" in message:
            message["tool_calls"] = [_tool_call(each, refuse) for each in message["tool_calls"]]
        self._check_filled(message, refuse)
        return message

    def _check_filled(self, message: Message, refuse: Refuse) -> None:
        content = message.get("content")
        if message["role"] == ANSWERS:
            if not (content or "").strip() and not message.get("tool_calls"):
                refuse("an answer of no tokens: the assistant's turn is empty, and there is nothing to learn from it.")
        elif content is None:
            refuse(
                f"the {message['role']} has no {self._content!r}. Its fields: {', '.join(sorted(message))}. Say under "
                "`fields` what the source calls it, {content: its name}."
            )


def _content(value: Any, refuse: Refuse) -> str | None:
    """The text of a message, which may be given in parts."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse(f"its content is {value!r:.80}, a {type(value).__name__}, but must be a text, or a list of texts.")
    texts: list[str] = []
    for part in value:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
        if not isinstance(text, str):
            refuse(f'its content has the part {part!r:.80}. Parts must be {{"type": "text", "text": "..."}}.')
        texts.append(text)
    return "".join(texts)


def _tool_call(value: Any, refuse: Refuse) -> dict[str, Any]:
    """A call with arguments as an object, as templates expect them; many records hold their JSON."""
    if not isinstance(value, Mapping):
        refuse(f"the tool call {value!r:.80} is no object.")
    call = {key: each for key, each in value.items() if each is not None}
    function = call.get("function")
    if isinstance(function, Mapping):
        call["function"] = _with_arguments(function)
        return call
    return _with_arguments(call)


def _with_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: each for key, each in function.items() if each is not None}
    arguments = found.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return found
        if isinstance(parsed, Mapping):
            found["arguments"] = parsed
    return found
