"""Render conversations with a chat template, and find the supervised spans in the text.

[Note: answers] Each answer is supervised once, after the same text that the model sees before it at inference. A
template with `{% generation %}` tags marks the answers itself. With other templates, the turns before an answer,
rendered with the generation prompt, must be a prefix of the text with the answer; the rest, up to the token that ends
the turn, is the answer. Many templates render earlier turns differently as a conversation continues. Then the
conversation becomes several documents: the full one, and others that end with the answers it does not contain.

Source: transformers, `apply_chat_template`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from meshwright.plugin import (
    ConfigError,
    DataError,
    format_docs_link,
    read_regular_file,
    render_with_generation_spans,
    time_limit,
)

from .conversations import ASSISTANT, REASONING_KEYS, Conversation, LossOn
from .tokenizer import Document, Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIXED_DATE = datetime(2024, 7, 26)
"""Date for templates that write today's date; otherwise the tokens of a source would change every day."""
RENDER_TIMEOUT_S = 30.0
"""Time limit for rendering one conversation."""
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_DATE_DIRECTIVES = ("%-d", "%-m", *(f"%{letter}" for letter in "dmYyBbAaHMSIpj"))
_ADVICE = {
    "TemplateSyntaxError": " The error is in line {line}: correct chat_template.",
    "UndefinedError": " It uses a value that this record does not have: add it, or set it in chat_template_kwargs.",
    "TemplateError": " The template rejects the conversation: change the record, or set another chat_template.",
}
_END_OF_THOUGHT = "</think>"

ResultT = TypeVar("ResultT")


def read_chat_template(value: str) -> str:
    """Return the template for `DataConfig.chat_template`: the value itself, or the content of the file it names."""
    if any(sign in value for sign in ("{{", "{%", "\n")):
        return value
    path = Path(value).expanduser()
    try:
        return read_regular_file(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"chat_template: {value!r} contains no {{{{ ... }}}} and is used as a path, but {path.absolute()} cannot "
            f"be read: {reason}."
        ) from None


class ChatTemplate:
    """A chat template with the special tokens of a tokenizer.

    `special_pattern` and `added_pattern` are regular expressions that match special tokens, and all added tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> None:
        if template is None and not tokenizer.chat_template:
            raise ConfigError(
                "conversations need a chat template, but the tokenizer has none. Set data.chat_template to a Jinja "
                f"template, or to the path of one. Example: {format_docs_link('reference/chat-data.md')}"
            )
        self._tokenizer, self._template = tokenizer, template
        tokens = tokenizer.added_tokens_decoder.values()
        special = {*tokenizer.all_special_tokens, *(token.content for token in tokens if token.special)}
        self.special_pattern = _build_alternation(special)
        self.added_pattern = _build_alternation(special | {token.content for token in tokens})

    def has_generation_tags(self, conversation: Conversation) -> bool:
        """Return whether the template for this conversation, which may be the one for tools, marks the answers."""
        return _GENERATION_TAG.search(self._get_template(conversation)) is not None

    def render(self, conversation: Conversation, *, add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation. `add_generation_prompt` adds the prompt for an answer at its end."""

        def rendered() -> str:
            return str(
                self._tokenizer.apply_chat_template(
                    list(conversation.messages),
                    tools=list(conversation.tools) or None,
                    chat_template=self._get_template(conversation),
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **conversation.template_kwargs,
                )
            )

        return _render_with_timeout(conversation, rendered)

    def render_with_spans(self, conversation: Conversation) -> tuple[str, list[Span]]:
        variables = {
            **self._tokenizer.special_tokens_map,
            "add_generation_prompt": False,
            **conversation.template_kwargs,
        }
        template, tools = self._get_template(conversation), conversation.tools or None
        return _render_with_timeout(
            conversation, lambda: render_with_generation_spans(template, conversation.messages, tools, variables)
        )

    def ends_turn(self, text: str) -> bool:
        return re.search(rf"(?:{self.special_pattern})\s*\Z", text) is not None

    def _get_template(self, conversation: Conversation) -> str:
        """Return the template, in which `strftime_now` formats `FIXED_DATE`."""
        template: str = self._tokenizer.get_chat_template(self._template, [{}] if conversation.tools else None)
        if "strftime_now" not in template:
            return template
        filters = "".join(
            f" | replace('{directive}', '{FIXED_DATE.strftime(directive)}')" for directive in _DATE_DIRECTIVES
        )
        # A macro of the template hides the global function. The newline after it renders as nothing.
        return f"{{% macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n{template}"


def _build_alternation(texts: set[str]) -> str:
    return "|".join(re.escape(text) for text in sorted(texts, key=lambda text: (-len(text), text)) if text) or r"(?!)"


def _render_with_timeout(conversation: Conversation, render: Callable[[], ResultT]) -> ResultT:
    try:
        with time_limit(RENDER_TIMEOUT_S, "the template"):
            return render()
    except Exception as error:  # templates can raise any exception
        roles = ", ".join(message["role"] for message in conversation.messages)
        kind = type(error).__name__
        advice = _ADVICE.get(kind, " Change the record, or set another chat_template.")
        raise DataError(
            f"{conversation.location}: the chat template cannot render this conversation (roles: {roles}): {kind}: "
            f"{error}.{advice.format(line=getattr(error, 'lineno', '?'))}"
        ) from error


@dataclass(frozen=True)
class _RenderedAnswer:
    """Text of the turns up to an answer, and the span of the answer. `is_open`: the template adds no end to it."""

    text: str
    span: Span
    is_open: bool


class AnswerExtractor:
    def __init__(self, template: ChatTemplate, loss_on: LossOn) -> None:
        self._template, self._loss_on = template, loss_on

    def build_documents(self, conversation: Conversation) -> list[Document]:
        """Return the documents of a conversation. Raises DataError if nothing is supervised, or the template leaves
        out a part."""
        if self._loss_on == "all":
            text = self._template.render(conversation)
            self._check_turns(conversation, text)
            return [self._build_document(text, None)]
        answers = conversation.find_answers()
        if not answers:
            roles = ", ".join(message["role"] for message in conversation.messages)
            raise DataError(
                f"{conversation.location}: there is no answer to supervise: no assistant turn follows a user turn "
                f"(roles: {roles}). Add one, remove the record, or set loss_on=all."
            )
        if self._loss_on == "last_answer":
            answers = answers[-1:]
        # Turns after the last answer are only counted.
        until_last = conversation.truncate(answers[-1] + 1)
        documents = (
            [self._build_from_tags(until_last, answers[0])]
            if self._template.has_generation_tags(until_last)
            else [*self._build_from_prefixes(until_last, answers)]
        )
        return [
            *documents[:-1],
            replace(documents[-1], num_trailing_turns=len(conversation.messages) - len(until_last.messages)),
        ]

    def _build_document(self, text: str, spans: tuple[Span, ...] | None) -> Document:
        # If the template does not end the turn, an eos token does.
        return Document(text, spans, add_eos=not self._template.ends_turn(text))

    def _build_from_tags(self, conversation: Conversation, first_answer: int) -> Document:
        text, spans = self._template.render_with_spans(conversation)
        self._check_turns(conversation, text)
        if any(message["role"] == ASSISTANT for message in conversation.messages[:first_answer]):
            spans = spans[len(self._template.render_with_spans(conversation.truncate(first_answer))[1]) :]
        kept = tuple((start, stop) for start, stop in spans if stop > start)
        if not kept:
            raise DataError(
                f"{conversation.location}: empty answer: the chat template writes nothing inside its "
                f"{{% generation %}} tags. Correct the template or the record."
            )
        return self._build_document(text, kept)

    def _build_from_prefixes(self, conversation: Conversation, answers: list[int]) -> Iterator[Document]:
        """Yield one document, or several if one cannot contain all answers; the full conversation comes last."""
        left = [self._render_answer(conversation, index) for index in answers]
        documents = []
        while left:
            text = left[-1].text
            inside = [
                answer for answer in left[:-1] if not answer.is_open and text.startswith(answer.text[: answer.span[1]])
            ]
            inside.append(left[-1])
            documents.append(self._build_document(text, tuple(answer.span for answer in inside)))
            left = [answer for answer in left if answer not in inside]
        return reversed(documents)

    def _render_answer(self, conversation: Conversation, index: int) -> _RenderedAnswer:
        until = conversation.truncate(index + 1)
        prompt = self._template.render(conversation.truncate(index), add_generation_prompt=True)
        text = self._template.render(until)
        if not text.startswith(prompt):
            common = _count_common_prefix(prompt, text)
            raise DataError(
                f"{conversation.location}: cannot find where the answer of turn {index + 1} starts: the chat template "
                f"writes {prompt[common:][:60]!r} when it prompts for the answer, but {text[common:][:60]!r} when the "
                f"answer is given. Set data.chat_template to one that marks answers with {{% generation %}} tags, or, "
                "if this template has an option for it, set chat_template_kwargs in the records."
            )
        self._check_turns(until, text)
        stop = self._find_answer_end(until, text, len(prompt))
        self._check_answer(until, text[len(prompt) : stop])
        content = conversation.messages[index].get("content", "").strip()
        is_open = bool(content) and text.rstrip().endswith(content) and not self._template.ends_turn(text)
        return _RenderedAnswer(text, (len(prompt), stop), is_open)

    def _find_answer_end(self, conversation: Conversation, text: str, start: int) -> int:
        """Return the end of an answer that begins at `start`: after the token that ends the turn, if there is one."""
        for tokens in (self._template.special_pattern, self._template.added_pattern):
            tail = re.search(rf"(?:(?:{tokens})\s*)+\Z", text[start:])
            if tail is None:
                continue
            ends = [start + tail.start() + match.end() for match in re.finditer(tokens, tail.group())]
            if len(ends) > 1:
                # Some templates end a text with one more token than a turn.
                common = _count_common_prefix(text, self._template.render(conversation, add_generation_prompt=True))
                ends = [end for end in ends if end <= common] or ends[:1]
            return ends[-1]
        return len(text)

    def _check_answer(self, conversation: Conversation, written: str) -> None:
        number, message = len(conversation.messages), conversation.messages[-1]
        if not re.sub(self._template.special_pattern, "", written).strip():
            raise DataError(
                f"{conversation.location}: turn {number}: empty answer: the chat template writes nothing for it."
            )
        parts = {"content": message.get("content", "")}
        if _END_OF_THOUGHT in parts["content"]:
            reasoning, _, reply = parts["content"].partition(_END_OF_THOUGHT)
            parts = {"content": reply, "reasoning (before </think>)": reasoning.replace("<think>", "")}
        parts |= {name: message[name] for name in REASONING_KEYS if isinstance(message.get(name), str)}
        for call in message.get("tool_calls", ()):
            parts["tool_calls"] = str((call.get("function") or call).get("name", ""))
        for name, value in parts.items():
            if value.strip() not in written:
                raise _omission_error(conversation, f"the {name} of turn {number}")

    def _check_turns(self, conversation: Conversation, text: str) -> None:
        """Raise DataError if the template leaves out a tool or a prompt turn, or a turn already contains its end."""
        for tool in conversation.tools:
            name = str((tool.get("function") or tool).get("name", ""))
            if name not in text:
                raise _omission_error(conversation, f"the tool {name!r}")
        for number, message in enumerate(conversation.messages, start=1):
            content = message.get("content", "").strip()
            # Some templates write tool results as JSON.
            if message["role"] != ASSISTANT and content not in text and json.dumps(content)[1:-1] not in text:
                raise _omission_error(conversation, f"the content of turn {number} ({message['role']})")
            ended = rf"{re.escape(content)}\s*(?:{self._template.special_pattern})"
            if self._template.ends_turn(content) and re.search(ended, text):
                raise DataError(
                    f"{conversation.location}: turn {number} ends with {content[-20:]!r}, but the chat template writes "
                    "the end of a turn itself. Remove such tokens from the records, which must hold only the messages."
                )


def _omission_error(conversation: Conversation, what: str) -> DataError:
    return DataError(
        f"{conversation.location}: the chat template leaves out {what}. Remove it from the record, or set "
        "chat_template to one that writes it."
    )


def _count_common_prefix(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
