"""Compiled blocks: nothing but speed changes, and a compiler that does not work is told before training."""

from __future__ import annotations

import pytest
import torch
from support.tiers import mostly_slow
from torch import nn

from meshwright._compat.torch import compiled
from meshwright.base.errors import ModelError, StrategyError
from meshwright.model.layout import layout_by_structure
from meshwright.model.recompute import check_compiler, checkpoint_blocks, compile_blocks
from meshwright.step.tokens import token_loss_sum
from meshwright_testing.models import tiny_model


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    check_compiler.cache_clear()
    yield
    torch.compiler.reset()
    check_compiler.cache_clear()


def _step(model: nn.Module) -> torch.Tensor:
    ids = torch.randint(0, 131, (2, 16), generator=torch.Generator().manual_seed(1))
    loss = token_loss_sum(model(input_ids=ids, use_cache=False).logits, ids)
    loss.backward()
    return loss.detach()


class _Counting:
    """A backend that counts compilations and runs the graph as it is."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        self.count += 1
        return graph.forward


@pytest.mark.parametrize("mode", mostly_slow([False, "full", "selective"]))
def test_loss_gradients_and_names_are_those_without(mode: bool | str) -> None:
    plain, model = tiny_model(), tiny_model()
    layout = layout_by_structure(model)
    checkpoint_blocks(model, layout, mode)
    compile_blocks(model, layout, backend="aot_eager")
    assert list(plain.state_dict()) == list(model.state_dict())
    torch.testing.assert_close(_step(model), _step(plain), rtol=1e-12, atol=0)
    for (name, expected), (other, found) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.slow
def test_the_default_backend_compiles_and_agrees() -> None:
    plain, model = tiny_model(), tiny_model()
    compile_blocks(model, layout_by_structure(model))
    # Fused kernels skip the roundings of the model's own float32 parts.
    torch.testing.assert_close(_step(model), _step(plain), rtol=1e-9, atol=0)


_ELEMENTWISE = {"aten::add", "aten::mul", "aten::neg", "aten::pow", "aten::rsqrt", "aten::silu", "aten::silu_backward"}


def _elementwise(model: nn.Module) -> int:
    """Number of elementwise operators that a step runs; each is a pass over memory of its own."""
    for _ in range(2):
        _step(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        _step(model)
    return sum(each.name in _ELEMENTWISE for each in profiler.events())


def test_compiled_blocks_run_no_elementwise_operators_of_their_own() -> None:
    model = tiny_model()
    blocks = len(model.model.layers)
    outside = tiny_model()
    outside.model.layers = nn.ModuleList()
    alone, before = _elementwise(outside), _elementwise(model)
    compile_blocks(model, layout_by_structure(model))
    after = _elementwise(model)
    assert before > alone + 30 * blocks
    assert after <= alone


@pytest.mark.slow
def test_every_block_is_compiled_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond torch's limit of 8 for all blocks together it would go on uncompiled, with a warning."""

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
    compile_blocks(model, layout_by_structure(model), backend=counting)
    x = torch.ones(2, 4)
    for block in model["blocks"]:
        x = block(x)
    assert ran
    assert counting.count == 12


def test_a_compiler_that_does_not_work_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no C++ compiler found\nlong trace")

    model = tiny_model()
    torch.compiler.reset()
    monkeypatch.setattr("meshwright.model.recompute.compiled", lambda *_, **__: broken)
    for found, remedy in ((None, r"Install a C\+\+ compiler such as g\+\+,"), ("/usr/bin/g++", "See the error above,")):
        monkeypatch.setattr("shutil.which", lambda _, found=found: found)
        told = rf"RuntimeError: no C\+\+ compiler found {remedy} or set enable_compile=false"
        with pytest.raises(StrategyError, match=told):
            compile_blocks(model, layout_by_structure(model))
    assert "forward" not in vars(model.model.layers[0])


def test_a_model_without_blocks_is_refused() -> None:
    flat = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ModelError, match="no stack of blocks"):
        compile_blocks(flat, layout_by_structure(flat))


def test_canary_compile_takes_a_limit_of_versions() -> None:
    counting = _Counting()

    def scaled(x: torch.Tensor, factor: str) -> torch.Tensor:
        return x * len(factor)

    function = compiled(scaled, backend=counting, versions=20)
    for length in range(15):
        function(torch.ones(2), "x" * length)
    assert counting.count == 15
