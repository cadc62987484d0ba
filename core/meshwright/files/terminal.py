"""All that is written to a terminal: text of files, names and paths is escaped, and cannot steer it.

Whoever prints uses `new_console`, `say` or `warn`, and nothing else; tests/security/test_terminal.py sees to it. This
module imports rich only where it is used, and no torch.
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
    """Write text, in one piece, so that the lines of two ranks do not mix.

    Args:
        text: with its line ends. What the stream's encoding lacks is escaped, too.
    """
    stream = sys.stderr if stderr else sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(printable(text).encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def warn(text: str, category: type[Warning] = UserWarning, *, stacklevel: int = 1) -> None:
    """`warnings.warn`, of text that may quote what is in files."""
    warnings.warn(printable(text), category, stacklevel=stacklevel + 1)


def escape_messages() -> None:
    """From now on, what libraries log in this process, and of what they warn, is escaped, too."""
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
    """A console of rich that prints text as it is: square brackets are no markup, colons no emoji.

    Args:
        options: of `rich.console.Console`, such as stderr=True.
    """
    from rich.console import Console, RenderHook

    class Escaping(RenderHook):
        """Escapes what renderables have made, just before it is written."""

        def process_renderables(self, renderables: list[Any]) -> list[Any]:
            return [_Escaped(each) for each in renderables]

    made = Console(markup=False, emoji=False, **options)
    made.push_render_hook(Escaping())
    return made


def styled(markup: str) -> Text:
    """Text from rich's markup; values in it that are not ours must have gone through `plain`."""
    from rich.text import Text

    return Text.from_markup(markup, emoji=False)


def plain(text: object) -> str:
    """A value for `styled`, of which nothing is markup."""
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
