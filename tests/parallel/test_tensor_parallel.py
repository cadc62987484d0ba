"""Tensor parallelism by itself, against single: models, options, what is communicated, whole parameters, wrong plans.

Shapes of messages: B sequences, S positions, D features, V entries of the vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.caught_errors import catch_error
from support.tensor_only import assert_equal_to_single, register_strategy_and_models
from support.tiers import mark_mostly_slow
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from meshwright import open_world
from meshwright.manager.chunked_cross_entropy import ChunkedCrossEntropy
from meshwright.parallel.tensor import apply_tensor_parallel
from meshwright.step.lm_head import DeferredHead
from meshwright.step.tokens import shift_labels
from meshwright.testing import Case, Cell
from meshwright.tracing.collectives import record_collectives
from meshwright_testing import pool
from meshwright_testing.case import build_global_batch
from meshwright_testing.models import build_case_model, build_tiny_model
from meshwright_testing.parity import build_manager, full_weights, train_steps

TP2 = {"tp_size": 2}
SLOW = pytest.mark.slow


# -- parity. The tiny Llama has 2 key heads, 52 features between MLP layers and 131 tokens.


@pytest.mark.parametrize(
    ("model_type", "ranks"),
    [
        # The middle rank's two query heads read a key head each, those of the others one. The last rank's MLP has 16
        # features, the others' 18.
        pytest.param("six_heads", 3, marks=SLOW),
        # A rank's first two query heads read one key head, and its third one another.
        ("three_kv_heads", 2),
        pytest.param("one_kv_head", 2, marks=SLOW),
        # Key and value projections with biases.
        pytest.param("qwen2", 4, marks=SLOW),
    ],
)
def test_key_heads_that_the_ranks_do_not_divide(model_type: str, ranks: int) -> None:
    assert_equal_to_single(Case(model_type=model_type, tied=None, steps=2), ranks)


@pytest.mark.parametrize(
    ("case", "sequence_parallel"),
    [
        pytest.param(Case(tied=True, microbatches=3, steps=2), False, id="tied-accumulating"),
        pytest.param(Case(eval_after=True, unshard_after=True, steps=2), True, id="sequence-evaluation-unshard"),
        pytest.param(Case(frozen=("*embed_tokens*", "*layers.1.*", "*k_proj*")), True, marks=SLOW, id="frozen"),
        pytest.param(Case(norm_type=math.inf, max_norm=0.05), False, marks=SLOW, id="largest"),
    ],
)
def test_options(case: Case, sequence_parallel: bool) -> None:
    assert_equal_to_single(case, sequence_parallel=sequence_parallel)


# A derived plan, biases, experts, packed and biased ones, latent attention, identity experts, norms of heads, an
# activation with a parameter, a soft cap.
@SLOW
@pytest.mark.parametrize(
    ("model_type", "sequence_parallel"),
    [
        *(("gpt2", True), ("starcoder2", False), ("mixtral", True), ("llama4_text", False), ("gpt_oss", True)),
        *(("deepseek_v2", False), ("longcat_flash", True), ("qwen3", False), ("apertus", True), ("gemma2", False)),
    ],
)
def test_models(model_type: str, sequence_parallel: bool) -> None:
    assert_equal_to_single(Case(model_type=model_type, tied=None, steps=2), sequence_parallel=sequence_parallel)


@SLOW
@pytest.mark.parametrize(
    ("tied", "config"), [(True, {"sequence_parallel": True}), (False, {"sequence_parallel": True, "plain": True})]
)
def test_state_moves_to_single_and_back(tied: bool, config: dict[str, Any]) -> None:
    case = Case(steps=4, tied=tied)
    Cell("tensor_only", "tp=2", 2, TP2, "state", case, config, kind="state", plugin="support.tensor_only").check()


@pytest.mark.parametrize("model_type", mark_mostly_slow(["first_entry_masked", "of_unit_length", "flipped"]))
def test_logits_that_are_changed_across_the_vocabulary(model_type: str) -> None:
    assert_equal_to_single(Case(model_type=model_type, steps=2))


ATTENTION = {f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"} | {
    "model.layers.*.self_attn.o_proj": "rowwise"
}
GATE, UP, DOWN = (f"model.layers.*.mlp.{name}_proj" for name in ("gate", "up", "down"))
PLANS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "attention-only": ("llama", ATTENTION),
    "gathered": (
        "llama",
        {"model.layers.*.self_attn.v_proj": "colwise_gather_output"}
        | {GATE: "colwise_rep", UP: "colwise_gather_output", DOWN: "rowwise_split_input"}
        | {"model.layers.*.self_attn.o_proj": "rowwise_rep", "lm_head": "colwise_rep"},
    ),
    "embedding-by-features": ("llama", {"model.embed_tokens": "embedding_colwise", "lm_head": "colwise_gather_output"}),
    "norms-on-a-part-of-the-positions": (
        "llama",
        {"model.layers.*.input_layernorm": "sequence_parallel", "model.norm": "sequence_parallel", **ATTENTION},
    ),
    "packed-phi3": ("phi3", {"model.layers.*.mlp.gate_up_proj": "packed_colwise", DOWN: "rowwise"}),
    "conv1d-gpt2": ("gpt2", {"transformer.h.*.mlp.c_fc": "colwise", "transformer.h.*.mlp.c_proj": "rowwise"}),
    "head-in-parts": ("llama", ATTENTION | {"lm_head": "colwise"}),
    "torch-positions": (
        "llama",
        ATTENTION
        | {
            "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
            "model.norm": SequenceParallel(),
        }
        | {"lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)},
    ),
    "torch-styles": ("llama", ATTENTION | {GATE: ColwiseParallel(), UP: ColwiseParallel(), DOWN: RowwiseParallel()}),
}


@SLOW
@pytest.mark.parametrize("name", PLANS)
def test_plans_of_the_user(name: str) -> None:
    model_type, plan = PLANS[name]
    assert_equal_to_single(Case(model_type=model_type, steps=2), tp_plan=plan)


# -- what is communicated


def _messages(model_type: str, sequence_parallel: bool) -> tuple[list[dict[str, int]], list[int]]:
    """Calls by kind and the largest message, in forward, backward and the sums after it."""
    register_strategy_and_models()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = build_case_model(model_type, tied=False, seed=0, dtype=torch.float64)
    head = DeferredHead(model, "lm_head")
    parallel = apply_tensor_parallel(model, mesh, sequence_parallel=sequence_parallel)
    loss = ChunkedCrossEntropy(head, None, is_sharded=parallel.shards_vocabulary, model_name=model_type)
    batch = build_global_batch(Case(), 0)
    losses: list[Tensor] = []

    loss.probe(lambda: model(input_ids=batch["input_ids"][:1, :8], use_cache=False), open_world("cpu"))

    def forward() -> None:
        run = lambda: model(input_ids=batch["input_ids"], use_cache=False)  # noqa: E731
        given = shift_labels(batch["labels"]), torch.tensor(7)
        losses.append(loss.compute_token_loss(run, *given, parallel.check_logits)[0])

    parts = [record_collectives(work) for work in (forward, lambda: losses[-1].backward(), parallel.reduce_gradients)]
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    assert all(each.kind in kinds for part in parts for each in part)
    counts = [{kind: len(part.filter(kind)) for kind in kinds} for part in parts]
    return counts, [max((each.nbytes for each in part), default=0) for part in parts]


BLOCKS = 3
HIDDEN_BSD_BYTES = 12 * 16 * 36 * 8
LOGITS_BSV_BYTES = 12 * 16 * 131 * 8


@pytest.mark.parametrize(
    ("sequence_parallel", "expected"),
    [
        # The embedding and the blocks, and three numbers of each position for the loss; the head and the blocks.
        (False, [[1 + 2 * BLOCKS, 1, 0], [1 + 2 * BLOCKS, 0, 0], [0, 0, 0]]),
        # The exit of the stack gathers, and the loss; the stack's entry; norms of blocks have met a part of positions.
        (True, [[1, 2 * BLOCKS + 2, 2 * BLOCKS], [1, 2 * BLOCKS + 1, 2 * BLOCKS], [2 * BLOCKS, 0, 0]]),
    ],
)
def test_two_collectives_per_block_and_direction_and_no_whole_logits(sequence_parallel, expected):
    for counts, largest in pool(2).run(_messages, "llama", sequence_parallel):
        assert [[*each.values()] for each in counts] == expected
        assert largest[:2] == [HIDDEN_BSD_BYTES, HIDDEN_BSD_BYTES]


def test_logits_are_gathered_where_the_loss_cannot_be_computed_on_shards() -> None:
    """The test above would prove nothing if gathered logits did not show."""
    for counts, largest in pool(2).run(_messages, "flipped", False):
        assert counts[0]["all_gather"] == 1
        assert largest[0] >= LOGITS_BSV_BYTES


# -- parameters


def _parameters(tied: bool) -> dict[str, tuple[int, ...]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = build_tiny_model(tied=tied)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    apply_tensor_parallel(model, mesh)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], p.full_tensor()) for name, p in after.items())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    return {name: tuple(p.to_local().shape) for name, p in after.items()}


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_keep_names_and_values_and_each_rank_its_part(tied: bool) -> None:
    for rank, shapes in enumerate(pool(2).run(_parameters, tied)):
        assert shapes["model.embed_tokens.weight"] == ((66, 65)[rank], 36)
        width = build_tiny_model().model.layers[0].self_attn.q_proj.out_features // 2
        assert shapes["model.layers.0.self_attn.q_proj.weight"] == (width, 36)
        assert shapes["model.layers.0.self_attn.o_proj.weight"] == (36, width)
        assert shapes["model.layers.0.mlp.down_proj.weight"] == (36, 26)
        assert shapes["model.layers.0.input_layernorm.weight"] == (36,)


# -- whole parameters


def _whole_with_an_error() -> bool:
    register_strategy_and_models()
    manager = build_manager("tensor_only", {}, TP2, Case())
    with pytest.raises(KeyError), manager.unshard():
        raise KeyError
    return all(isinstance(parameter, DTensor) for parameter in manager.model.parameters())


def test_shards_come_back_after_an_error() -> None:
    assert pool(2).run(_whole_with_an_error) == [True, True]


# -- plans that are wrong show in the first step


def _first_step(plan: Mapping[str, Any]) -> tuple[str, bool]:
    """The refusal, and whether weights are as they were."""
    register_strategy_and_models()
    case = Case(model_type="qwen3")
    manager = build_manager("tensor_only", {"tp_plan": plan}, TP2, case)
    before = full_weights(manager)
    text = catch_error(train_steps, manager, case, range(1))
    after = full_weights(manager)
    return text, all(torch.equal(before[name], after[name]) for name in before)


HEAD_NORMS = {f"model.layers.*.self_attn.{name}_norm": "replicated_with_grad_allreduce" for name in "qk"}


def test_a_plan_that_leaves_out_a_norm_of_heads_is_refused_with_nothing_trained() -> None:
    norms = {name: style for name, style in HEAD_NORMS.items() if "k_norm" not in name}
    for text, unchanged in pool(2).run(_first_step, ATTENTION | norms):
        assert "replicates model.layers.0.self_attn.k_norm.weight" in text
        assert "replicated_with_grad_allreduce in tp_plan" in text
        assert "and 1 more" in text
        assert unchanged
    assert pool(2).run(_first_step, ATTENTION | HEAD_NORMS) == [("", False)] * 2


@pytest.mark.parametrize("plan", [{GATE: "colwise"}, {DOWN: RowwiseParallel()}], ids=str)
def test_a_plan_that_names_half_of_a_pair_of_layers_is_refused(plan: Mapping[str, Any]) -> None:
    for text, _ in pool(2).run(_first_step, plan):
        assert re.search(r"cannot run with its tensor-parallel plan \(tp_plan\): .*give styles to both", text)
