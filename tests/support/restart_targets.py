"""`meshwright train` on ranks of which the last has no device any more, once a file says so.

python -c "from support import restart_targets; restart_targets.main()" RUN.yaml FILE
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from meshwright.base.processes import exit_process
from meshwright_run import start as starting
from meshwright_run.run_file import load_run
from meshwright_run.run_rank import run_rank

BROKEN_FILE_VARIABLE = "MESHWRIGHT_TEST_BROKEN"


def run_rank_or_die(*arguments: Any) -> None:
    """What each rank does: the fourth dies where the file is there."""
    if os.environ["RANK"] == "3" and Path(os.environ[BROKEN_FILE_VARIABLE]).exists():
        os.kill(os.getpid(), signal.SIGKILL)
    run_rank(*arguments)


def main() -> None:
    run_file, broken = sys.argv[1:]
    os.environ[BROKEN_FILE_VARIABLE] = broken
    starting.run_rank = run_rank_or_die  # type: ignore[attr-defined]
    exit_process(starting.start_run(load_run(run_file)))
