"""Canaries: what megatron-fsdp 0.6.1 gets wrong in its stock calls, on real ranks.

Where a test fails, upstream has fixed the defect, and our adjustment may go. That ours trains right is proven in the
other modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers.models.llama.modeling_llama import LlamaDecoderLayer as Block

from meshwright import RankError
from meshwright.step.tokens import token_loss_sum
from meshwright.testing import Case
from meshwright_megatron_fsdp._compat.cpu_torch import hold_cpu_torch
from meshwright_megatron_fsdp._compat.package import package
from meshwright_megatron_fsdp._compat.wrapped import slots
from meshwright_megatron_fsdp.shards import Shards
from meshwright_testing import pool
from meshwright_testing.case import share
from meshwright_testing.models import tiny_model

pytestmark = pytest.mark.slow
CASE = Case(dtype="float32", sequences=8, ragged=False, max_norm=None)
TOKENS = 8 * 15


@pytest.fixture(autouse=True, scope="module")
def _fresh_ranks() -> Iterator[None]:
    """End the processes in which stock calls leave their models behind."""
    yield
    for ranks in (2, 4):
        pool(ranks).close()


class _Owner:
    """Takes weak references, as a plain object does not."""


@contextmanager
def _on_cpu() -> Iterator[None]:
    owner = _Owner()
    release = hold_cpu_torch(owner)
    try:
        yield
    finally:
        release()


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(), 1), mesh_dim_names=("shard", "tp"))


def _sharded(model: nn.Module, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    """The model under the stock call, on all ranks."""
    base = {"dp_shard_dim": "shard", "tp_dim": "tp", "device": torch.device("cpu"), "fsdp_unit_modules": [Block]}
    wrapped = package().fully_shard_model(model, device_mesh=mesh or _mesh(), **{**base, **options})
    wrapped.ddp_config.gradient_reduce_div_fusion = False
    return wrapped


def _llama() -> nn.Module:
    return tiny_model(seed=0, dtype=torch.float32)


def _wrapped(outer: int = 1, **options: Any) -> Any:
    """A tiny Llama under the stock call; `outer`: ranks of the outer axis."""
    names, ranks = ("outer", "shard", "tp"), torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (outer, ranks // outer, 1), mesh_dim_names=names)
    if outer > 1:
        options |= {"dp_outer_dim": "outer", "hybrid_fsdp_group": mesh["outer", "shard"]._flatten("all").get_group()}
    return _sharded(_llama(), mesh, **options)


def _backward(wrapped: Any, microbatches: int = 1) -> None:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for batch in share(replace(CASE, microbatches=microbatches), 0, rank, ranks):
        logits = wrapped(input_ids=batch["input_ids"], use_cache=False).logits
        # The package averages over ranks unless told not to.
        (token_loss_sum(logits, batch["labels"]) / TOKENS * ranks).backward()


def _true_gradients() -> dict[str, Tensor]:
    model = _llama()
    for batch in share(CASE, 0, 0, 1):
        (token_loss_sum(model(input_ids=batch["input_ids"]).logits, batch["labels"]) / TOKENS).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def _apart(outer: int, microbatches: int, finish: bool, options: dict[str, Any]) -> float:
    """How far the gradients of the stock call are from those of one process, relative to their norm."""
    with _on_cpu():
        wrapped = _wrapped(outer, **options)
        _backward(wrapped, microbatches)
        if finish:
            wrapped.finish_grad_sync()
        shards, true = Shards(slots(wrapped)), _true_gradients()
        gradients = {
            name: shards.whole((torch.zeros_like(p) if p.grad is None else p.grad).detach(), p)
            for name, p in wrapped.module.named_parameters()
        }
        return max(float((gradients[name] - grad).norm() / grad.norm()) for name, grad in true.items())


ZERO1 = {"zero_dp_strategy": 1}


@pytest.mark.parametrize(
    ("outer", "microbatches", "finish", "options"),
    [
        # Gradients are summed over all ranks and not averaged: 4 times too large.
        pytest.param(2, 1, False, {"outer_dp_sharding_strategy": 1}, id="scale"),
        # A second microbatch reduces the first one's result again.
        pytest.param(1, 2, False, ZERO1, id="accumulation in ZeRO 1"),
        pytest.param(2, 2, False, {}, id="accumulation in HSDP"),
        # Nothing is reduced at all.
        pytest.param(1, 1, True, ZERO1 | {"sync_model_each_microbatch": False}, id="no last microbatch"),
        # Reduced twice.
        pytest.param(1, 1, False, ZERO1 | {"overlap_grad_reduce": False}, id="without overlap"),
    ],
)
def test_gradients_are_wrong(outer: int, microbatches: int, finish: bool, options: dict[str, Any]) -> None:
    # But in the plain case.
    assert max(pool(2).run(_apart, 1, 1, False, {})) < 1e-5
    assert min(pool(2 * outer).run(_apart, outer, microbatches, finish, options)) > 0.05


def _warm_step() -> tuple[float, float]:
    with _on_cpu():
        wrapped = _wrapped(zero_dp_strategy=0)
        before = [p.detach().to_local().clone() for p in wrapped.parameters()]
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2, weight_decay=0.1)
        package().fully_shard_optimizer(optimizer)
        after = [p.detach().to_local() for p in wrapped.parameters()]
        moved = max(float((one - other).abs().max()) for one, other in zip(after, before, strict=True))
        return max(float(state["step"]) for state in optimizer.state.values()), moved


def test_the_optimizer_steps_once_before_training() -> None:
    for steps, moved in pool(2).run(_warm_step):
        assert steps == 1
        assert moved > 1e-6


def _groups() -> int:
    with _on_cpu():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        groups = [{"params": layer.parameters(), "lr": lr} for layer, lr in zip(model, (1e-3, 1e-2), strict=True)]
        base = {"dp_shard_dim": "shard", "tp_dim": "tp", "device": torch.device("cpu")}
        _, optimizer = package().fully_shard(
            model, torch.optim.AdamW(groups), device_mesh=_mesh(), fsdp_unit_modules=[nn.Linear], **base
        )
        return len(optimizer.param_groups)


def test_one_group_is_made_of_all() -> None:
    assert pool(2).run(_groups) == [1, 1]


def _with_gradient() -> int:
    with _on_cpu():
        wrapped = _wrapped()
        _backward(wrapped)
        return sum(p.grad is not None for p in wrapped.parameters())


def test_ranks_have_gradients_of_different_parameters_so_that_clipping_runs_different_collectives() -> None:
    assert len(set(pool(4).run(_with_gradient))) > 1


def _stock_call(what: str) -> None:
    if what == "float64":
        _sharded(nn.Sequential(nn.Linear(4, 4, dtype=torch.float64)), fsdp_unit_modules=[nn.Linear])
    elif what == "units":
        _wrapped(fsdp_unit_modules=None)
    elif what == "tp_dim":
        _wrapped(tp_dim=None)
    elif what == "average":
        _wrapped(average_in_collective=True)
    elif what == "outer without ZeRO":
        wrapped = _wrapped(2, zero_dp_strategy=0)
        optimizer = torch.optim.AdamW(wrapped.parameters())
        _backward(wrapped)
        optimizer.step()
    elif what == "grads":
        _backward(_wrapped(mixed_precision_policy=package().MixedPrecisionPolicy(None, torch.float64, None)))
    elif what == "shared by three":
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        for layer in model[1:]:
            layer.weight = model[0].weight
        _sharded(model, fsdp_unit_modules=[nn.Linear])(torch.ones(2, 4))


def _error_of(what: str) -> str:
    with _on_cpu():
        try:
            _stock_call(what)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("what", "ranks", "told"),
    [
        ("float64", 2, "KeyError: torch.float64"),
        ("units", 2, "ZeroDivisionError"),
        ("tp_dim", 2, "No submesh with mesh_dim_names=(None,)"),
        ("average", 2, "'NoneType' object has no attribute 'size'"),
        ("grads", 2, "KeyError: torch.float64"),
        ("shared by three", 2, "AssertionError: Raw parameter 2.weight not found in module."),
        ("outer without ZeRO", 4, "in-place operations that require placement changes are not supported"),
    ],
)
def test_calls_that_fail(what: str, ranks: int, told: str) -> None:
    assert all(told in each for each in pool(ranks).run(_error_of, what))


def _row_parallel(stage: int) -> None:
    hold_cpu_torch(owner := _Owner())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    model = _llama()
    styles = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], {f"model.layers.*.mlp.{name}": style for name, style in styles.items()})
    wrapped = _sharded(model, mesh, zero_dp_strategy=stage)
    (batch,) = share(CASE, 0, mesh.get_local_rank("shard"), 2)
    logits = wrapped(input_ids=batch["input_ids"], use_cache=False).logits
    (token_loss_sum(logits, batch["labels"]) / TOKENS * 2).backward()
    del owner


@pytest.mark.parametrize(("stage", "told"), [(0, "Mismatch between param shape"), (1, "chunk metadata is invalid")])
def test_row_parallel_layers_fail_as_dtensors(stage: int, told: str) -> None:
    with pytest.raises(RankError, match=told):
        pool(4).run(_row_parallel, stage)


def _late_optimizer() -> None:
    hold_cpu_torch(owner := _Owner())
    model = _llama()
    optimizer = torch.optim.AdamW(model.parameters())
    _sharded(model)
    package().fully_shard_optimizer(optimizer)
    del owner


def test_an_optimizer_from_before_sharding_fails() -> None:
    # The stock call looks at memory that sharding has freed.
    with pytest.raises(RankError, match=r"died with signal SIGSEGV|out of bounds for storage of size 0"):
        pool(2).run(_late_optimizer)
