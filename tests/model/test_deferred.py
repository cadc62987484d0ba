"""A model on the meta device gets the weights of its seed, without a rank that holds them all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiers import mostly_slow
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright import Mesh, MeshSizes, ModelError, open_world, optimizer_factory, resolve
from meshwright.model import drawn_weights as deferred
from meshwright.model.drawn_weights import DeferredModel
from meshwright.model.weights import fill, materialize
from meshwright.testing import Case, pool
from meshwright.testing.models import tiny_model
from meshwright.testing.parity import full_weights, train_steps
from meshwright.testing.zoo import zoo_config
from meshwright_run.run_file import OptimizerConfig

CPU = torch.device("cpu")


def _whole_and_filled(model_type: str, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, nn.Module]:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(deferred, "LARGE_BYTES", 64)
    torch.manual_seed(3)
    whole = AutoModelForCausalLM.from_config(zoo_config(model_type), dtype=torch.float32)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(zoo_config(model_type), dtype=torch.float32)
    values = DeferredModel(model, budget_bytes=0)
    # What is drawn next is what would have been drawn.
    assert torch.equal(torch.get_rng_state(), after)
    materialize(model, CPU)
    fill(model, values)
    return whole, model


@pytest.mark.parametrize(
    "model_type",
    # Rotary tables, tied heads, rescaled projections, truncated normals by rejection, computed decay rates, experts,
    # submodels, arrays of numpy, one block in several places.
    ["llama", "gemma2", "gpt2", "modernbert-decoder", "mamba2", "mixtral", "gemma3", "roformer", "zamba"],
)
def test_parameters_buffers_and_ties_are_those_of_the_seed(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, model = _whole_and_filled(model_type, monkeypatch)
    expected, found = whole.state_dict(), model.state_dict()
    assert list(expected) == list(found)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    for (name, a), (_, b) in zip(whole.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(a, b), name
    assert [name for name, _ in whole.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_memory_is_bounded_by_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "LARGE_BYTES", 64)
    with torch.device("meta"):
        model = tiny_model()
    largest = max(p.nbytes for p in model.parameters())
    peaks = []

    class Outline(deferred._Outline):
        def __torch_dispatch__(self, *arguments: Any) -> Any:
            result = super().__torch_dispatch__(*arguments)
            peaks.append(sum(storage.nbytes() for storage in self._storages.values()))
            return result

    monkeypatch.setattr(deferred, "_Outline", Outline)
    built = DeferredModel(model, budget_bytes=largest)
    # One beside those that an operator works on: no model of 13 times as much.
    assert max(peaks) <= 3 * largest < sum(p.nbytes for p in model.parameters()) / 2
    materialize(model, CPU)
    fill(model, built)


def _parallelized(
    strategy: str, meta: bool, tied: bool, seed_by_rank: bool, config: dict[str, Any], tp_size: int = 1
) -> tuple[Any, ...]:
    world = open_world("cpu")
    deferred.LARGE_BYTES = 64
    stack, degrees = resolve(strategy, MeshSizes(tp_size=tp_size), world.size, config=config)
    manager = stack.build(Mesh(degrees, world))
    seed = world.rank if seed_by_rank else 0
    if meta:
        with torch.device("meta"):
            model = tiny_model(tied=tied, seed=seed)
    else:
        model = tiny_model(tied=tied, seed=seed)
    manager.parallelize(model)
    manager.build_optimizer(optimizer_factory(OptimizerConfig(lr=1e-2)))
    local = {n: (p.to_local() if isinstance(p, DTensor) else p).numel() for n, p in model.named_parameters()}
    same = model.lm_head.weight is model.model.embed_tokens.weight
    weights = full_weights(manager)
    losses = train_steps(manager, Case(), range(2))[0]
    return weights, losses, local, same, model.model.rotary_emb.inv_freq


@pytest.mark.parametrize("tied", mostly_slow([False, True]))
@pytest.mark.parametrize(
    ("strategy", "ranks", "config"),
    mostly_slow(
        [
            ("single", 1, {}),
            ("ddp", 2, {}),
            ("ddp", 2, {"engine": "bucketed", "use_distributed_optimizer": True}),
            ("fsdp2", 3, {}),
            ("fsdp2", 3, {"activation_checkpointing": "full", "reshard_after_forward": True}),
            ("megatron_fsdp", 3, {}),
            ("megatron_fsdp", 3, {"zero_dp_strategy": 0}),
            (
                "megatron_fsdp",
                3,
                {"zero_dp_strategy": 1, "main_params_dtype": "float64", "main_grads_dtype": "float64"},
            ),
        ]
    ),
    ids=str,
)
def test_sharded_on_meta_and_trained_bit_for_bit_as_without(
    strategy: str, ranks: int, tied: bool, config: dict[str, Any]
) -> None:
    expected = pool(ranks).run(_parallelized, strategy, False, tied, False, config)
    for (weights, losses, local, same, table), whole in zip(
        pool(ranks).run(_parallelized, strategy, True, tied, True, config), expected, strict=True
    ):
        assert weights.keys() == whole[0].keys()
        assert all(torch.equal(weights[name], whole[0][name]) for name in weights)
        assert losses == whole[1]
        assert local == whole[2]
        assert same is tied
        assert torch.equal(table, whole[4])


@pytest.mark.slow
def test_ranks_that_divide_tensors_get_the_weights_of_the_seed_too() -> None:
    expected = pool(4).run(_parallelized, "fsdp2", False, False, False, {}, 2)
    for found, whole in zip(pool(4).run(_parallelized, "fsdp2", True, False, False, {}, 2), expected, strict=True):
        assert found[0].keys() == whole[0].keys()
        assert all(torch.equal(found[0][name], whole[0][name]) for name in whole[0])
        assert found[1:3] == whole[1:3]


def test_what_has_no_weights_of_its_own_is_refused() -> None:
    with torch.device("meta"):
        plain = nn.ModuleDict({"blocks": nn.ModuleList([nn.Sequential(nn.Linear(2, 2))])})
        partly = tiny_model()
        changed = tiny_model()
    partly.model.norm.to_empty(device="cpu")
    changed.model.norm = nn.LayerNorm(36, device="meta", dtype=torch.float64)
    with pytest.raises(ModelError, match="no model of transformers"):
        DeferredModel(plain)
    with pytest.raises(ModelError, match=r"in part: model\.norm\.weight has memory"):
        DeferredModel(partly)
    with pytest.raises(ModelError, match=r"model\.norm\.bias differs"):
        DeferredModel(changed)
