"""A contest that has a script of its own, by the method of step.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import step as steps

from meshwright_run.launch.local import launch_ranks

SIZES = ("--hidden", "512", "--layers", "8", "--seq", "256", "--rounds", "36")
"""Where the command line gives no others."""


def compete(
    script: str,
    contest: str,
    arguments: Sequence[str],
    others: Sequence[str],
    run_rank: Callable[..., None],
    given: tuple[Any, ...],
    json_file: Path | None,
    tell: Callable[[], Mapping[str, Any]],
) -> int:
    """Hold a contest on all ranks, and write its report with what else there is to tell.

    Args:
        script: its name, without a suffix, which the report has as `benchmark`.
        contest: its name in `step.CONTESTS`, where each rank puts it.
        arguments: of the command line.
        others: those of them that `step.py` has.
        run_rank: called on each rank with the store, the plan and `given`.
        tell: further parts of the report; called when the ranks are done.

    Returns:
        The exit code.
    """
    written = ["--json", str(json_file)] if json_file else []
    plan = steps.parse([*SIZES, *others, "--strategies", "fsdp2", *written])
    plan = replace(plan, strategies=(contest,), command=" ".join([f"python benchmarks/{script}.py", *arguments]))
    code = launch_ranks(run_rank, (plan, *given), nproc=plan.ranks)
    about = tell()
    if json_file is not None and code == 0:
        report = json.loads(json_file.read_text(encoding="utf-8")) | {"benchmark": script, **about}
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return code
