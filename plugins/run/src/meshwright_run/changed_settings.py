"""Settings that differ between a run and the checkpoint that it resumes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from meshwright.plugin import CheckpointError, Manifest, StorageReader

from .run_file import RunConfig, to_redacted_dict
from .run_sections import AllowedChange, ResumeConfig
from .settings_diff import diff_settings, join_changes


def find_changed_settings(
    checkpoint: str | StorageReader,
    manifest: Manifest,
    identity: Mapping[str, Any],
    config: RunConfig,
    num_steps: int,
    *,
    min_steps_left: int = 0,
) -> tuple[str, ...]:
    """Return the settings that differ from the run of a checkpoint. Raises CheckpointError if one must not differ, or
    if fewer than `min_steps_left` steps are left."""
    saved = manifest.extra.get("identity")
    if saved is None:
        raise CheckpointError(
            f"the checkpoint {checkpoint} was not saved by `meshwright train`. Load it in a script, or start from "
            f"its weights only: model.checkpoint={checkpoint}."
        )
    changed = find_differences(saved, identity)
    allow = set(config.resume_config.allow)
    refused = [name for name in changed if name not in allow and name.partition(".")[0] not in allow]
    if "model.base" in refused:
        raise CheckpointError(
            f"{checkpoint} holds adapters for another base: {(manifest.base or {}).get('path')}, fingerprint "
            f"{str((manifest.base or {}).get('fingerprint'))[:12]}. The model at model.path={config.model['path']!r} "
            f"has other weights. Use the base that the run was started with, or start over in another output_dir."
        )
    if refused:
        changes = _describe_changes(refused, manifest.extra.get("run"), config)
        raise CheckpointError(
            f"the run differs from that of {checkpoint}: {changes}. Restore the settings of that run"
            f"{_describe_allowance(refused, config.resume_config)}; or start over: --set resume=never --set "
            f"overwrite=true; or start another run from its weights: --set model.checkpoint={checkpoint} --set "
            f"output_dir=..."
        )
    if manifest.step + min_steps_left > num_steps:
        raise CheckpointError(
            f"{checkpoint} was saved after step {manifest.step}, but the run has {num_steps} steps. Raise steps, or "
            "start over with resume=never."
        )
    return tuple(changed)


def _describe_changes(names: Sequence[str], saved_run: Any, config: RunConfig) -> str:
    """Return what the user has changed in the sections of `names`, as key=value (was ...), and the other names."""
    current = to_redacted_dict(config)
    changed = diff_settings(saved_run, current) if isinstance(saved_run, dict) else []
    parts: dict[str, None] = {}
    for name in names:
        section = name.partition(".")[0]
        exact = [each for each in changed if each[0] == name or each[0].startswith(f"{name}.")]
        found = exact or [each for each in changed if each[0] == section or each[0].startswith(f"{section}.")]
        parts |= dict.fromkeys([f"{key}={now} (was {before})" for key, before, now in found] or [name])
    return join_changes(list(parts))


def _describe_allowance(refused: Sequence[str], resume: ResumeConfig) -> str:
    """Return the option that allows all changes; an empty string if one of them cannot be allowed."""
    known = get_args(AllowedChange)
    wanted = {next((each for each in known if each in (name, name.partition(".")[0])), None) for name in refused}
    if None in wanted:
        return ""
    allow = [each for each in known if each in wanted or each in resume.allow]
    return f"; or allow the change: --set 'resume={{from: {resume.source}, allow: [{', '.join(allow)}]}}'"


def find_differences(saved: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
    """Return the names of settings that differ; sections that were not saved count as equal."""
    names = []
    for section, current in identity.items():
        value, before = (_use_current_names(each, section) for each in (current, saved.get(section, current)))
        if section == "schedule":
            value, before = _drop_derived_warmup(value, before)
        if before != value and isinstance(value, dict) and isinstance(before, dict):
            names += [f"{section}.{key}" for key in {**before, **value} if before.get(key) != value.get(key)]
        elif before != value:
            names.append(section)
    return names


def _drop_derived_warmup(*schedules: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return two schedules without the length of the warm-up if it is the same, and else without one form of it.

    The steps that follow from a ratio change with the length of the run, and a ratio may be written as steps.
    """
    ratio, (steps, steps_before) = schedules[0].get("warmup_ratio"), (each.get("warmup_steps") for each in schedules)
    if steps == steps_before:
        dropped = {"warmup_steps", "warmup_ratio"}
    else:
        dropped = {"warmup_ratio"} if ratio is None else {"warmup_steps"}
    return [{key: value for key, value in each.items() if key not in dropped} for each in schedules]


_EARLIER_NAMES: Mapping[str, Mapping[str, str]] = {
    "ema": {"start": "start_step"},
    "optimizer": {"matrices": "matrices_only"},
    "objective": {
        "log_entropy": "report_entropy",
        "entropy": "entropy_coef",
        "importance": "importance_level",
        "center": "center_coefficient",
        "sums": "extra_sums",
        "rest": "tail",
    },
}
"""By section of an identity, the keys in checkpoints of earlier versions, and their current names."""


def _use_current_names(value: Any, section: str) -> Any:
    if isinstance(value, list):
        return [_use_current_names(each, section) for each in value]
    if not isinstance(value, dict):
        return value
    names = {old: new for old, new in _EARLIER_NAMES.get(section, {}).items() if new not in value}
    return {names.get(key, key): _use_current_names(each, section) for key, each in value.items()}
