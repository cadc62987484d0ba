"""Bits that change by themselves: found within an interval, with the rank, under every stack; none where none did.

How often replicas are compared in a run is told by `RunConfig.verify_every`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.flips import first_gradient, first_held, flip
from support.commands import write_run
from support.runs import Place, output_of_rank
from test_stopping import STACKS
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from meshwright import Checkpointer, Loop, StepResult, TrainingError, fit
from meshwright.checkpoint.manifest import steps_in
from meshwright.checkpoint.values import flat
from meshwright.strategy.contract import StrategyManager
from meshwright.strategy.hooks import hookimpl
from meshwright.strategy.registry import get_registry
from meshwright.tensors.fingerprint import fingerprint
from meshwright.testing import Case, pool
from meshwright.testing.case import share
from meshwright.testing.parity import build_with_optimizer, full_weights
from meshwright.train.verifying import judged

CASE = Case(microbatches=2, sequences=16)
STEPS, EVERY, FLIPPED_AFTER, VICTIM = 6, 2, 2, 2


class _Flips:
    """Flips a bit of a rank's state right after a step."""

    def __init__(self, manager: StrategyManager, prefix: str) -> None:
        self._manager, self._prefix = manager, prefix

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        if self._prefix and result.step == FLIPPED_AFTER and result.rank == VICTIM:
            flip(first_held(self._manager, self._prefix))


def _trained(
    stack: str, where: str | None, directory: str, save_every: int = 5
) -> tuple[str, int, list[int], dict[str, Tensor]]:
    strategy, config, sizes = STACKS.get(stack, (stack, {}, {}))
    manager, optimizer = build_with_optimizer(strategy, config, sizes, CASE)
    mesh, done = manager.mesh, []
    told: Any = _Flips(manager, {"parameter": "model.", "optimizer": "optimizer."}.get(where or "", ""))

    def batches(step: int) -> Any:
        return share(CASE, step, mesh.data_rank, mesh.data_size)

    steps = 0

    def after_step(*_: Any) -> None:
        """Wrong arithmetic: what the optimizer of one rank has made is not what those of the others have."""
        nonlocal steps
        steps += 1
        if where == "replica" and steps == FLIPPED_AFTER + 1 and mesh.rank == VICTIM:
            named = flat(manager.sharded_state())
            flip(named["model.model.norm.weight"].pieces[0].tensor)

    optimizer.register_step_post_hook(after_step)
    if where == "gradient" and mesh.rank == VICTIM:
        _flip_gradients(manager, lambda: len(done) == FLIPPED_AFTER)
    loop = Loop(batches, steps=STEPS, seed=1, verify_every=EVERY, callbacks=[lambda result: done.append(result.step)])
    said = ""
    with get_registry().observing(told), Checkpointer(manager, directory, keep_last=None) as checkpointer:
        try:
            fit(manager, replace(loop, checkpointer=checkpointer, save_every=save_every))
        except TrainingError as error:
            said = str(error)
    return said, len(done), sorted(step for step, _ in steps_in(Path(directory))), full_weights(manager)


def _flip_gradients(manager: StrategyManager, is_now: Callable[[], bool]) -> None:
    read = manager.read

    def flipping(*values: Tensor) -> list[float]:
        found = read(*values)
        if is_now():
            gradient = first_gradient(manager)
            assert gradient is not None
            flip(gradient)
        return found

    manager.read = flipping  # type: ignore[method-assign]


@pytest.mark.parametrize("stack", ["fsdp2", *STACKS])
def test_a_flipped_bit_is_found_within_an_interval_and_names_its_rank(stack: str, tmp_path: Path) -> None:
    for where in ("parameter", "optimizer", "gradient"):
        for said, done, saved, _ in pool(4).run(_trained, stack, where, str(tmp_path / where)):
            assert f"rank {VICTIM} on " in said, where
            assert "bits have changed by themselves in " in said
            assert done == FLIPPED_AFTER + EVERY - 1
            assert saved == []


def test_a_replica_that_differs_is_found_by_the_others(tmp_path: Path) -> None:
    for stack in ("ddp", "fsdp2 tp2"):
        for said, _, _, _ in pool(4).run(_trained, stack, "replica", str(tmp_path / stack)):
            assert "other bits of model.model.norm.weight than the other replicas" in said
            assert f"rank {VICTIM} on " in said
            assert "changed by themselves" not in said


@pytest.mark.parametrize("stack", ["fsdp2", "ddp", *STACKS])
def test_a_healthy_run_raises_no_alarm_and_trains_the_same(stack: str, tmp_path: Path) -> None:
    for said, done, saved, _ in pool(4).run(_trained, stack, None, str(tmp_path)):
        assert said == ""
        assert done == STEPS
        assert saved == [5, 6]


def test_no_corrupted_state_is_saved(tmp_path: Path) -> None:
    for said, done, saved, _ in pool(4).run(_trained, "fsdp2", "parameter", str(tmp_path), 1):
        assert f"found after step {FLIPPED_AFTER}" in said
        assert done == FLIPPED_AFTER
        assert saved == [1]


# -- the run file


class _FlipsWhatWasStepped:
    """Flips a bit of what the optimizer of a run steps."""

    def __init__(self) -> None:
        self.stepped: list[Tensor] = []

    def note(self, optimizer: Optimizer, *_: Any) -> None:
        self.stepped = [p for group in optimizer.param_groups for p in group["params"]]

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        if result.step == FLIPPED_AFTER:
            flip(self.stepped[0])


def _flipped(path: str) -> tuple[str, int]:
    """The error of a run of which a parameter changes between two steps, and its exit code."""
    flips = _FlipsWhatWasStepped()
    hook = register_optimizer_step_post_hook(flips.note)
    try:
        with get_registry().observing(flips):
            _, error, code = output_of_rank(path, None)
    finally:
        hook.remove()
    return error, code


@pytest.mark.parametrize(("every", "found_after"), [(3, 3), (5, 5), (4, 4), (None, None)])
def test_verify_every_of_a_run_file_says_after_which_steps_bits_are_looked_at(
    every: int | None, found_after: int | None, tmp_path: Path
) -> None:
    write_run(tmp_path)
    place = Place(tmp_path, tmp_path)
    file = place.file(steps=STEPS, verify_every=every, checkpoint={}, log_every=1)
    error, code = pool(1).run(_flipped, str(file))[0]
    if found_after is None:
        assert (error, code) == ("", 0)
        assert len(place.metrics()) == STEPS
        return
    assert f"silent corruption, found after step {found_after}:" in error
    assert "rank 0 on " in error
    assert code != 0
    # The step that was just done is no longer told.
    assert [line["step"] for line in place.metrics()] == [*range(1, found_after)]


# -- fingerprints, and who is right


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_every_bit_counts(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(2, (7, 5), generator=generator).to(dtype)
    before = int(fingerprint(values))
    assert before == int(fingerprint(values.clone()))
    for index in range(values.numel()):
        for byte in range(values.element_size()):
            for bit in range(8 if dtype is not torch.bool else 1):
                other = values.clone()
                other.view(-1)[index : index + 1].view(torch.uint8)[byte] ^= 1 << bit
                assert int(fingerprint(other)) != before


def test_a_fingerprint_is_of_values_in_their_order_and_of_all_of_them() -> None:
    values = torch.arange(3_000_000, dtype=torch.int32)
    swapped = values.clone()
    swapped[0], swapped[2_999_999] = values[2_999_999], values[0]
    assert int(fingerprint(values)) != int(fingerprint(swapped))
    square = torch.arange(12.0).view(3, 4)
    assert int(fingerprint(square.T)) == int(fingerprint(square.T.contiguous())) != int(fingerprint(square))
    assert int(fingerprint(torch.empty(0))) == 0


def test_the_majority_is_right_and_of_two_neither() -> None:
    assert judged([{1: 5}, {1: 5}, {1: 5}]) == ([], 0)
    assert judged([{1: 5}, {1: 6}, {1: 5}]) == ([1], 1)
    assert judged([{1: 5, 2: 7}, {2: 8}, {1: 5}]) == ([0, 1], 2)
    assert judged([{1: 5}, {2: 6}, {}]) == ([], 0)
    assert judged([{1: 5}, {1: 6}, {1: 5}, {1: 7}]) == ([1, 3], 1)
