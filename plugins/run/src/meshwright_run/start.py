"""Start a run: join the ranks that a launcher has started, or start them here, and restart them after a failure.

[Note: restarts] A run is restarted after a runtime failure. It is not restarted if its input is wrong, if it has ended
normally, or if it has failed after the same step on the same number of ranks MAX_SAME_STEP_FAILURES times in a row.
With `elastic`, a run that fails before its first step is restarted on fewer ranks, since one may have lost its device.
After a later failure, it is restarted on as many ranks as possible.
"""

from __future__ import annotations

import os
import sys
import time
from functools import cache, partial
from pathlib import Path

import typer

from meshwright.plugin import (
    ConfigError,
    MeshwrightError,
    escape_unprintable,
    get_registry,
    is_launched,
    open_regular_file,
    parse_json,
)

from .data.progress import CONSOLE
from .launch.rank_process import run_guarded, write_stderr
from .metrics_report import print_finished
from .observers import StartupTimer
from .preflight import count_local_ranks, preflight
from .run_action import RunAction, choose_run_action, describe_replaced, find_resume_obstacle, is_finished
from .run_directory import RunDirectory
from .run_file import RunConfig, resolve_layout
from .run_logs import log_event
from .run_rank import RunMonitor, record_failure, run_rank

FAILURE_EXIT_CODE = 1
"""Exit code of a runtime failure, and of a rank that was killed."""
MAX_SAME_STEP_FAILURES = 3
_MAX_BACKOFF_S = 30.0
_TAIL_BYTES = 65_536
"""Bytes at the end of the metrics file, which contain its last line."""


def start_run(
    config: RunConfig, *, show_traceback: bool = False, startup: StartupTimer | None = None, confirm: bool = False
) -> int:
    """Run `config`: join the ranks that a launcher has started, or start them here. Returns the exit code.

    `confirm`: ask before earlier results are replaced, if there is a terminal.
    """
    if is_launched():
        monitor = create_monitor(config, int(os.environ["WORLD_SIZE"])) if os.environ["RANK"] == "0" else None
        return run_guarded(run_rank, (config, monitor, startup), show_traceback=show_traceback)
    if is_finished(config):
        print_finished(RunDirectory.from_config(config))
        return 0

    # Creating a monitor takes seconds.
    get_monitor = cache(partial(create_monitor, config))
    with CONSOLE.status("preparing the run"):
        restarts = RestartPolicy(config, find_rank_counts(config))
        num_steps = preflight(config, restarts.world_size).num_steps
        monitor = get_monitor(restarts.world_size)
    if monitor is not None and monitor.refusal_error is not None:
        raise monitor.refusal_error
    startup = startup or StartupTimer()
    startup.end_phase("plan and data")
    if confirm and sys.stdin.isatty() and sys.stderr.isatty():
        _confirm_overwrite(config, num_steps)
    if restarts.world_size == 1 and not config.max_restarts:
        return run_guarded(run_rank, (config, monitor, startup), show_traceback=show_traceback)
    from .launch.local import launch_ranks

    forwarded = config.checkpoint.stop_config.signals
    while True:
        arguments = config, get_monitor(restarts.world_size), startup
        code = launch_ranks(
            run_rank, arguments, nproc=restarts.world_size, show_traceback=show_traceback, forwarded_signals=forwarded
        )
        record_failure(config, code)
        if not restarts.prepare_restart(code):
            return code
        startup = StartupTimer(startup.should_print, started_at=time.time())


def _confirm_overwrite(config: RunConfig, num_steps: int) -> None:
    if choose_run_action(config, num_steps) is not RunAction.OVERWRITE:
        return
    where = f"output_dir={config.output_dir!r}"
    question = f"overwrite=true removes {describe_replaced(config)} from {where}. Continue?"
    if not typer.confirm(escape_unprintable(question), err=True):
        raise ConfigError(f"nothing was changed in {where}. Name another directory: --set output_dir=...")


def create_monitor(config: RunConfig, world_size: int) -> RunMonitor | None:
    """Return the monitor of a run on `world_size` ranks, from the hook `monitor_run`; None if no plugin has one."""
    monitor: RunMonitor | None = get_registry().hook.monitor_run(config=config, world_size=world_size)
    return monitor


def find_rank_counts(config: RunConfig) -> list[int]:
    """Return the numbers of ranks on which the run can be started on this node, highest first."""
    if not config.max_restarts and config.checkpoint.replicate is not None:
        raise ConfigError(
            "checkpoint.replicate copies state for restarted ranks, but max_restarts=0 restarts none. "
            "Set max_restarts, or leave checkpoint.replicate out."
        )
    if config.max_restarts and (obstacle := find_resume_obstacle(config)) is not None:
        reason, remedy = obstacle
        raise ConfigError(f"max_restarts={config.max_restarts}, but {reason}. {remedy}, or max_restarts=0.")
    count, elastic = count_local_ranks(config), config.elastic
    if elastic is None:
        return [count]
    wanted = range(min(count, elastic.max), elastic.min - 1, -1)
    if not wanted:
        raise ConfigError(
            f"elastic.min={elastic.min}, but this node starts {count} ranks (nproc={config.nproc}). Lower "
            f"elastic.min, or raise nproc."
        )

    def fits(count: int) -> bool:
        try:
            resolve_layout(config, count)
        except MeshwrightError:
            return False
        return True

    fitting = [count for count in wanted if fits(count)]
    if not fitting:
        # Raises the error that describes what does not fit.
        resolve_layout(config, wanted[0])
    return fitting


class RestartPolicy:
    def __init__(self, config: RunConfig, rank_counts: list[int]) -> None:
        self._max_restarts, self._directory = config.max_restarts, RunDirectory.from_config(config)
        self._rank_counts, self._count_index = rank_counts, 0
        self._failure_point: tuple[int, int] | None = None
        self._num_restarts = self._num_same_failures = 0
        self._started_at = time.time()

    @property
    def world_size(self) -> int:
        return self._rank_counts[self._count_index]

    def prepare_restart(self, exit_code: int) -> bool:
        """Return whether to restart a run that ended with `exit_code`; print the decision, and wait before a retry if
        the attempt did no step."""
        limit = self._max_restarts
        if exit_code != FAILURE_EXIT_CODE or not limit:
            return False
        if self._num_restarts == limit:
            write_stderr(f"not restarted: max_restarts={limit} is reached\n")
            return False
        step, ended = _read_last_step(self._directory.metrics)
        has_trained = ended >= self._started_at
        failure_point = self.world_size, step
        self._num_same_failures = self._num_same_failures + 1 if failure_point == self._failure_point else 1
        self._failure_point = failure_point
        if self._num_same_failures == MAX_SAME_STEP_FAILURES and (
            has_trained or self._count_index + 1 == len(self._rank_counts)
        ):
            write_stderr(
                f"not restarted: failed {self._num_same_failures} times in a row after step {step}, although "
                f"max_restarts={limit} allows more restarts\n"
            )
            return False
        before = self.world_size
        self._count_index = 0 if has_trained else min(self._count_index + 1, len(self._rank_counts) - 1)
        self._num_restarts += 1
        ranks = "" if self.world_size == before else f", on {self.world_size} ranks instead of {before}"
        write_stderr(f"restarting the run ({self._num_restarts} of {limit}){ranks}\n")
        log_event(
            self._directory.events, "restart", number=self._num_restarts, max_restarts=limit, ranks=self.world_size
        )
        time.sleep(0.0 if has_trained else min(2.0**self._num_same_failures - 1, _MAX_BACKOFF_S))
        self._started_at = time.time()
        return True


def _read_last_step(metrics: Path) -> tuple[int, float]:
    """Return the last completed step and its Unix time [s]; 0 and 0 if unknown."""
    try:
        with open_regular_file(metrics) as file:
            file.seek(max(0, metrics.stat().st_size - _TAIL_BYTES))
            last = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
        record = parse_json(last.decode())
        return int(record["step"]), float(record["time"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return 0, 0.0
