"""What can go wrong with saving and loading: one clear error on all ranks, and no valid checkpoint is lost."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import catch_error_text, step_directory

from meshwright import Checkpointer, load_checkpoint, save_checkpoint
from meshwright.checkpoint import read_manifest, saving
from meshwright.checkpoint.index import write_tensors
from meshwright.checkpoint.lifecycle import CheckpointWriter
from meshwright.checkpoint.manifest import StoredFile, list_steps
from meshwright.optim.build import build_scheduler
from meshwright.strategy.contract import StrategyManager
from meshwright.testing import Case
from meshwright_run.run_file import OptimizerConfig, ScheduleConfig
from meshwright_testing import pool
from meshwright_testing.parity import build_manager, full_weights, train_steps

CASE = Case(steps=2)


def _manager(case: Case = CASE, strategy: str = "fsdp2", seed: int = 0) -> StrategyManager:
    return build_manager(strategy, {}, {}, case, seed=seed)


# -- it is another model's


def _mismatches(path: str) -> list[str]:
    manager = _manager()
    train_steps(manager, CASE, range(1))
    save_checkpoint(manager, path, step=1)
    found = []
    for case in (Case(tied=True), Case(layers=5), Case(model_type="gpt2"), Case(frozen=("*lm_head*",))):
        manager = _manager(case, seed=1)
        before = full_weights(manager)
        found.append(catch_error_text(lambda manager=manager: load_checkpoint(manager, path)))
        after = full_weights(manager)
        assert all(torch.equal(after[name], before[name]) for name in before)
    # Another optimizer's state is taken as it is, as by torch: SGD without momentum has none.
    sgd = Case(optimizer=OptimizerConfig(name="SGD", lr=0.1))
    found.append(catch_error_text(lambda: load_checkpoint(_manager(sgd), path)))
    scheduler = build_scheduler(ScheduleConfig(), (manager := _manager()).optimizer, 5)
    found.append(catch_error_text(lambda: load_checkpoint(manager, path, scheduler=scheduler)))
    return found


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    for tied, deeper, other, frozen, _, schedule in pool(2).run(_mismatches, str(tmp_path / "x")):
        assert "it holds lm_head.weight, which the model has not" in tied
        assert "it lacks model.layers.3" in deeper
        assert "which the model has not" in other
        assert "lm_head.weight" in frozen
        assert "no learning-rate schedule" in schedule


# -- it cannot be written


def _full_disk(draft: CheckpointWriter, name: str, tensors: Any) -> Any:
    """Fails on the second rank, as on a full disk."""
    if torch.distributed.get_rank() == 1:
        raise OSError(28, "No space left on device")
    return write_tensors(draft, name, tensors)


def _with_full_disk(root: str, asynchronous: bool, on_error: Any) -> tuple[list[str], list[float], list[str]]:
    manager = _manager()
    losses, errors = train_steps(manager, CASE, range(1))[0], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saver = Checkpointer(manager, root, asynchronous=asynchronous, on_error=on_error)
        saver.save(1)
        saver.wait()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(saving, "write_tensors", _full_disk)
            errors += [catch_error_text(lambda: saver.save(2)), catch_error_text(saver.wait)]
        losses += train_steps(manager, CASE, range(1, 2))[0]
        saver.save(3)
        saver.close()
    return errors, losses, [str(each.message) for each in caught if "could not be written" in str(each.message)]


@pytest.mark.parametrize(
    ("on_error", "asynchronous"),
    [
        ("stop", False),
        ("continue", True),
        pytest.param("stop", True, marks=pytest.mark.slow),
        pytest.param("continue", False, marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_stops_the_run_or_not_and_harms_no_checkpoint(
    asynchronous: bool, on_error: str, tmp_path: Path
) -> None:
    expected = pool(2).run(_losses, 2)
    for rank, (errors, losses, reported) in enumerate(
        pool(2).run(_with_full_disk, str(tmp_path), asynchronous, on_error)
    ):
        assert losses == expected[rank]
        if on_error == "stop":
            # While it is written, or by the next call.
            assert "No space left on device" in errors[int(asynchronous)]
            assert not reported
        else:
            assert errors == ["", ""]
            assert len(reported) == (1 if rank == 0 else 0)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001", "step-00000003"}
    assert read_manifest(step_directory(tmp_path, 1)).step == 1


def _losses(steps: int) -> list[float]:
    return train_steps(_manager(), Case(steps=steps), range(steps))[0]


def _refused(root: str) -> tuple[str, str]:
    below_a_file = catch_error_text(lambda: save_checkpoint(_manager(), f"{root}/file/step-1", step=1))
    return below_a_file, catch_error_text(lambda: save_checkpoint(_manager(), f"{root}/x", step=1, extra={"a": {1, 2}}))


def test_what_cannot_be_written_is_reported_on_all_ranks_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for below_a_file, no_json in pool(2).run(_refused, str(tmp_path)):
        assert "cannot be written" in below_a_file
        assert "cannot be written to a checkpoint" in no_json
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# -- which are kept, and that saving does not disturb


def _save_many(root: str, keep_last: int | None, keep_every: int | None) -> list[float]:
    manager = _manager()
    losses = []
    with Checkpointer(manager, root, keep_last=keep_last, keep_every=keep_every) as saver:
        for step in range(6):
            losses += train_steps(manager, Case(steps=6), range(step, step + 1))[0]
            saver.save(step + 1)
    return losses


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [
        (1, 2, [6, 4, 2]),
        pytest.param(None, None, [6, 5, 4, 3, 2, 1], marks=pytest.mark.slow),
    ],
)
def test_retention(keep_last: int | None, keep_every: int | None, kept: list[int], tmp_path: Path) -> None:
    assert pool(2).run(_save_many, str(tmp_path), keep_last, keep_every) == pool(2).run(_losses, 6)
    assert [step for step, _ in list_steps(tmp_path)] == kept
    assert len(list(tmp_path.iterdir())) == len(kept)


def _asynchronous_contents(root: str) -> tuple[bool, bool]:
    manager = _manager()
    train_steps(manager, CASE, range(1))
    expected = full_weights(manager)
    write, has_moved = saving.write_tensors, threading.Event()

    def write_late(draft: CheckpointWriter, name: str, tensors: Sequence[torch.Tensor]) -> StoredFile:
        has_moved.wait(60)
        return write(draft, name, tensors)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(saving, "write_tensors", write_late)
        with Checkpointer(manager, root) as saver:
            saver.save(1)
            train_steps(manager, CASE, range(1, 2))
            has_moved.set()
    moved = not torch.equal(full_weights(manager)["lm_head.weight"], expected["lm_head.weight"])
    load_checkpoint(manager, step_directory(Path(root), 1))
    found = full_weights(manager)
    return moved, all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_asynchronous_checkpoint_is_of_the_step_it_was_asked_for(tmp_path: Path) -> None:
    assert pool(2).run(_asynchronous_contents, str(tmp_path)) == [(True, True)] * 2


def _random_numbers(path: str) -> tuple[list[float], list[float]]:
    manager = _manager()
    torch.manual_seed(7 + manager.mesh.rank)
    save_checkpoint(manager, path, step=0)
    expected = torch.rand(3).tolist()
    torch.manual_seed(99)
    load_checkpoint(manager, path)
    return expected, torch.rand(3).tolist()


def test_random_generators_continue_on_the_same_mesh(tmp_path: Path) -> None:
    results = pool(2).run(_random_numbers, str(tmp_path / "x"))
    assert all(found == expected for expected, found in results)
    assert results[0] != results[1]
