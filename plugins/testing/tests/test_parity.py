"""fsdp2 and ddp against single, where it goes beyond the conformance suite: 3 ranks, the last bit, state, seeds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from meshwright.optim.config import OptimizerConfig
from meshwright.testing import Case, assert_parity, compare
from meshwright_testing import pool
from meshwright_testing.case import Outcome, build_global_batch, rank_microbatches
from meshwright_testing.models import build_case_model
from meshwright_testing.parity import (
    build_manager,
    find_max_difference,
    run_reference,
    train_case,
    train_part,
    train_steps,
)

HSDP = {"dp_replicate_size": 2}
LAYOUTS: dict[str, tuple[str, int, dict[str, int]]] = {
    **{f"{name}-{ranks}": (name, ranks, {}) for name in ("ddp", "fsdp2") for ranks in (2, 3, 4)},
    "fsdp2-2x2": ("fsdp2", 4, HSDP),
    "single": ("single", 1, {}),
}
ACCUMULATING = Case(microbatches=3, tied=True)


def test_one_process_is_a_loop_of_plain_torch() -> None:
    case = Case(tied=True)
    model = build_case_model(case.model_type, tied=case.tied, seed=0, dtype=torch.float64).train()
    named = dict(model.named_parameters())
    norms = [parameter for name, parameter in named.items() if "norm" in name]
    others = [parameter for name, parameter in named.items() if "norm" not in name]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    outcome = Outcome([], [], [], {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)})
    for step in range(case.steps):
        batch = build_global_batch(case, step)
        logits = model(input_ids=batch["input_ids"]).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        outcome.losses.append(loss.item())
        outcome.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    assert find_max_difference([outcome], run_reference(case)).worst <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "case", "config"),
    [
        *((layout, Case(), {}) for layout in ("ddp-3", "fsdp2-3")),
        ("fsdp2-2x2", Case(num_masked_sequences=3, microbatches=3), {"defer_fsdp_grad_sync": False}),
        ("ddp-4", Case(shares=(3, 4, 5, 6), sequences=18, microbatches=3), {}),
        ("fsdp2-4", Case(norm_type=3.0, max_norm=0.2), {}),
        ("fsdp2-2x2", Case(model_type="gpt2", tied=True), {}),
        *(("fsdp2-2", ACCUMULATING, {"reshard_after_forward": value}) for value in (True, False)),
        *((layout, ACCUMULATING, {"reduce_dtype": "float64"}) for layout in ("fsdp2-2", "ddp-2")),
        ("ddp-2", ACCUMULATING, {"gradient_as_bucket_view": True, "bucket_cap_mb": 1}),
        ("ddp-2", ACCUMULATING, {"find_unused_parameters": True}),
    ],
)
def test_layouts_and_options_are_single_in_float64(layout: str, case: Case, config: dict[str, Any]) -> None:
    strategy, ranks, sizes = LAYOUTS[layout]
    assert_parity(strategy, case, world_size=ranks, sizes=sizes, config=config)


# -- bit for bit: gradients summed in a wider dtype

FLOAT32 = Case(dtype="float32", steps=8)
BFLOAT16 = Case(dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-2))


def _with_sums(layout: str, case: Case, config: dict[str, Any]) -> Any:
    strategy, ranks, sizes = LAYOUTS[layout]
    # The same microbatches of one sequence under every layout, so that only the order of the sums differs.
    whole = replace(case, microbatches=12)
    expected = pool(1).run(train_case, "single", config, {}, whole)[0]
    return find_max_difference(
        pool(ranks).run(train_case, strategy, config, sizes, replace(case, microbatches=12 // ranks)), expected
    )


@pytest.mark.parametrize(
    ("layout", "case", "sums"),
    [
        ("ddp-2", replace(FLOAT32, tied=True), "float64"),
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in (
                ("fsdp2-2x2", replace(FLOAT32, tied=True), "float64"),
                ("fsdp2-4", FLOAT32, "float64"),
                ("ddp-4", BFLOAT16, "float32"),
                ("fsdp2-2x2", BFLOAT16, "float32"),
            )
        ),
    ],
    ids=str,
)
def test_losses_are_those_of_single_to_the_last_bit_with_wide_sums(layout: str, case: Case, sums: str) -> None:
    found = _with_sums(layout, case, {"reduce_dtype": sums})
    if case.tied and layout.startswith("fsdp2") and torch.__version__ >= "2.15":
        # fully_shard then adds up what a weight gets in its two places in float64, and not in float32 as autograd does.
        assert found.worst <= 1e-5, found
        return
    assert (found.loss, found.weight) == (0.0, 0.0), found
    # The norm is a float64 sum of many terms; clipping rounds what it gives to float32.
    assert found.norm <= 1e-12 or case.dtype == "bfloat16", found


# -- state: out of one strategy and into another, in the middle of training


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "tied"),
    [
        ("single", "fsdp2-2x2", True),
        ("fsdp2-4", "ddp-2", True),
        ("ddp-2", "fsdp2-3", False),
        ("fsdp2-2x2", "single", False),
    ],
)
def test_state_moves_between_strategies_with_the_optimizer(first: str, second: str, tied: bool) -> None:
    case = Case(steps=4, tied=tied)
    strategy, ranks, sizes = LAYOUTS[first]
    (_, state), *others = pool(ranks).run(train_part, strategy, {}, sizes, case, range(2))
    assert all(not other["model"] for _, other in others)
    strategy, ranks, sizes = LAYOUTS[second]
    parts = pool(ranks).run(train_part, strategy, {}, sizes, case, range(2, 4), state)
    whole = run_reference(case)
    expected = Outcome(whole.losses[2:], whole.norms[2:], [], whole.weights)
    found = find_max_difference([outcome for outcome, _ in parts], expected)
    assert found.worst <= 1e-9, found


def _loss_from_seeds(strategy: str, case: Case) -> list[float]:
    manager = build_manager(strategy, {}, {}, case, seed=dist.get_rank())
    return train_steps(manager, case, range(case.steps))[0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_copies_built_from_different_seeds_start_from_the_first_rank(strategy: str) -> None:
    for losses in pool(2).run(_loss_from_seeds, strategy, Case()):
        assert losses == pytest.approx(run_reference(Case()).losses, abs=1e-9)


# -- the harness itself


def test_harness_sees_a_wrong_option_a_nan_and_sums_of_another_order() -> None:
    """A different clipping limit is a different training."""
    outcome = run_reference(Case(max_norm=0.5))
    assert find_max_difference(pool(2).run(train_case, "ddp", {}, {}, Case(max_norm=0.4)), outcome).worst > 1e-4
    assert not find_max_difference([replace(outcome, losses=[math.nan] * 3)], outcome).worst <= 1e-9
    assert compare("single", Case(), world_size=1).worst == 0.0
    # What is to the last bit with wide sums is not without.
    assert _with_sums("ddp-2", FLOAT32, {}).worst > 0.0
    case = Case(shares=(1, 2, 4, 5))
    parts = [batch["input_ids"] for rank in range(4) for batch in rank_microbatches(case, 0, rank, 4)]
    assert torch.equal(torch.cat(parts), build_global_batch(case, 0)["input_ids"])
