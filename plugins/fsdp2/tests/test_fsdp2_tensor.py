"""fsdp2 with tensor and sequence parallelism: placements, parity with options, communication, memory, whole weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.steps import build_and_train, catch_refusal
from support.training import prepare_training_step, unshard_between_steps
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard

from meshwright import OptimizerConfig, StrategyError, count_tokens
from meshwright.step.tokens import sum_token_loss
from meshwright.testing import Case, assert_parity
from meshwright.tracing.collectives import CollectiveTrace, record_collectives
from meshwright_fsdp2 import FSDP2Config, FSDP2Manager, fsdp2_strategy_parallelize
from meshwright_testing import pool
from meshwright_testing.case import rank_microbatches
from meshwright_testing.models import build_case_model
from meshwright_testing.parity import build_manager, find_max_difference, train_case

slow = pytest.mark.slow
TP2 = {"tp_size": 2}
SP = {"sequence_parallel": True}
OF_THE_REFERENCE = {"tp_plan": "meshwright_fsdp2.get_hf_tp_shard_plan"}
HARD = Case(tied=True, microbatches=2, sequences=24, eval_after=True, unshard_after=True)
FUSED = OptimizerConfig(lr=1e-2, weight_decay=0.1, options={"fused": True})
PACKED = {"model.layers.*.mlp.gate_up_proj": "packed_colwise", "model.layers.*.mlp.down_proj": "rowwise"}


@slow
def test_a_plan_in_styles_of_torch_is_compiled_as_the_models_own_is() -> None:
    compiled, case = {"enable_compile": True}, Case(tied=True, layers=1, steps=2)
    own = pool(2).run(train_case, "fsdp2", compiled, TP2, case)
    found = pool(2).run(train_case, "fsdp2", OF_THE_REFERENCE | compiled, TP2, case)
    assert find_max_difference(found, own[0]).worst <= 1e-12


def _placements(config: dict[str, Any]) -> dict[str, Any]:
    manager = build_manager("fsdp2", config, TP2, Case())
    parameters = dict(manager.model_parts[0].named_parameters())
    return {
        name: (p.device_mesh.mesh_dim_names, p.placements[-1], p.placements[0].dim) for name, p in parameters.items()
    }


def test_every_parameter_lies_on_both_axes() -> None:
    for found in pool(2).run(_placements, {}):
        assert {names for names, _, _ in found.values()} == {("dp_shard", "tp")}
        assert {dim for _, _, dim in found.values()} == {0}
        along_tp = {name.removeprefix("model.layers.0."): tp for name, (_, tp, _) in found.items()}
        assert along_tp["self_attn.q_proj.weight"] == Shard(0)
        assert along_tp["mlp.down_proj.weight"] == Shard(1)
        assert along_tp["input_layernorm.weight"] == Replicate()
        assert along_tp["model.embed_tokens.weight"] == along_tp["lm_head.weight"] == Shard(0)


@pytest.mark.parametrize(
    ("ranks", "sizes", "config", "case"),
    [
        (2, TP2, SP | {"activation_checkpointing": "full", "reshard_after_forward": True}, HARD),
        *(
            pytest.param(4, *each, marks=slow)
            for each in (
                (TP2, {}, HARD),
                (TP2, SP | {"defer_fsdp_grad_sync": False, "enable_fsdp2_prefetch": True}, HARD),
                (TP2, SP, Case(frozen=("*embed*", "*layers.1.*"))),
                (TP2, {}, Case(model_type="routed", route="ranks", optimizer=FUSED)),
                (TP2, OF_THE_REFERENCE, Case(model_type="mixtral", tied=None, steps=2)),
                # Packed layers are sharded along different dims by the two axes.
                (TP2, {"tp_plan": PACKED}, Case(model_type="phi3", tied=None)),
                # 2 key and value heads for 4 ranks; and 5 features, of which the last rank would have none.
                ({"tp_size": 4}, {}, Case(model_type="routed")),
            )
        ),
        pytest.param(8, TP2 | {"dp_replicate_size": 2}, SP, HARD, marks=slow),
    ],
    ids=str,
)
def test_parity(ranks: int, sizes: dict[str, int], config: dict[str, Any], case: Case) -> None:
    assert_parity("fsdp2", case, world_size=ranks, config=config, sizes=sizes)


def _after_a_forward_alone(sizes: dict[str, int]) -> bool:
    """Gradients of a step, and of one that follows a forward in training mode without backward."""
    gradients = []
    for is_first in (True, False):
        manager = build_manager("fsdp2", {}, sizes, Case())
        (batch,) = rank_microbatches(Case(), 0, manager.mesh.data_rank, manager.mesh.data_size)
        (model,) = manager.model_parts
        model.train()
        if not is_first:
            model(input_ids=batch["input_ids"], use_cache=False)
        manager.forward_backward([batch], num_tokens=count_tokens([batch], manager.mesh))
        gradients.append([p.grad.full_tensor() for p in model.parameters()])
    return all(map(torch.equal, *gradients)) and all(bool(grad.any()) for grad in gradients[1])


@slow
@pytest.mark.parametrize("sizes", [{}, TP2], ids=["dp", "tp"])
def test_a_forward_without_backward_loses_no_gradient_of_the_next_step(sizes: dict[str, int]) -> None:
    """It leaves the last block gathered, whose parameters the model must not take for its own."""
    assert pool(2).run(_after_a_forward_alone, sizes) == [True, True]


@slow
def test_packed_layers_that_no_dim_is_left_to_divide_are_refused() -> None:
    for text in pool(6).run(catch_refusal, "fsdp2", {"tp_plan": PACKED}, TP2, Case(model_type="phi3", tied=None)):
        assert text.startswith("ModelError")
        assert "dp_shard=3 divides no other" in text


# -- communication


def _traffic(config: dict[str, Any], case: Case) -> tuple[CollectiveTrace, int]:
    """Collectives of a whole second step, and the bytes that fsdp gathers in forward, by each parameter's own part."""
    manager = build_and_train("fsdp2", config, TP2, case)
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
    return record_collectives(prepare_training_step(manager, case, 1), groups), padded


HIDDEN = 12 // 2 * 16 * 36 * 8
"""Bytes of the hidden states of a data rank: half of 12 sequences of 16 tokens, 36 wide, in float64."""
BLOCKS = 3


@slow
def test_a_block_all_reduces_twice_in_forward_and_twice_in_backward() -> None:
    for traffic, padded in pool(4).run(_traffic, {"reshard_after_forward": False}, Case()):
        own = [each for each in traffic.filter("all_reduce", "tp") if each.nbytes == HIDDEN]
        # Beside the blocks', the embedding's output and the gradient of the head's input.
        assert len(own) == 4 * BLOCKS + 2
        # Three numbers of each position, to compute the loss of logits that no rank has whole.
        assert [each.nbytes for each in traffic.filter("all_gather", "tp")] == [2 * 3 * 6 * 16 * 8]
        assert traffic.filter("all_gather", "dp_shard").nbytes == padded
        assert traffic.filter("reduce_scatter", "dp_shard").nbytes == padded
        # Logits are never whole.
        logits = 6 * 16 * 131 * 8
        for kind in ("all_gather", "all_reduce"):
            assert all(each.nbytes < logits / 2 for each in traffic.filter(kind, "tp"))


@slow
def test_sequence_parallel_scatters_and_gathers_in_pairs() -> None:
    for traffic, _ in pool(4).run(_traffic, {"reshard_after_forward": False, **SP}, Case()):
        own = [each for each in traffic.filter("all_reduce", "tp") if each.nbytes == HIDDEN]
        assert len(own) == 2
        scatters = [each for each in traffic.filter("reduce_scatter", "tp") if each.nbytes == HIDDEN]
        gathers = [each for each in traffic.filter("all_gather", "tp") if each.nbytes == HIDDEN]
        assert len(scatters) == 4 * BLOCKS
        # And at the stack's exit in forward, and its entry in backward.
        assert len(gathers) == 4 * BLOCKS + 2


# -- whole weights


@slow
def test_unshard_gives_a_plain_model_and_changes_nothing() -> None:
    for plain, apart, same, is_same in pool(4).run(unshard_between_steps, "fsdp2", SP, TP2, Case()):
        assert plain
        assert apart < 1e-12
        assert same
        assert is_same


# -- precision, and the functions


HEADS = {f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"} | {
    "model.layers.*.self_attn.o_proj": "rowwise"
}


def _forgetful(door: str, options: dict[str, Any]) -> tuple[str, bool]:
    """The refusal of a plan that leaves out the norms of heads, and whether weights are as they were."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = build_case_model("qwen3", tied=None, seed=0, dtype=torch.float64)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    if door == "function":
        names = {"dp_mesh_name": "dp", "tp_mesh_name": "tp", "mp_policy": MixedPrecisionPolicy()}
        fsdp2_strategy_parallelize(model, mesh, tp_shard_plan=HEADS, **names, **options)
    else:
        FSDP2Manager(FSDP2Config(tp_plan=HEADS, **options), mesh).parallelize(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(24).view(2, 12)
    try:
        sum_token_loss(model(input_ids=ids, use_cache=False).logits, ids).backward()
        optimizer.step()
    except StrategyError as error:
        return str(error), all(torch.equal(before[name], p.full_tensor()) for name, p in model.named_parameters())
    return "trained", False


@pytest.mark.parametrize(
    ("door", "options"),
    [
        ("function", {}),
        pytest.param("function", {"sequence_parallel": True, "activation_checkpointing": True}, marks=slow),
        pytest.param("manager", {}, marks=slow),
    ],
    ids=str,
)
def test_a_loop_by_hand_refuses_a_plan_that_leaves_out_norms_of_heads(door: str, options: dict[str, Any]) -> None:
    for text, unchanged in pool(2).run(_forgetful, door, options):
        assert "replicates model.layers.0.self_attn.q_norm.weight" in text
        assert unchanged


@slow
def test_bfloat16_follows_one_rank_of_the_same_precision() -> None:
    case = Case(dtype="float32")
    config = {"mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32", "output_dtype": "float32"}}
    alone = pool(1).run(train_case, "fsdp2", config, {}, case)[0].losses
    for found in pool(4).run(train_case, "fsdp2", config | SP, TP2, case):
        assert found.losses == pytest.approx(alone, rel=5e-3)
