"""`meshwright doctor`: what is wrong with this machine, or with the ranks of a launcher, and how to fix it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from meshwright.plugin import Traceback, join, leave, say, started_by_launcher, told, uncollected


def doctor(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Look at a directory, too, in which runs would leave their results.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
    traceback: Traceback = False,
) -> None:
    """Look at versions, devices, backends, links, files and clocks, and say what is wrong and how to mend it.

    Starts two ranks on this machine; under torchrun and the like it joins the ranks that are there.
    """
    with told(traceback, everywhere=True):
        join()
    with told(traceback):
        with uncollected():
            from .examine import of_launched_ranks, of_local_ranks, of_machine
            from .finding import as_lines, as_plain, exit_code

        if started_by_launcher():
            code, found = of_launched_ranks(directory)
        else:
            code, found = 0, [*of_machine(directory), *of_local_ranks()]
        if found and os.environ.get("RANK", "0") == "0":
            text = json.dumps(as_plain(found), indent=2) if as_json else "\n".join(as_lines(found))
            say(f"{text}\n")
            sys.stdout.flush()
    leave(code or exit_code(found))
