"""What can go wrong with checkpoints: each is one clear error on all ranks, and nothing that was whole is lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from meshwright import (
    Checkpointer,
    CheckpointError,
    Mesh,
    MeshSizes,
    StrategyError,
    load_checkpoint,
    open_world,
    optimizer_factory,
    resolve,
    save_checkpoint,
)
from meshwright.checkpoint import newest_checkpoint, read_manifest, saving
from meshwright.checkpoint.drafts import Draft
from meshwright.checkpoint.index import INDEX
from meshwright.checkpoint.manifest import MANIFEST, StoredFile, step_directory, steps_in
from meshwright.checkpoint.payload import write_tensors
from meshwright.cli import main as cli
from meshwright.strategy.contract import StrategyManager
from meshwright.testing import Case, pool
from meshwright.testing.parity import build_manager, full_weights, train_steps
from meshwright.train.run_file import OptimizerConfig, ScheduleConfig
from meshwright.train.schedules import build_scheduler

CASE = Case(steps=2)


def _manager(case: Case = CASE, strategy: str = "fsdp2", seed: int = 0) -> StrategyManager:
    return build_manager(strategy, {}, {}, case, seed=seed)


def _error(work: Callable[[], object]) -> str:
    try:
        work()
    except (CheckpointError, StrategyError) as error:
        return str(error)
    return ""


# -- what was saved is damaged


def _saved(root: str) -> None:
    manager = _manager()
    train_steps(manager, CASE, range(1))
    for step in (1, 2):
        save_checkpoint(manager, step_directory(Path(root), step), step=step)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole")
    pool(2).run(_saved, str(root))
    return root


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file is cut off": (lambda at: _truncate(at / "tensors-00001.bin"), "tensors-00001.bin has .* bytes instead of"),
    "a file is gone": (lambda at: (at / "tensors-00000.bin").unlink(), "tensors-00000.bin is missing"),
    "a bit is flipped": (lambda at: _flip(at / "tensors-00001.bin"), "the contents of tensors-00001.bin have changed"),
    "the index is altered": (lambda at: _flip(at / INDEX), f"the contents of {INDEX} have changed"),
    "the manifest is cut off": (lambda at: _truncate(at / MANIFEST), f"{MANIFEST} was altered or cut off"),
    "the manifest is altered": (
        lambda at: _replace(at / MANIFEST, '"step": 2', '"step": 3'),
        f"{MANIFEST} was altered",
    ),
    "the manifest is written in another way": (
        lambda at: _replace(at / MANIFEST, '"step": 2', '"step":  2'),
        f"{MANIFEST} was altered",
    ),
    "a setting is altered": (
        lambda at: _replace(at / "optimizer-00000.json", '"lr": 0.01', '"lr": 0.02'),
        "the contents of optimizer-00000.json have changed",
    ),
    "the manifest is gone": (lambda at: (at / MANIFEST).unlink(), "was never completed"),
}


def _load_and_find(root: str) -> tuple[str, bool, str, list[str]]:
    manager = _manager(seed=3)
    before = full_weights(manager)
    error = _error(lambda: load_checkpoint(manager, step_directory(Path(root), 2)))
    after = full_weights(manager)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = newest_checkpoint(root, manager.mesh.world)
    same = all(torch.equal(after[name], before[name]) for name in before)
    return error, same, str(found), [str(each.message) for each in told]


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_whole_is_named_and_an_older_one_is_taken(damage: str, checkpoints: Path, tmp_path: Path) -> None:
    root = tmp_path / "damaged"
    shutil.copytree(checkpoints, root)
    change, expected = DAMAGE[damage]
    change(step_directory(root, 2))
    results = pool(2).run(_load_and_find, str(root))
    for error, same, found, _ in results:
        assert re.search(expected, error), error
        assert "Others beside it: step-00000001" in error
        assert same, "nothing may be changed by a checkpoint that is refused"
        assert found == str(step_directory(root, 1))
    told = [text for _, _, _, texts in results for text in texts if "An older one is tried" in text]
    assert len(told) == 1
    shown = CliRunner().invoke(cli.app, ["checkpoint", "show", str(root)])
    assert shown.exit_code == 1
    assert "torn" in shown.output
    assert "whole" in shown.output


def test_show_tells_what_is_in_whole_ones(checkpoints: Path) -> None:
    for directory in (checkpoints, step_directory(checkpoints, 2)):
        shown = CliRunner().invoke(cli.app, ["checkpoint", "show", str(directory)])
        assert shown.exit_code == 0, shown.output
        for text in ("fsdp2", "dp_shard=2", "float64", "whole", "2"):
            assert text in shown.output
    missing = CliRunner().invoke(cli.app, ["checkpoint", "show", str(checkpoints / "none")])
    assert missing.exit_code == 2
    assert "is no directory" in missing.stderr


# -- it is another model's


def _mismatches(root: str) -> list[str]:
    path = step_directory(Path(root), 1)
    sgd = Case(optimizer=OptimizerConfig(name="SGD", lr=0.1))
    frozen = Case(frozen=("*lm_head*",))
    tied = Case(tied=True)
    deeper = Case(layers=5)
    other = Case(model_type="gpt2")
    found = []
    for case in (tied, deeper, other, frozen):
        manager = _manager(case, seed=1)
        before = full_weights(manager)
        found.append(_error(lambda manager=manager: load_checkpoint(manager, path)))
        after = full_weights(manager)
        assert all(torch.equal(after[name], before[name]) for name in before)
    # Another optimizer's state is taken as it is, as by torch: SGD without momentum has none.
    found.append(_error(lambda: load_checkpoint(_manager(sgd), path)))
    scheduler = build_scheduler(ScheduleConfig(), (manager := _manager()).optimizer, 5)
    found.append(_error(lambda: load_checkpoint(manager, path, scheduler=scheduler)))
    return found


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_changed(checkpoints: Path) -> None:
    for tied, deeper, other, frozen, _, schedule in pool(2).run(_mismatches, str(checkpoints)):
        assert "it holds lm_head.weight, which the model has not" in tied
        assert "it lacks model.layers.3" in deeper
        assert "which the model has not" in other
        assert "lm_head.weight" in frozen
        assert "no learning-rate schedule" in schedule


# -- it cannot be written


def _full_disk(draft: Draft, name: str, tensors: Any) -> Any:
    """Fails on the second rank, as a disk does that is full."""
    if torch.distributed.get_rank() == 1:
        raise OSError(28, "No space left on device")
    return write_tensors(draft, name, tensors)


def _with_full_disk(root: str, asynchronous: bool, on_error: str) -> tuple[list[str], list[float], list[str]]:
    from meshwright.checkpoint import saving as module

    manager = _manager()
    losses, errors = train_steps(manager, CASE, range(1))[0], []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        saver = Checkpointer(manager, root, asynchronous=asynchronous, on_error=on_error)  # type: ignore[arg-type]
        saver.save(1)
        saver.wait()
        module.write_tensors = _full_disk
        try:
            errors.append(_error(lambda: saver.save(2)))
            errors.append(_error(saver.wait))
        finally:
            module.write_tensors = write_tensors
        losses += train_steps(manager, CASE, range(1, 2))[0]
        saver.save(3)
        saver.close()
    return errors, losses, [str(each.message) for each in told if "could not be written" in str(each.message)]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_full_disk_stops_the_run_or_not_and_harms_no_checkpoint(
    asynchronous: bool, on_error: str, tmp_path: Path
) -> None:
    expected = pool(2).run(_plain_losses)
    for rank, (errors, losses, told) in enumerate(pool(2).run(_with_full_disk, str(tmp_path), asynchronous, on_error)):
        assert losses == expected[rank]
        if on_error == "stop":
            # While it is written, or by the next call.
            assert errors[int(asynchronous)].count("No space left on device") >= 1
            assert not told
        else:
            assert errors == ["", ""]
            assert len(told) == (1 if rank == 0 else 0)
    assert [step for step, _ in steps_in(tmp_path)] == [3, 1]
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001", "step-00000003"}
    assert read_manifest(step_directory(tmp_path, 1)).step == 1


def _plain_losses() -> list[float]:
    return train_steps(_manager(), CASE, range(2))[0]


def test_a_place_that_cannot_be_written_is_told_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for error in pool(2).run(_save_below_a_file, str(tmp_path / "file" / "step-1")):
        assert "cannot be written" in error


def _save_below_a_file(path: str) -> str:
    return _error(lambda: save_checkpoint(_manager(), path, step=1))


def test_values_that_are_none_of_json_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    for error in pool(2).run(_save_a_set, str(tmp_path / "x")):
        assert "cannot be written to a checkpoint" in error
    assert list(tmp_path.iterdir()) == []


def _save_a_set(path: str) -> str:
    return _error(lambda: save_checkpoint(_manager(), path, step=1, extra={"a": {1, 2}}))


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
    ("keep_last", "keep_every", "kept"), [(2, None, [6, 5]), (1, 2, [6, 4, 2]), (None, None, [6, 5, 4, 3, 2, 1])]
)
def test_retention(keep_last: int | None, keep_every: int | None, kept: list[int], tmp_path: Path) -> None:
    expected = pool(2).run(_losses_without_saving)
    assert pool(2).run(_save_many, str(tmp_path), keep_last, keep_every) == expected
    assert [step for step, _ in steps_in(tmp_path)] == kept
    assert len(list(tmp_path.iterdir())) == len(kept)


def _losses_without_saving() -> list[float]:
    return train_steps(_manager(), Case(steps=6), range(6))[0]


def _asynchronous_contents(root: str) -> tuple[bool, bool]:
    """What is saved is the state at the call, though training goes on."""
    manager = _manager()
    train_steps(manager, CASE, range(1))
    expected = full_weights(manager)
    write, has_moved = saving.write_tensors, threading.Event()

    def write_late(draft: Draft, name: str, tensors: Sequence[torch.Tensor]) -> StoredFile:
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


def _random_numbers(path: str, strategy: str) -> tuple[list[float], list[float]]:
    manager = _manager(strategy=strategy)
    torch.manual_seed(7 + manager.mesh.rank)
    save_checkpoint(manager, path, step=0)
    expected = torch.rand(3).tolist()
    torch.manual_seed(99)
    load_checkpoint(manager, path)
    return expected, torch.rand(3).tolist()


def test_random_generators_go_on_on_the_same_mesh(tmp_path: Path) -> None:
    results = pool(2).run(_random_numbers, str(tmp_path / "x"), "fsdp2")
    assert all(found == expected for expected, found in results)
    assert results[0] != results[1]


def test_bytes_are_those_of_the_state_and_alike_on_all_ranks(tmp_path: Path) -> None:
    for strategy in ("ddp", "fsdp2"):
        path = tmp_path / strategy
        numel = pool(4).run(_save_large, str(path), strategy)[0]
        manifest = json.loads((path / MANIFEST).read_text())
        sizes = [stored["size"] for name, stored in manifest["files"].items() if name.endswith(".bin")]
        # Parameters and two moments in float64; a header for each piece.
        assert len(sizes) == 4
        assert 3 * numel * 8 <= sum(sizes) <= 3 * numel * 8 * 1.02
        assert max(sizes) <= 1.1 * min(sizes)


def _save_large(path: str, strategy: str) -> int:
    world = open_world("cpu")
    stack, degrees = resolve(strategy, MeshSizes(), world.size)
    manager = stack.build(Mesh(degrees, world))
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, vocab_size=3001
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    numel = sum(parameter.numel() for parameter in model.parameters())
    manager.parallelize(model)
    manager.build_optimizer(optimizer_factory(OptimizerConfig()))
    ids = torch.randint(0, 3001, (1, 8), generator=torch.Generator().manual_seed(world.rank))
    manager.forward_backward([{"input_ids": ids, "labels": ids}], num_tokens=torch.tensor(7 * world.size))
    manager.optimizer_step()
    save_checkpoint(manager, path, step=1)
    return numel
