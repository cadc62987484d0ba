"""fsdp2 with tensor and sequence parallelism: placements, parity with options, communication, memory, whole weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard

from meshwright import ModelError, OptimizerConfig, StrategyError, count_tokens
from meshwright.model import drawn_weights as deferred
from meshwright.step.token_loss import token_loss_sum
from meshwright.testing import Case, assert_parity, pool
from meshwright.testing.case import global_batch, share
from meshwright.testing.collectives import Traffic, measure_collectives
from meshwright.testing.memory import Held, measure_memory
from meshwright.testing.models import case_model, tiny_model
from meshwright.testing.parity import (
    build_manager,
    difference,
    full_weights,
    reference,
    train_case,
    train_steps,
    training_step,
    unshard_between_steps,
)
from meshwright_fsdp2 import FSDP2Config, FSDP2Manager, fsdp2_strategy_parallelize, unshard_fsdp2_model

TP2 = {"tp_size": 2}
SP = {"sequence_parallel": True}
OF_THE_REFERENCE = {"tp_plan": "meshwright_fsdp2.get_hf_tp_shard_plan"}
HARD = Case(tied=True, microbatches=2, sequences=24, eval_after=True, unshard_after=True)


def test_a_plan_in_styles_of_torch_is_compiled_as_the_models_own_is() -> None:
    compiled, case = {"enable_compile": True}, Case(tied=True, layers=1, steps=2)
    own = pool(2).run(train_case, "fsdp2", compiled, TP2, case)
    found = pool(2).run(train_case, "fsdp2", OF_THE_REFERENCE | compiled, TP2, case)
    assert difference(found, own[0]).worst <= 1e-12


def _placements(config: dict[str, Any]) -> dict[str, Any]:
    manager = build_manager("fsdp2", config, TP2, Case())
    parameters = dict(manager.model_parts[0].named_parameters())
    return {
        name: (p.device_mesh.mesh_dim_names, p.placements[-1], p.placements[0].dim) for name, p in parameters.items()
    }


def test_every_parameter_lies_on_both_axes() -> None:
    for found in pool(4).run(_placements, {}):
        assert {names for names, _, _ in found.values()} == {("dp_shard", "tp")}
        assert {dim for _, _, dim in found.values()} == {0}
        along_tp = {name.removeprefix("model.layers.0."): tp for name, (_, tp, _) in found.items()}
        assert along_tp["self_attn.q_proj.weight"] == Shard(0)
        assert along_tp["mlp.down_proj.weight"] == Shard(1)
        assert along_tp["input_layernorm.weight"] == Replicate()
        assert along_tp["model.embed_tokens.weight"] == along_tp["lm_head.weight"] == Shard(0)


def test_a_plan_of_ones_own_takes_the_place_of_the_models() -> None:
    plan = {"model.layers.*.mlp.up_proj": "colwise_gather_output"}
    for found in pool(2).run(_placements, {"tp_plan": plan}):
        divided = {name for name, (_, tp, _) in found.items() if tp.is_shard()}
        assert divided == {f"model.layers.{index}.mlp.up_proj.weight" for index in range(3)}


@pytest.mark.parametrize(
    ("config", "case"),
    [
        ({}, HARD),
        (SP, HARD),
        (SP | {"activation_checkpointing": "full", "reshard_after_forward": True}, HARD),
        (SP | {"activation_checkpointing": "selective", "reshard_after_forward": False}, HARD),
        (SP | {"defer_fsdp_grad_sync": False, "enable_fsdp2_prefetch": True}, HARD),
        (SP | {"offload_policy": {"pin_memory": False}}, Case(norm_type=math.inf)),
        (SP, Case(frozen=("*embed*", "*layers.1.*"))),
        ({}, Case(model_type="routed", route="ranks")),
        ({}, Case(optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1, options={"fused": True}))),
        ({}, Case(optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1, options={"foreach": True}))),
        (OF_THE_REFERENCE | {"activation_checkpointing": "full"}, HARD),
        (OF_THE_REFERENCE | SP, Case(model_type="qwen3", tied=True, steps=2)),
        (OF_THE_REFERENCE, Case(model_type="mixtral", tied=None, steps=2)),
    ],
    ids=str,
)
def test_parity_on_two_axes(config: dict[str, Any], case: Case) -> None:
    assert_parity("fsdp2", case, world_size=4, config=config, sizes=TP2)


@pytest.mark.parametrize("config", [{}, SP], ids=["tp", "sp"])
def test_parity_on_three_axes(config: dict[str, Any]) -> None:
    assert_parity("fsdp2", HARD, world_size=8, config=config, sizes=TP2 | {"dp_replicate_size": 2})


@pytest.mark.parametrize("config", [{}, SP], ids=["tp", "sp"])
def test_heads_that_ranks_share(config: dict[str, Any]) -> None:
    """2 key and value heads for 4 ranks."""
    assert_parity("fsdp2", HARD, world_size=4, config=config, sizes={"tp_size": 4})


def test_layers_with_fewer_features_than_ranks_can_share_stay_whole() -> None:
    """5 features for 4 ranks would leave the last one nothing."""
    assert_parity("fsdp2", Case(model_type="routed"), world_size=4, sizes={"tp_size": 4})


def _after_a_forward_alone(sizes: dict[str, int]) -> bool:
    """Gradients of a step, and of one that follows a forward in training mode without backward."""
    gradients = []
    for is_first in (True, False):
        manager = build_manager("fsdp2", {}, sizes, Case())
        (batch,) = share(Case(), 0, manager.mesh.data_rank, manager.mesh.data_size)
        (model,) = manager.model_parts
        model.train()
        if not is_first:
            model(input_ids=batch["input_ids"], use_cache=False)
        manager.forward_backward([batch], num_tokens=count_tokens([batch], manager.mesh))
        gradients.append([p.grad.full_tensor() for p in model.parameters()])
    return all(map(torch.equal, *gradients)) and all(bool(grad.any()) for grad in gradients[1])


@pytest.mark.parametrize("sizes", [{}, TP2], ids=["dp", "tp"])
def test_a_forward_without_backward_loses_no_gradient_of_the_next_step(sizes: dict[str, int]) -> None:
    """It leaves the last block gathered, whose parameters the model must not take for its own."""
    assert pool(2).run(_after_a_forward_alone, sizes) == [True, True]


PACKED = {
    "model.layers.*.mlp.gate_up_proj": "packed_colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}


def test_packed_layers_are_sharded_along_different_dims_by_the_two_axes() -> None:
    case = Case(model_type="phi3", tied=None)
    assert_parity("fsdp2", case, world_size=4, config={"tp_plan": PACKED}, sizes=TP2)


def _refused() -> str:
    try:
        build_manager("fsdp2", {"tp_plan": PACKED}, TP2, Case(model_type="phi3", tied=None))
    except ModelError as error:
        return str(error)
    return "accepted"


def test_packed_layers_that_no_dim_is_left_to_divide_are_refused() -> None:
    for text in pool(6).run(_refused):
        assert "dp_shard=3 divides no other" in text


# -- communication


def _traffic(config: dict[str, Any], case: Case) -> tuple[Traffic, int]:
    """Collectives of a whole second step, and the bytes that fsdp gathers in forward, by each parameter's own part."""
    manager = build_manager("fsdp2", config, TP2, case)
    train_steps(manager, case, range(1))
    mesh = manager.mesh
    groups = {axis: mesh.group(axis) for axis in ("dp_shard", "tp")}
    padded = 0
    for parameter in manager.model_parts[0].parameters():
        placement = parameter.placements[-1]
        part = list(parameter.shape)
        if placement.is_shard():
            chunk = -(-part[placement.dim] // 2)
            part[placement.dim] = max(0, min(chunk, part[placement.dim] - mesh.axis_rank("tp") * chunk))
        padded += -(-part[0] // 2) * 2 * math.prod(part[1:]) * parameter.element_size()
    return measure_collectives(training_step(manager, case, 1), groups), padded


HIDDEN = 12 // 2 * 16 * 36 * 8
"""Bytes of the hidden states of a data rank: half of 12 sequences of 16 tokens, 36 wide, in float64."""
BLOCKS = 3


def test_a_block_all_reduces_twice_in_forward_and_twice_in_backward() -> None:
    for traffic, padded in pool(4).run(_traffic, {"reshard_after_forward": False}, Case()):
        own = [each for each in traffic.of("all_reduce", "tp") if each.bytes == HIDDEN]
        # Beside the blocks', the embedding's output and the gradient of the head's input.
        assert len(own) == 4 * BLOCKS + 2
        # Three numbers of each position, to compute the loss of logits that no rank has whole.
        assert [each.bytes for each in traffic.of("all_gather", "tp")] == [2 * 3 * 6 * 16 * 8]
        assert traffic.of("all_gather", "dp_shard").bytes == padded
        assert traffic.of("reduce_scatter", "dp_shard").bytes == padded


def test_sequence_parallel_scatters_and_gathers_in_pairs() -> None:
    for traffic, _ in pool(4).run(_traffic, {"reshard_after_forward": False, **SP}, Case()):
        own = [each for each in traffic.of("all_reduce", "tp") if each.bytes == HIDDEN]
        assert len(own) == 2
        scatters = [each for each in traffic.of("reduce_scatter", "tp") if each.bytes == HIDDEN]
        gathers = [each for each in traffic.of("all_gather", "tp") if each.bytes == HIDDEN]
        assert len(scatters) == 4 * BLOCKS
        # And at the stack's exit in forward, and its entry in backward.
        assert len(gathers) == 4 * BLOCKS + 2


def test_logits_are_never_whole() -> None:
    logits = 6 * 16 * 131 * 8
    for traffic, _ in pool(4).run(_traffic, {}, Case()):
        assert all(each.bytes < logits / 2 for each in traffic.of("all_gather", "tp"))
        assert all(each.bytes < logits / 2 for each in traffic.of("all_reduce", "tp"))


# -- memory


def _held() -> tuple[Held, int, int]:
    """What a rank holds after a step, its part of the parameters as cut by hand, and their number."""
    case = Case()
    manager = build_manager("fsdp2", {}, TP2, case)

    def step() -> None:
        train_steps(manager, case, range(1))

    optimizer = manager.optimizer  # type: ignore[attr-defined]
    memory = measure_memory(step, manager.model_parts, optimizer)
    parameters = list(manager.model_parts[0].parameters())
    return memory.after, sum(p.to_local().numel() for p in parameters), len(parameters)


def test_a_rank_holds_its_part_of_both_axes_and_no_more() -> None:
    whole = sum(p.numel() for p in tiny_model().parameters())
    replicated = sum(p.numel() for name, p in tiny_model().named_parameters() if "norm" in name)
    outcomes = pool(4).run(_held)
    assert sum(elements for _, elements, _ in outcomes) == whole + replicated
    for held, elements, count in outcomes:
        # FSDP pads its shards.
        assert elements * 8 <= held.parameters <= elements * 8 * 1.05
        assert held.optimizer == pytest.approx(2 * elements * 8 + 4 * count, rel=0.05)


# -- whole weights


@pytest.mark.parametrize("config", [{}, SP], ids=["tp", "sp"])
def test_unshard_gives_a_plain_model_and_changes_nothing(config: dict[str, Any]) -> None:
    for plain, apart, same, is_same in pool(4).run(unshard_between_steps, "fsdp2", config, TP2, Case()):
        assert plain
        assert apart < 1e-12
        assert same
        assert is_same


def _from_meta(model_type: str) -> bool:
    deferred.LARGE_BYTES = 64
    like = case_model(model_type, tied=None, seed=0, dtype=torch.float32)
    weights = []
    for device in ("meta", "cpu"):
        torch.manual_seed(3)
        with torch.device(device):
            model = type(like)(like.config)
        weights.append(full_weights(_manager(model)))
    return all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


def _manager(model: nn.Module) -> Any:
    from meshwright import Mesh, MeshSizes, open_world, resolve

    world = open_world("cpu")
    stack, degrees = resolve("fsdp2", MeshSizes(**TP2), world.size)
    manager = stack.build(Mesh(degrees, world))
    manager.parallelize(model)
    return manager


def test_a_model_on_the_meta_device_gets_the_weights_that_its_seed_gives() -> None:
    assert pool(4).run(_from_meta, "llama") == [True] * 4


# -- precision, and the functions


def test_bfloat16_follows_one_rank_of_the_same_precision() -> None:
    case = Case(dtype="float32")
    config = {"mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32", "output_dtype": "float32"}}
    alone = pool(1).run(_losses, config, {}, case)[0]
    for losses in pool(4).run(_losses, config | SP, TP2, case):
        assert losses == pytest.approx(alone, rel=5e-3)


def _losses(config: dict[str, Any], sizes: dict[str, Any], case: Case) -> list[float]:
    return train_steps(build_manager("fsdp2", config, sizes, case), case, range(3))[0]


def _by_hand(options: dict[str, Any]) -> tuple[list[float], float]:
    """A loop by hand; and how far the whole model inside of unshard_fsdp2_model is from its own answer outside."""
    case = Case(max_norm=None)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    model = fsdp2_strategy_parallelize(tiny_model(), mesh, mp_policy=MixedPrecisionPolicy(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(3):
        (batch,) = share(case, step, mesh.get_local_rank("data_parallel"), 2)
        tokens = (global_batch(case, step)["labels"][:, 1:] != -100).sum()
        logits: Tensor = model(input_ids=batch["input_ids"], use_cache=False).logits
        loss = token_loss_sum(logits, batch["labels"]) / tokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.distributed.all_reduce(loss.detach_(), group=mesh.get_group("data_parallel"))
        losses.append(float(loss))
    with torch.no_grad():
        outside = model(input_ids=batch["input_ids"], use_cache=False).logits
        with unshard_fsdp2_model(model):
            inside = model(input_ids=batch["input_ids"], use_cache=False).logits
    return losses, float((outside - inside).abs().max())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sequence_parallel": True, "activation_checkpointing": True},
        {"tp_shard_plan": {"model.layers.*.mlp.gate_proj": "colwise_gather_output"}},
    ],
    ids=str,
)
def test_a_loop_by_hand_on_two_axes(options: dict[str, Any]) -> None:
    expected = reference(Case(max_norm=None, optimizer=OptimizerConfig(lr=1e-2))).losses
    for losses, apart in pool(4).run(_by_hand, options):
        assert losses == pytest.approx(expected, abs=1e-9)
        assert apart < 1e-12


HEADS = {f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"} | {
    "model.layers.*.self_attn.o_proj": "rowwise"
}


def _forgetful(door: str, options: dict[str, Any]) -> tuple[str, bool]:
    """The refusal of a plan that leaves out the norms of heads, and whether weights are as they were."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = case_model("qwen3", tied=None, seed=0, dtype=torch.float64)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    if door == "function":
        names = {"dp_mesh_name": "dp", "tp_mesh_name": "tp", "mp_policy": MixedPrecisionPolicy()}
        fsdp2_strategy_parallelize(model, mesh, tp_shard_plan=HEADS, **names, **options)
    else:
        FSDP2Manager(FSDP2Config(tp_plan=HEADS, **options), mesh).parallelize(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(24).view(2, 12)
    try:
        token_loss_sum(model(input_ids=ids, use_cache=False).logits, ids).backward()
        optimizer.step()
    except StrategyError as error:
        return str(error), all(torch.equal(before[name], p.full_tensor()) for name, p in model.named_parameters())
    return "trained", False


@pytest.mark.parametrize(
    ("door", "options"),
    [
        ("function", {}),
        ("function", {"sequence_parallel": True, "activation_checkpointing": True}),
        ("manager", {}),
    ],
    ids=str,
)
def test_a_loop_by_hand_refuses_a_plan_that_leaves_out_norms_of_heads(door: str, options: dict[str, Any]) -> None:
    for text, unchanged in pool(4).run(_forgetful, door, options):
        assert "replicates model.layers.0.self_attn.q_norm.weight" in text
        assert unchanged
