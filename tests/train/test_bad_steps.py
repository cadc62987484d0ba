"""Steps that are not made: every stack leaves them out, or goes back, as one process that never saw their batches.

What is bad, and what is done then, is documented in `BadStepConfig`.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import step_directory
from support.commands import run_command, write_run
from support.stacks import STACKS
from torch import Tensor

from meshwright import BadStepConfig, Checkpointer, Loop, TrainingError, fit, load_checkpoint
from meshwright.base.types import Batch
from meshwright.events.run import BadStep
from meshwright.step.handshake import count_tokens
from meshwright.strategy.contract import StrategyManager
from meshwright.strategy.hooks import hookimpl
from meshwright.strategy.registry import get_registry
from meshwright.testing import Case
from meshwright.training.loop.monitors import MIN_GOOD_STEPS, BadStepDetector, compute_deviations_above
from meshwright_testing import pool
from meshwright_testing.case import rank_microbatches
from meshwright_testing.parity import build_manager_and_optimizer, full_weights

CASE = Case(microbatches=2, sequences=16)
POISON = 130
"""A token whose embedding is not a number."""
STEPS = 6
TOLERANCE = 1e-9


class _Reported:
    """An observer of bad steps."""

    def __init__(self) -> None:
        self.bad: list[tuple[int, int | None, int]] = []

    @hookimpl
    def on_bad_step(self, bad_step: BadStep) -> None:
        assert "nan" in bad_step.reason.lower()
        self.bad.append((bad_step.step, bad_step.rollback_step, bad_step.num_bad_steps))


def _built(stack: str) -> StrategyManager:
    """A manager whose model knows one token that makes everything not a number."""
    strategy, config, sizes = STACKS.get(stack, (stack, {}, {}))
    manager, _ = build_manager_and_optimizer(strategy, config, sizes, CASE)
    state = manager.state_dict(full=True)
    if "model.embed_tokens.weight" in state["model"]:
        state["model"]["model.embed_tokens.weight"][POISON] = math.nan
    manager.load_state_dict(state, full=True)
    return manager


def _batches(manager: StrategyManager, poisoned: Sequence[int]) -> Callable[[int], list[Batch]]:
    """By draw, from 0; some of them have the token in one place of one data rank's."""
    mesh = manager.mesh

    def batches(draw: int) -> list[Batch]:
        found = [dict(each) for each in rank_microbatches(CASE, draw, mesh.data_rank, mesh.data_size)]
        for each in found:
            each["input_ids"] = each["input_ids"].clamp(max=POISON - 1)
            each["labels"] = each["labels"].clamp(max=POISON - 1)
        if draw in poisoned and mesh.data_rank == mesh.data_size - 1:
            found[-1]["input_ids"][0, 0] = POISON
        return found

    return batches


def _scheduler(manager: StrategyManager) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(manager.optimizer, lambda step: 1 / (1 + step))


def _by_hand(draws: Sequence[int | None]) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """One process that makes a step of each of some draws; None: no step, but the rate continues."""
    manager = _built("single")
    scheduler, batches = _scheduler(manager), _batches(manager, ())
    losses, norms = [], []
    for draw in draws:
        if draw is not None:
            drawn = batches(draw)
            loss = manager.forward_backward(drawn, num_tokens=count_tokens(drawn, manager.mesh))
            norms.append(float(manager.clip_grad_norm(CASE.max_norm)))
            losses.append(float(loss))
            manager.optimizer_step()
        scheduler.step()
    return losses, norms, full_weights(manager)


def _fitted(stack: str, do: Any, poisoned: Sequence[int], directory: str, stop_at: int | None = None) -> Any:
    """What `fit` makes of it, in one attempt or in two; each step once, as the course has it."""
    manager = _built(stack)
    reported, root, course = _Reported(), Path(directory), {}
    loop = Loop(
        _batches(manager, poisoned),
        steps=STEPS,
        scheduler=_scheduler(manager),
        max_grad_norm=CASE.max_norm,
        seed=3,
        save_every=2,
        on_bad_step=BadStepConfig(action=do, max_bad_steps=3),
        callbacks=[lambda result: result.step == stop_at],
    )
    with get_registry().observing(reported):
        with Checkpointer(manager, root, keep_last=None) as checkpointer:
            results = fit(manager, replace(loop, checkpointer=checkpointer))
        if stop_at is not None:
            manager = _built(stack)
            scheduler = _scheduler(manager)
            manifest = load_checkpoint(manager, step_directory(root, stop_at), scheduler=scheduler)
            loop = replace(loop, batches=_batches(manager, poisoned), scheduler=scheduler, callbacks=[]).resume_from(
                manifest
            )
            with Checkpointer(manager, root, keep_last=None) as checkpointer:
                results += fit(manager, replace(loop, checkpointer=checkpointer))
    for result in results:
        course[result.step] = result
    made = [course[step] for step in sorted(course)]
    return (
        [(each.step, each.loss, each.grad_norm, each.learning_rate, bool(each.skip_reason)) for each in made],
        full_weights(manager),
        reported.bad,
    )


def _compare(found: Any, expected: Any, draws: Sequence[int | None]) -> None:
    steps, weights, _ = found
    losses, norms, whole = expected
    assert [step for step, *_ in steps] == list(range(1, STEPS + 1))
    assert [rate for *_, rate, _ in steps] == pytest.approx([CASE.optimizer.lr / (1 + step) for step in range(STEPS)])
    assert [skipped for *_, skipped in steps] == [draw is None for draw in draws]
    good = [(loss, norm) for _, loss, norm, _, skipped in steps if not skipped]
    assert [loss for loss, _ in good] == pytest.approx(losses, rel=TOLERANCE)
    assert [norm for _, norm in good] == pytest.approx(norms, rel=TOLERANCE)
    for name, value in whole.items():
        torch.testing.assert_close(weights[name], value, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


COURSES: dict[str, tuple[list[int], list[int | None], list[Any]]] = {
    "skip": ([2], [0, 1, None, 3, 4, 5], [(3, None, 1)]),
    # The fourth batch is bad; the newest checkpoint is that of step 2. Then the eighth, which comes sixth: back to 4.
    "rollback": ([3, 7], [0, 1, 4, 5, 8, 9], [(4, 2, 1), (6, 4, 2)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("do", COURSES)
@pytest.mark.parametrize("stack", STACKS)
def test_every_stack_leaves_out_what_is_not_a_number_or_goes_back(stack: str, do: str, tmp_path: Path) -> None:
    poisoned, draws, reported = COURSES[do]
    (expected,) = pool(1).run(_by_hand, draws)
    for found in pool(4).run(_fitted, stack, do, poisoned, str(tmp_path)):
        _compare(found, expected, draws)
        assert found[2] == reported


@pytest.mark.parametrize(
    "stop_at", [pytest.param(None, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow), 5]
)
def test_a_course_continues_as_it_would_have_after_it_was_stopped(stop_at: int | None, tmp_path: Path) -> None:
    for do, poisoned, draws in (("skip", [2, 4], [0, 1, None, 3, None, 5]), ("rollback", [2], [0, 1, 3, 4, 5, 6])):
        (expected,) = pool(1).run(_by_hand, draws)
        directory = str(tmp_path / do)
        for found in pool(2).run(_fitted, "fsdp2", do, poisoned, directory, stop_at):
            _compare(found, expected, draws)
            count = len(poisoned)
            assert found[2][-1][2] == count


def _ends(do: str, poisoned: Sequence[int], directory: str) -> tuple[str, bool]:
    manager = _built("fsdp2")
    before = full_weights(manager)
    config = BadStepConfig(action=do, max_bad_steps=2)  # type: ignore[arg-type]
    loop = Loop(_batches(manager, poisoned), steps=STEPS, on_bad_step=config)
    with Checkpointer(manager, directory) as checkpointer:
        try:
            fit(manager, replace(loop, checkpointer=checkpointer, save_every=3))
        except TrainingError as error:
            after = full_weights(manager)
            same = all(torch.equal(after[name].nan_to_num(), value.nan_to_num()) for name, value in before.items())
            return str(error), same
    return "", False


@pytest.mark.parametrize(
    ("do", "poisoned", "text"),
    [
        ("stop", [0], "step 1: the loss is nan and the gradient norm nan. The parameters were not changed"),
        (
            "skip",
            [0, 1, 2],
            "3 bad steps without a good one that is further, and on_bad_step.max_bad_steps=2",
        ),
        ("rollback", [0], "there is no checkpoint to go back to"),
    ],
)
def test_what_cannot_continue_ends_on_all_ranks_and_has_changed_nothing(
    do: str, poisoned: list[int], text: str, tmp_path: Path
) -> None:
    for said, is_same in pool(2).run(_ends, do, poisoned, str(tmp_path)):
        assert text in said
        assert is_same


# -- an objective that is not finite, and what is far above


# -- judging


def _judged(config: BadStepConfig, values: Sequence[float], state: Any = None) -> tuple[list[bool], BadStepDetector]:
    judge = BadStepDetector(config, state)
    return [judge.check_step(step, value, 1.0) is not None for step, value in enumerate(values, start=1)], judge


def test_what_is_far_follows_from_the_good_steps_before_alone() -> None:
    values = [2 + 0.1 * math.sin(step) for step in range(60)]
    leaps = {25: 9.0, 26: 9.0, 40: math.inf, 41: -50.0}
    for step, value in leaps.items():
        values[step] = value
    config = BadStepConfig(action="skip", max_deviations=8, window=30)
    found, whole = _judged(config, values)
    # What falls is no harm.
    assert [step for step, is_bad in enumerate(found) if is_bad] == [25, 26, 40]
    for cut in (10, 26, 41):
        first, judge = _judged(config, values[:cut])
        rest, judge = _judged(config, values[cut:], json.loads(json.dumps(judge.state_dict()))["bad_steps"])
        assert first + rest == found
        assert judge.state_dict()["bad_steps"]["losses"] == whole.state_dict()["bad_steps"]["losses"]
    assert not any(_judged(BadStepConfig(action="skip"), [1.0] * 30 + [1e9])[0])
    assert not any(_judged(config, [1.0] * (MIN_GOOD_STEPS - 1) + [1e9])[0])
    assert _judged(config, [1.0] * MIN_GOOD_STEPS + [1e9])[0][-1]
    # Values that hardly differ are no reason to find a hair's breadth far.
    assert not any(_judged(config, [1.0] * MIN_GOOD_STEPS + [1.005])[0])


def test_deviations_are_those_of_a_normal_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    known = deque((5 + 2 * torch.randn(20_001, generator=generator, dtype=torch.float64)).tolist())
    far, median = compute_deviations_above(11.0, known)
    assert median == pytest.approx(5, abs=0.05)
    assert far == pytest.approx(3, abs=0.1)


def test_the_limit_counts_bad_steps_since_the_furthest_good_one() -> None:
    assert _judged(BadStepConfig(), [1.0])[1].state_dict() == {}
    judge = BadStepDetector(BadStepConfig(action="skip", max_bad_steps=2))
    for step, loss in ((1, 1.0), (2, math.nan), (3, math.nan), (4, 1.0), (5, math.nan), (6, math.nan)):
        judge.check_step(step, loss, 1.0)
    # A step that was done before is not further.
    judge.check_step(4, 1.0, 1.0)
    with pytest.raises(TrainingError, match=r"There were 3 bad steps"):
        judge.check_step(5, math.nan, 1.0)


# -- the run file


def _lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_says_what_it_leaves_out_and_continues_alike(tmp_path: Path) -> None:
    """Norms of a low rate vary about their median; the same run, stopped in between, judges the same."""
    write_run(tmp_path)
    judged = "on_bad_step={action: rollback, max_deviations: 0.7, window: 20, max_bad_steps: 50}"
    values = ["optimizer.lr=0.0002", "checkpoint={every: 4, keep_last: 3}", "sample=null", judged]
    settings = [part for value in [*values, "schedule={name: constant}"] for part in ("--set", value)]

    def train(directory: Path, steps: int) -> str:
        further = ["--set", f"output_dir={directory}", "--set", f"steps={steps}"]
        result = run_command("train", str(tmp_path / "run.yaml"), *settings, *further)
        assert result.returncode == 0, result.stderr
        return result.stdout

    whole, parted = tmp_path / "whole", tmp_path / "parted"
    output = train(whole, 60)
    events = [json.loads(line) for line in (whole / "events.jsonl").read_text().splitlines()]
    bad = [event for event in events if event["event"] == "bad_step"]
    assert bad, "no step of this run was bad: choose other settings"
    assert f"rolling back to step {bad[0]['rollback_step']}, skipping the batches since then (1 so far)" in output
    lines = _lines(whole)
    assert [line["step"] for line in lines] == list(range(1, 61))
    # It resumes from a checkpoint after the first bad step.
    train(parted, next(step for step in range(4, 60, 4) if step >= bad[0]["rollback_step"] + 4))
    train(parted, 60)
    keys = ("step", "loss", "grad_norm", "learning_rate", "num_tokens")
    found, expected = ([[line[key] for key in keys] for line in _lines(each)] for each in (parted, whole))
    assert found == expected


@pytest.mark.parametrize(("window", "is_far"), [(MIN_GOOD_STEPS, True), (50, False)], ids=["window=20", "window=50"])
def test_what_is_far_is_reported_by_as_many_good_steps_as_the_window_holds(window: int, is_far: bool) -> None:
    """Losses that have halved: what is as before is a leap for whom remembers the lower ones alone."""
    noise = [0.05 * math.sin(step) for step in range(MIN_GOOD_STEPS + 30)]
    losses = [2 + each for each in noise[:30]] + [1 + each for each in noise[30:]]
    found, judge = _judged(BadStepConfig(action="skip", max_deviations=8, window=window), [*losses, 2.0])
    assert found == [False] * len(losses) + [is_far]
    assert len(judge.state_dict()["bad_steps"]["losses"]) == (window if is_far else len(losses))
