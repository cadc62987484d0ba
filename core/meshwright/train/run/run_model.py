"""The model of a run: its files, the base of its adapters, and how it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...base.errors import ModelError
from ...checkpoint import read_manifest
from ...checkpoint.directory import HUGGING_FACE
from ...mesh.world import World
from ...model.adapter import Base
from ...model.adapter_options import AdapterOptions, adapt, adapter_options, check_base
from ...model.configuration import check_needs_no_code, is_commit, trust_code
from ...model.pretrained import build_model, commit_of, dtype_of, find_directory, find_on_all
from ...model.weights import Weights
from ..from_pretrained import base_at

_WHERE = "model.peft"


@dataclass(frozen=True)
class RunModel:
    """What is known of a run's model before it is made.

    Attributes:
        directory: of Hugging Face, with its configuration and perhaps a tokenizer; None: the run file has a model_type.
        base: of the adapters.
    """

    directory: Path | None = None
    adapters: AdapterOptions | None = None
    base: Base | None = None

    def dtype(self, section: Mapping[str, Any]) -> torch.dtype:
        """Return the dtype of the parameters, except those of adapters."""
        return (self.adapters and self.adapters.base_dtype) or dtype_of(section)

    def identity(self, section: Mapping[str, Any]) -> dict[str, Any]:
        """Return what must be equal for a run to resume; values of JSON."""
        if self.base is None:
            return {}
        return {"peft": dict(section["peft"]), "base": self.base.fingerprint}


def fetch_model(section: Mapping[str, Any], world: World) -> str | None:
    """Download the model of a run file on every node. Collective.

    Returns:
        The commit, if it is one of the hub.

    Raises:
        ModelError: it cannot be found; on all ranks.
    """
    if "path" not in section:
        return None
    return commit_of(section["path"], find_on_all(section["path"], world, **_wanted(section)))


def find_model(section: Mapping[str, Any], *, commit: str | None = None) -> RunModel:
    """Find the model of a run file; download it if it is one of the hub.

    Args:
        section: the run file's `model`.
        commit: as of `fetch_model`.

    Raises:
        CheckpointError: the model's checkpoint is none.
        ModelError: it has no directory, or its adapter is of another base.
        ConfigError: an option of the adapter is not valid.
    """
    if "checkpoint" in section:
        checkpoint = Path(section["checkpoint"]).expanduser()
        manifest = read_manifest(checkpoint)
        if manifest.base is not None:
            raise ModelError(
                f"model.checkpoint={str(checkpoint)!r} holds adapters alone. Export it (meshwright export {checkpoint} "
                f"DIR) and go on from it: model.path={manifest.base.get('path')}, model.peft.adapter=DIR; or merge it "
                f"(meshwright export --merge {checkpoint} DIR), and train model.path=DIR."
            )
        return RunModel(checkpoint / HUGGING_FACE)
    if "path" not in section:
        return RunModel()
    wanted = _wanted(section)
    directory = find_directory(section["path"], **{**wanted, "revision": commit or wanted["revision"]})
    if section.get("trust_remote_code") is not None:
        trust_code(directory, section["trust_remote_code"], commit=commit_of(section["path"], directory))
    else:
        check_needs_no_code(directory)
    if "peft" not in section:
        return RunModel(directory)
    adapters = adapter_options(section["peft"], where=_WHERE)
    base = base_at(section["path"], directory, allow_pickle=bool(section.get("allow_pickle", False)))
    check_base(adapters, base, where=_WHERE)
    return RunModel(directory, adapters, base)


def make_model(
    section: Mapping[str, Any], found: RunModel, config: Any, *, seed: int
) -> tuple[nn.Module, Weights | None]:
    """Make the model of a run, with its adapters if it has any; see `build_model`."""
    if found.adapters is None:
        return build_model(section, config, seed=seed, directory=found.directory)
    dtype = found.dtype(section)
    model, weights = build_model(section, config, seed=seed, directory=found.directory, dtype=dtype)
    return adapt(model, weights, found.adapters, found.base, seed=seed, where=_WHERE)


def _wanted(section: Mapping[str, Any]) -> dict[str, Any]:
    trusted = section.get("trust_remote_code")
    commit = trusted if is_commit(trusted) else None
    return {
        "revision": section.get("revision") or commit,
        "allow_pickle": bool(section.get("allow_pickle", False)),
        "code": trusted is not None,
    }
