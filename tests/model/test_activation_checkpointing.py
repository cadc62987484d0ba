"""Blocks that are recomputed or compiled: what is computed again, and that nothing else changes, in any model."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from support.measurements import OperationCounter
from support.tiers import mark_mostly_slow
from torch import Tensor, nn

from meshwright._compat.torch import is_attention, is_collective, is_matmul, is_topk
from meshwright.base.errors import ConfigError, ModelError, StrategyError
from meshwright.model.activation_options import ActivationOptions
from meshwright.model.layout import infer_layout
from meshwright.model.recompute import (
    CheckpointMode,
    _make_selective_contexts,
    check_compiler,
    checkpoint_blocks,
    compile_blocks,
)
from meshwright.step.tokens import sum_token_loss
from meshwright_testing.models import build_case_model, build_tiny_model, case_vocab_size

BLOCKS = 3
LINEARS = 7


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    check_compiler.cache_clear()
    yield
    torch.compiler.reset()
    check_compiler.cache_clear()


def _step(model: nn.Module) -> Tensor:
    ids = torch.randint(0, 131, (2, 16), generator=torch.Generator().manual_seed(1))
    loss = sum_token_loss(model(input_ids=ids, use_cache=False).logits, ids)
    loss.backward()
    return loss.detach()


def _counted(model: nn.Module) -> Counter[str]:
    with OperationCounter() as counting:
        _step(model)
    return counting.counts


@pytest.mark.parametrize(
    ("mode", "products", "attentions"),
    [
        (False, 0, 0),
        # All but the last product of a block, whose result no gradient needs.
        ("full", LINEARS - 1, 1),
        # Of these, every second one is held; and attention.
        ("selective", (LINEARS - 1) // 2, 0),
    ],
)
def test_what_is_computed_again(mode: bool | str, products: int, attentions: int) -> None:
    plain = _counted(build_tiny_model())
    model = build_tiny_model()
    checkpoint_blocks(model, infer_layout(model), mode)
    counts = _counted(model)
    assert plain["aten.mm.default"] == 3 * (BLOCKS * LINEARS + 1)
    assert counts["aten.mm.default"] - plain["aten.mm.default"] == BLOCKS * products
    name = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert plain[name] == BLOCKS
    assert counts[name] - plain[name] == BLOCKS * attentions


@pytest.mark.parametrize("mode", mark_mostly_slow(["full", "selective", ActivationOptions(offload="cpu")]))
@pytest.mark.parametrize(
    "model_type", mark_mostly_slow(["llama", "mixtral", "zamba2", "rembert", "hrm_text", "qwen3_next"])
)
def test_gradients_and_names_are_those_without_and_blocks_take_no_cache(model_type: str, mode: CheckpointMode) -> None:
    def trained(model: nn.Module, **options: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        ids = torch.randint(0, case_vocab_size(model_type), (2, 16), generator=torch.Generator().manual_seed(1))
        sum_token_loss(model(input_ids=ids, **options).logits, ids).backward()
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return found

    plain, model = (build_case_model(model_type, tied=None, seed=0, dtype=torch.float64).train() for _ in range(2))
    checkpoint_blocks(model, infer_layout(model), mode)
    assert list(plain.state_dict()) == list(model.state_dict())
    torch.testing.assert_close(trained(model, use_cache=False), trained(plain, use_cache=False), rtol=1e-12, atol=1e-13)
    # In a loop that says nothing of caches.
    torch.testing.assert_close(trained(model), trained(plain), rtol=0, atol=1e-9)


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
    checkpoint_blocks(model, infer_layout(model), mode)
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
    # Evaluation is not touched.
    model.eval()
    model(torch.ones(2, 8)).sum().backward()
    model.train()
    with torch.no_grad():
        model(torch.ones(2, 8))
    assert model.blocks[1].calls == 2 + 2


@pytest.mark.parametrize(("dropout", "is_held"), [(0.0, True), (0.1, False)])
def test_selective_computes_attention_that_drops_again_so_that_what_is_behind_draws_as_before(
    dropout: float, is_held: bool
) -> None:
    forward, again = _make_selective_contexts()
    query = torch.empty(1, 2, 8, 16, dtype=torch.bfloat16, device="meta")
    computed = []
    for context in (forward, again):
        with OperationCounter() as counting, context:
            torch.ops.aten._scaled_dot_product_flash_attention.default(query, query, query, dropout)
        computed.append(counting.counts["aten._scaled_dot_product_flash_attention.default"])
    assert computed == [1, 0 if is_held else 1]


def test_an_unknown_mode_and_a_model_without_blocks_are_refused() -> None:
    model = build_tiny_model()
    with pytest.raises(ConfigError, match=r"activation_checkpointing='half'.*'selective'"):
        checkpoint_blocks(model, infer_layout(model), "half")
    flat = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ModelError, match="no stack of blocks"):
        checkpoint_blocks(flat, infer_layout(flat), "full")
    with pytest.raises(ModelError, match="no stack of blocks"):
        compile_blocks(flat, infer_layout(flat))
    checkpoint_blocks(flat, infer_layout(flat), False)


def test_canary_operators_have_the_names_by_which_they_are_known() -> None:
    aten, collectives = torch.ops.aten, torch.ops._c10d_functional
    assert all(map(is_matmul, (aten.mm.default, aten.addmm.default, aten._grouped_mm.default)))
    assert not any(map(is_matmul, (aten.bmm.default, aten.mul.Tensor, aten.mm.out)))
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
    assert all(map(is_collective, (collectives.all_reduce.default, collectives.wait_tensor.default)))
    assert not is_collective(aten.mm.default)
    assert is_topk(aten.topk.default)
    assert not is_topk(aten.sort.default)


def test_a_cache_that_holds_tokens_is_refused_where_blocks_are_recomputed() -> None:
    model, ids = build_tiny_model(), torch.arange(8)[None]
    checkpoint_blocks(model, infer_layout(model), True)
    with torch.no_grad():
        cache = model(input_ids=ids).past_key_values
    assert cache.get_seq_length() == 8
    for module in (model, model.model):
        with pytest.raises(ModelError, match=r"DynamicCache that Llama.* got holds tokens already"):
            module(input_ids=ids, past_key_values=cache)


# -- compilation


class _Counting:
    """A backend that counts compilations and runs the graph as it is."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        self.count += 1
        return graph.forward


@pytest.mark.parametrize("mode", mark_mostly_slow([False, "full", "selective"]))
def test_compiled_blocks_give_loss_gradients_and_names_of_those_without(mode: bool | str) -> None:
    plain, model = build_tiny_model(), build_tiny_model()
    layout = infer_layout(model)
    checkpoint_blocks(model, layout, mode)
    compile_blocks(model, layout, backend="aot_eager")
    assert list(plain.state_dict()) == list(model.state_dict())
    torch.testing.assert_close(_step(model), _step(plain), rtol=1e-12, atol=0)
    for (name, expected), (other, found) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-11, atol=1e-12, msg=name)


_ELEMENTWISE = {"aten::add", "aten::mul", "aten::neg", "aten::pow", "aten::rsqrt", "aten::silu", "aten::silu_backward"}


def _elementwise(model: nn.Module) -> int:
    """Number of elementwise operators that a step runs; each is a pass over memory of its own."""
    for _ in range(2):
        _step(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        _step(model)
    return sum(each.name in _ELEMENTWISE for each in profiler.events())


def test_compiled_blocks_run_no_elementwise_operators_of_their_own() -> None:
    model = build_tiny_model()
    blocks = len(model.model.layers)
    outside = build_tiny_model()
    outside.model.layers = nn.ModuleList()
    alone, before = _elementwise(outside), _elementwise(model)
    loss = _step(model)
    compile_blocks(model, infer_layout(model))
    # Fused kernels skip the roundings of the model's own float32 parts.
    torch.testing.assert_close(_step(model), loss, rtol=1e-9, atol=0)
    after = _elementwise(model)
    assert before > alone + 30 * blocks
    assert after <= alone


def test_every_block_is_compiled_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond torch's limit of 8 for all blocks together it would continue uncompiled, with a warning."""

    class Block(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.index = index

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.index

    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Sequential(Block(i)) for i in range(12))})
    ran = []
    counting = _Counting()
    monkeypatch.setattr("meshwright.model.recompute.check_compiler", lambda *_: ran.append(1))
    compile_blocks(model, infer_layout(model), backend=counting)
    x = torch.ones(2, 4)
    for block in model["blocks"]:
        x = block(x)
    assert ran
    assert counting.count == 12


def test_a_compiler_that_does_not_work_is_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no C++ compiler found\nlong trace")

    model = build_tiny_model()
    torch.compiler.reset()
    monkeypatch.setattr("meshwright.model.recompute.compile_function", lambda *_, **__: broken)
    for found, remedy in ((None, r"Install a C\+\+ compiler such as g\+\+,"), ("/usr/bin/g++", "See the error above,")):
        monkeypatch.setattr("shutil.which", lambda _, found=found: found)
        reported = rf"RuntimeError: no C\+\+ compiler found {remedy} or set enable_compile=false"
        with pytest.raises(StrategyError, match=reported):
            compile_blocks(model, infer_layout(model))
    assert "forward" not in vars(model.model.layers[0])
