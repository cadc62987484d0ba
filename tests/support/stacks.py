"""Stacks of strategies on four ranks that tests of the loop run under."""

from __future__ import annotations

from typing import Any

STACKS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "ddp bucketed": ("ddp", {"engine": "bucketed", "use_distributed_optimizer": True}, {}),
    "fsdp2 tp2": ("fsdp2", {}, {"tp_size": 2}),
    "fsdp2 cp2": ("fsdp2", {}, {"cp_size": 2}),
    "pp2 fsdp2": ("fsdp2", {}, {"pp_size": 2}),
    "megatron_fsdp": ("megatron_fsdp", {}, {}),
}
