"""How the command line tells errors of the user's making."""

from __future__ import annotations

import os
import traceback as tracebacks

from ..base.errors import MeshwrightError
from ..files.terminal import say
from ..launch.error_text import said


class told:
    """Show an error of the user's making as one message, once for all ranks of a node, and exit with its code.

    Args:
        traceback: show where it was raised, too.
        everywhere: each rank shows its own, since the others may have none, or another.
    """

    def __init__(self, traceback: bool, *, everywhere: bool = False) -> None:
        self._traceback = traceback
        self._everywhere = everywhere

    def __enter__(self) -> None:
        return None

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, MeshwrightError):
            # Each node has its own files, so each tells what is wrong with them.
            if self._everywhere or os.environ.get("LOCAL_RANK", "0") == "0":
                frames = "".join(tracebacks.format_exception(error)[:-1]) if self._traceback else ""
                say(f"{frames}{said(error)}\n", stderr=True)
            raise SystemExit(error.exit_code) from None
