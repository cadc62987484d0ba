"""The zoo of all architectures: every type has a tiny configuration or a reason, and those with one train."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from support.kinds import DIFFERENT_IN_KIND
from torch import Tensor, nn

from meshwright.base.errors import ModelError
from meshwright.step.tokens import token_loss_sum
from meshwright_testing.zoo import tiny_config, zoo_config, zoo_data, zoo_model, zoo_reason, zoo_types, zoo_vocab

TRAINABLE = [model_type for model_type in zoo_types() if zoo_reason(model_type) is None]
TOLERANCE = 1e-12
NOT_CAUSAL = {
    "cpmant": "all of its context sees all of it",
    "prophetnet": "its second stream predicts two tokens ahead, and leaks 1e-10 into the first",
    "reformer": "a token changes into which buckets all others are hashed",
}
if Version(transformers.__version__) < Version("5.23"):
    # As in 5.17. No parallel strategy depends on it.
    NOT_CAUSAL |= dict.fromkeys(["big_bird", "doge", "megatron-bert", "rembert", "roformer"], "fixed in 5.23")


def ids_of(model_type: str, seed: int = 1) -> Tensor:
    return torch.randint(0, zoo_vocab(model_type), (4, 16), generator=torch.Generator().manual_seed(seed))


def logits_of(model: nn.Module, ids_BS: Tensor) -> Tensor:
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    return model(input_ids=ids_BS, **options).logits


def loss_and_gradients(model: nn.Module, ids_BS: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss sum and the gradients of what takes part."""
    model.zero_grad(set_to_none=True)
    loss = token_loss_sum(logits_of(model, ids_BS), ids_BS) / 60
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _marks(model_type: str) -> list[pytest.MarkDecorator]:
    if model_type in ("gemma3_text", "qwen3_moe"):
        return []
    return [pytest.mark.slow if model_type in DIFFERENT_IN_KIND else pytest.mark.zoo]


@pytest.mark.parametrize("model_type", [pytest.param(each, marks=_marks(each)) for each in TRAINABLE])
def test_trains_with_independent_rows_and_equal_results_for_equal_seeds(model_type: str) -> None:
    ids_BS = ids_of(model_type)
    model = zoo_model(model_type)
    assert {p.dtype for p in model.parameters()} == {torch.float64}

    logits_BSV = logits_of(model, ids_BS).detach()
    assert logits_BSV.shape[:2] == ids_BS.shape
    loss, gradients = loss_and_gradients(model, ids_BS)
    assert torch.isfinite(loss)
    assert gradients
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values())

    again, same = loss_and_gradients(zoo_model(model_type), ids_BS)
    assert torch.equal(loss, again)
    assert gradients.keys() == same.keys()
    assert all(torch.equal(gradient, same[name]) for name, gradient in gradients.items())

    (one, first), (two, second) = (loss_and_gradients(model, half) for half in ids_BS.chunk(2))
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    assert abs(one + two - loss) <= TOLERANCE * loss
    zero = torch.zeros(())
    apart = {
        name: float((first.get(name, zero) + second.get(name, zero) - gradient).norm() / norm)
        for name, gradient in gradients.items()
    }
    assert max(apart.values()) <= TOLERANCE, max(apart, key=apart.__getitem__)

    changed_BS = ids_BS.clone()
    changed_BS[:, -1] = (changed_BS[:, -1] + 1) % zoo_vocab(model_type)
    moved = (logits_of(model, changed_BS).detach() - logits_BSV).abs()
    assert moved[:, -1].max() > 1e-6
    assert model_type in NOT_CAUSAL or moved[:, :-1].max() <= TOLERANCE


def test_every_type_has_a_tiny_configuration_or_a_reason() -> None:
    assert len(zoo_types()) > 150
    failed = {}
    for model_type in TRAINABLE:
        try:
            assert 64 <= zoo_vocab(model_type) <= 512
        except Exception as error:
            failed[model_type] = f"{type(error).__name__}: {error}"
    assert not failed
    assert len(TRAINABLE) >= 0.95 * len(zoo_types())


def test_models_have_the_ties_dtype_seed_and_noise_that_were_asked_for() -> None:
    for model_type, tied in (("llama", True), ("llama", False), ("qwen3_moe", True)):
        model = zoo_model(model_type, tied=tied)
        assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    before = torch.get_rng_state()
    one, other = (zoo_model("llama", seed=seed).get_input_embeddings().weight for seed in (0, 1))
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.detach().std() > 1e-3 for parameter in zoo_model("opt").parameters())
    assert {p.dtype for p in zoo_model("llama", dtype=torch.float32).parameters()} == {torch.float32}


def test_float32_parts_compute_in_float64_also_in_checkpointed_blocks() -> None:
    model = zoo_model("gemma3_text")
    ids_BS = ids_of("gemma3_text")
    loss, gradients = loss_and_gradients(model, ids_BS)
    assert torch.get_default_dtype() is torch.float32
    # Older versions know only the second name.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    again, same = loss_and_gradients(model, ids_BS)
    assert torch.equal(loss, again)
    assert all(torch.equal(gradient, same[name]) for name, gradient in gradients.items())
    assert torch.get_default_dtype() is torch.float32


def test_the_mode_ends_with_a_forward_that_fails() -> None:
    model = zoo_model("llama")
    with pytest.raises(IndexError):
        model(input_ids=torch.full((1, 4), 10_000))
    assert torch.get_default_dtype() is torch.float32
    assert torch.ones(1).float().dtype is torch.float32


def test_unknown_and_refused_types_are_named() -> None:
    with pytest.raises(ModelError, match=r"no model type 'lama'.*llama"):
        zoo_config("lama")
    refused = next(model_type for model_type in zoo_types() if zoo_reason(model_type))
    with pytest.raises(ModelError, match=refused):
        zoo_config(refused)
    # A list by layer is cut so that the kinds of layers come in turn.
    assert zoo_config("gemma3_text").layer_types == ["sliding_attention", "full_attention"] * 2


def undeclared(config_cls: Any, values: Mapping[str, Any]) -> Iterator[str]:
    """Fields that an entry of zoo.yaml sets and the configuration does not declare."""
    for name, value in values.items():
        nested = getattr(config_cls, "sub_configs", {}).get(name)
        if nested is not None and isinstance(value, Mapping):
            yield from undeclared(nested, value)
        elif name not in inspect.signature(config_cls).parameters and name not in config_cls.attribute_map:
            yield name


def test_every_entry_has_a_reason_and_names_a_type_and_fields_that_exist() -> None:
    from transformers import CONFIG_MAPPING

    data = zoo_data()
    assert not data["values"].keys() & data["refused"].keys()
    assert all(len(reason) > 20 for reason in data["refused"].values())
    assert all(len(entry["reason"]) > 20 for entry in data["values"].values())
    # An older transformers has fewer types.
    known = [model_type for model_type in (*data["values"], *data["refused"]) if model_type in CONFIG_MAPPING]
    assert len(known) >= 0.8 * (len(data["values"]) + len(data["refused"]))
    assert set(known) <= set(zoo_types())
    for model_type in set(known) & data["values"].keys():
        entry = {name: value for name, value in data["values"][model_type].items() if name != "reason"}
        assert entry, model_type
        # transformers reads this one without declaring it.
        assert set(undeclared(CONFIG_MAPPING[model_type], entry)) <= ({"rope_theta"} if model_type == "dbrx" else set())


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [each for each in zoo_data()["values"] if each in zoo_types()])
def test_every_entry_changes_what_the_rules_give(model_type: str) -> None:
    from transformers import CONFIG_MAPPING

    try:
        by_rules = tiny_config(CONFIG_MAPPING[model_type], {})
    except Exception:
        return
    assert by_rules.to_dict() != zoo_config(model_type).to_dict()
