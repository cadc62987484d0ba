"""The loop: what it tells observers, when it evaluates, how it continues, and how it stops."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright import (
    DataError,
    Loop,
    StepResult,
    count_tokens,
    fit,
    get_registry,
    hookimpl,
)
from meshwright.optim.build import build_scheduler
from meshwright.strategy.contract import StrategyManager
from meshwright.testing import Case
from meshwright.training.loop.batches import derive_step_seed
from meshwright.training.loop.step import train_step
from meshwright_run.run_file import ScheduleConfig
from meshwright_testing import pool
from meshwright_testing.case import rank_microbatches
from meshwright_testing.parity import build_manager

STEPS = 6


class Recorder:
    def __init__(self) -> None:
        self.seen: list[StepResult] = []

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        self.seen.append(result)


def _loop(manager: StrategyManager, case: Case, **changes: Any) -> Loop:
    mesh = manager.mesh

    def batches(step: int) -> Any:
        return rank_microbatches(case, step, mesh.data_rank, mesh.data_size)

    return Loop(
        **{"steps": STEPS, "batches": batches, "eval_sets": {"held_out": batches(99)}, "eval_every": 4, **changes}
    )


def _scheduler(manager: StrategyManager) -> Any:
    return build_scheduler(ScheduleConfig(name="linear", warmup_steps=2), manager.optimizer, STEPS)


def _fit(strategy: str) -> tuple[list[StepResult], list[StepResult]]:
    case = Case(microbatches=3)
    manager = build_manager(strategy, {}, {}, case)
    registry, recorder = get_registry(), Recorder()
    with registry.observing(recorder):
        results = fit(manager, _loop(manager, case, scheduler=_scheduler(manager)))
    registry.hook.on_step_end(result=results[0])
    return results, recorder.seen


def test_observers_see_every_step_while_they_are_registered() -> None:
    for rank, (results, seen) in enumerate(pool(2).run(_fit, "ddp")):
        assert seen == results
        assert [r.step for r in results] == [1, 2, 3, 4, 5, 6]
        assert {r.rank for r in results} == {rank}
        assert [r.held_out_loss is not None for r in results] == [False, False, False, True, False, True]
        assert [r.learning_rate for r in results] == pytest.approx([0, 5e-3, 1e-2, 7.5e-3, 5e-3, 2.5e-3])


def _seeds() -> list[int]:
    case, found = Case(), []
    manager = build_manager("ddp", {}, {}, case)

    def batches(step: int) -> Any:
        found.append(torch.initial_seed())
        return rank_microbatches(case, step, manager.mesh.data_rank, manager.mesh.data_size)

    fit(manager, _loop(manager, case, scheduler=_scheduler(manager), steps=3, seed=5, batches=batches, eval_sets={}))
    return found


def test_each_step_and_each_data_rank_has_random_numbers_of_its_own() -> None:
    one, other = pool(2).run(_seeds)
    assert len({*one, *other}) == 6


def _evaluated(sizes: dict[str, int]) -> tuple[list[float], bool]:
    """Losses of one batch without dropout and twice with it; and whether training mode has come back."""
    case = Case()
    manager = build_manager("single", {}, sizes, case)
    batches = rank_microbatches(case, 0, manager.mesh.data_rank, manager.mesh.data_size)
    num_tokens = count_tokens(batches, manager.mesh)
    losses = [float(manager.eval_loss(batches, num_tokens=num_tokens))]
    modules = [module for part in manager.model_parts for module in part.modules()]
    for module in modules:
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
        module.train()
    losses += [float(manager.eval_loss(batches, num_tokens=num_tokens)) for _ in range(2)]
    return losses, all(module.training for module in modules)


@pytest.mark.parametrize("sizes", [{}, {"pp_size": 2}], ids=str)
def test_evaluation_draws_no_dropout(sizes: dict[str, int]) -> None:
    for losses, is_training in pool(sizes.get("pp_size", 1)).run(_evaluated, sizes):
        assert len(set(losses)) == 1
        assert is_training


# -- report


def _drawn(*, ahead: bool) -> list[Any]:
    """What happened in which order, and losses that depend on random numbers of the data and of dropout."""
    case, reported = Case(), []
    manager = build_manager("ddp", {}, {}, case)
    manager.model_parts[0].model.norm.register_forward_hook(lambda *a: torch.nn.functional.dropout(a[-1], 0.3))

    def batches(step: int) -> Any:
        reported.append(f"draw {step}")
        if step == 3:
            raise KeyError("no more data")
        batch = rank_microbatches(case, step, manager.mesh.data_rank, manager.mesh.data_size)[0]
        return [{**batch, "labels": torch.where(torch.rand(batch["labels"].shape) < 0.5, batch["labels"], -100)}]

    class Reported:
        @hookimpl
        def on_step_end(self, result: StepResult) -> None:
            reported.append(result.loss)

    loop = _loop(manager, case, seed=5, batches=batches, eval_sets={})
    registry, loop = get_registry(), replace(loop, scheduler=_scheduler(manager))

    def alone() -> None:
        for step in range(STEPS):
            torch.manual_seed(derive_step_seed(5, step, manager.mesh.data_rank))
            drawn = batches(step)
            plain = replace(loop, seed=None, batches=lambda _, drawn=drawn: drawn)
            registry.hook.on_step_end(result=train_step(manager, plain, step))

    run = functools.partial(fit, manager, loop) if ahead else alone
    with registry.observing(Reported()), pytest.raises(KeyError, match="no more data"):
        run()
    return reported


def _both_ways() -> Any:
    return _drawn(ahead=True), _drawn(ahead=False)


def test_a_step_is_started_before_the_one_before_it_is_reported_and_is_the_step_that_it_would_be() -> None:
    for ahead, plain in pool(2).run(_both_ways):
        losses = [each for each in plain if isinstance(each, float)]
        # What fails in drawing the fourth batch leaves the third step whole.
        assert plain == ["draw 0", losses[0], "draw 1", losses[1], "draw 2", losses[2], "draw 3"]
        assert ahead == ["draw 0", "draw 1", losses[0], "draw 2", losses[1], "draw 3", losses[2]]


# -- the next step begins while this one computes


def _undrawn(kind: str, culprits: tuple[int, ...]) -> tuple[str, int]:
    """The error of a rank where some ranks have nothing sound for the third step; and what was trained until
    then."""
    case = Case()
    manager = build_manager("fsdp2", {}, {}, case)
    registry, recorder = get_registry(), Recorder()

    def batches(step: int) -> Any:
        good = rank_microbatches(case, step, manager.mesh.data_rank, manager.mesh.data_size)
        if step != 2 or manager.mesh.rank not in culprits:
            return good
        if kind == "known":
            raise DataError("the tokens of this step are gone")
        if kind == "unknown":
            raise KeyError("row 7")
        return [{**good[0], "labels": good[0]["labels"].int()}]

    try:
        with registry.observing(recorder):
            fit(manager, _loop(manager, case, scheduler=_scheduler(manager), batches=batches))
    except Exception as error:
        # Ranks can continue together.
        mine = rank_microbatches(case, 0, manager.mesh.data_rank, manager.mesh.data_size)
        manager.eval_loss(mine, num_tokens=count_tokens(mine, manager.mesh))
        return f"{type(error).__name__}: {error}", len(recorder.seen)
    return "nothing", len(recorder.seen)


@pytest.mark.parametrize("culprits", [(1,), pytest.param((0, 1), marks=pytest.mark.slow)])
def test_what_is_wrong_with_a_step_that_was_started_ahead_is_reported_to_all_ranks(culprits: tuple[int, ...]) -> None:
    ranks = 2
    for kind, error in (("known", "DataError: the tokens of"), ("malformed", "BatchError: microbatch 0 of 1: labels")):
        reported = pool(ranks).run(_undrawn, kind, culprits)
        assert len(set(reported)) == 1
        assert reported[0][0].startswith(error)
        assert reported[0][1] == 2
    for rank, (text, steps) in enumerate(pool(ranks).run(_undrawn, "unknown", culprits)):
        cause = "KeyError: 'row 7'"
        about = "the microbatches of step 3 cannot be drawn"
        assert text.startswith(cause if rank in culprits else f"BatchError: {about}: {cause}")
        assert steps == 2
