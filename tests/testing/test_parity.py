"""fsdp2 and ddp against single, where it goes beyond the conformance suite: 3 ranks, the last bit, state, seeds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from meshwright.testing import Case, assert_parity, compare, pool
from meshwright.testing.case import Outcome, global_batch, share
from meshwright.testing.models import case_model
from meshwright.testing.parity import (
    build_manager,
    difference,
    full_weights,
    reference,
    train_case,
    train_part,
    train_steps,
)
from meshwright.train.run.run_file import OptimizerConfig

HSDP = {"dp_replicate_size": 2}
LAYOUTS = [
    pytest.param("ddp", 1, {}, id="ddp-1"),
    pytest.param("ddp", 2, {}, id="ddp-2"),
    pytest.param("ddp", 3, {}, id="ddp-3"),
    pytest.param("ddp", 4, {}, id="ddp-4"),
    pytest.param("fsdp2", 1, {}, id="fsdp2-1"),
    pytest.param("fsdp2", 2, {}, id="fsdp2-2"),
    pytest.param("fsdp2", 3, {}, id="fsdp2-3"),
    pytest.param("fsdp2", 4, {}, id="fsdp2-4"),
    pytest.param("fsdp2", 4, HSDP, id="fsdp2-2x2"),
    pytest.param("fsdp2", 4, {"dp_replicate_size": 4}, id="fsdp2-4x1"),
]
WIDE_LAYOUTS = [layout for layout in LAYOUTS if layout.id in ("ddp-4", "fsdp2-4", "fsdp2-2x2")]


def _plainly(case: Case) -> Outcome:
    """The case in a loop of plain torch, which shares nothing with what all others are compared with."""
    model = case_model(case.model_type, tied=case.tied, seed=0, dtype=torch.float64).train()
    named = dict(model.named_parameters())
    norms = [parameter for name, parameter in named.items() if "norm" in name]
    others = [parameter for name, parameter in named.items() if "norm" not in name]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
    outcome = Outcome([], [], [], weights)
    for step in range(case.steps):
        batch = global_batch(case, step)
        logits = model(input_ids=batch["input_ids"]).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        outcome.losses.append(loss.item())
        outcome.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return outcome


def test_one_process_is_a_loop_of_plain_torch() -> None:
    case = Case(tied=True)
    assert difference([_plainly(case)], reference(case)).worst <= 1e-9


@pytest.mark.parametrize(("strategy", "ranks", "sizes"), LAYOUTS)
def test_ragged_masks_with_different_token_counts_per_rank(strategy: str, ranks: int, sizes: dict[str, int]) -> None:
    assert_parity(strategy, Case(), world_size=ranks, sizes=sizes)


@pytest.mark.parametrize(("strategy", "ranks", "sizes"), WIDE_LAYOUTS)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(empty=3, microbatches=3), id="a-rank-without-tokens-accumulating"),
        pytest.param(Case(shares=(3, 4, 5, 6), sequences=18, microbatches=3), id="uneven-microbatches"),
        pytest.param(Case(tied=True, microbatches=3), id="tied-accumulating"),
        pytest.param(Case(norm_type=3.0, max_norm=0.2), id="norm-3"),
        pytest.param(Case(model_type="gpt2", tied=True), id="gpt2"),
    ],
)
def test_options_under_four_ranks(strategy: str, ranks: int, sizes: dict[str, int], case: Case) -> None:
    assert_parity(strategy, case, world_size=ranks, sizes=sizes)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "Adagrad", "RMSprop"])
def test_other_optimizers(optimizer: str) -> None:
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    case = Case(optimizer=OptimizerConfig(name=optimizer, lr=1e-2, weight_decay=0.1, options=options))
    assert_parity("fsdp2", case, world_size=4)


@pytest.mark.parametrize(
    ("strategy", "config"),
    [
        ("fsdp2", {"reshard_after_forward": True}),
        ("fsdp2", {"reshard_after_forward": False}),
        ("fsdp2", {"defer_fsdp_grad_sync": False}),
        ("fsdp2", {"reduce_dtype": "float64"}),
        ("ddp", {"gradient_as_bucket_view": True}),
        ("ddp", {"find_unused_parameters": True}),
        ("ddp", {"bucket_cap_mb": 1}),
        ("ddp", {"reduce_dtype": "float64"}),
        ("ddp", {"reduce_dtype": "float64", "gradient_as_bucket_view": True}),
    ],
)
def test_every_option_accumulating(strategy: str, config: dict[str, Any]) -> None:
    assert_parity(strategy, Case(microbatches=3, tied=True), world_size=4, config=config)


def test_hsdp_reduces_on_every_microbatch_alike() -> None:
    assert_parity("fsdp2", Case(microbatches=3), world_size=4, sizes=HSDP, config={"defer_fsdp_grad_sync": False})


# -- bit for bit: float32 with gradients summed in float64

WIDE = {"reduce_dtype": "float64"}
FLOAT32 = Case(dtype="float32", steps=8)


@pytest.mark.parametrize(("strategy", "ranks", "sizes"), WIDE_LAYOUTS)
@pytest.mark.parametrize("tied", [False, True])
def test_float32_losses_are_those_of_single_to_the_last_bit_with_wide_sums(
    strategy: str, ranks: int, sizes: dict[str, int], tied: bool
) -> None:
    case = Case(**{**vars(FLOAT32), "tied": tied, "microbatches": 3})
    # The same microbatches of one sequence under every layout, so that only the order of the sums differs.
    whole = Case(**{**vars(case), "microbatches": 12})
    expected = pool(1).run(train_case, "single", WIDE, {}, whole)[0]
    found = difference(pool(ranks).run(train_case, strategy, WIDE, sizes, case), expected)
    if tied and strategy == "fsdp2" and torch.__version__ >= "2.15":
        # fully_shard then adds up what a weight gets in its two places in float64, and not in float32 as autograd does.
        assert found.worst <= 1e-5, found
        return
    assert found.loss == 0.0, found
    assert found.weight == 0.0, found
    # The norm is a float64 sum of many terms; clipping rounds what it gives to float32.
    assert found.norm <= 1e-12, found


@pytest.mark.parametrize(("strategy", "ranks", "sizes"), WIDE_LAYOUTS)
def test_bfloat16_with_float32_sums_is_single_to_the_last_bit(strategy: str, ranks: int, sizes: dict[str, int]) -> None:
    case = Case(dtype="bfloat16", microbatches=3, optimizer=OptimizerConfig(lr=1e-2))
    whole = Case(**{**vars(case), "microbatches": 12})
    config = {"reduce_dtype": "float32"}
    expected = pool(1).run(train_case, "single", config, {}, whole)[0]
    found = difference(pool(ranks).run(train_case, strategy, config, sizes, case), expected)
    assert (found.loss, found.weight) == (0.0, 0.0), found


def test_float32_losses_differ_without_wide_sums() -> None:
    """The test above would prove nothing if float32 sums agreed by themselves."""
    case = Case(**{**vars(FLOAT32), "microbatches": 3})
    whole = Case(**{**vars(case), "microbatches": 12})
    expected = pool(1).run(train_case, "single", {}, {}, whole)[0]
    assert difference(pool(4).run(train_case, "ddp", {}, {}, case), expected).worst > 0.0


# -- state: out of one strategy and into another, in the middle of training


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("single", 1, {}), ("fsdp2", 4, HSDP)),
        (("fsdp2", 4, {}), ("ddp", 2, {})),
        (("ddp", 2, {}), ("fsdp2", 3, {})),
        (("fsdp2", 4, HSDP), ("single", 1, {})),
    ],
)
def test_state_moves_between_strategies_with_the_optimizer(
    first: tuple[str, int, dict[str, int]], second: tuple[str, int, dict[str, int]], tied: bool
) -> None:
    case = Case(steps=4, tied=tied)
    (_, state), *others = pool(first[1]).run(train_part, first[0], {}, first[2], case, range(2))
    assert all(not other["model"] for _, other in others)
    parts = pool(second[1]).run(train_part, second[0], {}, second[2], case, range(2, 4), state)
    outcomes = [outcome for outcome, _ in parts]
    whole = reference(case)
    expected = Outcome(whole.losses[2:], whole.norms[2:], [], whole.weights)
    found = difference(outcomes, expected)
    assert found.worst <= 1e-9, found


def _sharded_round_trip(strategy: str, sizes: dict[str, int], case: Case) -> float:
    manager = build_manager(strategy, {}, sizes, case)
    train_steps(manager, case, range(2))
    state = {
        "model": {name: tensor.clone() for name, tensor in manager.state_dict()["model"].items()},
        "optimizer": manager.state_dict()["optimizer"],
    }
    before = full_weights(manager)
    train_steps(manager, case, range(2, 3))
    manager.load_state_dict({**state, "optimizer": manager.state_dict()["optimizer"]})
    after = full_weights(manager)
    return max(float((before[name] - after[name]).abs().max()) for name in before)


@pytest.mark.parametrize(("strategy", "ranks", "sizes"), WIDE_LAYOUTS)
def test_sharded_state_loads_back(strategy: str, ranks: int, sizes: dict[str, int]) -> None:
    assert max(pool(ranks).run(_sharded_round_trip, strategy, sizes, Case(tied=True))) == 0.0


# -- weights at the start


def _loss_from_seeds(strategy: str, case: Case) -> list[float]:
    manager = build_manager(strategy, {}, {}, case, seed=dist.get_rank())
    return train_steps(manager, case, range(case.steps))[0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_copies_built_from_different_seeds_start_from_the_first_rank(strategy: str) -> None:
    for losses in pool(3).run(_loss_from_seeds, strategy, Case()):
        assert losses == pytest.approx(reference(Case()).losses, abs=1e-9)


# -- the harness itself


def test_harness_sees_a_wrong_option() -> None:
    """A different clipping limit is a different training."""
    outcomes = pool(2).run(train_case, "ddp", {}, {}, Case(max_norm=0.4))
    assert difference(outcomes, reference(Case(max_norm=0.5))).worst > 1e-4


def test_shares_cover_the_global_batch_in_order() -> None:
    case = Case(shares=(1, 2, 4, 5))
    parts = [batch["input_ids"] for rank in range(4) for batch in share(case, 0, rank, 4)]
    assert torch.equal(torch.cat(parts), global_batch(case, 0)["input_ids"])


def test_difference_of_nan_is_no_parity() -> None:
    outcome = reference(Case())
    assert not difference([replace(outcome, losses=[math.nan] * 3)], outcome).worst <= 1e-9
    assert compare("single", Case(), world_size=1).worst == 0.0
