"""A parameter without elements has no gradient that could be sharded: it is refused alike, before anything is."""

from __future__ import annotations

from typing import Any

import pytest

import meshwright as mw
from meshwright import ModelError
from meshwright_testing import pool
from meshwright_testing.models import build_tiny_model

REPORTED = r"layers.0.mlp.gate_proj.weight is to be trained, but its shape \(0, \d+\) has no elements\. Change the size"


def _config() -> Any:
    config = build_tiny_model(layers=2).config
    config.intermediate_size = 0
    return config


def _refused(strategy: str, sizes: dict[str, int]) -> str:
    with pytest.raises(ModelError, match=REPORTED) as caught:
        mw.from_config(_config(), strategy, device="cpu", **sizes)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize(
    ("strategy", "ranks", "sizes"),
    [
        ("fsdp2", 2, {"tp_size": 2}),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("ddp", 2, {}), ("fsdp2", 2, {"pp_size": 2}))),
    ],
)
def test_a_trained_parameter_without_elements_is_refused_on_all_ranks(strategy, ranks, sizes):
    assert len(set(pool(ranks).run(_refused, strategy, sizes))) == 1
