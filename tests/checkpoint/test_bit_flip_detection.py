"""Bits that change on their own: found within an interval, with the rank, under every stack; no false alarms.

How often replicas are compared in a run is documented in `RunConfig.verify_every`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.bit_flips import find_first_gradient, find_first_state_tensor, flip_tensor_bit
from support.bit_flip_runs import FLIPPED_AFTER, run_with_bit_flip
from support.checkpoints import catch_error_text
from support.commands import write_run
from support.runs import RunWorkspace
from support.tiers import mark_mostly_slow
from torch import Tensor

from meshwright import Checkpointer, Loop, StepResult, fit
from meshwright.checkpoint.manifest import list_steps
from meshwright.checkpoint.training_state import flatten_state
from meshwright.strategy.contract import StrategyManager
from meshwright.strategy.hooks import hookimpl
from meshwright.strategy.registry import get_registry
from meshwright.tensors.ops import fingerprint
from meshwright.testing import Case
from meshwright.training.loop.verifier import find_outlier_ranks
from meshwright_testing import pool
from meshwright_testing.case import rank_microbatches
from meshwright_testing.parity import build_manager_and_optimizer

CASE = Case(microbatches=2, sequences=16)
STEPS, EVERY = 6, 2
STACKS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "fsdp2": ("fsdp2", {}, {}),
    "ddp bucketed": ("ddp", {"engine": "bucketed", "use_distributed_optimizer": True}, {}),
    "fsdp2 tp2": ("fsdp2", {}, {"tp_size": 2}),
    "fsdp2 cp2": ("fsdp2", {}, {"cp_size": 2}),
    "pp2 fsdp2": ("fsdp2", {}, {"pp_size": 2}),
    "megatron_fsdp": ("megatron_fsdp", {}, {}),
}


class _Flips:
    """Flips a bit of a rank's state right after a step."""

    def __init__(self, manager: StrategyManager, prefix: str, victim: int) -> None:
        self._manager, self._prefix, self._victim = manager, prefix, victim

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        if self._prefix and result.step == FLIPPED_AFTER and result.rank == self._victim:
            flip_tensor_bit(find_first_state_tensor(self._manager, self._prefix))


def _trained(stack: str, where: str | None, directory: str, save_every: int = 5) -> tuple[str, int, list[int]]:
    """Train, and flip a bit on the last rank but one; return the error, and the steps done and saved."""
    strategy, config, sizes = STACKS[stack]
    manager, optimizer = build_manager_and_optimizer(strategy, config, sizes, CASE)
    mesh, done = manager.mesh, []
    victim = _victim(mesh.world.size)
    flips: Any = _Flips(manager, {"parameter": "model.", "optimizer": "optimizer."}.get(where or "", ""), victim)
    steps = 0

    def after_step(*_: Any) -> None:
        """Wrong arithmetic: what one rank's optimizer has computed is not what the others' have."""
        nonlocal steps
        steps += 1
        if where == "replica" and steps == FLIPPED_AFTER + 1 and mesh.rank == victim:
            flip_tensor_bit(flatten_state(manager.sharded_state())["model.model.norm.weight"].chunks[0].tensor)

    optimizer.register_step_post_hook(after_step)
    if where == "gradient" and mesh.rank == victim:
        _flip_gradients(manager, done)
    loop = Loop(
        lambda step: rank_microbatches(CASE, step, mesh.data_rank, mesh.data_size),
        steps=STEPS,
        seed=1,
        verify_every=EVERY,
        callbacks=[lambda result: done.append(result.step)],
    )
    with get_registry().observing(flips), Checkpointer(manager, directory, keep_last=None) as checkpointer:
        error = catch_error_text(lambda: fit(manager, replace(loop, checkpointer=checkpointer, save_every=save_every)))
    return error, len(done), sorted(step for step, _ in list_steps(Path(directory)))


def _victim(size: int) -> int:
    return max(size - 2, 1)


def _flip_gradients(manager: StrategyManager, done: list[int]) -> None:
    read = manager.read_scalars

    def flipping(*values: Tensor) -> list[float]:
        found = read(*values)
        if len(done) == FLIPPED_AFTER:
            gradient = find_first_gradient(manager)
            assert gradient is not None
            flip_tensor_bit(gradient)
        return found

    manager.read_scalars = flipping  # type: ignore[method-assign]


ON_STACKS = mark_mostly_slow([(2, "fsdp2"), *((4, stack) for stack in STACKS)])


@pytest.mark.parametrize(("ranks", "stack"), ON_STACKS)
def test_a_flipped_bit_is_found_within_an_interval_and_names_its_rank(ranks: int, stack: str, tmp_path: Path) -> None:
    for where in ("parameter", "optimizer", "gradient"):
        for said, done, saved in pool(ranks).run(_trained, stack, where, str(tmp_path / where)):
            assert f"rank {_victim(ranks)} on " in said, where
            assert "bits have changed on their own in " in said
            assert done == FLIPPED_AFTER + EVERY - 1
            assert saved == []


@pytest.mark.slow
def test_a_replica_that_differs_is_found_by_the_others(tmp_path: Path) -> None:
    for said, _, _ in pool(4).run(_trained, "fsdp2 tp2", "replica", str(tmp_path)):
        assert "other bits of model.model.norm.weight than the other replicas" in said
        assert "rank 2 on " in said
        assert "changed on their own" not in said


@pytest.mark.parametrize(("ranks", "stack"), ON_STACKS)
def test_a_healthy_run_raises_no_alarm_and_trains_the_same(ranks: int, stack: str, tmp_path: Path) -> None:
    assert pool(ranks).run(_trained, stack, None, str(tmp_path)) == [("", STEPS, [5, 6])] * ranks


def test_no_corrupted_state_is_saved(tmp_path: Path) -> None:
    for said, done, saved in pool(2).run(_trained, "fsdp2", "parameter", str(tmp_path), 1):
        assert f"found after step {FLIPPED_AFTER}" in said
        assert done == FLIPPED_AFTER
        assert saved == [1]


def test_verify_every_of_a_run_file_says_after_which_steps_bits_are_looked_at(tmp_path: Path) -> None:
    write_run(tmp_path)
    place = RunWorkspace(tmp_path, tmp_path)
    file = place.write_run_file(steps=STEPS, verify_every=3, checkpoint={}, log_every=1)
    error, code = pool(1).run(run_with_bit_flip, str(file))[0]
    assert "silent corruption, found after step 3:" in error
    assert "rank 0 on " in error
    assert code != 0
    # The step that was just done is not reported.
    assert [line["step"] for line in place.read_metrics()] == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_every_bit_counts(dtype: torch.dtype) -> None:
    values = torch.randint(2, (7, 5), generator=torch.Generator().manual_seed(0)).to(dtype)
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
    assert find_outlier_ranks([{1: 5}, {1: 5}, {1: 5}]) == ([], 0)
    assert find_outlier_ranks([{1: 5}, {1: 6}, {1: 5}]) == ([1], 1)
    assert find_outlier_ranks([{1: 5, 2: 7}, {2: 8}, {1: 5}]) == ([0, 1], 2)
    assert find_outlier_ranks([{1: 5}, {2: 6}, {}]) == ([], 0)
    assert find_outlier_ranks([{1: 5}, {1: 6}, {1: 5}, {1: 7}]) == ([1, 3], 1)
