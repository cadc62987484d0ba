"""`meshwright schema`: what an editor checks run files with."""

from __future__ import annotations

import json

from ..files.terminal import say
from ..train.run_schema import run_schema


def schema() -> None:
    """Print the JSON schema of the run file, with the options of the installed strategies, for editors."""
    say(json.dumps(run_schema(), indent=2) + "\n")
