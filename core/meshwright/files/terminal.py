"""Output to a terminal, with text of files, names and paths escaped so that it cannot control the terminal.

All output goes through `new_console`, `say` or `warn`; tests/security/test_terminal.py checks this. rich is imported
only where it is used, and torch nowhere.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ..base.errors import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def say(text: str, *, stderr: bool = False) -> None:
    """Write text with its line ends in one piece, so that the lines of two ranks do not mix."""
    stream = sys.stderr if stderr else sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(printable(text).encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def warn(text: str, category: type[Warning] = UserWarning, *, stacklevel: int = 1) -> None:
    """Call `warnings.warn` with text that may quote files."""
    warnings.warn(printable(text), category, stacklevel=stacklevel + 1)


def escape_messages() -> None:
    """Escape what libraries log and warn of in this process."""
    logging.setLogRecordFactory(_Record)
    if not getattr(warnings.formatwarning, "escapes", False):
        warnings.formatwarning = _escaping(warnings.formatwarning)


class _Record(logging.LogRecord):
    def getMessage(self) -> str:
        return printable(super().getMessage())


def _escaping(form: Callable[..., str]) -> Callable[..., str]:
    def escaped(*arguments: Any, **options: Any) -> str:
        return printable(form(*arguments, **options))

    escaped.escapes = True  # type: ignore[attr-defined]
    return escaped


def new_console(**options: Any) -> Console:
    """Return a rich console, with its options, that prints text as it is, without markup and emoji."""
    from rich.console import Console, RenderHook

    class Escaping(RenderHook):
        """Escapes what renderables produce, just before it is written."""

        def process_renderables(self, renderables: list[Any]) -> list[Any]:
            return [_Escaped(each) for each in renderables]

    made = Console(markup=False, emoji=False, **options)
    made.push_render_hook(Escaping())
    return made


def styled(markup: str) -> Text:
    """Return text with rich's markup; values of others in it must be escaped by `plain`."""
    from rich.text import Text

    return Text.from_markup(markup, emoji=False)


def plain(text: object) -> str:
    """Escape a value for `styled`."""
    from rich.markup import escape

    return escape(printable(str(text)))


class _Escaped:
    def __init__(self, renderable: Any) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: Any) -> Iterable[Any]:
        from rich.segment import Segment

        encoding = console.encoding
        for segment in console.render(self._renderable, options):
            if segment.control or (segment.text.isprintable() and segment.text.isascii()):
                yield segment
                continue
            text = printable(segment.text).encode(encoding, "backslashreplace").decode(encoding)
            yield Segment(text, segment.style)
