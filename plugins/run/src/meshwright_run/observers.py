"""Observers of a run: seconds of its startup, stragglers, and trackers. No torch in this module.

[Note: a rank's own seconds] Ranks wait for each other in every step. A slow one is distinguished from the others by
what it does without them: drawing microbatches, stepping the optimizer, observers and callbacks. A rank is named only
when it has been slow for as many steps more, since other work on its machine makes any rank slow for a moment.
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
    """Return when this process started [s since 1970], or if unknown, when this module was imported."""
    try:
        # The 22nd field, counted behind the command's name, which may contain blanks; in ticks since boot.
        ticks = float(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        since_boot = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        return _STARTED
    return time.time() - since_boot + ticks / os.sysconf("SC_CLK_TCK")


@dataclass
class StartupTimer:
    """When each part of the way to the first step has ended."""

    should_print: bool = False
    started_at: float = field(default_factory=get_process_start)
    phase_ends: list[tuple[str, float]] = field(default_factory=list)

    def end_phase(self, phase: str) -> None:
        """End a part; consecutive parts of one name are one."""
        if self.phase_ends and self.phase_ends[-1][0] == phase:
            self.phase_ends.pop()
        self.phase_ends.append((phase, time.time()))

    def compute_seconds(self) -> dict[str, float]:
        """Return the seconds of each part, and in total."""
        found: dict[str, float] = {}
        before = self.started_at
        for part, end in self.phase_ends:
            found[part] = found.get(part, 0.0) + end - before
            before = end
        return {**{part: round(each, 3) for part, each in found.items()}, "total": round(before - self.started_at, 3)}

    def __str__(self) -> str:
        return "startup: " + ", ".join(f"{part} {each:.1f} s" for part, each in self.compute_seconds().items())


class StartupReporter:
    """Observer on the first rank that ends the last part with the first step, and reports all."""

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
"""Deviations from which a rank is a straggler; Iglewicz and Hoaglin 1993, modified z-score."""
MAD_TO_STD = 1.4826
"""Standard deviation of a normal distribution in median absolute deviations."""
MIN_EXCESS_FRACTION = 0.02
"""Part of a step by which a rank must be slower: where all are equal to a microsecond, any is an outlier."""
MIN_BUSY_EXCESS_FRACTION, MIN_BUSY_EXCESS_S = 0.05, 0.005
"""The same for a rank's own seconds: part of a step, and seconds."""
MIN_RANKS = 4
"""Fewer ranks have no stragglers."""


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than others in a part of the step, or in all of it ("seconds"), by medians."""

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
    """Return the stragglers by one part of the step, the slowest first. `seconds` are medians of `ranks`, float64 (R);
    NaN where there is none."""
    min_excess_s = MIN_EXCESS_FRACTION * step_s if min_excess_s is None else min_excess_s
    known = seconds[np.isfinite(seconds)]
    if len(known) < MIN_RANKS:
        return []
    middle = float(np.median(known))
    scale = MAD_TO_STD * float(np.median(np.abs(known - middle)))
    found = []
    for rank, value in zip(ranks, seconds.tolist(), strict=True):
        beyond = value - middle
        if np.isfinite(value) and beyond > min_excess_s and beyond > deviations * scale:
            found.append(Straggler(rank, phase, value, middle, beyond / scale if scale else float("inf")))
    return sorted(found, key=lambda each: each.seconds, reverse=True)


class StragglerDetector(LoopExtension):
    """Reports the stragglers of a run on its first rank, by the others' signs of life; see
    [Note: a rank's own seconds]."""

    def __init__(self, config: StragglersConfig, progress: Progress) -> None:
        self._config, self._progress = config, progress
        self._last_heartbeats: Mapping[int, HeartbeatRecord] = {}
        self._stragglers: tuple[Mapping[str, float], ...] = ()
        self._since: dict[int, int] = {}

    def __call__(self) -> Sequence[Mapping[str, float]]:
        """See `StepResult.stragglers`."""
        if self._progress.heartbeats is not self._last_heartbeats:
            self._last_heartbeats = self._progress.heartbeats
            self._stragglers = self._find_persistent()
        return self._stragglers

    def process_result(self, result: StepResult) -> StepResult:
        return replace(result, stragglers=self())

    def _find_persistent(self) -> tuple[Mapping[str, float], ...]:
        known = {
            rank: sign for rank, sign in self._last_heartbeats.items() if sign.num_steps >= self._config.window_steps
        }
        if not known:
            return ()
        step_s = float(np.median([sign.step_s for sign in known.values()]))
        found = find_stragglers(
            list(known),
            "own",
            np.array([sign.busy_s for sign in known.values()]),
            step_s=step_s,
            deviations=self._config.deviations,
            min_excess_s=max(MIN_BUSY_EXCESS_FRACTION * step_s, MIN_BUSY_EXCESS_S),
        )
        step = max(sign.phase.step for sign in known.values())
        self._since = {each.rank: self._since.get(each.rank, step) for each in found}
        return tuple(
            {"rank": each.rank, "seconds": each.seconds, "median": each.median, "deviations": each.deviations}
            for each in found
            if step - self._since[each.rank] >= self._config.window_steps
        )


# -- trackers

TrackerOption: TypeAlias = "str | Mapping[str, Any]"
"""A tracker in the run file: its name, or a mapping of name and options."""
INSTALL_COMMAND = "pip install -e plugins/trackers"


def list_trackers(registry: Registry | None = None) -> dict[str, TrackerSpec]:
    """Return the trackers of the installed plugins by name, sorted."""
    found: dict[str, TrackerSpec] = {}
    for plugin, register in (registry or get_registry()).find_implementations("register_trackers"):
        for spec in (spec for specs in register() for spec in specs):
            if not isinstance(spec, TrackerSpec):
                raise ConfigError(f"plugin {plugin} brings {spec!r}, which is no meshwright.TrackerSpec.")
            if spec.name in found:
                raise ConfigError(f"two plugins bring a tracker {spec.name!r}; one is {plugin}. Uninstall one.")
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
                f"trackers: there is no tracker {name!r}.{hint} Installed: {', '.join(known) or 'none'}. Those of the "
                f"project are installed from a clone with: {INSTALL_COMMAND}"
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
                # Whatever a library raises that cannot reach its server, or write its files.
                raise ConfigError(
                    f"tracker {spec.name!r} cannot be started: {type(error).__name__}: {error}. Mend that, or leave it "
                    f"out of trackers."
                ) from error
            tracker = _GuardedTracker(spec.name, built)
            held.callback(tracker.close)
            held.enter_context(get_registry().observing(tracker))
        yield


class _GuardedTracker:
    """A tracker whose failures end no run."""

    def __init__(self, name: str, tracker: Any) -> None:
        self._name, self._tracker, self._has_failed = name, tracker, False

    def _call(self, hook: str, *values: Any) -> None:
        try:
            if not self._has_failed and hasattr(self._tracker, hook):
                getattr(self._tracker, hook)(*values)
        except Exception as error:
            self._has_failed = True
            warn(
                f"tracker {self._name!r} has failed in {hook} and is left aside: {type(error).__name__}: {error}. "
                f"Training continues; metrics.jsonl has everything.",
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
