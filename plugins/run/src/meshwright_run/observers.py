"""Observers of a run: startup times, stragglers and trackers. Imports no torch.

[Note: busy time] Ranks wait for each other in every step, so their step times are equal. A slow rank differs in its
busy time, the time that it spends without the others: reading micro-batches, stepping the optimizer, observers and
callbacks. A rank is reported only if it stays slow for another `window_steps` steps, since any rank is slow at times.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from meshwright.plugin import (
    ConfigError,
    FrozenModel,
    HeartbeatRecord,
    LoopExtension,
    Progress,
    Registry,
    RunInfo,
    StepResult,
    TrackerSpec,
    get_registry,
    hookimpl,
    suggest_match,
    validate_config,
    warn,
)

from .run_sections import StragglersConfig
from .secrets import resolve_environment

_STARTED = time.time()


def get_process_start() -> float:
    """Return the Unix time at which this process started [s]; if unknown, that of this module's import."""
    try:
        # Field 22, in ticks since boot. Fields are counted after the command's name, which may contain spaces.
        ticks = float(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        since_boot = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        return _STARTED
    return time.time() - since_boot + ticks / os.sysconf("SC_CLK_TCK")


@dataclass
class StartupTimer:
    """End times of the phases of the startup, until the first step."""

    should_print: bool = False
    started_at: float = field(default_factory=get_process_start)
    phase_ends: list[tuple[str, float]] = field(default_factory=list)

    def end_phase(self, phase: str) -> None:
        """Record the end of a phase. Consecutive phases of the same name are joined."""
        if self.phase_ends and self.phase_ends[-1][0] == phase:
            self.phase_ends.pop()
        self.phase_ends.append((phase, time.time()))

    def compute_seconds(self) -> dict[str, float]:
        """Return the duration of each phase, and the total [s]."""
        seconds: dict[str, float] = {}
        before = self.started_at
        for part, end in self.phase_ends:
            seconds[part] = seconds.get(part, 0.0) + end - before
            before = end
        return {**{part: round(each, 3) for part, each in seconds.items()}, "total": round(before - self.started_at, 3)}

    def __str__(self) -> str:
        return "startup: " + ", ".join(f"{part} {each:.1f} s" for part, each in self.compute_seconds().items())


class StartupReporter:
    """Observer on rank 0 that reports the startup times after the first step, which ends the last phase."""

    def __init__(self, startup: StartupTimer, *, log: Callable[..., None], print_text: Callable[[str], None]) -> None:
        self._startup: StartupTimer | None = startup
        self._note, self._show = log, print_text

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        startup, self._startup = self._startup, None
        if startup is None:
            return
        startup.end_phase("first step")
        self._note("startup_times", step=result.step, seconds=startup.compute_seconds())
        if startup.should_print:
            self._show(str(startup))


# -- stragglers

DEFAULT_DEVIATIONS = 3.5
"""Number of deviations above which a rank is a straggler. Source: Iglewicz and Hoaglin 1993, modified z-score."""
MAD_TO_STD = 1.4826
"""Standard deviation of a normal distribution, in units of its median absolute deviation."""
MIN_EXCESS_FRACTION = 0.02
"""Fraction of a step by which a rank must be slower. If all are equal to a microsecond, any rank is an outlier."""
MIN_BUSY_EXCESS_FRACTION, MIN_BUSY_EXCESS_S = 0.05, 0.005
"""The same for a rank's busy time: fraction of a step, and seconds."""
MIN_RANKS = 4
"""Minimum number of ranks among which stragglers are detected."""


@dataclass(frozen=True)
class Straggler:
    """A rank whose median time in a phase of the step is above that of others; phase "seconds" is the full step."""

    rank: int
    phase: str
    seconds: float
    median: float
    deviations: float


def find_stragglers(
    ranks: list[int],
    phase: str,
    seconds: np.ndarray,
    *,
    step_s: float,
    deviations: float = DEFAULT_DEVIATIONS,
    min_excess_s: float | None = None,
) -> list[Straggler]:
    """Return the stragglers in one phase of the step, slowest first. `seconds`: the median time of each of `ranks`,
    float64, (R,); NaN if unknown."""
    min_excess_s = MIN_EXCESS_FRACTION * step_s if min_excess_s is None else min_excess_s
    known = seconds[np.isfinite(seconds)]
    if len(known) < MIN_RANKS:
        return []
    middle = float(np.median(known))
    scale = MAD_TO_STD * float(np.median(np.abs(known - middle)))
    stragglers = []
    for rank, value in zip(ranks, seconds.tolist(), strict=True):
        excess = value - middle
        if np.isfinite(value) and excess > min_excess_s and excess > deviations * scale:
            stragglers.append(Straggler(rank, phase, value, middle, excess / scale if scale else float("inf")))
    return sorted(stragglers, key=lambda each: each.seconds, reverse=True)


class StragglerDetector(LoopExtension):
    """Loop extension on rank 0 that finds stragglers from the heartbeats of all ranks; see [Note: busy time]."""

    def __init__(self, config: StragglersConfig, progress: Progress) -> None:
        self._config, self._progress = config, progress
        self._last_heartbeats: Mapping[int, HeartbeatRecord] = {}
        self._stragglers: tuple[Mapping[str, float], ...] = ()
        self._since: dict[int, int] = {}

    def __call__(self) -> Sequence[Mapping[str, float]]:
        """Return the value of `StepResult.stragglers`."""
        if self._progress.heartbeats is not self._last_heartbeats:
            self._last_heartbeats = self._progress.heartbeats
            self._stragglers = self._find_persistent()
        return self._stragglers

    def process_result(self, result: StepResult) -> StepResult:
        return replace(result, stragglers=self())

    def _find_persistent(self) -> tuple[Mapping[str, float], ...]:
        known = {
            rank: record
            for rank, record in self._last_heartbeats.items()
            if record.num_steps >= self._config.window_steps
        }
        if not known:
            return ()
        step_s = float(np.median([record.step_s for record in known.values()]))
        found = find_stragglers(
            list(known),
            "own",
            np.array([record.busy_s for record in known.values()]),
            step_s=step_s,
            deviations=self._config.deviations,
            min_excess_s=max(MIN_BUSY_EXCESS_FRACTION * step_s, MIN_BUSY_EXCESS_S),
        )
        step = max(record.phase.step for record in known.values())
        self._since = {each.rank: self._since.get(each.rank, step) for each in found}
        return tuple(
            {"rank": each.rank, "seconds": each.seconds, "median": each.median, "deviations": each.deviations}
            for each in found
            if step - self._since[each.rank] >= self._config.window_steps
        )


# -- trackers

TrackerOption: TypeAlias = "str | Mapping[str, Any]"
"""A tracker in a run file: its name, or a mapping of its name and options."""
INSTALL_COMMAND = "pip install -e plugins/trackers"


def list_trackers(registry: Registry | None = None) -> dict[str, TrackerSpec]:
    """Return the trackers of the installed plugins by name, sorted."""
    found: dict[str, TrackerSpec] = {}
    for plugin, register in (registry or get_registry()).find_implementations("register_trackers"):
        for spec in (spec for specs in register() for spec in specs):
            if not isinstance(spec, TrackerSpec):
                raise ConfigError(f"plugin {plugin} registers {spec!r}, which is not a meshwright.TrackerSpec.")
            if spec.name in found:
                raise ConfigError(f"two plugins register a tracker {spec.name!r}; one is {plugin}. Uninstall one.")
            found[spec.name] = spec
    return dict(sorted(found.items()))


def resolve_trackers(
    requested: Sequence[TrackerOption], registry: Registry | None = None
) -> list[tuple[TrackerSpec, FrozenModel]]:
    known = list_trackers(registry) if requested else {}
    found = []
    for each in requested:
        options = {"name": each} if isinstance(each, str) else dict(each)
        name = options.pop("name", None)
        if not isinstance(name, str) or name not in known:
            hint = suggest_match(str(name), known)
            raise ConfigError(
                f"trackers: tracker {name!r} is not installed.{hint} Installed: {', '.join(known) or 'none'}. Install "
                f"the project's trackers from a clone with: {INSTALL_COMMAND}"
            )
        spec = known[name]
        options = resolve_environment(options, f"trackers: {name}")
        config = validate_config(spec.config_cls, options, where=f"trackers: {name}")
        spec.check(config)
        found.append((spec, config))
    return found


@contextmanager
def attach_trackers(trackers: Sequence[tuple[TrackerSpec, FrozenModel]], run: RunInfo) -> Iterator[None]:
    with ExitStack() as held:
        for spec, config in trackers:
            try:
                built = spec.build(config, run)
            except ConfigError:
                raise
            except Exception as error:
                # A library may raise anything if it cannot reach its server, or cannot write its files.
                raise ConfigError(
                    f"tracker {spec.name!r} cannot be started: {type(error).__name__}: {error}. Fix that, or remove it "
                    f"from trackers."
                ) from error
            tracker = _GuardedTracker(spec.name, built)
            held.callback(tracker.close)
            held.enter_context(get_registry().observing(tracker))
        yield


class _GuardedTracker:
    """Wrapper of a tracker whose failures do not end the run."""

    def __init__(self, name: str, tracker: Any) -> None:
        self._name, self._tracker, self._has_failed = name, tracker, False

    def _call(self, hook: str, *values: Any) -> None:
        try:
            if not self._has_failed and hasattr(self._tracker, hook):
                getattr(self._tracker, hook)(*values)
        except Exception as error:
            self._has_failed = True
            warn(
                f"tracker {self._name!r} failed in {hook} and is disabled: {type(error).__name__}: {error}. "
                f"Training continues; metrics.jsonl has all metrics.",
                stacklevel=2,
            )

    def close(self) -> None:
        self._has_failed = False
        self._call("close")

    @hookimpl
    def on_run_start(self, run: Any, mesh: Any) -> None:
        self._call("on_run_start", run, mesh)

    @hookimpl
    def on_evaluation(self, evaluation: Any) -> None:
        self._call("on_evaluation", evaluation)

    @hookimpl
    def on_step_end(self, result: Any) -> None:
        self._call("on_step_end", result)

    @hookimpl
    def on_checkpoint(self, checkpoint: Any) -> None:
        self._call("on_checkpoint", checkpoint)

    @hookimpl
    def on_fault(self, fault: Any) -> None:
        self._call("on_fault", fault)

    @hookimpl
    def on_run_end(self, summary: Any) -> None:
        self._call("on_run_end", summary)
