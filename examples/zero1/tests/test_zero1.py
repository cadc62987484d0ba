"""zero1 against `single`, its state moved to `single` and back, and what each rank holds. Works uninstalled."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from meshwright import OptimizerConfig, StrategyError, get_registry
from meshwright.testing import Case
from meshwright_testing import conformance, pool
from meshwright_testing.case import Outcome
from meshwright_testing.cells import register_plugin_module
from meshwright_testing.parity import (
    build_manager,
    find_max_difference,
    full_weights,
    run_reference,
    train_case,
    train_steps,
)

SOURCE_DIR = Path(__file__).parents[1] / "src"
# Worker ranks get this process's sys.path and import this module to find their tasks, so they see the plugin too.
if str(SOURCE_DIR) not in sys.path:
    sys.path.insert(0, str(SOURCE_DIR))
PLUGIN = None if "zero1" in get_registry().strategies else "meshwright_zero1.plugin"
register_plugin_module(PLUGIN)

TOLERANCE = 1e-9


def _train_zero1(*arguments: Any) -> Outcome:
    """`train_case`, in a module that registers the plugin."""
    return train_case(*arguments)


def _max_difference(case: Case, ranks: int) -> float:
    return find_max_difference(pool(ranks).run(_train_zero1, "zero1", {}, {}, case), run_reference(case)).worst


# -- parity


@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 2, 4))])
def test_ragged_masks_and_two_decay_groups(ranks: int) -> None:
    assert _max_difference(Case(), ranks) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(num_masked_sequences=3, microbatches=3), id="a-rank-without-tokens-accumulating"),
        pytest.param(Case(shares=(1, 2, 4, 5)), id="uneven-shares"),
        pytest.param(Case(tied=True, microbatches=3), id="tied-accumulating"),
        pytest.param(Case(max_norm=None), id="unclipped"),
        pytest.param(Case(norm_type=1.0, max_norm=5.0), id="norm-1"),
        pytest.param(Case(norm_type=math.inf, max_norm=0.05), id="norm-inf"),
        pytest.param(Case(frozen=("*embed_tokens*", "*layers.1.*")), id="frozen-block-and-embedding"),
        pytest.param(Case(frozen=("[!l]*",)), id="fewer-parameters-than-ranks"),
        pytest.param(Case(eval_after=True), id="eval-between-steps"),
        pytest.param(Case(model_type="gpt2", tied=True), id="gpt2"),
    ],
)
def test_options_on_four_ranks(case: Case) -> None:
    assert _max_difference(case, 4) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [("SGD", {"momentum": 0.9}), ("Adagrad", {}), ("Adafactor", {})],
)
def test_other_optimizers(name: str, options: dict[str, Any]) -> None:
    case = Case(optimizer=OptimizerConfig(name=name, lr=1e-2, weight_decay=0.1, options=options))
    assert _max_difference(case, 3) <= TOLERANCE


@pytest.mark.slow
def test_float32_losses_are_those_of_single_to_the_last_bit_with_wide_sums() -> None:
    wide = {"reduce_dtype": "float64"}
    case = Case(dtype="float32", steps=5, tied=True, microbatches=3)
    # The same microbatches of one sequence on one rank, so that only the order of the sums differs.
    whole = Case(**{**vars(case), "microbatches": 12})
    expected = pool(1).run(train_case, "single", wide, {}, whole)[0]
    found = find_max_difference(pool(4).run(_train_zero1, "zero1", wide, {}, case), expected)
    assert (found.loss, found.weight) == (0.0, 0.0), found


def _train_with_schedule(strategy: str, case: Case) -> Outcome:
    manager = build_manager(strategy, {}, {}, case)
    optimizer = manager.build_optimizer(
        lambda named: torch.optim.AdamW([{"params": [p]} for _, p in named], lr=1e-2, weight_decay=0.1)
    )
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=case.steps)
    losses, norms = [], []
    for step in range(case.steps):
        (loss,), (norm,), _ = train_steps(manager, case, range(step, step + 1))
        schedule.step()
        losses.append(loss)
        norms.append(norm)
    return Outcome(losses, norms, [], full_weights(manager))


@pytest.mark.slow
def test_learning_rate_schedule_on_the_returned_optimizer() -> None:
    case = Case(steps=4)
    expected = pool(1).run(_train_with_schedule, "single", case)[0]
    assert find_max_difference(pool(3).run(_train_with_schedule, "zero1", case), expected).worst <= TOLERANCE
    assert expected.losses[1:] != run_reference(case).losses[1:], "the schedule changed nothing"


@pytest.mark.slow
@pytest.mark.parametrize(("route", "config"), [("steps", {}), ("ranks", {"reduce_dtype": "float64"})])
def test_parameters_without_gradient_on_some_or_all_ranks(config: dict[str, Any], route: str) -> None:
    # Decay moves every parameter that is stepped, so stepping one without gradient shows.
    decay = OptimizerConfig(lr=1e-2, weight_decay=0.5)
    case = Case(model_type="routed", route=route, microbatches=2, steps=4, optimizer=decay)
    found = find_max_difference(pool(4).run(_train_zero1, "zero1", config, {}, case), run_reference(case))
    assert found.worst <= TOLERANCE, found


# -- state


def _train_first_half(strategy: str, case: Case) -> dict[str, Any]:
    manager = build_manager(strategy, {}, {}, case)
    train_steps(manager, case, range(2))
    return manager.state_dict(full=True)


def _train_second_half(strategy: str, case: Case, state: dict[str, Any], has_own_state: bool) -> Outcome:
    # Other weights and settings: what is not loaded shows.
    other = replace(case, optimizer=OptimizerConfig(lr=0.3, weight_decay=0.4))
    manager = build_manager(strategy, {}, {}, other, seed=7)
    if has_own_state:
        train_steps(manager, case, range(5, 6))
    manager.load_state_dict(state if manager.mesh.rank == 0 else {"model": {}, "optimizer": {}}, full=True)
    losses, norms, _ = train_steps(manager, case, range(2, 4))
    return Outcome(losses, norms, [], full_weights(manager))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "tied", "practice"),
    [
        (("zero1", 3), ("single", 1), True, False),
        (("single", 1), ("zero1", 4), False, True),
        (("single", 1), ("zero1", 4), True, False),
    ],
)
def test_state_moves_to_single_and_back_with_the_optimizer(
    first: tuple[str, int], second: tuple[str, int], tied: bool, practice: bool
) -> None:
    case = Case(steps=4, tied=tied)
    state, *others = pool(first[1]).run(_train_first_half, first[0], case)
    assert all(not other["model"] and not other["optimizer"] for other in others)
    outcomes = pool(second[1]).run(_train_second_half, second[0], case, state, practice)
    whole = run_reference(case)
    expected = Outcome(whole.losses[2:], whole.norms[2:], [], whole.weights)
    assert find_max_difference(outcomes, expected).worst <= TOLERANCE


@pytest.mark.parametrize("tied", [False, True])
def test_full_state_is_that_of_single(tied: bool) -> None:
    case = Case(tied=tied)
    expected = pool(1).run(_train_first_half, "single", case)[0]
    found = pool(3).run(_train_first_half, "zero1", case)[0]
    assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    assert found["model"].keys() == expected["model"].keys()
    state = expected["optimizer"]["state"]
    assert found["optimizer"]["state"].keys() == state.keys()
    for name, values in state.items():
        for key, value in values.items():
            torch.testing.assert_close(found["optimizer"]["state"][name][key], value, rtol=0, atol=TOLERANCE)


def _save_and_load(directory: Path, case: Case) -> tuple[Outcome, set[str]]:
    manager = build_manager("zero1", {}, {}, case)
    train_steps(manager, case, range(2))
    state = manager.state_dict()
    path = directory / f"{manager.mesh.rank}.pt"
    torch.save(state, path)
    train_steps(manager, case, range(2, 3))
    manager.load_state_dict(torch.load(path))
    losses, norms, _ = train_steps(manager, case, range(2, 4))
    return Outcome(losses, norms, [], full_weights(manager)), set(state["optimizer"]["state"])


@pytest.mark.slow
def test_sharded_state_loads_back_and_holds_each_parameter_once(tmp_path: Path) -> None:
    # Adagrad makes its state for all parameters when it is built.
    case = Case(steps=4, optimizer=OptimizerConfig(name="Adagrad", lr=1e-2, weight_decay=0.1))
    outcomes, owned = zip(*pool(3).run(_save_and_load, tmp_path, case), strict=True)
    whole = run_reference(case)
    expected = Outcome(whole.losses[2:], whole.norms[2:], [], whole.weights)
    assert find_max_difference(list(outcomes), expected).worst <= TOLERANCE
    assert sorted(name for names in owned for name in names) == sorted(whole.weights)


def _train_after_saving(case: Case) -> Outcome:
    manager = build_manager("zero1", {}, {}, case)
    manager.load_state_dict(manager.state_dict(full=True), full=True)
    losses, norms, _ = train_steps(manager, case, range(case.steps))
    return Outcome(losses, norms, [], full_weights(manager))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one rank", "dp_replicate=2"])
def test_a_run_resumes_from_a_checkpoint(layout: str) -> None:
    (cell,) = (each for each in conformance("zero1", plugin=PLUGIN) if (each.layout, each.name) == (layout, "resume"))
    result = cell.run()
    assert result.status == "passed", result


def test_saving_and_loading_before_the_first_step_changes_nothing() -> None:
    assert find_max_difference(pool(2).run(_train_after_saving, Case()), run_reference(Case())).worst <= TOLERANCE


def _load_into_other_groups(state: dict[str, Any]) -> str:
    case = Case()
    manager = build_manager("zero1", {}, {}, case)
    manager.build_optimizer(lambda named: torch.optim.AdamW([p for _, p in named]))
    with pytest.raises(StrategyError) as error:
        manager.load_state_dict(state if manager.mesh.rank == 0 else {"model": {}, "optimizer": {}}, full=True)
    return str(error.value)


def test_other_parameter_groups_are_refused_the_same_on_every_rank() -> None:
    state = pool(1).run(_train_first_half, "single", Case())[0]
    first, *others = pool(3).run(_load_into_other_groups, state)
    assert "meets 2 groups of the optimizer state to load, not 1" in first
    assert others == [first, first]


# -- what a rank holds, and the plugin


def _optimizer_bytes(strategy: str, state: dict[str, Any]) -> int:
    """After a step, after saving and loading whole states, and after another step: what the optimizer itself holds."""
    case = Case()
    manager = build_manager(strategy, {}, {}, case)
    optimizer = manager.build_optimizer(
        lambda named: torch.optim.AdamW(
            [{"params": [p for name, p in named if ("norm" in name) == norm]} for norm in (0, 1)]
        )
    )
    train_steps(manager, case, range(1))
    manager.state_dict(full=True)
    manager.load_state_dict(state, full=True)
    train_steps(manager, case, range(1, 2))
    held = [optimizer.state, optimizer.optim.state] if strategy == "zero1" else [optimizer.state]
    tensors = {id(value): value for states in held for values in states.values() for value in values.values()}
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_each_rank_holds_its_share_of_the_optimizer_state(ranks: int) -> None:
    state = pool(1).run(_train_first_half, "single", Case())[0]
    whole = pool(1).run(_optimizer_bytes, "single", state)[0]
    held = pool(ranks).run(_optimizer_bytes, "zero1", state)
    assert sum(held) == whole
    assert max(held) <= 1.05 * whole / ranks, [each / whole for each in held]


def test_the_plugin_imports_no_torch() -> None:
    code = "import sys, meshwright_zero1.plugin as p; p.register_strategies(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"], check=True)
