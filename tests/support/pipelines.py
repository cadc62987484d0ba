"""Managers of pipelines of two ranks, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from support.managers import build_empty_manager

PP2 = {"pp_size": 2}


def build_pipeline_manager(strategy: str, options: Mapping[str, Any]) -> Any:
    own = {name: value for name, value in options.items() if name.startswith(("pp_", "loss_", "patch_"))}
    inner = {name: value for name, value in options.items() if name not in own}
    return build_empty_manager(strategy, inner, PP2, wrapper=own)
