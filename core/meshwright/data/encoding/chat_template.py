"""A chat template: what it writes of a conversation, always the same, and clear errors where it cannot.

Source: transformers, `apply_chat_template`.
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ..._compat.chat_templates import render_marked
from ...base.errors import ConfigError, DataError
from ...files.parsing import read_regular, time_limit
from .conversations import Conversation
from .drafts import Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TODAY = datetime(2024, 7, 26)
"""What templates that write today's date take it for: otherwise the tokens of a source would change overnight."""

AT_MOST_S = 30.0
"""For one conversation."""
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_DIRECTIVES = ("%-d", "%-m", *(f"%{letter}" for letter in "dmYyBbAaHMSIpj"))


def read_chat_template(value: str) -> str:
    """The text of the template that `DataConfig.chat_template` gives: itself, or the path of a file.

    Raises:
        ConfigError: the file cannot be read, or is no UTF-8.
    """
    if any(sign in value for sign in ("{{", "{%", "\n")):
        return value
    path = Path(value).expanduser()
    try:
        return read_regular(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"chat_template: {value!r} holds no {{{{ ... }}}} and is taken for a path, but {path.absolute()} cannot "
            f"be read: {reason}."
        ) from None


class ChatTemplate:
    """The template of a tokenizer, or another one, with the tokenizer's special tokens.

    Attributes:
        special: the special tokens, as a regular expression of alternatives.
        added: these, and other tokens that stand apart from text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> None:
        """Take a template's text; None: the tokenizer's own.

        Raises:
            ConfigError: there is none.
        """
        if template is None and not tokenizer.chat_template:
            raise ConfigError(
                "conversations need a chat template, but the tokenizer has none. Set chat_template to a Jinja "
                "template, or to the path of one; docs/conversations.md has an example."
            )
        self._tokenizer = tokenizer
        self._given = template
        tokens = tokenizer.added_tokens_decoder.values()
        special = {*tokenizer.all_special_tokens, *(token.content for token in tokens if token.special)}
        self.special = _any_of(special)
        self.added = _any_of(special | {token.content for token in tokens})

    def marks(self, conversation: Conversation) -> bool:
        """Whether the template says by `{% generation %}` what is learnt; there may be another one for tools."""
        return _MARK.search(self._text(bool(conversation.tools))) is not None

    def write(self, conversation: Conversation, *, ask: bool = False) -> str:
        """The text of a conversation; `ask`: with what asks for an answer at its end.

        Raises:
            DataError: the template cannot.
        """
        try:
            with time_limit(AT_MOST_S, "the template"):
                return str(
                    self._tokenizer.apply_chat_template(
                        list(conversation.messages),
                        tools=list(conversation.tools) or None,
                        chat_template=self._text(bool(conversation.tools)),
                        add_generation_prompt=ask,
                        tokenize=False,
                        **conversation.variables,
                    )
                )
        except Exception as error:  # templates raise whatever their authors thought of
            raise _refusal(conversation, error) from error

    def write_marked(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """The text of a conversation and the spans that the template marks; only where it is marked.

        Raises:
            DataError: the template cannot.
        """
        variables = {**self._tokenizer.special_tokens_map, "add_generation_prompt": False, **conversation.variables}
        template = self._text(bool(conversation.tools))
        try:
            with time_limit(AT_MOST_S, "the template"):
                return render_marked(template, conversation.messages, conversation.tools or None, variables)
        except Exception as error:
            raise _refusal(conversation, error) from error

    def ends(self, text: str) -> bool:
        """Whether a text ends with a special token, and perhaps spaces."""
        return re.search(rf"(?:{self.special})\s*\Z", text) is not None

    def _text(self, tools: bool) -> str:
        template = self._tokenizer.get_chat_template(self._given, [{}] if tools else None)
        return without_clock(template)


def without_clock(template: str) -> str:
    """A template in which it is always `TODAY`."""
    if "strftime_now" not in template:
        return template
    filters = "".join(f" | replace('{each}', '{TODAY.strftime(each)}')" for each in _DIRECTIVES)
    # A name that a template defines hides the global one. Templates are read so that the line's end is no text.
    return f"{{% macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n{template}"


def _any_of(texts: set[str]) -> str:
    """A regular expression of alternatives, longer ones first."""
    return "|".join(re.escape(text) for text in sorted(texts, key=lambda text: (-len(text), text)) if text) or r"(?!)"


def _refusal(conversation: Conversation, error: Exception) -> DataError:
    roles = ", ".join(message["role"] for message in conversation.messages)
    kind = type(error).__name__
    advice = {
        "TemplateSyntaxError": f" It breaks at line {getattr(error, 'lineno', '?')}: correct chat_template.",
        "UndefinedError": " It reads what this record does not have: add that, or give it as chat_template_kwargs.",
        "TemplateError": " The template itself refuses it: change the record, or set another chat_template.",
    }.get(kind, " Change the record, or set another chat_template.")
    return DataError(
        f"{conversation.where}: the chat template cannot write this conversation (roles: {roles}): {kind}: {error}."
        f"{advice}"
    )
