"""Activation checkpointing: what is computed again, that nothing else changes, and that it fits any architecture."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from support.measures import Counting
from support.tiers import mostly_slow
from torch import nn

from meshwright._compat.torch import is_attention, is_choice, is_communication, is_matrix_product
from meshwright.base.errors import ConfigError, ModelError
from meshwright.model.activation_options import ActivationOptions
from meshwright.model.layout import layout_by_structure
from meshwright.model.recompute import Mode, _selective_contexts, checkpoint_blocks
from meshwright.step.tokens import token_loss_sum
from meshwright.testing import Case
from meshwright_testing import pool
from meshwright_testing.models import case_model, case_vocab, tiny_model
from meshwright_testing.parity import build_manager, train_steps

BLOCKS = 3
LINEARS = 7


def _step(model: nn.Module, vocab: int = 131) -> torch.Tensor:
    ids = torch.randint(0, vocab, (2, 16), generator=torch.Generator().manual_seed(1))
    loss = token_loss_sum(model(input_ids=ids, use_cache=False).logits, ids)
    loss.backward()
    return loss.detach()


def _counted(model: nn.Module) -> Counter[str]:
    with Counting() as counting:
        _step(model)
    return counting.counts


@pytest.mark.parametrize(
    ("mode", "products", "attentions"),
    [
        (False, 0, 0),
        # All but the last product of a block, whose result no gradient needs.
        (True, LINEARS - 1, 1),
        ("full", LINEARS - 1, 1),
        # Of these, every second one is held; and attention.
        ("selective", (LINEARS - 1) // 2, 0),
    ],
)
def test_what_is_computed_again(mode: bool | str, products: int, attentions: int) -> None:
    plain = _counted(tiny_model())
    model = tiny_model()
    checkpoint_blocks(model, layout_by_structure(model), mode)
    counts = _counted(model)
    assert plain["aten.mm.default"] == 3 * (BLOCKS * LINEARS + 1)
    assert counts["aten.mm.default"] - plain["aten.mm.default"] == BLOCKS * products
    name = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert plain[name] == BLOCKS
    assert counts[name] - plain[name] == BLOCKS * attentions


@pytest.mark.parametrize("mode", mostly_slow(["full", "selective"]))
@pytest.mark.parametrize(
    "model_type", mostly_slow(["llama", "gpt2", "gemma2", "mixtral", "zamba2", "falcon", "opt", "gpt_neox"])
)
def test_loss_gradients_and_names_are_those_without(model_type: str, mode: str) -> None:
    plain, model = (case_model(model_type, tied=None, seed=0, dtype=torch.float64) for _ in range(2))
    checkpoint_blocks(model, layout_by_structure(model), mode)
    assert list(plain.state_dict()) == list(model.state_dict())
    vocab = case_vocab(model_type)
    assert torch.equal(_step(plain.train(), vocab), _step(model.train(), vocab))
    for (name, expected), (other, found) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert name == other
        assert (expected.grad is None) == (found.grad is None), name
        if expected.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-13, msg=name)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> tuple[torch.Tensor, dict[str, float]]:
        self.calls += 1
        return x + self.dropout(self.linear(x).tanh()) * scale, {"scale": scale}


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = _Block()
        self.blocks = nn.ModuleList([block, _Block(), block])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x, info = block(x, scale=0.5)
            assert info == {"scale": 0.5}
        return x


def _run(mode: str | bool) -> tuple[_Model, torch.Tensor]:
    torch.manual_seed(0)
    model = _Model()
    checkpoint_blocks(model, layout_by_structure(model), mode)
    x = torch.ones(2, 8, requires_grad=True)
    model(x).sum().backward()
    return model, x.grad


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_dropout_is_drawn_again_alike_and_a_block_in_two_places_is_wrapped_once(mode: str) -> None:
    plain, expected = _run(False)
    model, gradient = _run(mode)
    assert torch.equal(gradient, expected)
    assert [block.calls for block in plain.blocks] == [2, 1, 2]
    assert [block.calls for block in model.blocks] == [4, 2, 4]


@pytest.mark.parametrize(("dropout", "is_held"), [(0.0, True), (0.1, False)])
def test_selective_computes_attention_that_drops_again_so_that_what_is_behind_draws_as_before(
    dropout: float, is_held: bool
) -> None:
    forward, again = _selective_contexts()
    query = torch.empty(1, 2, 8, 16, dtype=torch.bfloat16, device="meta")
    computed = []
    for context in (forward, again):
        with Counting() as counting, context:
            torch.ops.aten._scaled_dot_product_flash_attention.default(query, query, query, dropout)
        computed.append(counting.counts["aten._scaled_dot_product_flash_attention.default"])
    assert computed == [1, 0 if is_held else 1]


def test_evaluation_is_not_touched() -> None:
    model, _ = _run("full")
    calls = model.blocks[1].calls
    model.eval()
    model(torch.ones(2, 8)).sum().backward()
    model.train()
    with torch.no_grad():
        model(torch.ones(2, 8))
    assert model.blocks[1].calls == calls + 2


def test_an_unknown_mode_and_a_model_without_blocks_are_refused() -> None:
    model = tiny_model()
    with pytest.raises(ConfigError, match=r"activation_checkpointing='half'.*'selective'"):
        checkpoint_blocks(model, layout_by_structure(model), "half")
    flat = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ModelError, match="no stack of blocks"):
        checkpoint_blocks(flat, layout_by_structure(flat), "full")
    checkpoint_blocks(flat, layout_by_structure(flat), False)


def test_canary_operators_have_the_names_by_which_they_are_known() -> None:
    aten, collectives = torch.ops.aten, torch.ops._c10d_functional
    assert all(map(is_matrix_product, (aten.mm.default, aten.addmm.default, aten._grouped_mm.default)))
    assert not any(map(is_matrix_product, (aten.bmm.default, aten.mul.Tensor, aten.mm.out)))
    attentions = (
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_fused_attention_overrideable.default,
        aten.scaled_dot_product_attention.default,
        torch.ops.higher_order.flex_attention,
    )
    assert all(map(is_attention, attentions))
    assert not is_attention(aten.softmax.int)
    assert all(map(is_communication, (collectives.all_reduce.default, collectives.wait_tensor.default)))
    assert not is_communication(aten.mm.default)
    assert is_choice(aten.topk.default)
    assert not is_choice(aten.sort.default)


def _on_single(mode: object) -> tuple[int, list[float]]:
    """How often the last block's MLP begins in a step of one microbatch, and the loss and norm."""
    manager = build_manager("single", {"activation_checkpointing": mode}, {}, Case())
    calls: list[int] = []
    manager.model_parts[0].get_submodule("model.layers.2.mlp").register_forward_pre_hook(lambda *_: calls.append(1))
    losses, norms, _ = train_steps(manager, Case(), range(1))
    return len(calls), [*losses, *norms]


@pytest.mark.slow
def test_single_recomputes_as_other_strategies_do() -> None:
    (plain,) = pool(1).run(_on_single, False)
    assert plain[0] == 1
    for mode, calls in ((True, 2), ("full", 2), ("selective", 2), ({"offload": "cpu"}, 1)):
        assert pool(1).run(_on_single, mode) == [(calls, plain[1])]


@pytest.mark.parametrize("mode", mostly_slow(["full", "selective", ActivationOptions(offload="cpu")]))
@pytest.mark.parametrize(
    "model_type", mostly_slow(["llama", "gpt2", "rembert", "recurrent_gemma", "hrm_text", "qwen3_next"])
)
def test_blocks_take_no_cache_in_a_loop_that_says_nothing_of_caches(model_type: str, mode: Mode) -> None:
    def trained(*, recomputes: bool) -> dict[str, torch.Tensor | None]:
        model = case_model(model_type, tied=None, seed=0, dtype=torch.float64).train()
        if recomputes:
            checkpoint_blocks(model, layout_by_structure(model), mode)
        torch.manual_seed(0)
        ids = torch.randint(0, case_vocab(model_type), (2, 16), generator=torch.Generator().manual_seed(1))
        model(input_ids=ids).logits.square().sum().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    torch.testing.assert_close(trained(recomputes=True), trained(recomputes=False), rtol=0, atol=1e-9)


def test_a_cache_that_holds_tokens_is_refused_where_blocks_are_recomputed() -> None:
    model, ids = tiny_model(), torch.arange(8)[None]
    checkpoint_blocks(model, layout_by_structure(model), True)
    with torch.no_grad():
        cache = model(input_ids=ids).past_key_values
    assert cache.get_seq_length() == 8
    for module in (model, model.model):
        with pytest.raises(ModelError, match=r"DynamicCache that Llama.* got holds tokens already"):
            module(input_ids=ids, past_key_values=cache)
