"""Read what the directory of a run says of its steps, to do them again; nothing here changes a file.

[Note: whose run file] A directory has the run file of its last attempt. A step of an earlier attempt is done again by
the run file that the first checkpoint after it has kept.

[Note: abandoned steps] Where a bad step has taken a run back, `metrics.jsonl` has what it did afterwards. What it did
before it went back changed nothing but which batches are drawn, so it is not done again: from the step to which the run
went back, the batches that it has left out since are left out. An attempt that resumes from an earlier checkpoint has
forgotten what was done after that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.plugin import (
    ConfigError,
    Folder,
    Manifest,
    StepResult,
    TornCheckpointError,
    all_in,
    open_regular,
    parse_json,
    read_manifest,
    validated,
)
from meshwright_run.fate import AUTO, NEVER
from meshwright_run.report import read_metrics
from meshwright_run.run_directory import RunDirectory
from meshwright_run.run_file import RunConfig, load_run

_MOST_EVENTS = 1 << 28
"""Bytes of the file of events that are read."""


@dataclass(frozen=True)
class Beginning:
    """What a replay begins with: how many steps were done before, and a checkpoint; None: where the run begins."""

    step: int
    checkpoint: Folder | None


@dataclass(frozen=True)
class WentBack:
    """The run went back to `to` steps done, and left out so many batches from there."""

    to: int
    batches: int


class Recorded:
    """A run that has been done, or is being done, by its output_dir."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        paths = RunDirectory(directory)
        if not paths.run_file.is_file():
            raise ConfigError(
                f"{str(directory)!r} has no {paths.run_file.name}: it is no directory of a run. Give its output_dir."
            )
        self.config = load_run(paths.run_file)
        self.paths = RunDirectory(directory, self.config.checkpoint)
        results = read_metrics(paths.metrics, until=1 << 62, steps=self.config.steps or 0)
        self.results: Mapping[int, StepResult] = {each.step: each for each in results}
        if not self.results:
            raise ConfigError(f"{paths.metrics} tells of no step: nothing of the run in {directory} can be told.")

    @property
    def saved(self) -> Folder:
        """The place of its checkpoints, also where the directory was moved."""
        return self.paths.checkpoints

    @cached_property
    def events(self) -> Sequence[Mapping[str, Any]]:
        """The complete lines of its events, in their order."""
        try:
            with open_regular(self.paths.events) as file:
                lines = file.read(_MOST_EVENTS).decode(errors="replace").splitlines()
        except OSError:
            return ()
        found = []
        for line in lines:
            try:
                found.append(parse_json(line))
            except ValueError:
                continue
        return tuple(event for event in found if isinstance(event, dict))

    @cached_property
    def sittings(self) -> Sequence[int]:
        """The steps that were done before each attempt: 0 for the first, and then where the run resumed."""
        starts = (event.get("start") for event in self.events if event.get("event") == "start")
        return tuple(start for start in starts if isinstance(start, int))

    def went_back(self, beginning: Beginning) -> tuple[WentBack, ...]:
        """Return where the run went back to after a beginning, in the order of steps; see [Note: abandoned steps]."""
        left: list[tuple[int, int]] = []
        for event in self.events:
            match event:
                case {"event": "start", "start": int(start)}:
                    left = [each for each in left if each[0] < start]
                case {"event": "bad step", "step": int(step), "back_to": int(to)}:
                    left.append((to, step - to))
        found: list[WentBack] = []
        for to, batches in reversed(left):
            if to < beginning.step:
                break
            # A run that went back further later has left out from there all that was left out until then.
            found.append(WentBack(min(to, found[-1].to) if found else to, batches))
        return tuple(reversed(found))

    def went_on_before(self, step: int) -> int | None:
        """Return where the attempt that has done a step began, if it resumed."""
        # An attempt voids what earlier ones have done from its beginning on.
        begun = [start for place, start in enumerate(self.sittings) if all(start <= e for e in self.sittings[place:])]
        return max((start for start in begun if 0 < start < step), default=None)

    def result(self, step: int) -> StepResult:
        """Return what was written of a step."""
        if step not in self.results:
            raise ConfigError(
                f"step {step} is none of the run in {self.directory}: {self.paths.metrics.name} has steps "
                f"{min(self.results)} to {max(self.results)}. Give one of them."
            )
        return self.results[step]

    def beginning(self, step: int) -> Beginning:
        """Return the nearest checkpoint before a step, or the beginning of the run."""
        for place in all_in(self.saved):
            manifest = _manifest(place)
            if manifest is not None and manifest.step < step:
                return Beginning(manifest.step, place)
        first, named = min(self.results), self.config.resumption.source
        if named not in (AUTO, NEVER) and first > 1:
            place = self.paths.place_of(named)
            manifest = read_manifest(place)
            if manifest.step < step:
                return Beginning(manifest.step, place)
        if first == 1:
            return Beginning(0, None)
        raise ConfigError(
            f"there is no whole checkpoint before step {step} in {self.saved}, and the run began at "
            f"step {first}. Give a step behind a checkpoint; checkpoint.keep_last and keep_every keep more."
        )

    def config_of(self, step: int) -> RunConfig:
        """Return the run file by which a step was done; see [Note: whose run file]."""
        if self.sittings and step <= self.sittings[-1]:
            for place in reversed(all_in(self.saved)):
                manifest = _manifest(place)
                if manifest is not None and manifest.step >= step and "run" in manifest.extra:
                    return validated(RunConfig, manifest.extra["run"], where=f"the run file in {place}")
        return self.config


def _manifest(checkpoint: Folder) -> Manifest | None:
    """The manifest of a checkpoint; None where it is incomplete."""
    try:
        return read_manifest(checkpoint)
    except TornCheckpointError:
        return None


def plain_of(result: StepResult) -> dict[str, float]:
    """Return what must be the same when a step is done again, by name, causes first."""
    rates = result.learning_rates if len(result.learning_rates) > 1 else {}
    return {
        "num_tokens": result.num_tokens,
        "learning_rate": result.learning_rate,
        **{f"learning_rate of group {name}": rate for name, rate in rates.items()},
        "loss": result.loss,
        **{f"sum {name}": value for name, value in result.sums.items()},
        "grad_norm": result.grad_norm,
    }
