"""New weights are those of a seed, whoever draws them, and no rank holds them all."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.managers import build_empty_manager
from support.tiers import mark_mostly_slow
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from meshwright import ModelError, from_config, optimizer_factory
from meshwright.model import deferred_init, random_tiles
from meshwright.model.deferred_init import DeferredWeights
from meshwright.model.random_tiles import FillOp, FillRecipe
from meshwright.model.weights import load_weights, materialize
from meshwright.testing import Case
from meshwright_run.run_file import OptimizerConfig
from meshwright_testing import pool
from meshwright_testing.models import build_tiny_model
from meshwright_testing.parity import full_weights, train_steps
from meshwright_testing.zoo import build_zoo_config

# Tied heads, experts of three dims, truncated normals, rows of padding, computed decay rates, orthogonal matrices,
# rescaled projections, submodels.
TYPES = ["llama", "gpt2", "mixtral", "qwen3_moe", "gemma2", "modernbert-decoder", "mamba2", "bert", "rwkv", "gemma3"]


def _config(**sizes: Any) -> LlamaConfig:
    given = {"vocab_size": 3000, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2} | sizes
    return LlamaConfig(**given, num_attention_heads=4, num_key_value_heads=2)


def _deferred(config: Any, seed: int | None = 0) -> tuple[nn.Module, DeferredWeights]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    torch.manual_seed(0 if seed is None else seed)
    return model, DeferredWeights(model, seed=seed)


def _all_of(model: nn.Module, values: DeferredWeights) -> dict[str, Tensor]:
    return {name: values.read(name, [0] * p.dim(), p.shape).clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("model_type", TYPES)
def test_any_part_is_that_of_the_whole_and_is_distributed_as_transformers_has_it(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred_init, "MIN_TRACKED_BYTES", 64)
    config = build_zoo_config(model_type)
    model, values = _deferred(config, 3)
    found = _all_of(model, values)
    torch.manual_seed(3)
    expected = dict(AutoModelForCausalLM.from_config(config, dtype=torch.float32).named_parameters())
    assert found.keys() == expected.keys()
    for name, full in found.items():
        _assert_alike(name, full, expected[name].detach())
        if full.numel():
            offsets = [size // 3 for size in full.shape]
            sizes = [max(1, size // 2) for size in full.shape]
            part = full[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
            assert torch.equal(values.read(name, offsets, sizes), part), name


def _assert_alike(name: str, found: Tensor, expected: Tensor) -> None:
    """Means and spreads of two samples differ by no more than chance, at five standard deviations."""
    n, spread = expected.numel(), float(expected.std(correction=0)) if expected.numel() > 1 else 0.0
    if spread == 0.0:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, msg=name)
        return
    assert found.isfinite().all(), name
    if n >= 64:
        slack = 7.5 / math.sqrt(n)
        assert abs(float(found.mean() - expected.mean())) < slack * spread, name
        assert abs(float(found.std(correction=0)) / spread - 1) < slack, name


def test_values_depend_on_the_seed_and_not_on_threads_and_tiles_differ() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = _all_of(*_deferred(_config()))
        torch.set_num_threads(3)
        together = _all_of(*_deferred(_config()))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(alone[name], together[name]) for name in alone)
    other = _all_of(*_deferred(_config(), 1))
    drawn = [name for name, each in alone.items() if each.dim() > 1]
    assert not any(torch.equal(alone[name], other[name]) for name in drawn)
    rows = torch.cat([alone[name].flatten()[: alone[name].numel() // 64 * 64].view(-1, 64) for name in drawn])
    assert len(torch.unique(rows, dim=0)) == len(rows)


@pytest.mark.parametrize("shape", [(7,), (200_000,), (3, 5), (700, 1300), (5, 40, 33), (4, 2, 3, 100), ()])
def test_rectangles_of_any_shape_are_cut_from_the_same_values(shape: tuple[int, ...]) -> None:
    operator = torch.ops.aten.normal_.default
    scale = FillOp(torch.ops.aten.mul_.Tensor, (2.0,), {})
    recipe = FillRecipe(shape, torch.float32, (FillOp(operator, (0.0, 1.0), {}, first_tile=11), scale), 5)
    full = recipe.read([0] * len(shape), shape)
    assert full.shape == torch.Size(shape)
    for begin, end in ((0.0, 0.5), (0.4, 0.9), (0.9, 1.0), (0.5, 0.5)):
        offsets = [int(size * begin) for size in shape]
        sizes = [int(size * end) - offset for size, offset in zip(shape, offsets, strict=True)]
        part = full[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        assert torch.equal(recipe.read(offsets, sizes), part)


def test_rows_that_are_set_are_set_in_every_tile() -> None:
    fills = (
        FillOp(torch.ops.aten.normal_.default, (0.0, 1.0), {}, first_tile=0),
        FillOp(torch.ops.aten.zero_.default, (), {}, rows=slice(127, 130)),
    )
    full = FillRecipe((300, 600), torch.float32, fills, 1).read([0, 0], [300, 600])
    is_zero = (full == 0).all(1)
    assert is_zero.nonzero().flatten().tolist() == [127, 128, 129]
    assert (full == 0).sum() < 3 * 600 + 5


def _weights(strategy: str, config: dict[str, Any], sizes: dict[str, int], init: str) -> tuple[dict[str, Tensor], int]:
    deferred_init.MIN_TRACKED_BYTES = 64
    tiles: list[int] = []
    tile = random_tiles.FillRecipe._draw_tile

    def counted(self: FillRecipe, which: Any) -> Tensor:
        found = tile(self, which)
        tiles.append(found.numel())
        return found

    random_tiles.FillRecipe._draw_tile = counted  # type: ignore[method-assign]
    try:
        manager = from_config(config, strategy, device="cpu", seed=7, init=init, **sizes)  # type: ignore[arg-type]
    finally:
        random_tiles.FillRecipe._draw_tile = tile  # type: ignore[method-assign]
    return {name: value.clone() for name, value in full_weights(manager).items()}, sum(tiles)


LLAMA = {**_config().to_diff_dict(), "model_type": "llama"}
MOE = {"model_type": "qwen3_moe", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_experts": 4}
MOE |= {"moe_intermediate_size": 96, "intermediate_size": 128, "num_experts_per_tok": 2}
MOE |= {"num_attention_heads": 4, "num_key_value_heads": 2}
LAYOUTS = [
    *((LLAMA, "fsdp2", 2, {}), (LLAMA, "fsdp2", 4, {}), (LLAMA, "ddp", 2, {}), (LLAMA, "fsdp2", 2, {"tp_size": 2})),
    *((LLAMA, "fsdp2", 2, {"pp_size": 2}), (MOE, "fsdp2", 4, {"ep_size": 2}), (MOE, "megatron_fsdp", 2, {})),
]


@pytest.mark.parametrize(("config", "strategy", "ranks", "sizes"), mark_mostly_slow(LAYOUTS))
def test_every_layout_has_the_same_weights(config: Any, strategy: str, ranks: int, sizes: dict[str, int]) -> None:
    ((expected, _),) = pool(1).run(_weights, "single", config, {}, "parallel")
    for found, _ in pool(ranks).run(_weights, strategy, config, sizes, "parallel"):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_a_rank_draws_what_it_holds() -> None:
    total = sum(p.numel() for p in AutoModelForCausalLM.from_config(_config()).parameters())
    ((_, alone),) = pool(1).run(_weights, "fsdp2", LLAMA, {}, "parallel")
    # Once, and constants such as those of norms not at all.
    assert 0.95 * total < alone <= total
    most = max(drawn for _, drawn in pool(4).run(_weights, "fsdp2", LLAMA, {}, "parallel"))
    tile_rows = sum(128 * p.shape[1] for p in AutoModelForCausalLM.from_config(_config()).parameters() if p.dim() > 1)
    assert most <= total / 4 + 2 * tile_rows


@pytest.mark.parametrize("sizes", mark_mostly_slow([{}, {"tp_size": 2}, {"pp_size": 2}]), ids=str)
def test_the_values_of_transformers_are_there_for_the_asking(sizes: dict[str, int]) -> None:
    torch.manual_seed(7)
    expected = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA)).state_dict()
    for found, drawn in pool(2).run(_weights, "fsdp2", LLAMA, sizes, "transformers"):
        assert drawn == 0
        assert all(torch.equal(found[name], expected[name]) for name in expected)


WIDE = ("main_params_dtype", "main_grads_dtype")


@pytest.mark.parametrize(
    "model_type",
    # Rotary tables, tied heads, rescaled projections, truncated normals by rejection, computed decay rates, experts,
    # submodels, arrays of numpy, one block in several places.
    ["llama", "gemma2", "gpt2", "modernbert-decoder", "mamba2", "mixtral", "gemma3", "roformer", "zamba"],
)
def test_parameters_buffers_and_ties_are_those_of_the_seed(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_init, "MIN_TRACKED_BYTES", 64)
    monkeypatch.setattr(deferred_init, "MAX_RESIDENT_BYTES", 0)
    torch.manual_seed(3)
    whole = AutoModelForCausalLM.from_config(build_zoo_config(model_type), dtype=torch.float32)
    after = torch.get_rng_state()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(build_zoo_config(model_type), dtype=torch.float32)
    torch.manual_seed(3)
    values = DeferredWeights(model)
    # What is drawn next is what would have been drawn.
    assert torch.equal(torch.get_rng_state(), after)
    materialize(model, "cpu")
    load_weights(model, values)
    expected, found = whole.state_dict(), model.state_dict()
    assert list(expected) == list(found)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    for (name, a), (_, b) in zip(whole.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(a, b), name
    assert [name for name, _ in whole.named_parameters()] == [name for name, _ in model.named_parameters()]


def _parallelized(
    strategy: str, meta: bool, tied: bool, seed_by_rank: bool, config: dict[str, Any], tp_size: int
) -> tuple[Any, ...]:
    deferred_init.MIN_TRACKED_BYTES = 64
    manager = build_empty_manager(strategy, config, {"tp_size": tp_size})
    seed = manager.mesh.rank if seed_by_rank else 0
    with torch.device("meta") if meta else nullcontext():
        model = build_tiny_model(tied=tied, seed=seed)
    manager.parallelize(model)
    manager.build_optimizer(optimizer_factory(OptimizerConfig(lr=1e-2)))
    local = {n: (p.to_local() if isinstance(p, DTensor) else p).numel() for n, p in model.named_parameters()}
    same = model.lm_head.weight is model.model.embed_tokens.weight
    weights = full_weights(manager)
    losses = train_steps(manager, Case(), range(2))[0]
    return weights, losses, local, same, model.model.rotary_emb.inv_freq


@pytest.mark.parametrize(
    ("strategy", "ranks", "tied", "config", "tp_size"),
    mark_mostly_slow(
        [
            ("single", 1, False, {}, 1),
            ("ddp", 2, True, {}, 1),
            ("ddp", 2, True, {"engine": "bucketed", "use_distributed_optimizer": True}, 1),
            ("fsdp2", 3, True, {"activation_checkpointing": "full", "reshard_after_forward": True}, 1),
            ("fsdp2", 4, False, {}, 2),
            ("megatron_fsdp", 3, True, {}, 1),
            ("megatron_fsdp", 3, True, {"zero_dp_strategy": 1, **dict.fromkeys(WIDE, "float64")}, 1),
        ]
    ),
    ids=str,
)
def test_sharded_on_meta_and_trained_bit_for_bit_as_without(
    strategy: str, ranks: int, tied: bool, config: dict[str, Any], tp_size: int
) -> None:
    expected = pool(ranks).run(_parallelized, strategy, False, tied, False, config, tp_size)
    # Ranks that divide tensors share a seed.
    found = pool(ranks).run(_parallelized, strategy, True, tied, tp_size == 1, config, tp_size)
    for (weights, losses, local, same, table), whole in zip(found, expected, strict=True):
        assert weights.keys() == whole[0].keys()
        assert all(torch.equal(weights[name], whole[0][name]) for name in weights)
        assert (losses, local, same) == (*whole[1:3], tied)
        assert torch.equal(table, whole[4])


def test_what_has_no_weights_of_its_own_is_refused() -> None:
    with torch.device("meta"):
        plain = nn.ModuleDict({"blocks": nn.ModuleList([nn.Sequential(nn.Linear(2, 2))])})
        partly = build_tiny_model()
        changed = build_tiny_model()
    partly.model.norm.to_empty(device="cpu")
    changed.model.norm = nn.LayerNorm(36, device="meta", dtype=torch.float64)
    with pytest.raises(ModelError, match="no model of transformers"):
        DeferredWeights(plain)
    with pytest.raises(ModelError, match=r"in part: model\.norm\.weight has memory"):
        DeferredWeights(partly)
    with pytest.raises(ModelError, match=r"model\.norm\.bias differs"):
        DeferredWeights(changed)
