"""Read the fields of records: texts, objects, and conversations, whose order of roles is checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

from meshwright.plugin import DataError, suggest_match

from .layouts import find_layout
from .sources import Record

LossOn = Literal["answers", "last_answer", "all"]
ASSISTANT = "assistant"
"""Role whose turns are supervised."""
_SYSTEM_ROLES = ("system", "developer")
_TOOL_ROLES = ("tool", "function", "ipython")
ROLES = (*_SYSTEM_ROLES, "user", ASSISTANT, *_TOOL_ROLES)
_ROLE_ALIASES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "model", "bot", "chatgpt"), ASSISTANT),
    "observation": "tool",
}
"""Role names in datasets that are older than chat templates."""
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Message keys of the reasoning before an answer, as in transformers."""

Message = dict[str, Any]
RaiseError = Callable[[str], NoReturn]


class FieldReader:
    """Read fields of records under the names that `SourceConfig.fields` gives."""

    def __init__(self, source_names: Mapping[str, str]) -> None:
        self._source_names = source_names

    def get_source_name(self, field: str) -> str:
        return self._source_names.get(field, field)

    def has_source_name(self, field: str) -> bool:
        return field in self._source_names

    def get(self, record: Record, field: str) -> Any:
        return record.fields.get(self.get_source_name(field))

    def require(self, record: Record, field: str) -> Any:
        name = self.get_source_name(field)
        if name not in record.fields:
            present = ", ".join(sorted(map(str, record.fields))) or "none"
            advice = f"Give its name in the source under `fields`, {{{field}: its name}}, or set another format."
            if (layout := find_layout(record.fields)) is not None:
                names = ", ".join(f"{standard}: {own}" for standard, own in layout.fields.items())
                named = f", with fields: {{{names}}}" if names else ""
                advice = f"Set format: {layout.format}, whose fields these are{named}."
            raise DataError(
                f"{record.location}: no field {name!r}. Fields of this line: "
                f"{present}.{suggest_match(name, record.fields)} {advice}"
            )
        return record.fields[name]

    def read_text(self, record: Record, field: str) -> str:
        value = self.require(record, field)
        if not isinstance(value, str):
            self.raise_invalid(record, field, value, "must hold a string")
        check_text(value, record.location, f"field {self.get_source_name(field)!r}")
        return value

    def raise_invalid(self, record: Record, field: str, value: Any, rule: str) -> NoReturn:
        raise DataError(
            f"{record.location}: field {self.get_source_name(field)!r} holds {value!r:.80}, a {type(value).__name__}, "
            f"but {rule}."
        )

    def read_mapping(self, record: Record, field: str) -> dict[str, Any]:
        value = self.read_json(record, field)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.raise_invalid(record, field, value, "must hold an object, or one as a JSON string")
        return dict(value)

    def read_mappings(self, record: Record, field: str) -> tuple[dict[str, Any], ...]:
        value = self.read_json(record, field)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
            self.raise_invalid(record, field, value, "must hold a list of objects, or one as a JSON string")
        return tuple(dict(each) for each in value)

    def read_json(self, record: Record, field: str) -> Any:
        """Return a value, parsed if it is a string: tables often hold JSON where keys differ from row to row."""
        value = self.get(record, field)
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{record.location}: field {self.get_source_name(field)!r} holds a string that is not JSON: {error}."
            ) from None


def check_text(text: str, where: str, description: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {description} holds an unpaired surrogate, {text[error.start]!r}, at character "
            f"{error.start}, which is not valid text. Remove or repair it."
        ) from None


@dataclass(frozen=True)
class Conversation:
    """Messages, tools (JSON schemas) and template variables. The first `num_prompt_messages` are not supervised."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    template_kwargs: Mapping[str, Any]
    location: str
    num_prompt_messages: int = 0

    def truncate(self, stop: int) -> Conversation:
        return replace(self, messages=self.messages[:stop])

    def find_answers(self) -> list[int]:
        """Return the indices of the supervised messages: assistant messages after a user or tool message."""
        questions = [index for index, message in enumerate(self.messages) if message["role"] in ("user", *_TOOL_ROLES)]
        first = max(self.num_prompt_messages, questions[0] if questions else len(self.messages))
        return [index for index in range(first, len(self.messages)) if self.messages[index]["role"] == ASSISTANT]

    def _check_roles(self) -> None:
        before = None
        for number, message in enumerate(self.messages, start=1):
            role = message["role"]
            if reason := _find_order_error(role, before):
                raise DataError(
                    f"{self.location}: roles out of order: turn {number} has role {role!r}{reason}. Expected: system "
                    "or developer first, if any; then user and assistant alternating; tool after assistant or tool."
                )
            before = role


def _find_order_error(role: str, previous: str | None) -> str:
    """Return why a role cannot follow another one; empty if it can."""
    after = "at the start of the conversation" if previous is None else f"after {previous!r}"
    if role in _SYSTEM_ROLES:
        return "" if previous in (None, *_SYSTEM_ROLES) else f", {after}"
    if role in _TOOL_ROLES:
        return "" if previous in (ASSISTANT, *_TOOL_ROLES) else f", {after}"
    return f", {after}: join the two turns" if role == previous else ""


class MessageReader:
    """Read conversations from the fields of records. Raises DataError for invalid ones."""

    def __init__(self, fields: FieldReader) -> None:
        self._fields = fields
        self._role, self._content = fields.get_source_name("role"), fields.get_source_name("content")

    def build_conversation(
        self, record: Record, messages: Sequence[Message], num_prompt_messages: int = 0
    ) -> Conversation:
        tools = self._fields.read_mappings(record, "tools")
        variables = self._fields.read_mapping(record, "chat_template_kwargs")
        conversation = Conversation(tuple(messages), tools, variables, record.location, num_prompt_messages)
        conversation._check_roles()
        return conversation

    def read_messages(self, record: Record, field: str) -> list[Message]:
        self._fields.require(record, field)
        value = self._fields.read_json(record, field)
        if isinstance(value, Mapping):
            value = [value]
        if not isinstance(value, list | tuple):
            self._fields.raise_invalid(record, field, value, "must hold a list of messages")
        if not value:
            raise DataError(
                f"{record.location}: field {self._fields.get_source_name(field)!r} holds an empty conversation. It "
                "must hold at least one message; remove such records."
            )
        return [self._read_message(record, field, number, each) for number, each in enumerate(value, start=1)]

    def _read_message(self, record: Record, field: str, number: int, value: Any) -> Message:
        def refuse(problem: str) -> NoReturn:
            raise DataError(
                f"{record.location}: field {self._fields.get_source_name(field)!r}, turn {number}: {problem}"
            )

        if not isinstance(value, Mapping):
            refuse(f"holds {value!r:.80}, but a message is an object with {self._role!r} and {self._content!r}.")
        # Tables hold null for keys that only other messages have.
        message = {str(key): each for key, each in value.items() if each is not None}
        if not isinstance(message.get(self._role), str):
            refuse(
                f"has no string {self._role!r}. Its fields: {', '.join(sorted(message)) or 'none'}. Give the source's "
                f"names under `fields`, {{role: its name, content: its name}}."
            )
        role = message.pop(self._role)
        role = _ROLE_ALIASES.get(role, role)
        if role not in ROLES:
            refuse(f"role {role!r} is not one of {', '.join(ROLES)}.")
        content = _read_content(message.pop(self._content, None), refuse)
        message = {"role": role, **({} if content is None else {"content": content}), **message}
        if "tool_calls" in message:
            message["tool_calls"] = [_read_tool_call(each, refuse) for each in message["tool_calls"]]
        if role == ASSISTANT:
            if not (content or "").strip() and not message.get("tool_calls"):
                refuse("empty answer: the assistant's turn is empty, so there is nothing to supervise.")
        elif content is None:
            refuse(
                f"the {role} has no {self._content!r}. Its fields: {', '.join(sorted(message))}. Give the source's "
                "name under `fields`, {content: its name}."
            )
        return message


def _read_content(value: Any, raise_error: RaiseError) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise_error(
            f"its content is {value!r:.80}, a {type(value).__name__}, but must be a string, or a list of texts."
        )
    texts: list[str] = []
    for part in value:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
        if not isinstance(text, str):
            raise_error(f'its content has the part {part!r:.80}. Parts must be {{"type": "text", "text": "..."}}.')
        texts.append(text)
    return "".join(texts)


def _read_tool_call(value: Any, raise_error: RaiseError) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, as templates expect; many records hold a JSON string."""
    if not isinstance(value, Mapping):
        raise_error(f"the tool call {value!r:.80} is not an object.")
    if isinstance(value.get("function"), Mapping):
        call = {key: each for key, each in value.items() if each is not None}
        return {**call, "function": _parse_arguments(value["function"])}
    return _parse_arguments(value)


def _parse_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    call = {key: item for key, item in function.items() if item is not None}
    if isinstance(call.get("arguments"), str):
        with suppress(ValueError, RecursionError):
            parsed = json.loads(call["arguments"])
            if isinstance(parsed, Mapping):
                call["arguments"] = parsed
    return call
