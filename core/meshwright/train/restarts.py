"""Beginning anew after a failure: whether a run whose ranks this process has started is, and on how many ranks.

[Note: beginning anew] What fails while running may not fail again: a rank was killed, a device has broken, a machine is
starved. What is wrong with the input will, and what ends a run in order is no failure; neither is begun anew. Nor is
what has failed after the same step on as many ranks SAME_PLACE times in a row: it is not chance.

With `elastic` a run that fails before its first step is begun anew on fewer ranks, since one of them may have no device
any more; when it has done steps, the next failure begins anew on as many as there may be.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from ..base.errors import ConfigError, MeshwrightError
from ..files.parsing import open_regular, parse_json
from ..files.terminal import say
from .fate import NEVER
from .files import METRICS
from .journal import note
from .plan import layout_of, processes
from .run_file import RunConfig

FAILED = 1
"""The exit code of a failure while running, and of a rank that was killed."""
SAME_PLACE = 3
_LONGEST_PAUSE_S = 30.0
_TAIL = 65_536
"""Bytes of the metrics that hold their last line."""


def rank_counts(config: RunConfig) -> list[int]:
    """On how many ranks of this machine the run can be, the most first.

    Raises:
        ConfigError: `max_restarts` or `elastic` cannot be heeded.
        MeshwrightError: the sizes fit no number of ranks that `elastic` allows.
    """
    _check(config)
    count, elastic = processes(config), config.elastic
    if elastic is None:
        return [count]
    wanted = range(min(count, elastic.max), elastic.min - 1, -1)
    if not wanted:
        raise ConfigError(
            f"elastic.min={elastic.min}, but this machine is to start {count} ranks (nproc={config.nproc}). Lower "
            f"elastic.min, or raise nproc."
        )
    fitting = [each for each in wanted if _fits(config, each)]
    if not fitting:
        # Says what does not fit.
        layout_of(config, wanted[0])
    return fitting


def _fits(config: RunConfig, count: int) -> bool:
    try:
        layout_of(config, count)
    except MeshwrightError:
        return False
    return True


def _check(config: RunConfig) -> None:
    if not config.max_restarts:
        if config.checkpoint.replicate is not None:
            raise ConfigError(
                "checkpoint.replicate copies state for ranks that are begun anew, and max_restarts=0 begins none anew. "
                "Set max_restarts, or leave checkpoint.replicate out."
            )
        return
    if not config.checkpoint.saves:
        wrong, remedy = "the run saves no checkpoints to go on from", "Set checkpoint.every"
    elif config.resumption.source == NEVER:
        wrong, remedy = "resume=never would start anew, and remove what has been done", "Set resume=auto"
    else:
        return
    raise ConfigError(f"max_restarts={config.max_restarts}, but {wrong}. {remedy}, or max_restarts=0.")


class Restarts:
    """The sittings of one run.

    Args:
        counts: see `rank_counts`.

    Attributes:
        ranks: of the sitting to come.
    """

    def __init__(self, config: RunConfig, counts: list[int]) -> None:
        self._config, self._counts, self._fewer = config, counts, 0
        self._done = 0
        self._place: tuple[int, int] | None = None
        self._times = 0
        self._began = time.time()

    @property
    def ranks(self) -> int:
        return self._counts[self._fewer]

    def again(self, code: int) -> bool:
        """Whether the run is begun anew that has left with `code`; says so, and waits a moment if it fails at once."""
        limit, directory = self._config.max_restarts, Path(self._config.output_dir)
        if code != FAILED or not limit:
            return False
        if self._done == limit:
            _say(f"restarted {limit} times, which is max_restarts; not begun anew")
            return False
        step, ended = _last_step(directory / METRICS)
        has_trained = ended >= self._began
        place = self.ranks, step
        self._times = self._times + 1 if place == self._place else 1
        self._place = place
        if self._times == SAME_PLACE and (has_trained or self._fewer + 1 == len(self._counts)):
            _say(
                f"failed {self._times} times after step {step}: not begun anew, though max_restarts={limit} would "
                f"allow it"
            )
            return False
        before, self._fewer = self.ranks, 0 if has_trained else min(self._fewer + 1, len(self._counts) - 1)
        self._done += 1
        ranks = "" if self.ranks == before else f", on {self.ranks} ranks instead of {before}"
        _say(f"beginning anew: restart {self._done} of {limit}{ranks}")
        note(directory, "restart", number=self._done, of=limit, ranks=self.ranks)
        time.sleep(0.0 if has_trained else min(2.0**self._times - 1, _LONGEST_PAUSE_S))
        self._began = time.time()
        return True


def _last_step(metrics: Path) -> tuple[int, float]:
    """The last step that was done, and when [s since 1970]; 0 and 0 where nothing tells."""
    try:
        with open_regular(metrics) as file:
            file.seek(max(0, metrics.stat().st_size - _TAIL))
            last = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
        record = parse_json(last.decode())
        return int(record["step"]), float(record["time"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return 0, 0.0


def _say(text: str) -> None:
    say(f"{text}\n", stderr=True)
    sys.stderr.flush()
