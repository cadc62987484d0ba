"""What megatron-fsdp 0.6.1 gets wrong, and that ours does not: each test runs the stock call and ours on real ranks.

A test that finds the stock call right is a canary: upstream has fixed it, and our adjustment may go.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from meshwright import Mesh, MeshSizes, RankError, StrategyError, count_tokens, open_world
from meshwright.step.token_loss import token_loss_sum
from meshwright.testing import Case, assert_parity, pool
from meshwright.testing.case import share
from meshwright.testing.models import tiny_model
from meshwright.testing.parity import build_manager, full_weights
from meshwright_megatron_fsdp import MegatronFSDPConfig, MegatronFSDPManager, megatron_fsdp_strategy_parallelize
from meshwright_megatron_fsdp._compat.cpu_torch import hold_cpu_torch
from meshwright_megatron_fsdp._compat.package import package
from meshwright_megatron_fsdp._compat.wrapped import slots
from meshwright_megatron_fsdp.shards import Shards

CASE = Case(dtype="float32", sequences=8, ragged=False, max_norm=None)
TOKENS = 8 * 15


@pytest.fixture(autouse=True, scope="module")
def _fresh_ranks() -> Iterator[None]:
    """What stock calls leave behind in a process, their models among it, goes with the process."""
    yield
    for ranks in (2, 4):
        pool(ranks).close()


class _Owner:
    """Keeps torch on a CPU in place; a plain object cannot be referred to weakly."""


def _blocks() -> list[type]:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer as Block

    return [Block]


def _wrapped(outer: int | None = None, **options: Any) -> Any:
    """A tiny Llama under the stock call, on all ranks; `outer`: ranks of the outer axis."""
    model = tiny_model(seed=0, dtype=torch.float32)
    ranks = torch.distributed.get_world_size()
    names = ("outer", "shard", "tp")
    mesh = init_device_mesh("cpu", (outer or 1, ranks // (outer or 1), 1), mesh_dim_names=names)
    if outer:
        options |= {"dp_outer_dim": "outer", "hybrid_fsdp_group": mesh["outer", "shard"]._flatten("all").get_group()}
    base = {"dp_shard_dim": "shard", "tp_dim": "tp", "fsdp_unit_modules": _blocks(), "device": torch.device("cpu")}
    wrapped = package().fully_shard_model(model, device_mesh=mesh, **{**base, **options})
    wrapped.ddp_config.gradient_reduce_div_fusion = False
    return wrapped


def _backward(wrapped: Any, microbatches: int = 1) -> None:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for batch in share(Case(**{**vars(CASE), "microbatches": microbatches}), 0, rank, ranks):
        logits = wrapped(input_ids=batch["input_ids"], use_cache=False).logits
        # The package averages over ranks unless told not to.
        (token_loss_sum(logits, batch["labels"]) / TOKENS * ranks).backward()


def _gradients(wrapped: Any) -> dict[str, Tensor]:
    shards = Shards(slots(wrapped))
    found = {}
    for name, p in wrapped.module.named_parameters():
        grad = p.grad if p.grad is not None else torch.zeros_like(p)
        found[name] = shards.whole(grad.detach(), p).clone()
    return found


def _true_gradients() -> dict[str, Tensor]:
    model = tiny_model(seed=0, dtype=torch.float32)
    for batch in share(CASE, 0, 0, 1):
        (token_loss_sum(model(input_ids=batch["input_ids"]).logits, batch["labels"]) / TOKENS).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def _apart(found: dict[str, Tensor]) -> float:
    true = _true_gradients()
    return max(float((found[name] - grad).norm() / grad.norm()) for name, grad in true.items())


def _ours(config: dict[str, Any], sizes: dict[str, int], microbatches: int = 1) -> float:
    """How far our gradients are from those of one process."""
    case = Case(**{**vars(CASE), "microbatches": microbatches})
    manager = build_manager("megatron_fsdp", config, sizes, case)
    batches = share(case, 0, manager.mesh.data_rank, manager.mesh.data_size)
    manager.forward_backward(batches, num_tokens=count_tokens(batches, manager.mesh))
    parts = manager.parts
    return _apart({name: parts.whole(p.grad.detach(), p).clone() for name, p in manager.model.named_parameters()})


def _stock(outer: int | None, microbatches: int, finish: bool, options: dict[str, Any]) -> float:
    owner = _Owner()
    release = hold_cpu_torch(owner)
    wrapped = _wrapped(outer, **options)
    _backward(wrapped, microbatches)
    if finish:
        wrapped.finish_grad_sync()
    apart = _apart(_gradients(wrapped))
    release()
    return apart


def test_the_stock_call_is_right_where_it_is_and_so_is_this_test() -> None:
    assert max(pool(2).run(_stock, None, 1, False, {})) < 1e-5
    assert max(pool(2).run(_ours, {}, {})) < 1e-5


@pytest.mark.parametrize(
    ("outer", "microbatches", "finish", "options", "config"),
    [
        # Gradients are summed over all ranks and not averaged: 4 times too large.
        pytest.param(2, 1, False, {"outer_dp_sharding_strategy": 1}, {"outer_dp_sharding_strategy": 1}, id="scale"),
        # A second microbatch reduces the first one's result again.
        pytest.param(None, 2, False, {"zero_dp_strategy": 1}, {"zero_dp_strategy": 1}, id="accumulation in ZeRO 1"),
        pytest.param(2, 2, False, {}, {}, id="accumulation in HSDP"),
        # Nothing is reduced at all.
        pytest.param(
            None,
            1,
            True,
            {"zero_dp_strategy": 1, "sync_model_each_microbatch": False},
            {"zero_dp_strategy": 1},
            id="no last microbatch",
        ),
        # Reduced twice.
        pytest.param(
            None,
            1,
            False,
            {"zero_dp_strategy": 1, "overlap_grad_reduce": False},
            {"zero_dp_strategy": 1, "overlap_grad_reduce": False},
            id="without overlap",
        ),
    ],
)
def test_stock_gradients_are_wrong(
    outer: int | None, microbatches: int, finish: bool, options: dict[str, Any], config: dict[str, Any]
) -> None:
    ranks = 4 if outer else 2
    sizes = {"dp_replicate_size": outer} if outer else {}
    assert min(pool(ranks).run(_stock, outer, microbatches, finish, options)) > 0.05
    assert max(pool(ranks).run(_ours, config, sizes, microbatches)) < 1e-5


# -- the optimizer


def _warm_step() -> list[float]:
    owner = _Owner()
    release = hold_cpu_torch(owner)
    wrapped = _wrapped(zero_dp_strategy=0)
    before = [p.detach().to_local().clone() for p in wrapped.parameters()]
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2, weight_decay=0.1)
    package().fully_shard_optimizer(optimizer)
    steps = max(float(state["step"]) for state in optimizer.state.values())
    moved = max(
        float((p.detach().to_local() - b).abs().max()) for p, b in zip(wrapped.parameters(), before, strict=True)
    )
    release()
    manager = build_manager("megatron_fsdp", {"zero_dp_strategy": 0}, {}, CASE)
    ours = len(manager.optimizer.state)
    same = all(
        torch.equal(p.detach().to_local(), q)
        for p, q in zip(manager.trainable(), tiny_model(seed=0, dtype=torch.float32).parameters(), strict=True)
    )
    return [steps, moved, ours, float(same)]


def test_the_stock_optimizer_steps_once_before_training_and_ours_does_not() -> None:
    for steps, moved, ours, same in pool(2).run(_warm_step):
        assert steps == 1
        assert moved > 1e-6
        assert ours == 0
        assert same == 1.0


def _groups() -> list[int]:
    owner = _Owner()
    release = hold_cpu_torch(owner)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    groups = [{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[1].parameters(), "lr": 1e-2}]
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(), 1), mesh_dim_names=("shard", "tp"))
    _, optimizer = package().fully_shard(
        model,
        torch.optim.AdamW(groups),
        device_mesh=mesh,
        dp_shard_dim="shard",
        tp_dim="tp",
        fsdp_unit_modules=[nn.Linear],
        device=torch.device("cpu"),
    )
    release()
    ours = build_manager("megatron_fsdp", {}, {}, CASE).optimizer.param_groups
    return [len(optimizer.param_groups), len(ours), len({group["weight_decay"] for group in ours})]


def test_the_stock_call_makes_one_group_of_all_and_ours_keeps_them() -> None:
    assert pool(2).run(_groups) == [[1, 2, 2]] * 2


# -- clipping, and what else ranks must do alike


def _with_gradient() -> list[int]:
    owner = _Owner()
    release = hold_cpu_torch(owner)
    wrapped = _wrapped()
    _backward(wrapped)
    stock = sum(p.grad is not None for p in wrapped.parameters())
    release()
    manager = build_manager("megatron_fsdp", {}, {}, CASE)
    batches = share(CASE, 0, manager.mesh.data_rank, manager.mesh.data_size)
    manager.forward_backward(batches, num_tokens=count_tokens(batches, manager.mesh))
    return [stock, sum(p.grad is not None for p in manager.trainable())]


def test_ranks_have_gradients_of_the_same_parameters_so_that_clipping_works() -> None:
    answers = pool(4).run(_with_gradient)
    # torch.nn.utils.clip_grad_norm_ then runs different collectives on each rank.
    assert len({stock for stock, _ in answers}) > 1
    assert len({ours for _, ours in answers}) == 1


def _error_of(what: str) -> str:
    owner = _Owner()
    release = hold_cpu_torch(owner)
    try:
        if what == "float64":
            package().fully_shard_model(
                nn.Sequential(nn.Linear(4, 4, dtype=torch.float64)),
                device_mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "tp")),
                dp_shard_dim="shard",
                tp_dim="tp",
                fsdp_unit_modules=[nn.Linear],
                device=torch.device("cpu"),
            )
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
            policy = package().MixedPrecisionPolicy(None, torch.float64, None)
            _backward(_wrapped(mixed_precision_policy=policy))
        return "no error"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        release()


@pytest.mark.parametrize(
    ("what", "told", "config"),
    [
        ("float64", "KeyError: torch.float64", {"main_params_dtype": "float64", "main_grads_dtype": "float64"}),
        # Of ours, see also `test_a_model_without_blocks`.
        ("units", "ZeroDivisionError", {}),
        ("tp_dim", "No submesh with mesh_dim_names=(None,)", {}),
        ("average", "'NoneType' object has no attribute 'size'", {"average_in_collective": True}),
        ("grads", "KeyError: torch.float64", {"main_grads_dtype": "float64"}),
    ],
)
def test_stock_calls_that_fail_and_ours_that_are_right(what: str, told: str, config: dict[str, Any]) -> None:
    assert all(told in each for each in pool(2).run(_error_of, what))
    assert max(pool(2).run(_ours, config, {})) < 1e-5


def _shared_by_three() -> str:
    owner = _Owner()
    release = hold_cpu_torch(owner)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for layer in model[1:]:
        layer.weight = model[0].weight
    wrapped = package().fully_shard_model(
        model,
        device_mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "tp")),
        dp_shard_dim="shard",
        tp_dim="tp",
        fsdp_unit_modules=[nn.Linear],
        device=torch.device("cpu"),
    )
    try:
        wrapped(torch.ones(2, 4))
    except AssertionError as error:
        return str(error)
    finally:
        release()
    return "no error"


def test_a_parameter_that_three_modules_share_is_lost_by_the_stock_call_and_kept_by_ours() -> None:
    assert pool(2).run(_shared_by_three) == ["Raw parameter 2.weight not found in module."] * 2
    assert_parity("megatron_fsdp", Case(model_type="prophetnet", tied=None, unshard_after=True), world_size=2)


def _refusal(config: dict[str, Any], sizes: dict[str, int]) -> str:
    try:
        build_manager("megatron_fsdp", config, sizes, CASE)
    except StrategyError as error:
        return str(error)
    return "accepted"


def test_copies_over_two_axes_fail_in_the_stock_step_and_are_refused_by_ours_before_it() -> None:
    told = "in-place operations that require placement changes are not supported"
    assert all(told in each for each in pool(4).run(_error_of, "outer without ZeRO"))
    answers = pool(4).run(_refusal, {"zero_dp_strategy": 0}, {"dp_replicate_size": 2})
    assert len(set(answers)) == 1
    assert "Set zero_dp_strategy=1 or more" in answers[0]
    assert max(pool(4).run(_ours, {"zero_dp_strategy": 1}, {"dp_replicate_size": 2})) < 1e-5


class _Flat(nn.Module):
    """A model without a stack of blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(17, 6, dtype=torch.float64)
        self.head = nn.Linear(6, 17, dtype=torch.float64)

    def forward(self, input_ids: Tensor) -> Any:
        return type("Output", (dict,), {"logits": property(lambda out: out["logits"])})(
            logits=self.head(self.embed(input_ids))
        )


def _flat() -> float:
    world = open_world("cpu")
    manager = MegatronFSDPManager(MegatronFSDPConfig(), Mesh(MeshSizes().resolve(world.size), world))
    model, alone = _Flat(), _Flat()
    manager.parallelize(model)
    manager.build_optimizer(lambda named: torch.optim.SGD([p for _, p in named], lr=1.0))
    ids = torch.randint(17, (4, 5), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": ids[world.rank * 2 :][:2], "labels": ids[world.rank * 2 :][:2]}]
    manager.forward_backward(batches, num_tokens=count_tokens(batches, manager.mesh))
    manager.optimizer_step()
    (token_loss_sum(alone(ids).logits, ids) / 16).backward()
    whole = full_weights(manager)
    return max(float((p - p.grad - whole[name]).abs().max()) for name, p in alone.named_parameters())


def test_a_model_without_blocks() -> None:
    assert max(pool(2).run(_flat)) < 1e-12


# -- tensor parallelism by DTensors


def _row_parallel(stage: int) -> None:
    owner = _Owner()
    hold_cpu_torch(owner)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    model = tiny_model(seed=0, dtype=torch.float32)
    plan = {
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
    }
    parallelize_module(model, mesh["tp"], plan)
    wrapped = package().fully_shard_model(
        model,
        device_mesh=mesh,
        dp_shard_dim="shard",
        tp_dim="tp",
        fsdp_unit_modules=_blocks(),
        device=torch.device("cpu"),
        zero_dp_strategy=stage,
    )
    wrapped.ddp_config.gradient_reduce_div_fusion = False
    (batch,) = share(CASE, 0, mesh.get_local_rank("shard"), 2)
    logits = wrapped(input_ids=batch["input_ids"], use_cache=False).logits
    (token_loss_sum(logits, batch["labels"]) / TOKENS * 2).backward()


PLAN = {
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}


@pytest.mark.parametrize(("stage", "told"), [(0, "Mismatch between param shape"), (1, "chunk metadata is invalid")])
def test_row_parallel_layers_fail_as_dtensors_and_are_right_as_ours(stage: int, told: str) -> None:
    with pytest.raises(RankError, match=told):
        pool(4).run(_row_parallel, stage)
    assert max(pool(4).run(_ours, {"zero_dp_strategy": stage, "tp_plan": PLAN}, {"tp_size": 2})) < 1e-5


# -- an optimizer that was there before


def _late_optimizer() -> None:
    owner = _Owner()
    hold_cpu_torch(owner)
    model = tiny_model(seed=0, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "tp"))
    wrapped = package().fully_shard_model(
        model,
        device_mesh=mesh,
        dp_shard_dim="shard",
        tp_dim="tp",
        fsdp_unit_modules=_blocks(),
        device=torch.device("cpu"),
    )
    wrapped.ddp_config.gradient_reduce_div_fusion = False
    package().fully_shard_optimizer(optimizer)


def _ours_with_a_late_optimizer() -> float:
    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    model, alone = tiny_model(seed=0), tiny_model(seed=0)
    module, optimizer = megatron_fsdp_strategy_parallelize(model, mesh, torch.optim.AdamW(model.parameters(), lr=1e-2))
    reference = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    ids = torch.randint(131, (4, 6), generator=torch.Generator().manual_seed(0))
    mine = ids[2 * rank :][:2]
    for _ in range(2):
        (token_loss_sum(module(input_ids=mine).logits, mine) / 20).backward()
        optimizer.step()
        reference.zero_grad()
        (token_loss_sum(alone(input_ids=ids).logits, ids) / 20).backward()
        reference.step()
    with torch.no_grad():
        return float((module(input_ids=ids).logits - alone(input_ids=ids).logits).abs().max())


def test_an_optimizer_from_before_sharding_fails_in_the_stock_call_and_trains_with_ours() -> None:
    # The stock call looks at memory that sharding has freed.
    with pytest.raises(RankError, match=r"died with signal SIGSEGV|out of bounds for storage of size 0"):
        pool(2).run(_late_optimizer)
    assert max(pool(2).run(_ours_with_a_late_optimizer)) < 1e-11
