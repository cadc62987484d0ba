"""Each option of fsdp2 acts, on real ranks; and where it cannot, it is refused on all of them before any step."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from transformers import modeling_flash_attention_utils as flash

from meshwright import (
    BatchError,
    Mesh,
    MeshError,
    MeshSizes,
    MeshwrightError,
    StrategyError,
    count_tokens,
    open_world,
    resolve,
)
from meshwright.model.layout import layout_by_structure
from meshwright.step.token_loss import token_loss_sum
from meshwright.testing import Case, assert_parity, count_collectives, pool
from meshwright.testing.case import share
from meshwright.testing.models import tiny_model
from meshwright.testing.observe import Observer
from meshwright.testing.parity import build_manager, full_weights, train_case, train_steps
from meshwright_fsdp2 import FSDP2Config, FSDP2Manager

BLOCKS = 3
UNITS = BLOCKS + 1
OWN_REDUCTIONS = 1


def _step(manager: Any, case: Case, index: int = 1) -> Any:
    batches = share(case, index, manager.mesh.data_rank, manager.mesh.data_size)
    tokens = count_tokens(batches, manager.mesh)
    return lambda: manager.forward_backward(batches, num_tokens=tokens)


class Watch(Observer):
    """Calls `see` with the name and the arguments of each operation."""

    def __init__(self, see: Callable[[str, tuple[Any, ...]], object]) -> None:
        super().__init__()
        self._see = see

    def observe(self, operation: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        self._see(str(operation), args)


# -- parity: options that must not change a thing


@pytest.mark.parametrize(
    "config",
    [
        {"activation_checkpointing": True},
        {"activation_checkpointing": "selective", "reshard_after_forward": True},
        {"enable_fsdp2_prefetch": True, "fsdp2_forward_prefetch_depth": 2},
        {"enable_fsdp2_prefetch": True, "fsdp2_backward_prefetch_depth": 9, "reshard_after_forward": True},
        {"reshard_after_forward": 2},
        {"reshard_after_forward": 2, "activation_checkpointing": "full"},
        {"defer_fsdp_grad_sync": "reduce_scatter"},
        {"patch_is_packed_sequence": True},
        {"offload_policy": {"pin_memory": False}},
        {"backend": "gloo"},
        {"mp_policy": {"param_dtype": "float64", "reduce_dtype": "float64", "output_dtype": "float64"}},
    ],
    ids=str,
)
def test_parity(config: dict[str, Any]) -> None:
    case = Case(microbatches=2, sequences=24, tied=True, eval_after=True, unshard_after=True)
    assert_parity("fsdp2", case, world_size=4, config=config)


@pytest.mark.parametrize("config", [{"defer_fsdp_grad_sync": "reduce_scatter"}, {"reshard_after_forward": 2}], ids=str)
def test_parity_on_hsdp(config: dict[str, Any]) -> None:
    case = Case(microbatches=3, sequences=24)
    assert_parity("fsdp2", case, world_size=4, config=config, sizes={"dp_replicate_size": 2})


@pytest.mark.parametrize(("model_type", "mode"), [("mixtral", "full"), ("mixtral", "selective"), ("zamba", "full")])
def test_recomputation_fits_experts_and_units_within_blocks(model_type: str, mode: str) -> None:
    case = Case(model_type=model_type, tied=None, microbatches=2, sequences=8)
    config = {"activation_checkpointing": mode, "reshard_after_forward": True}
    assert_parity("fsdp2", case, world_size=2, config=config)


# -- communication


def _traffic(config: dict[str, Any], sizes: dict[str, int], case: Case) -> Counter[str]:
    manager = build_manager("fsdp2", config, sizes, case)
    train_steps(manager, case, range(1))
    return count_collectives(_step(manager, case))


@pytest.mark.parametrize(
    ("defer", "scatters", "reductions"),
    [(True, UNITS, UNITS), (False, 3 * UNITS, 3 * UNITS), ("reduce_scatter", 3 * UNITS, UNITS)],
)
def test_what_is_reduced_on_each_microbatch_and_what_on_the_last(defer: Any, scatters: int, reductions: int) -> None:
    sizes = {"dp_replicate_size": 2}
    for traffic in pool(4).run(_traffic, {"defer_fsdp_grad_sync": defer}, sizes, Case(microbatches=3)):
        assert traffic["reduce_scatter"] == scatters
        assert traffic["all_reduce"] == reductions + OWN_REDUCTIONS


FROZEN = ("*embed_tokens*", "*layers.0.*", "*layers.1.*")


@pytest.mark.parametrize(
    ("frozen", "config", "gathers"),
    [
        # Backward gathers the last block again and no frozen one before it.
        (FROZEN, {"reshard_after_forward": True}, UNITS + 2),
        (FROZEN, {"reshard_after_forward": True, "enable_fsdp2_prefetch": True}, UNITS + 2),
        # Gradients run through a frozen block on their way to the first.
        (("*layers.1.*",), {"reshard_after_forward": True}, 2 * UNITS),
    ],
)
def test_a_frozen_tower_is_not_gathered_for_backward(
    frozen: tuple[str, ...], config: dict[str, Any], gathers: int
) -> None:
    for traffic in pool(2).run(_traffic, config, {}, Case(frozen=frozen)):
        assert traffic["all_gather"] == gathers


def test_parity_with_a_frozen_tower() -> None:
    for config in ({}, {"reshard_after_forward": True, "enable_fsdp2_prefetch": True}):
        assert_parity("fsdp2", Case(frozen=FROZEN, microbatches=2), world_size=2, config=config)


def _order(config: dict[str, Any]) -> list[str]:
    """Gathers and block forwards of a step, as they follow on each other."""
    case = Case()
    manager = build_manager("fsdp2", config, {}, case)
    train_steps(manager, case, range(1))
    seen: list[str] = []
    root = manager.model_parts[0]
    for index, block in enumerate(root.model.layers):
        block.register_forward_pre_hook(lambda *_, index=index: seen.append(f"forward {index}"))

    step = _step(manager, case)
    with Watch(lambda name, _: seen.append("gather") if name.startswith("c10d._allgather_base_") else None):
        step()
    return seen


def test_prefetch_gathers_units_before_their_turn() -> None:
    plain = pool(2).run(_order, {})[0]
    ahead = pool(2).run(_order, {"enable_fsdp2_prefetch": True, "fsdp2_forward_prefetch_depth": 2})[0]
    first = [name for name in plain if name != "gather"]
    assert [name for name in ahead if name != "gather"] == first == ["forward 0", "forward 1", "forward 2"]
    # The root and the block itself; or the root, two blocks, and the one after.
    assert plain.index("forward 0") == 2
    assert ahead.index("forward 0") == 4
    assert plain.count("gather") == ahead.count("gather")


def _backward_order(config: dict[str, Any]) -> list[str]:
    """Gathers and blocks' backwards, from the first block's backward on."""
    case = Case()
    manager = build_manager("fsdp2", {"reshard_after_forward": True, **config}, {}, case)
    train_steps(manager, case, range(1))
    seen: list[str] = []
    for index, block in enumerate(manager.model_parts[0].model.layers):
        block.mlp.down_proj.register_full_backward_pre_hook(lambda *_, index=index: seen.append(f"backward {index}"))

    step = _step(manager, case)
    with Watch(lambda name, _: seen.append("gather") if name.startswith("c10d._allgather_base_") else None):
        step()
    return seen[UNITS:]


def test_prefetch_depth_in_backward() -> None:
    config = {"enable_fsdp2_prefetch": True}
    one, two = (pool(2).run(_backward_order, {**config, "fsdp2_backward_prefetch_depth": depth})[0] for depth in (1, 2))
    # The root's gather, and so many blocks ahead of it, and of each block.
    assert one.index("backward 2") == 3
    assert two.index("backward 2") == 4
    assert one.count("gather") == two.count("gather") == UNITS


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

    step = _step(manager, case)
    with Watch(see):
        loss = step()
    seen["shard"] = {p.dtype for p in model.parameters()}
    seen["gradient"] = {p.grad.dtype for p in model.parameters()}
    seen["loss"] = float(loss)
    return seen


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"product": FP32, "weight": FP32, "residual": FP32, "logits": FP32, "reduced": FP32}),
        (
            {"mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}},
            {"product": BF16, "weight": BF16, "residual": BF16, "logits": BF16, "reduced": FP32},
        ),
        (
            {"mp_policy": {"param_dtype": "bfloat16", "output_dtype": "float32"}},
            {"product": BF16, "weight": BF16, "residual": BF16, "logits": FP32, "reduced": BF16},
        ),
        (
            {"autocast_dtype": "bfloat16"},
            {"product": BF16, "weight": FP32, "residual": FP32, "logits": BF16, "reduced": FP32},
        ),
        (
            {"autocast_dtype": "bfloat16", "mp_policy": {"output_dtype": "float32"}},
            {"product": BF16, "weight": FP32, "residual": FP32, "logits": FP32, "reduced": FP32},
        ),
    ],
    ids=str,
)
def test_precision(config: dict[str, Any], expected: dict[str, torch.dtype]) -> None:
    plain = pool(2).run(_dtypes, {})[0]["loss"]
    for seen in pool(2).run(_dtypes, config):
        assert {name: seen[name] for name in expected} == expected
        # The optimizer's are full precision throughout.
        assert seen["shard"] == seen["gradient"] == {FP32}
        assert seen["loss"] == pytest.approx(plain, rel=2e-2)


WIDE = {"autocast_dtype": "bfloat16", "mp_policy": {"param_dtype": "bfloat16", "output_dtype": "float32"}}


def _stream(model_type: str, config: dict[str, Any], sizes: dict[str, int]) -> Counter[tuple[torch.dtype, bool]]:
    """How often what enters and leaves blocks has a dtype, and whether bfloat16 would hold it."""
    case = Case(model_type=model_type, tied=None, dtype="float32", sequences=4, layers=4)
    manager = build_manager("fsdp2", {**WIDE, **config}, sizes, case)
    found: Counter[tuple[torch.dtype, bool]] = Counter()

    def note(block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        for each in (hidden, output[0] if isinstance(output, tuple) else output):
            # What has been looked up is narrow, and enters the first block as wide.
            if not (each is hidden and block in first):
                found[each.dtype, torch.equal(each, each.bfloat16().to(each.dtype))] += 1

    blocks = [part.get_submodule(name) for part in manager.model_parts for name in layout_by_structure(part).blocks]
    first = blocks[:1] if manager.mesh.axis_rank("pp") == 0 else []
    for block in blocks:
        block.register_forward_hook(note, with_kwargs=True)
    microbatches = share(case, 0, manager.mesh.data_rank, manager.mesh.data_size)
    manager.forward_backward(microbatches, num_tokens=manager.announce(microbatches))
    manager.optimizer_step()
    return found


@pytest.mark.parametrize(
    ("model_type", "config", "sizes"),
    [
        ("llama", {}, {}),
        ("llama", {"activation_checkpointing": True}, {}),
        ("llama", {"sequence_parallel": True}, {"tp_size": 2}),
        ("llama", {}, {"pp_size": 2}),
        ("gpt2", {}, {}),
        ("nemotron", {}, {}),
        ("qwen3_moe", {}, {}),
    ],
)
def test_autocast_with_a_wide_output_keeps_the_residual_stream_wide(
    model_type: str, config: dict[str, Any], sizes: dict[str, int]
) -> None:
    for found in pool(2).run(_stream, model_type, config, sizes):
        assert set(found) == {(FP32, False)}


def test_inputs_are_cast_unless_told_otherwise() -> None:
    policy = {"param_dtype": "bfloat16", "cast_forward_inputs": False}
    assert pool(1).run(_cast, {"param_dtype": "bfloat16"}) == [BF16]
    assert pool(1).run(_cast, policy) == [FP32]


def _cast(policy: dict[str, Any]) -> torch.dtype:
    manager = build_manager("fsdp2", {"mp_policy": policy}, {}, Case(dtype="float32"))
    block = manager.model_parts[0].model.layers[0]
    seen = []
    block.forward = lambda hidden: (seen.append(hidden.dtype), hidden)[1]
    block(torch.zeros(1, 2, 36))
    return seen[0]


def test_bf16_on_two_ranks_is_near_bf16_on_one() -> None:
    case = Case(dtype="float32", steps=2)
    config = {"mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}
    one = pool(1).run(train_case, "fsdp2", config, {}, case)[0]
    two = pool(2).run(train_case, "fsdp2", config, {}, case)[0]
    assert two.losses == pytest.approx(one.losses, rel=2e-3)


# -- recomputation and compile


def _operators(config: dict[str, Any]) -> tuple[int, int, bool]:
    """How often attention and activation functions are computed in a step, and whether names are the model's."""
    case = Case()
    manager = build_manager("fsdp2", config, {}, case)
    step = _step(manager, case)
    counts: Counter[str] = Counter()

    with Watch(lambda name, _: counts.update([name])):
        step()
    same_names = list(full_weights(manager)) == [name for name, _ in tiny_model().named_parameters()]
    attention = counts["aten._scaled_dot_product_flash_attention_for_cpu.default"]
    return attention, counts["aten.silu.default"], same_names


@pytest.mark.parametrize(
    ("mode", "attentions", "activations"),
    [(False, 1, 1), (True, 2, 2), ("full", 2, 2), ("selective", 1, 2)],
)
def test_activation_checkpointing_computes_again_what_its_mode_says(
    mode: Any, attentions: int, activations: int
) -> None:
    for found in pool(2).run(_operators, {"activation_checkpointing": mode}):
        assert found == (BLOCKS * attentions, BLOCKS * activations, True)


def _shared_units() -> str:
    with pytest.raises(StrategyError) as caught:
        build_manager("fsdp2", {"activation_checkpointing": "selective"}, {}, Case(model_type="zamba", tied=None))
    return str(caught.value)


def test_selective_is_refused_where_units_lie_within_blocks() -> None:
    for text in pool(2).run(_shared_units):
        assert "shared_transf" in text
        assert "Set activation_checkpointing=full" in text


def _compiled(config: dict[str, Any], backend: str) -> tuple[list[float], int, bool]:
    from meshwright.model import compile as compiling

    torch.compiler.reset()
    original, calls = compiling.compiled, []

    def counted(function: Any, *, backend: str, versions: int) -> Any:
        calls.append(function)
        return original(function, backend=used, versions=versions)

    used, compiling.compiled = backend, counted
    compiling.check_compiler.cache_clear()
    try:
        manager = build_manager("fsdp2", config, {}, Case(microbatches=2))
        losses = train_steps(manager, Case(microbatches=2), range(3))[0]
        names = [name for name, _ in manager.model_parts[0].named_parameters()]
    finally:
        compiling.compiled = original
        compiling.check_compiler.cache_clear()
        torch.compiler.reset()
    return losses, len(calls), names == [name for name, _ in tiny_model().named_parameters()]


@pytest.mark.parametrize("extra", [{}, {"activation_checkpointing": "selective"}, {"reshard_after_forward": True}])
def test_compile_takes_each_block_and_changes_no_loss_and_no_name(extra: dict[str, Any]) -> None:
    expected = pool(2).run(train_case, "fsdp2", {}, {}, Case(microbatches=2))[0].losses
    for losses, calls, same_names in pool(2).run(_compiled, {"enable_compile": True, **extra}, "aot_eager"):
        assert losses == pytest.approx(expected, abs=1e-9)
        # Each block, and the trial.
        assert calls == BLOCKS + 1
        assert same_names


def _broken_compiler() -> str:
    from meshwright.model import compile as compiling

    original = compiling.check_compiler

    def broken(device: str, backend: str) -> None:
        # On one rank only.
        if torch.distributed.get_rank() == 1:
            raise StrategyError("no compiler on this node")

    compiling.check_compiler = broken
    try:
        with pytest.raises(StrategyError) as caught:
            build_manager("fsdp2", {"enable_compile": True}, {}, Case())
    finally:
        compiling.check_compiler = original
    return str(caught.value)


def test_a_compiler_that_is_missing_on_one_rank_is_told_on_all() -> None:
    assert all("no compiler on this node" in text and "rank 1" in text for text in pool(2).run(_broken_compiler))


# -- memory


def _offloaded() -> tuple[set[str], bool]:
    manager = build_manager("fsdp2", {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {}, Case())
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in manager._sharding.modules]
    return {type(group.offload_policy).__name__ for group in groups}, all(
        p.device.type == "cpu" for p in manager.trainable()
    )


def test_offload_policy_reaches_every_unit() -> None:
    assert pool(2).run(_offloaded) == [({"CPUOffloadPolicy"}, True)] * 2


def _after_eval(reshard: Any) -> tuple[bool, Counter[str]]:
    case = Case()
    manager = build_manager("fsdp2", {"reshard_after_forward": reshard}, {}, case)
    train_steps(manager, case, range(1))
    batches = share(case, 1, manager.mesh.data_rank, manager.mesh.data_size)
    tokens = count_tokens(batches, manager.mesh)
    before = count_collectives(_step(manager, case))
    manager.eval_loss(batches, num_tokens=tokens)
    sharded = all(isinstance(p, DTensor) for p in manager.model_parts[0].parameters())
    manager.optimizer_step()
    with manager.unshard():
        pass
    return sharded and before == count_collectives(_step(manager, case)), before


@pytest.mark.parametrize("reshard", [None, True, False, 2])
def test_evaluation_and_unshard_leave_shards_and_the_reshard_policy_as_they_were(reshard: Any) -> None:
    for same, counts in pool(4).run(_after_eval, reshard):
        assert same
        # A smaller group is gathered from, too; its gathers are as many.
        assert counts["all_gather"] == {None: UNITS + BLOCKS - 1, True: 2 * UNITS, False: UNITS, 2: 2 * UNITS}[reshard]


def _unshard_between(reshard: Any, use: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    case = Case()
    manager = build_manager("fsdp2", {"reshard_after_forward": reshard}, {}, case)
    losses = train_steps(manager, case, range(1))[0]
    if use:
        ids = share(case, 0, 0, manager.mesh.data_size)[0]["input_ids"]
        with manager.unshard() as (model,), torch.no_grad():
            model(input_ids=ids)
    losses += train_steps(manager, case, range(1, 3))[0]
    return losses, full_weights(manager)


@pytest.mark.parametrize("reshard", [True, False, 2])
def test_training_goes_on_bit_for_bit_after_unshard(reshard: Any) -> None:
    for (losses, weights), (expected, expected_weights) in zip(
        pool(4).run(_unshard_between, reshard, True), pool(4).run(_unshard_between, reshard, False), strict=True
    ):
        assert losses == expected
        assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)


# -- packed sequences


def _packed() -> tuple[list[Any], str, str]:
    case = Case()
    manager = build_manager("fsdp2", {"patch_is_packed_sequence": True}, {}, case)
    packed = torch.tensor([[0, 1, 2, 0, 1]])
    answers: list[Any] = []
    manager.model_parts[0].model.layers[0].register_forward_hook(
        lambda *_: answers.append(flash._is_packed_sequence(packed, 1))
    )
    (batch,) = share(case, 0, manager.mesh.data_rank, manager.mesh.data_size)
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


def test_the_check_for_packed_sequences_answers_false_when_the_module_is_called_by_hand() -> None:
    (first, second) = pool(2).run(_packed_by_hand)
    assert first[0] == second[0] == [False, True]
    assert first[1] == second[1]
    assert "position_ids restart" in first[1]
    assert "found on rank 1" in first[1]
    assert first[2] == second[2] == (1, 8)


def _dtypes_by_hand(config: dict[str, Any]) -> tuple[torch.dtype, float]:
    case = Case(dtype="float32")
    manager = build_manager("fsdp2", config, {}, case)
    dtypes: list[torch.dtype] = []
    manager.model_parts[0].model.layers[0].self_attn.q_proj.register_forward_hook(
        lambda module, args, output: dtypes.append(output.dtype)
    )
    (batch,) = share(case, 0, manager.mesh.data_rank, manager.mesh.data_size)
    tokens = count_tokens([batch], manager.mesh)
    by_hand = token_loss_sum(manager.module(input_ids=batch["input_ids"]).logits, batch["labels"]) / tokens
    torch.distributed.all_reduce(by_hand.detach_())
    return dtypes[0], abs(float(by_hand) - float(manager.eval_loss([batch], num_tokens=tokens)))


def test_autocast_acts_when_the_module_is_called_by_hand() -> None:
    for dtype, apart in pool(2).run(_dtypes_by_hand, {"autocast_dtype": "bfloat16"}):
        assert dtype is torch.bfloat16
        assert apart < 1e-6
    assert pool(2).run(_dtypes_by_hand, {})[0][0] is torch.float32


def _compiled_once() -> tuple[bool, bool]:
    manager = build_manager("fsdp2", {"enable_compile": True}, {}, Case())
    blocks = [*manager.model_parts[0].model.layers]
    before = [block.forward for block in blocks]
    manager.maybe_compile(manager.model_parts[0])
    return before == [block.forward for block in blocks], hasattr(before[0], "_torchdynamo_orig_callable")


def test_maybe_compile_after_parallelize_compiles_nothing_again() -> None:
    assert pool(1).run(_compiled_once) == [(True, True)]


# -- dtypes of a model


def _mixed_dtypes(freeze: bool) -> tuple[float, torch.dtype]:
    model = tiny_model(dtype=torch.float32)
    norm = model.model.layers[1].input_layernorm
    norm.to(torch.bfloat16)
    norm.weight.requires_grad_(not freeze)
    model.model.layers[0].register_parameter("steps", nn.Parameter(torch.tensor([3, 4, 5]), requires_grad=False))
    model.model.layers[0].register_buffer("mask", torch.ones(3, dtype=torch.bool))
    world = open_world("cpu")
    manager = FSDP2Manager(FSDP2Config(), Mesh(MeshSizes().resolve(world.size, frozenset({"dp_shard"})), world))
    manager.parallelize(model)
    case = Case()
    batches = share(case, 0, manager.mesh.data_rank, manager.mesh.data_size)
    loss = manager.forward_backward(batches, num_tokens=count_tokens(batches, manager.mesh))
    with manager.unshard():
        assert model.model.layers[0].steps.tolist() == [3, 4, 5]
        return float(loss), model.model.layers[1].input_layernorm.weight.dtype


@pytest.mark.parametrize("freeze", [False, True])
def test_parameters_of_several_dtypes_in_a_block_keep_them_also_where_they_are_frozen(
    freeze: bool,
) -> None:
    (loss, dtype), other = pool(2).run(_mixed_dtypes, freeze)
    assert other == (loss, dtype)
    assert loss == pytest.approx(4.9, abs=0.5)
    assert dtype is torch.bfloat16


# -- refusals


def _refused(config: dict[str, Any], sizes: dict[str, int]) -> str:
    with pytest.raises(MeshwrightError) as caught:
        build_manager("fsdp2", config, sizes, Case())
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("config", "texts"),
    [
        ({"offload_policy": {"pin_memory": True}}, ["StrategyError", "pin_memory: false"]),
        ({"offload_policy": {}}, ["StrategyError", "pin_memory: false"]),
        ({"backend": "mpi"}, ["MeshError", "backend='mpi'", "Set backend=gloo"]),
        (
            {"enable_async_tensor_parallel": True, "sequence_parallel": True, "enable_compile": True},
            ["StrategyError", "on the CPU", "Set enable_async_tensor_parallel=false"],
        ),
        ({"reshard_after_forward": 3}, ["MeshError", "reshard_after_forward=3", "2 ranks"]),
        ({"reshard_after_forward": 4}, ["MeshError", "reshard_after_forward=4", "(2)"]),
    ],
    ids=str,
)
def test_what_cannot_act_on_this_mesh_is_refused_on_all_ranks(config: dict[str, Any], texts: list[str]) -> None:
    sizes = {"tp_size": 2} if "enable_async_tensor_parallel" in config else {}
    found = pool(2).run(_refused, config, sizes)
    assert len(set(found)) == 1
    assert all(text in found[0] for text in texts), found[0]


def _expert_meshes() -> str:
    world = open_world("cpu")
    mesh = Mesh(MeshSizes().resolve(world.size, frozenset({"dp_shard"})), world)
    assert mesh.backend == "gloo"
    with pytest.raises(MeshError) as caught:
        FSDP2Manager(FSDP2Config(), mesh, mesh.device_mesh)
    for same in (None, mesh.expert_mesh, mesh.expert_mesh["ep_shard"]):
        assert FSDP2Manager(FSDP2Config(), device_mesh=mesh, moe_mesh=same).mesh is mesh
    return str(caught.value)


def test_a_mesh_for_experts_that_is_not_the_expert_mesh_is_refused() -> None:
    for text in pool(2).run(_expert_meshes):
        assert "moe_mesh" in text


def test_the_default_backend_means_what_the_device_uses() -> None:
    stack, _ = resolve("fsdp2", MeshSizes(), 1)
    assert stack.inner.config.backend == "nccl"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pool(1).run(_builds, {}) == [True]
        assert pool(1).run(_builds, {"backend": "nccl"}) == [True]


def _builds(config: dict[str, Any]) -> bool:
    return build_manager("fsdp2", config, {}, Case()) is not None
