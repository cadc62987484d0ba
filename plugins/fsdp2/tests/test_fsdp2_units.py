"""Units by structure: blocks, what blocks share, and the root."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.model.layout import infer_layout
from meshwright.testing import Case
from meshwright_fsdp2.units import find_units
from meshwright_testing import pool
from meshwright_testing.case import Outcome
from meshwright_testing.parity import train_case


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.lent = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


class _Model(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(_Block() for _ in range(count))


def _units(model: nn.Module) -> list[tuple[str, ...]]:
    return [unit.names for unit in find_units(model, infer_layout(model))]


BLOCKS = [(f"blocks.{index}",) for index in range(4)]


def test_parameters_shared_by_blocks_are_units_of_their_own_before_the_blocks() -> None:
    model = _Model()
    for one, two in ((0, 2), (1, 3)):
        for (_, a), (name, _) in zip(
            model.blocks[one].lent.named_parameters(), model.blocks[two].lent.named_parameters(), strict=True
        ):
            module, _, leaf = name.rpartition(".")
            setattr(model.blocks[two].lent.get_submodule(module), leaf, a)
    shared = [("blocks.0.lent", "blocks.2.lent"), ("blocks.1.lent", "blocks.3.lent")]
    assert _units(model) == [*shared, *BLOCKS, ("",)]


def test_a_module_in_two_blocks_is_one_unit_under_both_names() -> None:
    model = _Model()
    model.blocks[3].lent = model.blocks[0].lent
    assert _units(model) == [("blocks.0.lent", "blocks.3.lent"), *BLOCKS, ("",)]


def test_a_block_that_shares_with_the_rest_is_left_to_the_root() -> None:
    model = _Model()
    model.blocks[1].own.weight = nn.Parameter(torch.zeros(8, 4))
    model.embed.weight = model.blocks[1].own.weight
    assert _units(model) == [BLOCKS[0], BLOCKS[2], BLOCKS[3], ("",)]


def _trained(strategy: str, case: Case) -> tuple[Outcome, dict[str, torch.dtype]]:
    outcome = train_case(strategy, {}, {}, case)
    return outcome, {name: weight.dtype for name, weight in outcome.weights.items()}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["hunyuan_v1_moe", "zamba"])
def test_parameters_that_a_half_precision_model_keeps_in_float32_are_units_of_their_own(model_type: str) -> None:
    case = Case(model_type=model_type, tied=None, dtype="bfloat16", steps=2)
    ((expected, dtypes),) = pool(1).run(_trained, "single", case)
    assert set(dtypes.values()) == {torch.bfloat16, torch.float32}
    for found, kept in pool(2).run(_trained, "fsdp2", case):
        assert kept == dtypes
        assert found.losses == pytest.approx(expected.losses, abs=3e-3)
        assert found.norms == pytest.approx(expected.norms, rel=1e-2)
