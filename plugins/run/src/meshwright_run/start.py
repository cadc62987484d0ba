"""Start a run: join the ranks that a launcher has started, or start them here, and again after a failure.

[Note: starting over] A run is restarted after a failure while running, but not when its input is wrong, when it ended
in order, or when it has failed after the same step on as many ranks MAX_SAME_STEP_FAILURES times in a row. With
`elastic` a run that fails before its first step is restarted on fewer ranks, since one of them may have lost its
device; after a failure later on, it is restarted on as many as possible.
"""

from __future__ import annotations

import os
import time
from functools import cache, partial
from pathlib import Path

from meshwright.plugin import ConfigError, MeshwrightError, get_registry, is_launched, open_regular_file, parse_json

from .data.progress import CONSOLE
from .launch.rank_process import run_guarded, write_stderr
from .metrics_report import print_finished
from .observers import StartupTimer
from .preflight import count_local_ranks, preflight
from .run_action import find_resume_obstacle, is_finished
from .run_directory import RunDirectory
from .run_file import RunConfig, resolve_layout
from .run_logs import log_event
from .run_rank import RunMonitor, record_failure, run_rank

FAILURE_EXIT_CODE = 1
"""The exit code of a failure while running, and of a rank that was killed."""
MAX_SAME_STEP_FAILURES = 3
_MAX_BACKOFF_S = 30.0
_TAIL_BYTES = 65_536
"""Bytes of the metrics that hold their last line."""


def start_run(config: RunConfig, *, show_traceback: bool = False, startup: StartupTimer | None = None) -> int:
    """Run `config`: join the ranks that torchrun started, or start them here."""
    if is_launched():
        companion = create_monitor(config, int(os.environ["WORLD_SIZE"])) if os.environ["RANK"] == "0" else None
        return run_guarded(run_rank, (config, companion, startup), show_traceback=show_traceback)
    if is_finished(config):
        print_finished(RunDirectory.from_config(config))
        return 0

    # Making one takes seconds.
    companion_on = cache(partial(create_monitor, config))
    with CONSOLE.status("preparing the run"):
        restarts = RestartPolicy(config, find_rank_counts(config))
        preflight(config, restarts.world_size)
        companion = companion_on(restarts.world_size)
    if companion is not None and companion.refusal_error is not None:
        raise companion.refusal_error
    startup = startup or StartupTimer()
    startup.end_phase("plan and data")
    if restarts.world_size == 1 and not config.max_restarts:
        return run_guarded(run_rank, (config, companion, startup), show_traceback=show_traceback)
    from .launch.local import launch_ranks

    passed_on = config.checkpoint.stop_config.signals
    while True:
        order = config, companion_on(restarts.world_size), startup
        code = launch_ranks(
            run_rank, order, nproc=restarts.world_size, show_traceback=show_traceback, forwarded_signals=passed_on
        )
        record_failure(config, code)
        if not restarts.prepare_restart(code):
            return code
        startup = StartupTimer(startup.should_print, started_at=time.time())


def create_monitor(config: RunConfig, world_size: int) -> RunMonitor | None:
    """Return what monitors a run on so many ranks, by the hook `monitor_run`."""
    companion: RunMonitor | None = get_registry().hook.monitor_run(config=config, world_size=world_size)
    return companion


def find_rank_counts(config: RunConfig) -> list[int]:
    """Return on how many ranks of this machine the run can be, the most first."""
    if not config.max_restarts and config.checkpoint.replicate is not None:
        raise ConfigError(
            "checkpoint.replicate copies state for ranks that are restarted, and max_restarts=0 restarts none. "
            "Set max_restarts, or leave checkpoint.replicate out."
        )
    if config.max_restarts and (why_not := find_resume_obstacle(config)) is not None:
        wrong, remedy = why_not
        raise ConfigError(f"max_restarts={config.max_restarts}, but {wrong}. {remedy}, or max_restarts=0.")
    count, elastic = count_local_ranks(config), config.elastic
    if elastic is None:
        return [count]
    wanted = range(min(count, elastic.max), elastic.min - 1, -1)
    if not wanted:
        raise ConfigError(
            f"elastic.min={elastic.min}, but this machine is to start {count} ranks (nproc={config.nproc}). Lower "
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
        # Says what does not fit.
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
        """Whether to restart the run that has left with `exit_code`; says so, and waits a moment if it fails at
        once."""
        limit = self._max_restarts
        if exit_code != FAILURE_EXIT_CODE or not limit:
            return False
        if self._num_restarts == limit:
            write_stderr(f"restarted {limit} times, which is max_restarts; not restarted\n")
            return False
        step, ended = _read_last_step(self._directory.metrics)
        has_trained = ended >= self._started_at
        place = self.world_size, step
        self._num_same_failures = self._num_same_failures + 1 if place == self._failure_point else 1
        self._failure_point = place
        if self._num_same_failures == MAX_SAME_STEP_FAILURES and (
            has_trained or self._count_index + 1 == len(self._rank_counts)
        ):
            write_stderr(
                f"failed {self._num_same_failures} times after step {step}: not restarted, though "
                f"max_restarts={limit} would "
                f"allow it\n"
            )
            return False
        before = self.world_size
        self._count_index = 0 if has_trained else min(self._count_index + 1, len(self._rank_counts) - 1)
        self._num_restarts += 1
        ranks = "" if self.world_size == before else f", on {self.world_size} ranks instead of {before}"
        write_stderr(f"starting over: restart {self._num_restarts} of {limit}{ranks}\n")
        log_event(
            self._directory.events, "restart", number=self._num_restarts, max_restarts=limit, ranks=self.world_size
        )
        time.sleep(0.0 if has_trained else min(2.0**self._num_same_failures - 1, _MAX_BACKOFF_S))
        self._started_at = time.time()
        return True


def _read_last_step(metrics: Path) -> tuple[int, float]:
    """Return the last step that was done, and when [s since 1970]; 0 and 0 if unknown."""
    try:
        with open_regular_file(metrics) as file:
            file.seek(max(0, metrics.stat().st_size - _TAIL_BYTES))
            last = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
        record = parse_json(last.decode())
        return int(record["step"]), float(record["time"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return 0, 0.0
