"""Decide what a run does with its output directory: start fresh, overwrite, resume, or nothing if it has finished."""

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
from .run_file import RunConfig, load_run, to_redacted_dict
from .run_sections import EvalConfig, MetricsConfig
from .settings_diff import diff_settings, join_changes

NEVER, AUTO = "never", "auto"


class RunAction(Enum):
    """What a run does with its output directory."""

    FRESH = "start; no earlier results exist"
    OVERWRITE = "remove earlier results and start"
    RESUME = "resume if there is a checkpoint"
    FINISHED = "change nothing; the run has finished"


def check_restarts(config: RunConfig) -> None:
    """Raise ConfigError if torchrun would restart ranks that could not resume, or none under checkpoint.replicate."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if config.checkpoint.replicate is not None and is_launched_externally() and restarts in ("", "0"):
        raise ConfigError(
            "checkpoint.replicate copies state for ranks that the same launcher restarts, but this launcher "
            "restarts none. Use torchrun --max-restarts=3, or `meshwright train` with max_restarts, or leave "
            "checkpoint.replicate out."
        )
    obstacle = find_resume_obstacle(config)
    if restarts.isdecimal() and restarts != "0" and obstacle is not None:
        reason, remedy = obstacle
        raise ConfigError(
            f"torchrun would restart failed ranks up to {restarts} times (--max-restarts), but {reason}. {remedy}, or "
            f"--max-restarts=0."
        )


def find_resume_obstacle(config: RunConfig) -> tuple[str, str] | None:
    """Return why a restarted run would not resume, and the remedy; None if it would."""
    if not config.checkpoint.is_enabled:
        return "the run saves no checkpoints to resume from", "Set checkpoint.every"
    if config.resume_config.source == NEVER:
        return "resume=never would start over and remove all results", "Set resume=auto"
    return None


def choose_run_action(config: RunConfig, num_steps: int | None) -> RunAction:
    """Decide what happens to the output directory, without changing it. ConfigError if the run cannot use it."""
    directory = RunDirectory.from_config(config)
    path = directory.path
    if path.exists() and not path.is_dir():
        raise ConfigError(f"output_dir={config.output_dir!r} is a file. Name a directory.")
    existing = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not existing.is_dir():
        raise ConfigError(f"output_dir={config.output_dir!r} is below {existing}, which is a file. Name another.")
    if not os.access(existing, os.W_OK):
        raise ConfigError(
            f"output_dir={config.output_dir!r} cannot be written: you have no write access to {existing}."
        )
    action = _choose_action(config, directory, num_steps)
    if action is RunAction.OVERWRITE:
        _check_inputs_not_overwritten(config, directory)
        directory.check_only_created()
        _check_checkpoint_owner(directory)
    return action


def _choose_action(config: RunConfig, directory: RunDirectory, num_steps: int | None) -> RunAction:
    source = config.resume_config.source
    if is_finished(config):
        return RunAction.FINISHED
    if source not in (AUTO, NEVER):
        given = directory.resolve_checkpoint(source)
        if has_started_from(directory, given):
            # It may have been removed since, so it is not read.
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
    if directory.has_external_storage and (saved := list_checkpoints(directory.checkpoint_storage)):
        held.append(
            f"checkpoint.path={config.checkpoint.path!r} holds {saved[0].name} of an earlier run. Name another location"
        )
    if held and not config.overwrite:
        raise ConfigError(f"{held[0]}, or set overwrite=true to replace them.{_describe_difference(config, directory)}")
    return RunAction.OVERWRITE if held else RunAction.FRESH


def _describe_difference(config: RunConfig, directory: RunDirectory) -> str:
    """Return a sentence on the settings that differ from those of the earlier run; empty if it has no run file."""
    before = _load_previous_config(directory)
    if before is None:
        return ""
    changed = diff_settings(to_redacted_dict(before), to_redacted_dict(config))
    ignored = ("overwrite", "resume", "output_dir")
    texts = [f"{key}={now} (was {then})" for key, then, now in changed if key.partition(".")[0] not in ignored]
    return f" That run had other settings: {join_changes(texts)}." if texts else ""


def _should_extend_finished(config: RunConfig, directory: RunDirectory, num_steps: int | None) -> bool:
    """Return whether a finished run resumes: it has more steps now, or it stopped early and `eval` has changed."""
    if num_steps is None:
        return True
    has_some = bool(list_checkpoints(directory.checkpoint_storage))
    done, planned_steps = _read_summary(directory.summary)
    if num_steps > planned_steps:
        if has_some:
            return True
        raise ConfigError(
            f"steps={num_steps}, but the run in output_dir={config.output_dir!r} finished with {planned_steps} and "
            "left no checkpoint to resume from. To train again, name another directory, or set resume=never and "
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
    """Return whether this run has finished: its directory has a summary, and an equal run file."""
    directory, source = RunDirectory.from_config(config), config.resume_config.source
    if source == NEVER or not directory.summary.exists():
        return False
    before = _load_previous_config(directory)
    if before is None or _select_training_settings(before) != _select_training_settings(config):
        return False
    return source == AUTO or before.resume_config.source == source


def _select_training_settings(config: RunConfig, **overrides: Any) -> RunConfig:
    """Return the config without settings that do not affect training; `overrides` replaces others."""
    ignored = {"metrics": MetricsConfig(), "trackers": [], "profile": None, "max_restarts": 0, "elastic": None}
    ignored |= {"watchdog_s": None, "verify_every": None}
    return config.model_copy(update={"overwrite": False, "resume": AUTO, "launch": None, **ignored, **overrides})


def _load_previous_config(directory: RunDirectory) -> RunConfig | None:
    """Return the config in a run directory; None if there is none, or it cannot be read."""
    with suppress(ConfigError):
        return load_run(directory.run_file) if directory.run_file.is_file() else None
    return None


def find_previously_named(directory: RunDirectory) -> Storage | None:
    """Return the checkpoint that `resume` names in the run file of a run directory; None if it names none."""
    before = _load_previous_config(directory)
    if before is None or before.resume_config.source in (AUTO, NEVER):
        return None
    return directory.resolve_checkpoint(before.resume_config.source)


def has_started_from(directory: RunDirectory, checkpoint: Storage) -> bool:
    """Return whether the unfinished run in a directory has started from `checkpoint`, which may be elsewhere."""
    if directory.summary.exists():
        return False
    before = find_previously_named(directory)
    if before is not None and before.is_same_as(checkpoint):
        return True
    for each in list_checkpoints(directory.checkpoint_storage):
        with suppress(CheckpointError):
            if read_manifest(each).extra.get("named") == str(checkpoint):
                return True
    return False


def describe_replaced(config: RunConfig) -> str:
    """Return what overwriting removes, as a clause: the state of the earlier run, its checkpoints and its model."""
    directory = RunDirectory.from_config(config)
    state = "an unfinished run"
    if directory.summary.exists():
        with suppress(ConfigError):
            done, planned_steps = _read_summary(directory.summary)
            state = f"a finished run ({done:,} of {planned_steps:,} steps)"
    count = len(list_checkpoints(directory.checkpoint_storage))
    parts = [f"{count} checkpoint{'s' if count > 1 else ''}"] if count else []
    parts += [f"the model in {directory.model}"] if directory.model.exists() else []
    return " with ".join([state, *([" and ".join(parts)] if parts else [])])


def _read_summary(path: Path) -> tuple[int, int]:
    """Return the number of steps that a finished run has done, and the number that it planned."""
    try:
        summary = read_json_object(path)
        done = int(summary["step"])
        return done, int(summary.get("num_steps", done))
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error!r}. Remove it if the run has not finished; the run then resumes "
            f"from its newest checkpoint."
        ) from None


def _check_inputs_not_overwritten(config: RunConfig, directory: RunDirectory) -> None:
    """Raise ConfigError if overwriting would remove inputs of the run."""
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
                raise ConfigError(f"{key}={path!r} is inside {name}, which this run replaces. Name another output_dir.")


def _check_checkpoint_owner(directory: RunDirectory) -> None:
    """Raise an error if overwriting would remove checkpoints of another run, or ones signed with another key."""
    if not directory.has_external_storage and directory.checkpoint.key_file is None:
        return
    for each in list_checkpoints(directory.checkpoint_storage):
        try:
            run = read_manifest(each).extra.get("run")
        except IncompleteCheckpointError:
            continue
        owner = run.get("output_dir") if isinstance(run, dict) else None
        if directory.has_external_storage and isinstance(owner, str) and not directory.is_same(owner):
            raise ConfigError(
                f"{each} belongs to the run with output_dir={owner!r}, but overwrite=true replaces only checkpoints of "
                f"the run in output_dir={directory.configured_path!r}. Name another location in checkpoint.path, or "
                "remove it yourself."
            )
