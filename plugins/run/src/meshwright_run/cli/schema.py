"""`meshwright schema`: the JSON schema of the run file."""

from __future__ import annotations

import json

from meshwright.plugin import say


def schema() -> None:
    """Print the JSON schema of the run file, with the options of the installed strategies, for editors."""
    from ..run_schema import run_schema

    say(json.dumps(run_schema(), indent=2) + "\n")
