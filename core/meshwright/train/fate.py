"""What becomes of an output directory that holds something: a run begins, goes on, is finished, or is refused."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Any

from ..base.errors import CheckpointError, ConfigError, TornCheckpointError
from ..checkpoint import read_manifest
from ..checkpoint.manifest import all_in
from ..checkpoint.places import Folder, LocalFolder
from ..files.parsing import read_json_object
from ..launch.environment import started_elsewhere
from .files import AVERAGED_MODEL, HOLDER, LISTED, LOCK, MODEL, RUN, SUMMARY
from .listing import check_listed
from .run_file import RunConfig, load_run
from .run_sections import EvalConfig, MetricsConfig
from .saved import is_elsewhere, named_place, saved_by

NEVER, AUTO = "never", "auto"
_WATCH: dict[str, Any] = {"eval": EvalConfig()}
"""What says when a run stops early."""


class Fate(Enum):
    """What becomes of an output directory."""

    BEGIN = "nothing is there that matters"
    REPLACE = "what is there is removed"
    GO_ON = "the run goes on, if there is a checkpoint"
    DONE = "the run has finished; nothing is touched"


def check_restarts(config: RunConfig) -> None:
    """Refuse, at the first attempt, restarts by torchrun that could not go on.

    Raises:
        ConfigError: the run saves no checkpoints, or would start anew each time; or it copies state to memory, and
            nothing would begin it anew.
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if config.checkpoint.replicate is not None and started_elsewhere() and restarts in ("", "0"):
        raise ConfigError(
            "checkpoint.replicate copies state for ranks that are begun anew by the same launcher, and this one begins "
            "none anew. Start them with torchrun --max-restarts=3, or by `meshwright train` with max_restarts; or "
            "leave checkpoint.replicate out."
        )
    if not restarts.isdecimal() or restarts == "0":
        return
    if not config.checkpoint.saves:
        wrong, remedy = "the run saves no checkpoints to go on from", "Set checkpoint.every"
    elif config.resumption.source == NEVER:
        wrong, remedy = "resume=never would start anew, and remove what has been done", "Set resume=auto"
    else:
        return
    raise ConfigError(
        f"torchrun is to restart failed ranks up to {restarts} times (--max-restarts), but {wrong}. {remedy}, or "
        f"--max-restarts=0."
    )


def check_output(config: RunConfig, steps: int | None) -> Fate:
    """Decide what becomes of the output directory; nothing is changed.

    Args:
        steps: of the run; None: not known yet, so that nothing is refused that hangs on them.

    Raises:
        ConfigError: it cannot be written, or holds what may not be replaced.
        CheckpointError: a directory of checkpoints cannot be read, or `resume` names none.
    """
    directory = Path(config.output_dir)
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"output_dir={config.output_dir!r} is a file. Name a directory.")
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"output_dir={config.output_dir!r} lies below {existing}, which is a file. Name another.")
    if not os.access(existing, os.W_OK):
        raise ConfigError(f"output_dir={config.output_dir!r} cannot be written: {existing} is read-only for you.")
    fate = _fate(config, directory, steps)
    if fate is Fate.REPLACE:
        _check_not_needed(config, directory)
        check_listed(directory)
        _check_own(config)
    return fate


def _fate(config: RunConfig, directory: Path, steps: int | None) -> Fate:
    source = config.resumption.source
    if is_finished(config):
        return Fate.DONE
    if source not in (AUTO, NEVER):
        given = named_place(config, source)
        if began_from(config, given):
            # It may be gone: retention knows only what the run has saved.
            return Fate.GO_ON
        read_manifest(given)
        if lies_within(given, saved_by(config)):
            return Fate.GO_ON
    finished = (directory / SUMMARY).exists()
    begun = config.checkpoint.saves and (directory / RUN).exists()
    if source == AUTO and not finished and (all_in(saved_by(config)) or begun):
        return Fate.GO_ON
    if source == AUTO and finished:
        fate = _fate_of_finished(config, directory, steps)
        if fate is not None:
            return fate
    held = []
    if _holds_something(directory):
        held.append(f"output_dir={config.output_dir!r} holds the results of an earlier run. Name another directory")
    if is_elsewhere(config) and (there := all_in(saved_by(config))):
        held.append(
            f"checkpoint.to={config.checkpoint.to!r} holds {there[0].name} of an earlier run. Name another place"
        )
    if held and not config.overwrite:
        raise ConfigError(f"{held[0]}, or set overwrite=true to replace them.")
    return Fate.REPLACE if held else Fate.BEGIN


def _fate_of_finished(config: RunConfig, directory: Path, steps: int | None) -> Fate | None:
    """Whether a finished run is to go on; None where it is not."""
    if steps is None:
        return Fate.GO_ON
    has_some = all_in(saved_by(config))
    summary, before = _read_summary(directory), _run_before(directory)
    if steps > (done := summary["of_steps"]):
        if has_some:
            return Fate.GO_ON
        raise ConfigError(
            f"steps={steps}, but the run in output_dir={config.output_dir!r} has finished with {done} and has "
            f"left no checkpoint to go on from. To train anew, name another directory, or set resume=never and "
            f"overwrite=true to replace it."
        )
    # It has stopped early, and may be told to be more patient.
    stopped = summary["steps"] < done
    if stopped and has_some and before is not None and _trains(before, **_WATCH) == _trains(config, **_WATCH):
        return Fate.GO_ON
    return None


def is_finished(config: RunConfig) -> bool:
    """Whether this very run has finished: its directory has a summary, and the same run file."""
    directory, source = Path(config.output_dir), config.resumption.source
    if source == NEVER or not (directory / SUMMARY).exists():
        return False
    before = _run_before(directory)
    if before is None or _trains(before) != _trains(config):
        return False
    return source == AUTO or before.resumption.source == source


def _trains(config: RunConfig, **without: Any) -> RunConfig:
    """A run without what does not say how it trains, and without what else is to be left out."""
    unseen = {"metrics": MetricsConfig(), "trackers": [], "profile": None, "max_restarts": 0, "elastic": None}
    unseen |= {"watchdog_s": None, "verify_every": None}
    return config.model_copy(update={"overwrite": False, "resume": AUTO, "launch": None, **unseen, **without})


def _holds_something(directory: Path) -> bool:
    return directory.is_dir() and any(path.name not in (LOCK, HOLDER, LISTED) for path in directory.iterdir())


def lies_within(place: Folder, root: Folder) -> bool:
    """Whether a checkpoint is one of those in a place, or was set aside there."""
    return place.parent.is_same(root) or place.parent.parent.is_same(root)


def _run_before(directory: Path) -> RunConfig | None:
    """The run file that was left in an output directory; None where there is none that can be read."""
    if not (directory / RUN).is_file():
        return None
    try:
        return load_run(directory / RUN)
    except ConfigError:
        return None


def named_before(config: RunConfig) -> Folder | None:
    """The checkpoint that the run file in an output directory names."""
    before = _run_before(Path(config.output_dir))
    return (
        None
        if before is None or before.resumption.source in (AUTO, NEVER)
        else named_place(config, before.resumption.source)
    )


def began_from(config: RunConfig, given: Folder) -> bool:
    """Whether the unfinished run in its directory has begun with a checkpoint, there or elsewhere."""
    if (Path(config.output_dir) / SUMMARY).exists():
        return False
    before = named_before(config)
    return (before is not None and before.is_same(given)) or any(
        _named(place) == str(given) for place in all_in(saved_by(config))
    )


def _named(checkpoint: Folder) -> str | None:
    try:
        return read_manifest(checkpoint).extra.get("named")
    except CheckpointError:
        return None


def _read_summary(directory: Path) -> dict[str, Any]:
    """Of the finished run in a directory: `steps` done `of_steps`, both whole numbers, and what else it tells."""
    try:
        summary = read_json_object(directory / SUMMARY)
        done = int(summary["steps"])
        return {**summary, "steps": done, "of_steps": int(summary.get("of_steps", done))}
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise ConfigError(
            f"{directory / SUMMARY} cannot be read: {error!r}. Remove it, if the run has not finished; it then goes on "
            f"from its newest checkpoint."
        ) from None


def _check_not_needed(config: RunConfig, directory: Path) -> None:
    """Refuse to replace what the run begins with."""
    saved = saved_by(config)
    own = {directory / name for name in (MODEL, AVERAGED_MODEL)}
    for name in own | ({saved.path} if isinstance(saved, LocalFolder) else set()):
        replaced = name.resolve()
        for key, path in (
            ("model.path", config.model.get("path")),
            ("model.checkpoint", config.model.get("checkpoint")),
            ("model.peft.adapter", (config.model.get("peft") or {}).get("adapter")),
            ("data.tokenizer", config.data.tokenizer),
        ):
            if path is not None and replaced in (source := Path(path).expanduser().resolve(), *source.parents):
                raise ConfigError(f"{key}={path!r} lies in what this run replaces ({name}). Name another output_dir.")


def _check_own(config: RunConfig) -> None:
    """Refuse to replace checkpoints of another run, or such that are signed with another key."""
    if not is_elsewhere(config) and config.checkpoint.key_file is None:
        return
    for place in all_in(saved_by(config)):
        try:
            run = read_manifest(place).extra.get("run")
        except TornCheckpointError:
            continue
        whose = run.get("output_dir") if isinstance(run, dict) else None
        is_other = isinstance(whose, str) and Path(whose).resolve() != Path(config.output_dir).resolve()
        if is_elsewhere(config) and is_other:
            raise ConfigError(
                f"{place} is of the run with output_dir={whose!r}, and overwrite=true replaces what is of the run in "
                f"output_dir={config.output_dir!r} alone. Name another place in checkpoint.to, or remove it yourself."
            )
