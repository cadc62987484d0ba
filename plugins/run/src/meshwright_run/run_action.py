"""What happens to an output directory that holds something: a run begins, resumes, has finished, or is refused."""

from __future__ import annotations

import os
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

from meshwright.plugin import (
    CheckpointError,
    ConfigError,
    IncompleteCheckpointError,
    LocalStorage,
    Storage,
    is_launched_externally,
    list_checkpoints,
    read_json_object,
    read_manifest,
)

from .run_directory import RunDirectory
from .run_file import RunConfig, load_run
from .run_sections import EvalConfig, MetricsConfig

NEVER, AUTO = "never", "auto"


class RunAction(Enum):
    """What happens to an output directory."""

    FRESH = "nothing is there that matters"
    OVERWRITE = "what is there is removed"
    RESUME = "the run continues, if there is a checkpoint"
    FINISHED = "the run has finished; nothing is touched"


def check_restarts(config: RunConfig) -> None:
    """Refuse, at the first attempt, restarts by torchrun that could not resume."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if config.checkpoint.replicate is not None and is_launched_externally() and restarts in ("", "0"):
        raise ConfigError(
            "checkpoint.replicate copies state for ranks that are restarted by the same launcher, and this one "
            "restarts none. Start them with torchrun --max-restarts=3, or by `meshwright train` with max_restarts; or "
            "leave checkpoint.replicate out."
        )
    why_not = find_resume_obstacle(config)
    if restarts.isdecimal() and restarts != "0" and why_not is not None:
        wrong, remedy = why_not
        raise ConfigError(
            f"torchrun is to restart failed ranks up to {restarts} times (--max-restarts), but {wrong}. {remedy}, or "
            f"--max-restarts=0."
        )


def find_resume_obstacle(config: RunConfig) -> tuple[str, str] | None:
    """Return why a restarted run would not resume, and the remedy; None if it would."""
    if not config.checkpoint.is_enabled:
        return "the run saves no checkpoints to resume from", "Set checkpoint.every"
    if config.resume_config.source == NEVER:
        return "resume=never would start over, and remove what has been done", "Set resume=auto"
    return None


def choose_run_action(config: RunConfig, num_steps: int | None) -> RunAction:
    """Decide what happens to the output directory; nothing is changed."""
    directory = RunDirectory.from_config(config)
    path = directory.path
    if path.exists() and not path.is_dir():
        raise ConfigError(f"output_dir={config.output_dir!r} is a file. Name a directory.")
    existing = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not existing.is_dir():
        raise ConfigError(f"output_dir={config.output_dir!r} lies below {existing}, which is a file. Name another.")
    if not os.access(existing, os.W_OK):
        raise ConfigError(f"output_dir={config.output_dir!r} cannot be written: {existing} is read-only for you.")
    fate = _choose_action(config, directory, num_steps)
    if fate is RunAction.OVERWRITE:
        _check_inputs_not_overwritten(config, directory)
        directory.check_only_created()
        _check_checkpoint_owner(directory)
    return fate


def _choose_action(config: RunConfig, directory: RunDirectory, num_steps: int | None) -> RunAction:
    source = config.resume_config.source
    if is_finished(config):
        return RunAction.FINISHED
    if source not in (AUTO, NEVER):
        given = directory.resolve_checkpoint(source)
        if has_started_from(directory, given):
            # It may be gone: retention knows only what the run has saved.
            return RunAction.RESUME
        read_manifest(given)
        if given.parent.is_same_as(directory.checkpoint_storage) or given.parent.parent.is_same_as(
            directory.checkpoint_storage
        ):
            return RunAction.RESUME
    if source == AUTO and directory.summary.exists():
        if _should_extend_finished(config, directory, num_steps):
            return RunAction.RESUME
    elif source == AUTO:
        started = config.checkpoint.is_enabled and directory.run_file.exists()
        if list_checkpoints(directory.checkpoint_storage) or started:
            return RunAction.RESUME
    held = []
    if not directory.is_empty():
        held.append(f"output_dir={config.output_dir!r} holds the results of an earlier run. Name another directory")
    if directory.has_external_storage and (there := list_checkpoints(directory.checkpoint_storage)):
        held.append(
            f"checkpoint.path={config.checkpoint.path!r} holds {there[0].name} of an earlier run. Name another place"
        )
    if held and not config.overwrite:
        raise ConfigError(f"{held[0]}, or set overwrite=true to replace them.")
    return RunAction.OVERWRITE if held else RunAction.FRESH


def _should_extend_finished(config: RunConfig, directory: RunDirectory, num_steps: int | None) -> bool:
    """Whether a finished run is to resume: it has more steps now, or more patience."""
    if num_steps is None:
        return True
    has_some = bool(list_checkpoints(directory.checkpoint_storage))
    done, planned_steps = _read_summary(directory.summary)
    if num_steps > planned_steps:
        if has_some:
            return True
        raise ConfigError(
            f"steps={num_steps}, but the run in output_dir={config.output_dir!r} has finished with {planned_steps} and "
            "has left no checkpoint to resume from. To train again, name another directory, or set resume=never and "
            "overwrite=true to replace it."
        )
    before, eval_section = _load_previous_config(directory), EvalConfig()
    return (
        done < planned_steps
        and has_some
        and before is not None
        and _select_training_settings(before, eval=eval_section) == _select_training_settings(config, eval=eval_section)
    )


def is_finished(config: RunConfig) -> bool:
    """Whether this very run has finished: its directory has a summary, and the same run file."""
    directory, source = RunDirectory.from_config(config), config.resume_config.source
    if source == NEVER or not directory.summary.exists():
        return False
    before = _load_previous_config(directory)
    if before is None or _select_training_settings(before) != _select_training_settings(config):
        return False
    return source == AUTO or before.resume_config.source == source


def _select_training_settings(config: RunConfig, **overrides: Any) -> RunConfig:
    """Return a run without the settings that do not change how it trains, and without others."""
    unseen = {"metrics": MetricsConfig(), "trackers": [], "profile": None, "max_restarts": 0, "elastic": None}
    unseen |= {"watchdog_s": None, "verify_every": None}
    return config.model_copy(update={"overwrite": False, "resume": AUTO, "launch": None, **unseen, **overrides})


def _load_previous_config(directory: RunDirectory) -> RunConfig | None:
    """Return the run file in a directory; None if there is none that can be read."""
    with suppress(ConfigError):
        return load_run(directory.run_file) if directory.run_file.is_file() else None
    return None


def find_previously_named(directory: RunDirectory) -> Storage | None:
    """Return the checkpoint that the run file in a directory names."""
    before = _load_previous_config(directory)
    if before is None or before.resume_config.source in (AUTO, NEVER):
        return None
    return directory.resolve_checkpoint(before.resume_config.source)


def has_started_from(directory: RunDirectory, checkpoint: Storage) -> bool:
    """Whether the unfinished run in its directory has started with a checkpoint, there or elsewhere."""
    if directory.summary.exists():
        return False
    before = find_previously_named(directory)
    if before is not None and before.is_same_as(checkpoint):
        return True
    for place in list_checkpoints(directory.checkpoint_storage):
        with suppress(CheckpointError):
            if read_manifest(place).extra.get("named") == str(checkpoint):
                return True
    return False


def _read_summary(path: Path) -> tuple[int, int]:
    """Return the steps that a finished run has done, and those that it was to have."""
    try:
        summary = read_json_object(path)
        done = int(summary["step"])
        return done, int(summary.get("num_steps", done))
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error!r}. Remove it, if the run has not finished; it then continues "
            f"from its newest checkpoint."
        ) from None


def _check_inputs_not_overwritten(config: RunConfig, directory: RunDirectory) -> None:
    """Refuse to replace what the run begins with."""
    saved = directory.checkpoint_storage
    own = {directory.model, directory.averaged_model}
    for name in own | ({saved.path} if isinstance(saved, LocalStorage) else set()):
        replaced = name.resolve()
        for key, path in (
            ("model.path", config.model.get("path")),
            ("model.checkpoint", config.model.get("checkpoint")),
            ("model.peft.adapter", (config.model.get("peft") or {}).get("adapter")),
            ("data.tokenizer", config.data.tokenizer),
        ):
            if path is not None and replaced in (source := Path(path).expanduser().resolve(), *source.parents):
                raise ConfigError(f"{key}={path!r} lies in what this run replaces ({name}). Name another output_dir.")


def _check_checkpoint_owner(directory: RunDirectory) -> None:
    """Refuse to replace checkpoints of another run, or such that are signed with another key."""
    if not directory.has_external_storage and directory.checkpoint.key_file is None:
        return
    for place in list_checkpoints(directory.checkpoint_storage):
        try:
            run = read_manifest(place).extra.get("run")
        except IncompleteCheckpointError:
            continue
        whose = run.get("output_dir") if isinstance(run, dict) else None
        if directory.has_external_storage and isinstance(whose, str) and not directory.is_same(whose):
            raise ConfigError(
                f"{place} is of the run with output_dir={whose!r}, and overwrite=true replaces what is of the run in "
                f"output_dir={directory.configured_path!r} alone. Name another place in checkpoint.path, or remove it "
                "yourself."
            )
