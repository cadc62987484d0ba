"""Freezing and unfreezing between steps: as in one plain process under every strategy, or refused in the same words."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from support.tiers import mark_mostly_slow
from torch import Tensor, nn

from meshwright import OptimizerConfig, StrategyError, StrategyManager
from meshwright.testing import Case
from meshwright_testing import pool
from meshwright_testing.case import rank_microbatches
from meshwright_testing.models import build_case_model
from meshwright_testing.parity import build_manager

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:FutureWarning")

CASE = Case(layers=4, sequences=8, ragged=False, optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.0))
TRAINS = (
    ["*layers.1.*", "*layers.2.*", "*norm*"],
    ["*"],
    ["*layers.[12].*", "*layers.3.mlp*", "model.norm*", "*lm_head*"],
    ["*embed*", "*lm_head*"],
    ["*"],
)
"""What trains in each step."""
ZERO1 = {"engine": "bucketed", "use_distributed_optimizer": True, "overlap_grad_reduce": True}
LAYOUTS: Mapping[str, tuple[int, str, Mapping[str, Any], Mapping[str, int]]] = {
    "single": (1, "single", {}, {}),
    "ddp": (2, "ddp", {}, {}),
    "ddp-static": (2, "ddp", {"engine": "torch", "static_graph": True}, {}),
    "ddp-zero1": (2, "ddp", ZERO1, {}),
    "fsdp2": (2, "fsdp2", {}, {}),
    "fsdp2-each": (2, "fsdp2", {"defer_fsdp_grad_sync": False, "activation_checkpointing": True}, {}),
    "fsdp2-policy": (2, "fsdp2", {"mp_policy": {"param_dtype": "float64", "reduce_dtype": "float64"}}, {}),
    "fsdp2-tp": (2, "fsdp2", {}, {"tp_size": 2}),
    "fsdp2-cp": (2, "fsdp2", {}, {"cp_size": 2}),
    **{f"megatron-zero{zero}": (2, "megatron_fsdp", {"zero_dp_strategy": zero}, {}) for zero in (1, 3)},
    "megatron-tp": (2, "megatron_fsdp", {}, {"tp_size": 2}),
    "pp-single": (2, "single", {}, {"pp_size": 2}),
    "pp-zero1": (2, "ddp", ZERO1, {"pp_size": 2}),
    "pp-fsdp2": (4, "fsdp2", {}, {"pp_size": 2, "dp_size": 2}),
}


def _set_flags(part: nn.Module, patterns: list[str], *, tied: bool) -> None:
    for name, parameter in part.named_parameters():
        # A stage may have a tied weight under the name of the head.
        first = "model.embed_tokens.weight" if tied and "lm_head" in name else name
        parameter.requires_grad_(any(fnmatchcase(first, pattern) for pattern in patterns))


def _plain(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Norms and weights of a loop of torch in one process."""
    model = build_case_model(case.model_type, tied=case.tied, seed=0, dtype=torch.float64, layers=case.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    norms = []
    for step, patterns in enumerate(TRAINS):
        _set_flags(model, patterns, tied=bool(case.tied))
        (batch,) = rank_microbatches(case, step, 0, 1)
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten()).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: value.detach() for name, value in model.named_parameters()}


def _step(manager: StrategyManager, case: Case, step: int) -> float:
    batches = rank_microbatches(case, step, manager.mesh.data_rank, manager.mesh.data_size)
    # Which ends with what engines hold under the flags of now.
    manager.eval_loss(batches, num_tokens=manager.begin_step_sync(batches))
    manager.forward_backward(batches, num_tokens=manager.begin_step_sync(batches))
    norm = float(manager.clip_grad_norm(0.5))
    manager.optimizer_step()
    return norm


def _trained(layout: str, case: Case) -> tuple[list[float], dict[str, Tensor]]:
    _, strategy, config, sizes = LAYOUTS[layout]
    manager = build_manager(strategy, config, sizes, case)
    norms = []
    for step, patterns in enumerate(TRAINS):
        for part in manager.model_parts:
            _set_flags(part, patterns, tied=bool(case.tied))
        norms.append(_step(manager, case, step))
    return norms, {name: value.clone() for name, value in manager.iter_parameters(bucket_bytes=1 << 20)}


@pytest.mark.parametrize("tied", mark_mostly_slow([False, True], True))
@pytest.mark.parametrize("layout", mark_mostly_slow(LAYOUTS, "fsdp2"))
def test_what_is_frozen_and_unfrozen_between_steps_trains_as_in_one_process(layout: str, tied: bool) -> None:
    case = Case(**{**vars(CASE), "tied": tied})
    norms, weights = _plain(case)
    for found_norms, found in pool(LAYOUTS[layout][0]).run(_trained, layout, case):
        assert found_norms == pytest.approx(norms, abs=1e-9)
        assert max(float((found[name] - weights[name]).abs().max()) for name in weights) <= 1e-9


def _refused(layout: str, pattern: str, ranks: tuple[int, ...], tied: bool) -> str:
    """What a step raises for which parameters change their flags on some ranks."""
    _, strategy, config, sizes = LAYOUTS[layout]
    manager = build_manager(strategy, config, sizes, Case(layers=4, tied=tied, frozen=("*layers.0.mlp*",)))
    _step(manager, CASE, 0)
    for part in manager.model_parts if manager.mesh.rank in ranks else ():
        for name, parameter in part.named_parameters():
            if fnmatchcase(name, pattern):
                parameter.requires_grad_(not parameter.requires_grad)
    with pytest.raises(StrategyError) as caught:
        _step(manager, CASE, 1)
    return str(caught.value)


EACH = ("ddp", "ddp-zero1", "fsdp2-policy", "megatron-zero3", "pp-fsdp2")


@pytest.mark.parametrize("layout", mark_mostly_slow(EACH, "ddp"))
def test_what_was_frozen_when_the_model_was_sharded_is_not_unfrozen(layout: str) -> None:
    texts = pool(LAYOUTS[layout][0]).run(_refused, layout, "*layers.0.mlp.up_proj*", (0, 1, 2, 3), False)
    assert len(set(texts)) == 1
    assert texts[0].startswith("model.layers.0.mlp.up_proj.weight requires a gradient, but was frozen when")


@pytest.mark.parametrize(
    ("layout", "pattern", "tied"),
    mark_mostly_slow(
        [
            *((layout, "*layers.1.*", False) for layout in ("ddp", "fsdp2-tp", "megatron-zero3", "pp-fsdp2")),
            ("pp-fsdp2", "*embed*", True),
        ]
    ),
)
def test_ranks_that_freeze_other_parameters_are_refused_on_all(layout: str, pattern: str, tied: bool) -> None:
    texts = pool(LAYOUTS[layout][0]).run(_refused, layout, pattern, (0,), tied)
    assert len(set(texts)) == 1
    assert "ranks disagree on which parameters are frozen" in texts[0]
