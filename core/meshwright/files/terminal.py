"""Terminal output that escapes text of files, names and paths, so that it cannot control the terminal.

All output goes through `create_console`, `echo` or `warn`; tests/security/test_terminal_escapes.py checks this. rich is
imported on first use, torch never.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ..base.errors import MeshwrightError, escape_unprintable

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console
    from rich.text import Text


def echo(text: str, *, stderr: bool = False) -> None:
    """Write text, including its line ends, in a single call, so that the lines of two ranks do not mix.

    On a terminal, "error:" at the beginning of a line is red, unless NO_COLOR is set.
    """
    stream = sys.stderr if stderr else sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    escaped = escape_unprintable(text).encode(encoding, "backslashreplace").decode(encoding)
    if stderr and stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb":
        escaped = re.sub(r"^error:", "\033[1;31merror:\033[0m", escaped, flags=re.MULTILINE)
    stream.write(escaped)
    stream.flush()


def warn(text: str, category: type[Warning] = UserWarning, *, stacklevel: int = 1) -> None:
    """Call `warnings.warn` with escaped text."""
    warnings.warn(escape_unprintable(text), category, stacklevel=stacklevel + 1)


def install_output_escaping() -> None:
    """Escape the log messages and warnings of all libraries in this process."""
    logging.setLogRecordFactory(_EscapingLogRecord)
    if not getattr(warnings.formatwarning, "escapes", False):
        warnings.formatwarning = _escape_output(warnings.formatwarning)


class _EscapingLogRecord(logging.LogRecord):
    def getMessage(self) -> str:
        return escape_unprintable(super().getMessage())


def _escape_output(format_warning: Callable[..., str]) -> Callable[..., str]:
    def escaped(*arguments: Any, **options: Any) -> str:
        return escape_unprintable(format_warning(*arguments, **options))

    escaped.escapes = True  # type: ignore[attr-defined]
    return escaped


def shorten_tracebacks() -> None:
    """Show a MeshwrightError that ends a script as notebooks do: the message first, then the script's own lines.

    Replaces `sys.excepthook`; other exceptions still go to the one before.
    """
    previous = sys.excepthook

    def show(cls: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if isinstance(error, MeshwrightError):
            echo("\n".join([*error._render_traceback_(), ""]), stderr=True)
        else:
            previous(cls, error, frames)

    sys.excepthook = show


def create_console(**options: Any) -> Console:
    """Return a rich console that escapes text and interprets no markup or emoji; `options` are those of rich."""
    from rich.console import Console, RenderHook

    class Escaping(RenderHook):
        def process_renderables(self, renderables: list[Any]) -> list[Any]:
            return [_EscapedRenderable(each) for each in renderables]

    class Continuing(Console):
        def on_broken_pipe(self) -> None:
            """Print no more if the reader has ended, such as `head`; rich would end the process, and with it a run."""
            self.quiet = True

    console = Continuing(markup=False, emoji=False, **options)
    console.push_render_hook(Escaping())
    return console


def parse_markup(markup: str) -> Text:
    """Parse rich's markup; untrusted values in it must be escaped with `escape_markup`."""
    from rich.text import Text

    return Text.from_markup(markup, emoji=False)


def escape_markup(text: object) -> str:
    """Escape a value for use in `parse_markup`."""
    from rich.markup import escape

    return escape(escape_unprintable(str(text)))


class _EscapedRenderable:
    def __init__(self, renderable: Any) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: Any) -> Iterable[Any]:
        from rich.segment import Segment

        encoding = console.encoding
        for segment in console.render(self._renderable, options):
            if segment.control or (segment.text.isprintable() and segment.text.isascii()):
                yield segment
                continue
            text = escape_unprintable(segment.text).encode(encoding, "backslashreplace").decode(encoding)
            yield Segment(text, segment.style)
