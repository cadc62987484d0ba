"""megatron_fsdp_strategy_parallelize: a loop by hand on a plain DeviceMesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from meshwright import MeshwrightError
from meshwright.loss import token_loss_sum
from meshwright.testing import pool
from meshwright.testing.models import tiny_model
from meshwright_megatron_fsdp import megatron_fsdp_strategy_parallelize, nvfsdp_strategy_parallelize


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    norms = [p for name, p in named.items() if "norm" in name]
    others = [p for name, p in named.items() if "norm" not in name]
    return torch.optim.AdamW([{"params": norms, "weight_decay": 0.0}, {"params": others, "lr": 3e-3}], lr=1e-2)


def _loop(options: dict[str, Any]) -> float:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    model, alone = tiny_model(seed=0), tiny_model(seed=0)
    module, optimizer = nvfsdp_strategy_parallelize(model, mesh, _optimizer(model), **options)
    reference = _optimizer(alone)
    for step in range(3):
        ids = torch.randint(131, (2 * ranks, 6), generator=torch.Generator().manual_seed(step))
        mine = ids[2 * rank :][:2]
        with module.no_sync():
            (token_loss_sum(module(input_ids=mine[:1]).logits, mine[:1]) / (10 * ranks)).backward()
        (token_loss_sum(module(input_ids=mine[1:]).logits, mine[1:]) / (10 * ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.zero_grad()
        (token_loss_sum(alone(input_ids=ids).logits, ids) / (10 * ranks)).backward()
        reference.step()
    with torch.no_grad():
        return float((module(input_ids=ids).logits - alone(input_ids=ids).logits).abs().max())


@pytest.mark.parametrize(
    "options",
    [{}, {"data_parallel_sharding_strategy": "optim", "nvfsdp_unit_modules": ["LlamaMLP"]}],
    ids=str,
)
def test_a_loop_by_hand_equals_one_process_and_keeps_the_groups(options: dict[str, Any]) -> None:
    assert max(pool(2).run(_loop, options)) < 1e-11


def _loop_on_two_axes() -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tensor_parallel"))
    model, alone = tiny_model(seed=0), tiny_model(seed=0)
    options: dict[str, Any] = {"dp_mesh_name": "dp", "sequence_parallel": True, "tp_shard_plan": None}
    module, optimizer = nvfsdp_strategy_parallelize(model, mesh, _optimizer(model), **options)
    reference = _optimizer(alone)
    for step in range(3):
        ids = torch.randint(131, (4, 6), generator=torch.Generator().manual_seed(step))
        mine = ids[2 * mesh.get_local_rank("dp") :][:2]
        (token_loss_sum(module(input_ids=mine).logits, mine) / 20).backward()
        optimizer.step()
        reference.zero_grad()
        (token_loss_sum(alone(input_ids=ids).logits, ids) / 20).backward()
        reference.step()
    with torch.no_grad():
        return float((module(input_ids=ids).logits - alone(input_ids=ids).logits).abs().max())


def test_a_loop_by_hand_with_tensor_parallelism() -> None:
    assert max(pool(4).run(_loop_on_two_axes)) < 1e-11


def _refused(what: str) -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model = tiny_model()
    optimizer = _optimizer(tiny_model() if what == "stranger" else model)
    if what == "stepped":
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    name = "data_parallel" if what == "axis" else "dp"
    options = {"zero": 3} if what == "option" else {}
    try:
        megatron_fsdp_strategy_parallelize(model, mesh, optimizer, dp_mesh_name=name, **options)
    except MeshwrightError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("axis", "must have all 2 ranks in order"),
        ("stepped", "has been stepped before sharding"),
        ("stranger", "that are not the model's"),
        ("option", "zero: unknown key"),
    ],
)
def test_what_is_refused(what: str, told: str) -> None:
    first, second = pool(2).run(_refused, what)
    assert first == second
    assert told in first
