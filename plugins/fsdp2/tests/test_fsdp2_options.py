"""Each option of fsdp2 acts, on real ranks; and where it cannot, it is refused on all of them before any step."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.steps import build_and_train, catch_refusal, count_step_collectives, prepare_gradient_step
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import modeling_flash_attention_utils as flash

from meshwright import BatchError, Mesh, MeshSizes, OptimizerConfig, count_tokens, open_world
from meshwright.model.layout import infer_layout
from meshwright.step.tokens import sum_token_loss
from meshwright.testing import Case, assert_parity, count_collectives
from meshwright.tracing.observers import OperationObserver
from meshwright_fsdp2 import FSDP2Config, FSDP2Manager
from meshwright_testing import pool
from meshwright_testing.case import rank_microbatches
from meshwright_testing.models import build_tiny_model
from meshwright_testing.parity import build_manager, find_max_difference, full_weights, train_case, train_steps

slow = pytest.mark.slow
BLOCKS = 3
UNITS = BLOCKS + 1
HSDP = {"dp_replicate_size": 2}
MIXED: dict[str, Any] = {"mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}
AHEAD = {"reshard_after_forward": True, "enable_fsdp2_prefetch": True}
BF16, FP32 = torch.bfloat16, torch.float32


class Watch(OperationObserver):
    """Calls `see` with the name and the arguments of each operation."""

    def __init__(self, see: Callable[[str, tuple[Any, ...]], object]) -> None:
        super().__init__()
        self._see = see

    def observe(self, operation: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        self._see(str(operation), args)


# -- parity: options that must not change a thing


ROUTED = {route: Case(model_type="routed", route=route, microbatches=2, steps=4) for route in ("ranks", "steps", None)}
FROZEN = ("*embed_tokens*", "*layers.0.*", "*layers.1.*")
BASE = Case(microbatches=2, sequences=24, tied=True, eval_after=True, unshard_after=True)
LAYOUTS: list[tuple[int, dict[str, Any], dict[str, int], Case]] = [
    (4, {"defer_fsdp_grad_sync": False}, HSDP, ROUTED["ranks"]),
    (4, {"reduce_dtype": "float64"}, {}, ROUTED[None]),
    (4, {"activation_checkpointing": "selective", "reshard_after_forward": True}, {}, BASE),
    (4, {"offload_policy": {"pin_memory": False}}, {}, BASE),
    (4, {**AHEAD, "fsdp2_forward_prefetch_depth": 2, "fsdp2_backward_prefetch_depth": 9}, {}, BASE),
    (4, {"reshard_after_forward": 2, "activation_checkpointing": "full", "patch_is_packed_sequence": True}, {}, BASE),
    (4, {"defer_fsdp_grad_sync": "reduce_scatter", "backend": "gloo"}, HSDP, BASE),
    (2, AHEAD, {}, Case(frozen=FROZEN, microbatches=2)),
    # Recomputation of experts, and of units within blocks.
    (2, {"activation_checkpointing": "selective", "reshard_after_forward": True}, {}, Case("mixtral", tied=None)),
    (2, {"activation_checkpointing": "full", "reshard_after_forward": True}, {}, Case("zamba", tied=None)),
]


@pytest.mark.parametrize(
    ("ranks", "config", "sizes", "case"),
    [
        # Two branches of one shape: torch by itself adds up the gradients of one and the other, in silence.
        pytest.param(2, {"reduce_dtype": "float64"}, {}, ROUTED["ranks"], id="branches-of-one-shape"),
        *(pytest.param(*each, marks=slow) for each in LAYOUTS),
    ],
    ids=str,
)
def test_parity(ranks: int, config: dict[str, Any], sizes: dict[str, int], case: Case) -> None:
    assert_parity("fsdp2", case, world_size=ranks, config=config, sizes=sizes)


SGD = OptimizerConfig(name="SGD", lr=1.0)
"""So that weights differ by as much as gradients do."""


@pytest.mark.parametrize(
    ("defer", "route"),
    [(True, "steps"), pytest.param(False, "steps", marks=slow), pytest.param(True, "ranks", marks=slow)],
)
def test_sums_of_microbatches_that_do_not_use_all_parameters_are_in_the_reduce_dtype(defer: bool, route: Any) -> None:
    case = Case("routed", sequences=8, microbatches=4, max_norm=None, optimizer=SGD, dtype="float32", route=route)
    config = {**MIXED, "defer_fsdp_grad_sync": defer}
    alone = pool(1).run(train_case, "fsdp2", config, {}, case.on_one_rank(8), "cpu")[0]
    assert find_max_difference(pool(2).run(train_case, "fsdp2", config, {}, case), alone).weight < 1e-6


# -- where parameters lie, and communication


@slow
def test_a_frozen_tower_is_not_gathered_for_backward() -> None:
    # Backward gathers the last block again and no frozen one before it.
    for traffic in pool(2).run(count_step_collectives, "fsdp2", AHEAD, {}, Case(frozen=FROZEN)):
        assert traffic["all_gather"] == UNITS + 2
    # Gradients run through a frozen block on their way to the first.
    for traffic in pool(2).run(
        count_step_collectives, "fsdp2", {"reshard_after_forward": True}, {}, Case(frozen=("*layers.1.*",))
    ):
        assert traffic["all_gather"] == 2 * UNITS


def _order(config: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Gathers among block forwards, and among backwards from the first block's on, as they follow on each other."""
    case = Case()
    manager = build_and_train("fsdp2", config, {}, case)
    seen: list[str] = []
    for index, block in enumerate(manager.model_parts[0].model.layers):
        block.register_forward_pre_hook(lambda *_, index=index: seen.append(f"forward {index}"))
        block.mlp.down_proj.register_full_backward_pre_hook(lambda *_, index=index: seen.append(f"backward {index}"))
    step = prepare_gradient_step(manager, case, 1)
    with Watch(lambda name, _: seen.append("gather") if name.startswith("c10d._allgather_base_") else None):
        step()
    forward = [each for each in seen if not each.startswith("backward")]
    return forward, [each for each in seen if not each.startswith("forward")][UNITS:]


@slow
def test_prefetch_gathers_units_before_their_turn() -> None:
    plain = pool(2).run(_order, {})[0][0]
    ahead = {"enable_fsdp2_prefetch": True, "reshard_after_forward": True}
    two = {**ahead, "fsdp2_forward_prefetch_depth": 2, "fsdp2_backward_prefetch_depth": 2}
    one = {**ahead, "fsdp2_backward_prefetch_depth": 1}
    (forward, backward), (_, backward_of_one) = pool(2).run(_order, two)[0], pool(2).run(_order, one)[0]
    first = [name for name in plain if name != "gather"]
    assert [name for name in forward if name != "gather"] == first == ["forward 0", "forward 1", "forward 2"]
    # The root and the block itself; or the root, two blocks, and the one after.
    assert plain.index("forward 0") == 2
    assert forward.index("forward 0") == 4
    # The root's gather, and so many blocks ahead of it, and of each block.
    assert backward_of_one.index("backward 2") == 3
    assert backward.index("backward 2") == 4
    assert backward_of_one.count("gather") == backward.count("gather") == UNITS


# -- precision


def _dtypes(config: dict[str, Any]) -> dict[str, Any]:
    case = Case(dtype="float32")
    manager = build_manager("fsdp2", config, {}, case)
    seen: dict[str, Any] = {}
    model = manager.model_parts[0]
    block = model.model.layers[1]
    block.mlp.up_proj.register_forward_hook(lambda m, a, out: seen.update(product=out.dtype, weight=m.weight.dtype))
    block.register_forward_hook(lambda m, a, out: seen.update(residual=out.dtype))
    model.register_forward_hook(lambda m, a, out: seen.update(logits=out.logits.dtype))

    def see(name: str, args: tuple[Any, ...]) -> None:
        if name.startswith("c10d._reduce_scatter_base_"):
            seen["reduced"] = args[1].dtype

    step = prepare_gradient_step(manager, case, 1)
    with Watch(see):
        loss = step()
    seen["shard"] = {p.dtype for p in model.parameters()}
    seen["gradient"] = {p.grad.dtype for p in model.parameters()}
    seen["loss"] = float(loss)
    return seen


@slow
@pytest.mark.parametrize(
    ("config", "dtypes"),
    [
        (MIXED, (BF16, BF16, BF16, BF16, FP32)),
        ({"mp_policy": {"param_dtype": "bfloat16", "output_dtype": "float32"}}, (BF16, BF16, BF16, FP32, BF16)),
        ({"autocast_dtype": "bfloat16"}, (BF16, FP32, FP32, BF16, FP32)),
        ({"autocast_dtype": "bfloat16", "mp_policy": {"output_dtype": "float32"}}, (BF16, FP32, FP32, FP32, FP32)),
    ],
    ids=str,
)
def test_precision(config: dict[str, Any], dtypes: tuple[torch.dtype, ...]) -> None:
    expected = dict(zip(("product", "weight", "residual", "logits", "reduced"), dtypes, strict=True))
    plain = pool(2).run(_dtypes, {})[0]["loss"]
    for seen in pool(2).run(_dtypes, config):
        assert {name: seen[name] for name in expected} == expected
        # The optimizer's are full precision throughout.
        assert seen["shard"] == seen["gradient"] == {FP32}
        assert seen["loss"] == pytest.approx(plain, rel=2e-2)


WIDE = {"autocast_dtype": "bfloat16", "mp_policy": {"param_dtype": "bfloat16", "output_dtype": "float32"}}


def _stream(model_type: str, config: dict[str, Any], sizes: dict[str, int]) -> set[tuple[torch.dtype, bool]]:
    """Dtypes of what enters and leaves blocks, and whether bfloat16 would hold it."""
    case = Case(model_type=model_type, tied=None, dtype="float32", sequences=4, layers=4)
    manager = build_manager("fsdp2", {**WIDE, **config}, sizes, case)
    found: set[tuple[torch.dtype, bool]] = set()

    def note(block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        for each in (hidden, output[0] if isinstance(output, tuple) else output):
            # What has been looked up is narrow, and enters the first block as wide.
            if not (each is hidden and block in first):
                found.add((each.dtype, torch.equal(each, each.bfloat16().to(each.dtype))))

    blocks = [part.get_submodule(name) for part in manager.model_parts for name in infer_layout(part).blocks]
    first = blocks[:1] if manager.mesh.axis_rank("pp") == 0 else []
    for block in blocks:
        block.register_forward_hook(note, with_kwargs=True)
    microbatches = rank_microbatches(case, 0, manager.mesh.data_rank, manager.mesh.data_size)
    manager.forward_backward(microbatches, num_tokens=manager.begin_step_sync(microbatches))
    manager.optimizer_step()
    return found


@slow
@pytest.mark.parametrize(
    ("model_type", "config", "sizes"),
    [
        ("gpt2", {"activation_checkpointing": True}, {}),
        ("llama", {"sequence_parallel": True}, {"tp_size": 2}),
        ("llama", {}, {"pp_size": 2}),
        ("nemotron", {}, {}),
        ("qwen3_moe", {}, {}),
    ],
)
def test_autocast_with_a_wide_output_keeps_the_residual_stream_wide(
    model_type: str, config: dict[str, Any], sizes: dict[str, int]
) -> None:
    assert pool(2).run(_stream, model_type, config, sizes) == [{(FP32, False)}] * 2


def _cast(policy: dict[str, Any]) -> torch.dtype:
    """The dtype of what a block takes in."""
    manager = build_manager("fsdp2", {"mp_policy": policy}, {}, Case(dtype="float32"))
    block, seen = manager.model_parts[0].model.layers[0], []
    block.forward = lambda hidden: (seen.append(hidden.dtype), hidden)[1]
    block(torch.zeros(1, 2, 36))
    return seen[0]


def test_inputs_are_cast_unless_reported_otherwise() -> None:
    assert pool(1).run(_cast, {"param_dtype": "bfloat16"}) == [BF16]
    assert pool(1).run(_cast, {"param_dtype": "bfloat16", "cast_forward_inputs": False}) == [FP32]


# -- recomputation and compile


def _operators(config: dict[str, Any]) -> tuple[int, int, bool]:
    """How often attention and activation functions are computed in a step, and whether names are the model's."""
    manager = build_manager("fsdp2", config, {}, Case())
    step = prepare_gradient_step(manager, Case())
    found: Counter[str] = Counter()
    with Watch(lambda name, _: found.update([name])):
        step()
    same_names = list(full_weights(manager)) == [name for name, _ in build_tiny_model().named_parameters()]
    attention = found["aten._scaled_dot_product_flash_attention_for_cpu.default"]
    return attention, found["aten.silu.default"], same_names


@slow
@pytest.mark.parametrize(
    ("mode", "attentions", "activations"),
    [
        (False, 1, 1),
        (True, 2, 2),
        ("full", 2, 2),
        ("selective", 1, 2),
    ],
)
def test_activation_checkpointing_computes_again_what_its_mode_says(
    mode: Any, attentions: int, activations: int
) -> None:
    for found in pool(2).run(_operators, {"activation_checkpointing": mode}):
        assert found == (BLOCKS * attentions, BLOCKS * activations, True)


def _compiled(config: dict[str, Any], backend: str) -> tuple[list[float], int, bool]:
    from meshwright.model import recompute as compiling

    torch.compiler.reset()
    original, calls = compiling.compile_function, []

    def counted(function: Any, *, backend: str, max_versions: int) -> Any:
        calls.append(function)
        return original(function, backend=used, max_versions=max_versions)

    used, compiling.compile_function = backend, counted
    compiling.check_compiler.cache_clear()
    try:
        manager = build_manager("fsdp2", config, {}, Case(microbatches=2))
        losses = train_steps(manager, Case(microbatches=2), range(3))[0]
        names = [name for name, _ in manager.model_parts[0].named_parameters()]
        before = len(calls)
        manager.maybe_compile(manager.model_parts[0])
    finally:
        compiling.compile_function = original
        compiling.check_compiler.cache_clear()
        torch.compiler.reset()
    same = names == [name for name, _ in build_tiny_model().named_parameters()] and before == len(calls)
    return losses, len(calls), same


@slow
@pytest.mark.parametrize("extra", [{"activation_checkpointing": "selective"}, {"reshard_after_forward": True}])
def test_compile_takes_each_block_once_and_changes_no_loss_and_no_name(extra: dict[str, Any]) -> None:
    expected = pool(2).run(train_case, "fsdp2", {}, {}, Case(microbatches=2))[0].losses
    for losses, calls, same in pool(2).run(_compiled, {"enable_compile": True, **extra}, "aot_eager"):
        assert losses == pytest.approx(expected, abs=1e-9)
        # Each block, and the trial.
        assert calls == BLOCKS + 1
        assert same


# -- memory, evaluation and whole parameters


def _between_steps(reshard: Any) -> tuple[list[bool], int]:
    """Evaluate, and hold all parameters, between steps; what stays as it was, and the gathers of a step."""
    case = Case()
    runs, same = [], []
    for use in (False, True):
        manager = build_and_train("fsdp2", {"reshard_after_forward": reshard}, {}, case)
        before = count_collectives(prepare_gradient_step(manager, case, 1))
        if use:
            batches = rank_microbatches(case, 1, manager.mesh.data_rank, manager.mesh.data_size)
            manager.eval_loss(batches, num_tokens=count_tokens(batches, manager.mesh))
            same.append(all(isinstance(p, DTensor) for p in manager.model_parts[0].parameters()))
        manager.optimizer_step()
        if use:
            ids = rank_microbatches(case, 0, 0, manager.mesh.data_size)[0]["input_ids"]
            with manager.unshard() as (model,), torch.no_grad():
                model.eval()
                text = model.generate(ids[:, :4], max_new_tokens=5, do_sample=False, pad_token_id=0)
                same += [text.shape[1] == 9, not any(isinstance(p, DTensor) for p in model.parameters())]
        same.append(before == count_collectives(prepare_gradient_step(manager, case, 1)))
        manager.optimizer_step()
        runs.append((train_steps(manager, case, range(2, 3))[0], full_weights(manager)))
    (losses, weights), (again, weights_again) = runs
    same += [losses == again, *(torch.equal(weights[name], weights_again[name]) for name in weights)]
    return same, before["all_gather"]


@pytest.mark.parametrize(
    ("ranks", "reshard", "gathers"),
    [
        (2, None, UNITS + BLOCKS - 1),
        pytest.param(2, True, 2 * UNITS, marks=slow),
        pytest.param(2, False, UNITS, marks=slow),
        # A smaller group is gathered from, too; its gathers are as many.
        pytest.param(4, 2, 2 * UNITS, marks=slow),
    ],
)
def test_evaluation_and_unshard_leave_training_and_the_reshard_policy_as_they_were(
    ranks: int, reshard: Any, gathers: int
) -> None:
    for same, found in pool(ranks).run(_between_steps, reshard):
        assert all(same), same
        assert found == gathers


# -- packed sequences


def _packed() -> tuple[list[Any], str, str]:
    case = Case()
    manager = build_manager("fsdp2", {"patch_is_packed_sequence": True}, {}, case)
    packed = torch.tensor([[0, 1, 2, 0, 1]])
    answers: list[Any] = []
    manager.model_parts[0].model.layers[0].register_forward_hook(
        lambda *_: answers.append(flash._is_packed_sequence(packed, 1))
    )
    (batch,) = rank_microbatches(case, 0, manager.mesh.data_rank, manager.mesh.data_size)
    tokens = count_tokens([batch], manager.mesh)
    manager.forward_backward([batch], num_tokens=tokens)
    answers.append(bool(flash._is_packed_sequence(packed, 1)))
    positions = torch.arange(16).expand_as(batch["input_ids"]).clone()
    manager.optimizer_step()
    manager.forward_backward([{**batch, "position_ids": positions}], num_tokens=tokens)
    manager.optimizer_step()
    if manager.mesh.rank == 1:
        positions[:, 8:] -= 8
    texts = []
    for call in (manager.forward_backward, manager.eval_loss):
        with pytest.raises(BatchError) as caught:
            call([{**batch, "position_ids": positions}], num_tokens=tokens)
        texts.append(str(caught.value))
    with pytest.raises(BatchError, match="labels"):
        manager.forward_backward([{"input_ids": batch["input_ids"]}], num_tokens=tokens)
    answers.append(bool(flash._is_packed_sequence(packed, 1)))
    return answers, *texts


def test_the_check_for_packed_sequences_answers_false_in_steps_only_and_packed_data_is_refused_on_all_ranks() -> None:
    for answers, *texts in pool(2).run(_packed):
        assert answers == [False, True, False, True]
        for text in texts:
            assert "position_ids restart" in text
            assert "Set patch_is_packed_sequence=false" in text
            assert "found on rank 1" in text


def _packed_by_hand() -> tuple[list[bool], str, tuple[int, ...]]:
    manager = build_manager("fsdp2", {"patch_is_packed_sequence": True}, {}, Case())
    module, answers = manager.module, []
    packed, ids = torch.tensor([[0, 1, 2, 0, 1]]), torch.arange(8)[None]
    module.model.layers[0].register_forward_hook(lambda *_: answers.append(bool(flash._is_packed_sequence(packed, 1))))
    module(input_ids=ids, position_ids=torch.arange(8)[None]).logits.sum().backward()
    answers.append(bool(flash._is_packed_sequence(packed, 1)))
    restarting = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3] if manager.mesh.rank == 1 else list(range(8))])
    with pytest.raises(BatchError) as caught:
        module(ids, position_ids=restarting)
    with manager.unshard() as (model,), torch.no_grad():
        # One rank alone, with the positions of a padded prompt.
        positions = torch.tensor([[1, 1, 0, 1, 2, 3, 4, 5]])
        shape = model(ids, position_ids=positions).logits.shape if manager.mesh.rank == 0 else ids.shape
    return answers[:2], str(caught.value), tuple(shape[:2])


@slow
def test_the_check_for_packed_sequences_answers_false_when_the_module_is_called_by_hand() -> None:
    first, second = pool(2).run(_packed_by_hand)
    assert first == second
    assert (first[0], first[2]) == ([False, True], (1, 8))
    assert "position_ids restart" in first[1]
    assert "found on rank 1" in first[1]


def _dtypes_by_hand() -> tuple[torch.dtype, float]:
    case = Case(dtype="float32")
    manager = build_manager("fsdp2", {"autocast_dtype": "bfloat16"}, {}, case)
    dtypes: list[torch.dtype] = []
    projection = manager.model_parts[0].model.layers[0].self_attn.q_proj
    projection.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    (batch,) = rank_microbatches(case, 0, manager.mesh.data_rank, manager.mesh.data_size)
    tokens = count_tokens([batch], manager.mesh)
    by_hand = sum_token_loss(manager.module(input_ids=batch["input_ids"]).logits, batch["labels"]) / tokens
    torch.distributed.all_reduce(by_hand.detach_())
    return dtypes[0], abs(float(by_hand) - float(manager.eval_loss([batch], num_tokens=tokens)))


@slow
def test_autocast_acts_when_the_module_is_called_by_hand() -> None:
    for dtype, apart in pool(2).run(_dtypes_by_hand):
        assert dtype is torch.bfloat16
        assert apart < 1e-6


# -- dtypes of a model


def _mixed_dtypes(freeze: bool) -> tuple[float, torch.dtype, list[int]]:
    model = build_tiny_model(dtype=torch.float32)
    norm = model.model.layers[1].input_layernorm
    norm.to(torch.bfloat16)
    norm.weight.requires_grad_(not freeze)
    model.model.layers[0].register_parameter("steps", nn.Parameter(torch.tensor([3, 4, 5]), requires_grad=False))
    model.model.layers[0].register_buffer("mask", torch.ones(3, dtype=torch.bool))
    manager = FSDP2Manager(FSDP2Config(), _mesh())
    manager.parallelize(model)
    loss = prepare_gradient_step(manager, Case())()
    with manager.unshard():
        layers = model.model.layers
        return float(loss), layers[1].input_layernorm.weight.dtype, layers[0].steps.tolist()


def _mesh() -> Mesh:
    world = open_world("cpu")
    return Mesh(MeshSizes().resolve(world.size, frozenset({"dp_shard"})), world)


@pytest.mark.parametrize("freeze", [False, pytest.param(True, marks=slow)])
def test_parameters_of_several_dtypes_in_a_block_keep_them_also_where_they_are_frozen(freeze: bool) -> None:
    first, second = pool(2).run(_mixed_dtypes, freeze)
    assert first == second
    loss, dtype, steps = first
    assert loss == pytest.approx(4.9, abs=0.5)
    assert (dtype, steps) == (torch.bfloat16, [3, 4, 5])


# -- refusals


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"offload_policy": {"pin_memory": True}}, ["StrategyError", "pin_memory: false"]),
    ({"offload_policy": {}}, ["StrategyError", "pin_memory: false"]),
    ({"backend": "mpi"}, ["MeshError", "backend='mpi'", "Set backend=gloo"]),
    ({"reshard_after_forward": 3}, ["MeshError", "reshard_after_forward=3", "2 ranks"]),
    ({"reshard_after_forward": 4}, ["MeshError", "reshard_after_forward=4", "(2)"]),
    (
        {"enable_async_tensor_parallel": True, "sequence_parallel": True, "enable_compile": True},
        ["StrategyError", "on the CPU", "Set enable_async_tensor_parallel=false"],
    ),
    ({"backend": "nccl"}, ["accepted"]),
]


def _refusals() -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [
            catch_refusal("fsdp2", config, {"tp_size": 2} if "sequence_parallel" in config else {}, Case())
            for config, _ in REFUSED
        ]


def test_what_cannot_act_on_this_mesh_is_refused_on_all_ranks() -> None:
    first, second = pool(2).run(_refusals)
    assert first == second
    for found, (_, texts) in zip(first, REFUSED, strict=True):
        assert all(text in found for text in texts), found


def _shared_units() -> str:
    return catch_refusal("fsdp2", {"activation_checkpointing": "selective"}, {}, Case(model_type="zamba", tied=None))


@slow
def test_selective_is_refused_where_units_lie_within_blocks() -> None:
    for text in pool(2).run(_shared_units):
        assert "shared_transf" in text
        assert "Set activation_checkpointing=full" in text
