"""A run as its directory tells of it, for whoever does a part of it again; nothing here changes a file.

[Note: whose run file] A directory has the run file of its last sitting. A step that was done in an earlier one is done
again by the run file that the first checkpoint behind it has kept.

[Note: ways that were left] Where a bad step has taken a run back, `metrics.jsonl` has what it did afterwards. What it
did before it went back has changed nothing but which batches are drawn, so it is not done again: where the run came
back to, the batches that it has left out since are left out. A sitting that goes on from an earlier checkpoint has
forgotten what was done behind that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError, TornCheckpointError
from ..base.validation import validated
from ..checkpoint import Manifest, read_manifest
from ..checkpoint.manifest import all_in
from ..checkpoint.places import Folder
from ..events.step import StepResult
from ..files.parsing import open_regular, parse_json
from ..train.run.fate import AUTO, NEVER
from ..train.run.report import read_metrics
from ..train.run.run_directory import METRICS, RUN, RunDirectory
from ..train.run.run_file import RunConfig, load_run

_MOST_EVENTS = 1 << 28
"""Bytes of the file of events that are read."""


@dataclass(frozen=True)
class Beginning:
    """What a part of a run begins with.

    Attributes:
        step: steps done before.
        checkpoint: None where the run begins.
    """

    step: int
    checkpoint: Folder | None


@dataclass(frozen=True)
class WentBack:
    """The run went back, and left out the batches since then.

    Attributes:
        to: steps done before; from there the batches are left out.
        batches: how many.
    """

    to: int
    batches: int


class Recorded:
    """A run that has been done, or is being done.

    Args:
        directory: its output_dir.

    Raises:
        ConfigError: it is none, or has no metrics.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        paths = RunDirectory(directory)
        if not paths.run_file.is_file():
            raise ConfigError(f"{str(directory)!r} has no {RUN}: it is no directory of a run. Give its output_dir.")
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
        """The lines of its events that are whole, in their order."""
        try:
            with open_regular(self.paths.events) as file:
                lines = file.read(_MOST_EVENTS).decode(errors="replace").splitlines()
        except OSError:
            return ()
        found = []
        for line in lines:
            try:
                event = parse_json(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                found.append(event)
        return tuple(found)

    @cached_property
    def sittings(self) -> Sequence[int]:
        """The steps that were done before each sitting: 0 for the first, and then where the run went on."""
        return tuple(event["start"] for event in self.events if _begins(event))

    def went_back(self, beginning: Beginning) -> tuple[WentBack, ...]:
        """Where the run went back to behind a beginning, as those who go straight on come by there; see
        [Note: ways that were left]."""
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
            # Who went back further later has come by there with all that was left out till then.
            found.append(WentBack(min(to, found[-1].to) if found else to, batches))
        return tuple(reversed(found))

    def went_on_before(self, step: int) -> int | None:
        """Where the sitting that has done a step began, if it went on from an earlier one."""
        # A sitting voids what ones before it have done from its beginning on.
        begun = [start for place, start in enumerate(self.sittings) if all(start <= e for e in self.sittings[place:])]
        return max((start for start in begun if 0 < start < step), default=None)

    def result(self, step: int) -> StepResult:
        """What was written of a step.

        Raises:
            ConfigError: nothing was.
        """
        if step not in self.results:
            raise ConfigError(
                f"step {step} is none of the run in {self.directory}: {METRICS} has steps {min(self.results)} to "
                f"{max(self.results)}. Give one of them."
            )
        return self.results[step]

    def beginning(self, step: int) -> Beginning:
        """What is nearest to a step, before it: a checkpoint, or the beginning of the run.

        Raises:
            ConfigError: there is none.
        """
        for place in all_in(self.saved):
            manifest = _manifest(place)
            if manifest is not None and manifest.step < step:
                return Beginning(manifest.step, place)
        named = self.config.resumption.source
        if named not in (AUTO, NEVER) and min(self.results) > 1:
            place = self.paths.place_of(named)
            manifest = read_manifest(place)
            if manifest.step < step:
                return Beginning(manifest.step, place)
        if min(self.results) == 1:
            return Beginning(0, None)
        raise ConfigError(
            f"there is no whole checkpoint before step {step} in {self.saved}, and the run began at "
            f"step {min(self.results)}. Give a step behind a checkpoint; checkpoint.keep_last and keep_every keep more."
        )

    def config_of(self, step: int) -> RunConfig:
        """The run file by which a step was done; see [Note: whose run file]."""
        last = self.sittings[-1] if self.sittings else 0
        if step > last:
            return self.config
        for place in reversed(all_in(self.saved)):
            manifest = _manifest(place)
            if manifest is not None and manifest.step >= step and "run" in manifest.extra:
                return validated(RunConfig, manifest.extra["run"], where=f"the run file in {place}")
        return self.config


def _begins(event: Mapping[str, Any]) -> bool:
    return event.get("event") == "start" and isinstance(event.get("start"), int)


def _manifest(checkpoint: Folder) -> Manifest | None:
    """None where it is not whole."""
    try:
        return read_manifest(checkpoint)
    except TornCheckpointError:
        return None


def plain_of(result: StepResult) -> dict[str, float]:
    """What is known of a step that is the same when it is done again, by name, in the order of cause."""
    rates = result.learning_rates if len(result.learning_rates) > 1 else {}
    return {
        "num_tokens": result.num_tokens,
        "learning_rate": result.learning_rate,
        **{f"learning_rate of group {name}": rate for name, rate in rates.items()},
        "loss": result.loss,
        **{f"sum {name}": value for name, value in result.sums.items()},
        "grad_norm": result.grad_norm,
    }


def as_values(result: StepResult) -> dict[str, Any]:
    """The same, as it goes from a rank to the process that has started it."""
    return {"step": result.step, "world_size": result.world_size, "values": plain_of(result)}
