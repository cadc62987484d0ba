"""Context parallelism: parity with one process for all kinds of masks, communication, memory, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.caught_errors import catch_error
from support.managers import build_model_manager
from support.tiers import mark_mostly_slow
from torch import Tensor

from meshwright import BatchError, Mesh, MeshSizes, MeshwrightError, ModelError, count_tokens, open_world
from meshwright.base.types import IGNORE_INDEX
from meshwright.parallel.context import ContextParallel
from meshwright.parallel.context.attention import shard_for_all_ranks, shard_positions, unshard_positions
from meshwright.step.tokens import split_targets, sum_target_loss, sum_token_loss
from meshwright.strategy.registry import model_layout
from meshwright.testing import Case, assert_parity
from meshwright_testing import pool
from meshwright_testing.case import TOLERANCE, rank_microbatches
from meshwright_testing.models import build_tiny_model, case_vocab_size
from meshwright_testing.parity import build_manager, full_weights, train_steps

CP2, CP4, DP2_CP2, TP2_CP2 = {"cp_size": 2}, {"cp_size": 4}, {"dp_size": 2, "cp_size": 2}, {"tp_size": 2, "cp_size": 2}
ULYSSES, SP = {"cp_attention": "ulysses"}, {"sequence_parallel": True}
SLOW = pytest.mark.slow
BRIEF = Case(tied=None, steps=2)
HARD = Case(tied=True, microbatches=2, sequences=24, eval_after=True, unshard_after=True)


def _ranks(sizes: dict[str, int]) -> int:
    return sizes.get("dp_size", 1) * sizes.get("tp_size", 1) * sizes.get("cp_size", 1)


# -- which rank has what


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_has_a_chunk_of_the_head_and_one_of_the_tail(ranks: int) -> None:
    length = 4 * ranks
    parts = [shard_positions(torch.arange(length), 0, rank, ranks) for rank in range(ranks)]
    assert parts[0].tolist() == [0, 1, length - 2, length - 1]
    assert sorted(torch.cat(parts).tolist()) == list(range(length))
    # Under a causal mask, all see equally many keys.
    assert len({int((part + 1).sum()) for part in parts}) == 1
    whole = torch.randn(2, length, 3)
    assert torch.equal(unshard_positions(shard_for_all_ranks(whole, 1, ranks), 1), whole)
    assert torch.equal(unshard_positions([shard_positions(whole, 1, rank, ranks) for rank in range(ranks)], 1), whole)


# -- parity


@pytest.mark.parametrize(
    ("model_type", "sizes", "config"),
    [
        pytest.param("llama", CP2, {}, id="llama"),
        *(pytest.param(each, CP2, {}, marks=SLOW, id=each) for each in ("mixtral", "mistral", "gemma2", "gpt_oss")),
        pytest.param("gpt2", CP2, ULYSSES, marks=SLOW, id="gpt2-ulysses"),
        pytest.param("llama", CP4, ULYSSES, marks=SLOW, id="fewer-key-heads-than-ranks"),
    ],
)
def test_parity_of_architectures(model_type: str, sizes: dict[str, int], config: dict[str, Any]) -> None:
    """Grouped heads, fewer key heads than ranks, routing, sliding windows, softcap, sinks, absolute positions."""
    case = Case(model_type=model_type, tied=None, steps=2)
    assert_parity("fsdp2", case, world_size=_ranks(sizes), config=config, sizes=sizes)


@SLOW
@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        (CP2, {"activation_checkpointing": "full", "defer_fsdp_grad_sync": False}),
        (CP2, {"patch_is_packed_sequence": True, "activation_checkpointing": "selective"}),
        (DP2_CP2, ULYSSES | {"reshard_after_forward": 2}),
        (TP2_CP2, SP | ULYSSES | {"activation_checkpointing": "selective"}),
        (TP2_CP2, {}),
    ],
    ids=str,
)
def test_parity_with_other_axes_and_options(sizes: dict[str, int], config: dict[str, Any]) -> None:
    assert_parity("fsdp2", HARD, world_size=_ranks(sizes), config=config, sizes=sizes)


def _batches(kind: str, vocab: int) -> list[dict[str, Tensor]]:
    """Two microbatches of 3 sequences of 16 tokens."""
    generator = torch.Generator().manual_seed(5)
    batches: list[dict[str, Tensor]] = []
    for _ in range(2):
        ids = torch.randint(0, vocab, (3, 16), generator=generator)
        labels = ids.clone()
        labels[torch.rand(ids.shape, generator=generator) > 0.7] = IGNORE_INDEX
        batch = {"input_ids": ids, "labels": labels}
        if kind == "documents":
            # Of other lengths in each sequence, and across the borders of chunks.
            starts = torch.tensor([[0, 5, 11], [0, 3, 4], [0, 9, 15]])
            batch["position_ids"] = torch.stack([_restarted(row.tolist()) for row in starts])
        if kind == "shared positions":
            batch["position_ids"] = _restarted([0, 7])[None]
        if kind.startswith("padded"):
            batch["attention_mask"] = torch.ones_like(ids)
            batch["attention_mask"][0, :3] = 0
            batch["attention_mask"][1, 10:] = 0
            labels[batch["attention_mask"] == 0] = IGNORE_INDEX
        if kind == "padded, with positions":
            batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        batches.append(batch)
    return batches


def _restarted(starts: list[int]) -> Tensor:
    return torch.cat([torch.arange(stop - start) for start, stop in zip(starts, [*starts[1:], 16], strict=True)])


def _trained(strategy: str, config: dict[str, Any], sizes: dict[str, int], model_type: str, kind: str) -> Any:
    manager = build_manager(strategy, config, sizes, Case(model_type=model_type, tied=None))
    losses, norms = [], []
    for _ in range(2):
        batches = _batches(kind, case_vocab_size(model_type))
        num_tokens = count_tokens(batches, manager.mesh)
        losses.append(float(manager.eval_loss(batches, num_tokens=num_tokens)))
        losses.append(float(manager.forward_backward(batches, num_tokens=num_tokens)))
        norms.append(float(manager.clip_grad_norm(0.5)))
        manager.optimizer_step()
    return losses, norms, full_weights(manager)


def _in_blocks(config: dict[str, Any], sizes: dict[str, int], model_type: str, kind: str, largest: int) -> Any:
    """With masks of so few elements that queries are taken in blocks."""
    from meshwright.parallel.context import attention

    before = attention.MAX_MASK_ELEMENTS
    attention.MAX_MASK_ELEMENTS = largest
    try:
        return _trained("fsdp2", config, sizes, model_type, kind)
    finally:
        attention.MAX_MASK_ELEMENTS = before


def _assert_as_single(outcomes: list[Any], model_type: str, kind: str) -> None:
    (expected,) = pool(1).run(_trained, "single", {}, {}, model_type, kind)
    for losses, norms, weights in outcomes:
        assert losses == pytest.approx(expected[0], abs=TOLERANCE)
        assert norms == pytest.approx(expected[1], abs=TOLERANCE)
        assert max(float((weights[name] - whole).abs().max()) for name, whole in expected[2].items()) <= TOLERANCE


@pytest.mark.parametrize(
    ("model_type", "kind", "config"),
    [
        ("llama", "documents", ULYSSES),
        ("llama", "padded", {}),
        pytest.param("gpt2", "shared positions", {}, marks=SLOW),
        pytest.param("gpt2", "padded, with positions", ULYSSES, marks=SLOW),
        pytest.param("gemma2", "documents", ULYSSES, marks=SLOW),
    ],
)
def test_documents_and_padding(model_type: str, kind: str, config: dict[str, Any]) -> None:
    _assert_as_single(pool(2).run(_trained, "fsdp2", config, CP2, model_type, kind), model_type, kind)


@SLOW
@pytest.mark.parametrize(
    ("model_type", "kind", "config", "sizes"),
    [
        ("gpt_oss", "plain", {}, CP2),
        # Fewer key heads than ranks: recomputation takes the heads of the rank, not the layer's own number of them.
        ("llama", "documents", ULYSSES, CP4),
    ],
)
def test_long_sequences_are_attended_in_blocks(model_type, kind, config, sizes):
    found = pool(_ranks(sizes)).run(_in_blocks, config, sizes, model_type, kind, 100)
    _assert_as_single(found, model_type, kind)


# -- memory

BLOCKS, WIDTH, LONG = 3, 8, 512
"""Blocks of the model, bytes of float64, and tokens of a sequence."""


def _kept(size: int, way: Any) -> int:
    """Bytes that autograd keeps of a sequence for the backward of one rank, parameters left out."""
    world, model = open_world("cpu"), build_tiny_model()
    ids = torch.randint(0, 131, (1, LONG), generator=torch.Generator().manual_seed(0))
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in owned:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if size == 1:
            sum_token_loss(model(input_ids=ids, use_cache=False).logits, ids)
        else:
            mesh = Mesh(MeshSizes(cp_size=size).resolve(world.size), world)
            parallel = ContextParallel(model, model_layout(model), mesh["cp"], attention=way)
            inputs, targets_BS = split_targets(parallel.shard_batch({"input_ids": ids, "labels": ids}))
            with parallel.step_context(), parallel.forward_context(inputs) as given:
                sum_target_loss(model(**given, use_cache=False).logits, targets_BS)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=SLOW)])
def test_activations_of_a_rank_are_its_part_beside_gathered_keys_and_values(ranks: int) -> None:
    (whole,) = pool(1).run(_kept, 1, "")
    gathered = BLOCKS * LONG * 2 * (2 * 4) * WIDTH
    # For each of two chunks of queries: keys and values up to its end, once for each query head, and a mask.
    chunk = LONG // (2 * ranks)
    read = BLOCKS * (2 * ranks + 1) * chunk * (2 * 12 * 4 + chunk) * WIDTH
    for kept in pool(ranks).run(_kept, ranks, "allgather"):
        # Single numbers are not divided.
        assert kept < whole / ranks + gathered + read + 64
    for kept in pool(ranks).run(_kept, ranks, "ulysses"):
        # Attention's output on both sides of the exchange.
        assert kept < 1.12 * whole / ranks


# -- the attention setting


def _settings(fails: bool) -> tuple[list[Any], list[Any], list[Any], bool]:
    manager: Any = build_manager("fsdp2", {"activation_checkpointing": "full"}, CP2, BRIEF)
    layer = manager.model.model.layers[0].self_attn
    seen: list[Any] = []

    def note(*_: Any) -> None:
        seen.append(layer.config._attn_implementation)
        if fails and layer.training:
            raise RuntimeError("broken")

    before = [manager.model.config._attn_implementation, layer.config._attn_implementation]
    layer.register_forward_pre_hook(note)
    broke = False
    try:
        train_steps(manager, BRIEF, range(1))
    except RuntimeError:
        broke = True
    after = [manager.model.config._attn_implementation, layer.config._attn_implementation]
    return before, seen, after, broke


@pytest.mark.parametrize("fails", [pytest.param(False, marks=SLOW), True])
def test_the_attention_setting_is_ours_in_steps_only(fails: bool) -> None:
    for before, seen, after, broke in pool(2).run(_settings, fails):
        assert before == after == ["sdpa", "sdpa"]
        # In recomputation, too.
        assert set(seen) == {"meshwright_sdpa"}
        assert broke is fails


def _forward_outside() -> bool:
    """A model under context parallelism answers outside of steps as it would alone."""
    manager: Any = build_manager("fsdp2", {}, CP2, BRIEF)
    train_steps(manager, BRIEF, range(1))
    ids = torch.randint(0, 131, (2, 7), generator=torch.Generator().manual_seed(3))
    with manager.unshard() as (model,), torch.no_grad():
        answers = [torch.empty_like(model(input_ids=ids).logits) for _ in range(2)]
        dist.all_gather(answers, model(input_ids=ids).logits)
    return torch.equal(*answers)


def test_outside_of_steps_the_model_is_whole() -> None:
    assert pool(2).run(_forward_outside) == [True, True]


# -- refusals


def _refusal(
    config: dict[str, Any], sizes: dict[str, int], case: Case, change: dict[str, Any], evaluates: bool = False
) -> str:
    def train() -> None:
        manager: Any = build_manager("fsdp2", config, sizes, case)
        batches = rank_microbatches(case, 0, manager.mesh.data_rank, manager.mesh.data_size)
        num_tokens = count_tokens(batches, manager.mesh)
        for name, value in change.items():
            batches[0][name] = batches[0][name][:, :value] if isinstance(value, int) else value
        (manager.eval_loss if evaluates else manager.forward_backward)(batches, num_tokens=num_tokens)

    return catch_error(train)


def _refused_by(error: type[MeshwrightError], text: str, *arguments: Any, ranks: int = 2) -> None:
    answers = pool(ranks).run(_refusal, *arguments)
    assert len(set(answers)) == 1
    assert answers[0].startswith(f"{error.__name__}: ")
    assert text in answers[0]


@pytest.mark.parametrize(
    ("model_type", "text", "evaluates"),
    mark_mostly_slow(
        [
            ("mamba", "outside of attention", True),
            ("routed", "has no attention of transformers", False),
            ("bloom", "cannot run on a part of the positions", False),
            ("falcon_h1", "outside of attention", True),
        ]
    ),
)
def test_models_that_mix_positions_elsewhere_are_refused(model_type: str, text: str, evaluates: bool) -> None:
    case = Case(model_type=model_type, tied=None)
    (answer,) = set(pool(2).run(_refusal, {}, CP2, case, {}, evaluates))
    assert answer.startswith("ModelError: ")
    assert text.lower() in answer.lower()
    assert "Set cp_size=1" in answer


def _half(model_type: str, config: dict[str, Any]) -> float:
    case = replace(BRIEF, model_type=model_type, dtype="float32" if config else "bfloat16")
    return train_steps(build_manager("fsdp2", config, CP2, case), case, range(1))[0][0]


@SLOW
@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("mixtral", {}),
        ("llama", {"autocast_dtype": "bfloat16"}),
    ],
)
def test_rounding_in_half_precision_is_not_taken_for_mixing(model_type: str, config: dict[str, Any]) -> None:
    first, second = pool(2).run(_half, model_type, config)
    assert first == second
    assert 0 < first < 10


@SLOW
def test_what_cannot_be_exchanged_is_refused_with_the_other_way() -> None:
    _refused_by(ModelError, "s_aux", ULYSSES, CP2, Case(model_type="gpt_oss", tied=None), {})
    _refused_by(ModelError, "6 of them on each rank", ULYSSES, CP4, Case(model_type="gpt2", tied=None), {}, ranks=4)


@pytest.mark.parametrize(
    ("config", "sizes", "ranks", "text"),
    [
        ({}, CP2, 2, "multiple of 4 with masked labels, or choose another cp_size"),
        pytest.param(SP, TP2_CP2, 4, "cp_size=2 and sequence_parallel. Pad them to a multiple of 8", marks=SLOW),
    ],
)
def test_lengths_that_do_not_divide_are_refused(config, sizes, ranks, text):
    _refused_by(BatchError, text, config, sizes, Case(), {"input_ids": 14, "labels": 14}, ranks=ranks)


def test_what_cannot_be_divided_in_a_batch_is_refused() -> None:
    ones = torch.ones(12, 16, dtype=torch.int64)
    _refused_by(BatchError, "the batch holds token_type_ids", {}, CP2, Case(), {"token_type_ids": ones})
    four = torch.ones(12, 1, 16, 16, dtype=torch.int64)
    _refused_by(BatchError, "attention_mask has the shape (12, 1, 16, 16)", {}, CP2, Case(), {"attention_mask": four})
    _refused_by(BatchError, "position_ids has the shape", {}, CP2, Case(), {"position_ids": ones[None]})


def _configured(name: str, value: Any) -> str:
    model = build_tiny_model()
    setattr(model.config, name, value)
    return catch_error(build_model_manager, model, "fsdp2", sizes=CP2)


def test_attention_and_positions_that_cannot_be_divided_are_refused_before_the_model_is_changed() -> None:
    for text in pool(2).run(_configured, "_attn_implementation", "flex_attention"):
        assert re.search("attn_implementation='flex_attention'.*eager, sdpa", text)
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert all("rope_type='dynamic'" in text for text in pool(2).run(_configured, "rope_parameters", rope))
