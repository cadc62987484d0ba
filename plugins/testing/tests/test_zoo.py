"""The zoo of all architectures: every type has a tiny configuration or a reason, and those with one train."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers
from packaging.version import Version
from support.model_types import REPRESENTATIVE_MODEL_TYPES
from torch import Tensor, nn

from meshwright.base.errors import ModelError
from meshwright.step.tokens import sum_token_loss
from meshwright_testing.zoo import build_zoo_config, build_zoo_model, zoo_types, zoo_unsupported_reason, zoo_vocab_size

TRAINABLE = [model_type for model_type in zoo_types() if zoo_unsupported_reason(model_type) is None]
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
    return torch.randint(0, zoo_vocab_size(model_type), (4, 16), generator=torch.Generator().manual_seed(seed))


def logits_of(model: nn.Module, ids_BS: Tensor) -> Tensor:
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    return model(input_ids=ids_BS, **options).logits


def loss_and_gradients(model: nn.Module, ids_BS: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss sum and the gradients of what takes part."""
    model.zero_grad(set_to_none=True)
    loss = sum_token_loss(logits_of(model, ids_BS), ids_BS) / 60
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_equal(one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]) -> None:
    (loss, gradients), (again, same) = one, other
    assert torch.equal(loss, again)
    assert gradients.keys() == same.keys()
    assert all(torch.equal(gradient, same[name]) for name, gradient in gradients.items())


def _marks(model_type: str) -> list[pytest.MarkDecorator]:
    if model_type in ("gemma3_text", "qwen3_moe"):
        return []
    return [pytest.mark.slow if model_type in REPRESENTATIVE_MODEL_TYPES else pytest.mark.zoo]


@pytest.mark.parametrize("model_type", [pytest.param(each, marks=_marks(each)) for each in TRAINABLE])
def test_trains_with_independent_rows_and_equal_results_for_equal_seeds(model_type: str) -> None:
    ids_BS = ids_of(model_type)
    model = build_zoo_model(model_type)
    assert {p.dtype for p in model.parameters()} == {torch.float64}

    logits_BSV = logits_of(model, ids_BS).detach()
    loss, gradients = loss_and_gradients(model, ids_BS)
    assert gradients
    assert all(bool(each.isfinite().all()) for each in (loss, *gradients.values()))
    check_equal((loss, gradients), loss_and_gradients(build_zoo_model(model_type), ids_BS))

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
    changed_BS[:, -1] = (changed_BS[:, -1] + 1) % zoo_vocab_size(model_type)
    moved = (logits_of(model, changed_BS).detach() - logits_BSV).abs()
    assert moved[:, -1].max() > 1e-6
    assert model_type in NOT_CAUSAL or moved[:, :-1].max() <= TOLERANCE


def test_almost_every_type_has_a_tiny_configuration() -> None:
    assert len(zoo_types()) > 150
    assert all(64 <= zoo_vocab_size(model_type) <= 512 for model_type in TRAINABLE)
    assert len(TRAINABLE) >= 0.95 * len(zoo_types())


def test_models_have_the_ties_dtype_seed_and_noise_that_were_asked_for() -> None:
    for model_type, tied in (("llama", True), ("llama", False), ("qwen3_moe", True)):
        model = build_zoo_model(model_type, tied=tied)
        assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    before = torch.get_rng_state()
    one, other = (build_zoo_model("llama", seed=seed).get_input_embeddings().weight for seed in (0, 1))
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.detach().std() > 1e-3 for parameter in build_zoo_model("opt").parameters())
    assert {p.dtype for p in build_zoo_model("llama", dtype=torch.float32).parameters()} == {torch.float32}


def test_float32_parts_compute_in_float64_also_in_checkpointed_blocks() -> None:
    model, ids_BS = build_zoo_model("gemma3_text"), ids_of("gemma3_text")
    plain = loss_and_gradients(model, ids_BS)
    # Older versions know only the second name.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    check_equal(plain, loss_and_gradients(model, ids_BS))
    # The mode ends with a forward, and with one that fails.
    assert torch.get_default_dtype() is torch.float32
    with pytest.raises(IndexError):
        model(input_ids=torch.full((1, 4), 10_000))
    assert torch.get_default_dtype() is torch.ones(1).float().dtype is torch.float32


def test_unknown_and_refused_types_are_named() -> None:
    with pytest.raises(ModelError, match=r"no model type 'lama'.*llama"):
        build_zoo_config("lama")
    refused = next(model_type for model_type in zoo_types() if zoo_unsupported_reason(model_type))
    with pytest.raises(ModelError, match=refused):
        build_zoo_config(refused)
    # A list by layer is cut so that the kinds of layers come in turn.
    assert build_zoo_config("gemma3_text").layer_types == ["sliding_attention", "full_attention"] * 2
