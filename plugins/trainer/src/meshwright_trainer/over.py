"""Classes over trainers, made when they are asked for."""

from __future__ import annotations

import importlib

from meshwright.base.errors import ConfigError

from .grpo import MeshGRPOMixin
from .mixin import MeshTrainerMixin


def over(name: str, package: str, base: str) -> type:
    """The mixin over a trainer.

    Raises:
        ConfigError: its package is not installed.
    """
    try:
        cls = getattr(importlib.import_module(package), base)
    except ImportError as error:
        raise ConfigError(
            f"{name} is over {base} of {package}, which cannot be imported: {error}. Install it: pip install "
            f"'{package}>=1.16'."
        ) from error
    mixin = MeshGRPOMixin if base == "GRPOTrainer" else MeshTrainerMixin
    return type(name, (mixin, cls), {"__doc__": f"`{base}` over a mesh; see `{mixin.__name__}`."})
