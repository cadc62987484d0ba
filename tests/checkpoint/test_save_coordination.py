"""A save after the first asks the ranks for one integer, whatever the size of the state, and writes what it must."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from support.checkpoints import rank_layouts, step_directory
from support.tiers import mark_mostly_slow

from meshwright import Checkpointer, load_checkpoint
from meshwright.checkpoint.index import INDEX_FILE
from meshwright.checkpoint.saving import (
    CheckpointSave,
    SavePlanner,
    build_inventory,
    build_save_plans,
    collect_content,
    encode_optimizer_settings,
)
from meshwright.checkpoint.storage import LocalStorage
from meshwright.strategy.contract import StrategyManager
from meshwright.tensors.chunks import MIN_SPLIT_BYTES, ChunkedTensor, LocalChunk, Rectangle, assign_owners
from meshwright.tensors.state import OptimizerState
from meshwright.testing import Case
from meshwright.tracing.collectives import CollectiveTrace, record_collectives
from meshwright_testing import pool
from meshwright_testing.parity import build_manager, full_weights, train_steps


def _traffic(root: str, sizes: dict[str, int], layers: int) -> tuple[list[CollectiveTrace], list[bool]]:
    """Measure the blocking part of three saves, and the writing of the last."""
    case = Case(steps=3, layers=layers)
    manager = build_manager("fsdp2", {}, sizes, case)
    group, agreement = dist.new_group(backend="gloo"), SavePlanner()
    found: list[CollectiveTrace] = []
    right = []
    for step in (1, 2, 3):
        train_steps(manager, case, range(step - 1, step))
        expected = full_weights(manager)
        made: list[CheckpointSave] = []
        directory = step_directory(Path(root), step)

        def begin(made: list[CheckpointSave] = made, directory: Path = directory, step: int = step) -> None:
            content = collect_content(manager, group, step=step, scheduler=None, extra=None, planner=agreement)
            made.append(CheckpointSave(manager, LocalStorage(directory), group, content, None))

        found.append(record_collectives(begin))
        written = record_collectives(made[0].write)
        right.append(_holds(manager, directory, expected))
    dist.destroy_process_group(group)
    return [*found, written], right


def _holds(manager: StrategyManager, directory: Path, expected: dict[str, torch.Tensor]) -> bool:
    load_checkpoint(manager, directory)
    found = full_weights(manager)
    return all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("sizes", mark_mostly_slow([{}, {"pp_size": 2}]), ids=["fsdp2", "pipeline"])
def test_the_index_is_gathered_once_and_each_parameter_is_reported_once(sizes: dict[str, int], tmp_path: Path) -> None:
    ranks, sent = 2, {}
    for layers in (2, 4):
        root = str(tmp_path / f"{layers}")
        for (first, second, third, written), right in pool(ranks).run(_traffic, root, sizes, layers):
            assert all(right)
            assert first.filter("gather")
            assert first.filter("scatter")
            for later in (second, third):
                # One integer, to ask whether all have what they had; another, for errors.
                reported = [("send", 8), ("recv", 8)] * (ranks - 1).bit_length()
                assert [(each.kind, each.nbytes) for each in later] == [("all_reduce", 8), *reported]
            sent[layers] = written.nbytes
    # The end of a save does not grow with the state: names and checksums of files.
    assert sent[2] == pytest.approx(sent[4], abs=64)
    assert len({(step_directory(tmp_path / "4", step) / INDEX_FILE).read_bytes() for step in (1, 2, 3)}) == 1
    paths = sorted(step_directory(tmp_path / "4", 3).glob("optimizer-*.json"))
    contents = [json.loads(path.read_text()) for path in paths]
    # The first rank of each stage.
    assert len(contents) == sizes.get("pp_size", 1)
    values = [name for content in contents for name in content["values"]]
    params = [name for content in contents for group in content["groups"] for name in group["params"]]
    for names in (values, params):
        assert len(names) == len(set(names)) > 10


def _with_changes(root: str) -> list[list[bool]]:
    """Save before and after the optimizer gets its state; return what the checkpoints hold."""
    case = Case(steps=3)
    manager = build_manager("fsdp2", {}, {}, case)
    found = []
    with Checkpointer(manager, root, asynchronous=True) as saver:
        for step in (1, 2, 3):
            expected = full_weights(manager)
            saver.save(step)
            saver.wait()
            directory = step_directory(Path(root), step)
            texts = [json.loads(path.read_text()) for path in directory.glob("optimizer-*.json")]
            found.append([_holds(manager, directory, expected), any(text["values"] for text in texts)])
            train_steps(manager, case, range(step - 1, step))
    return found


def test_what_changes_between_saves_is_agreed_on_again(tmp_path: Path) -> None:
    for found in pool(2).run(_with_changes, str(tmp_path)):
        assert found == [[True, False], [True, True], [True, True]]


def test_no_tensor_is_sent_to_another_rank() -> None:
    # A step counter may be on an accelerator that the other rank does not have.
    state: OptimizerState[Any] = OptimizerState(
        values={"w": {"step": torch.tensor(3.0)}},
        groups=[{"lr": torch.tensor(0.5, dtype=torch.float64), "params": ["w"]}],
    )
    piece = LocalChunk((0, 0), torch.ones(2, 3))
    held = build_inventory({"model.w": ChunkedTensor(torch.Size((4, 3)), torch.float32, (piece,))}, state)
    assert b"torch" not in pickle.dumps(held)
    (share, _), _ = build_save_plans([held, held])
    settings = encode_optimizer_settings(state, share)
    assert settings is not None
    assert json.loads(settings) == {
        "groups": [{"lr": {"$tensor": 0.5, "dtype": "float64"}, "params": ["w"]}],
        "values": {"w": {"step": {"$tensor": 3.0, "dtype": "float32"}}},
    }


# -- each element is written once, and all ranks write about alike


@given(rank_layouts())
def test_every_element_is_written_once_by_a_rank_that_has_it(held: list[list[Rectangle]]) -> None:
    shapes: dict[str, list[int]] = {}
    for part in itertools.chain(*held):
        ends = [o + s for o, s in zip(part.offsets, part.sizes, strict=True)]
        shapes[part.name] = [max(a, b) for a, b in zip(shapes.get(part.name, ends), ends, strict=True)]
    written = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
    for rank, parts in enumerate(assign_owners(held)):
        for part in parts:
            written[part.name][tuple(slice(o, o + s) for o, s in zip(part.offsets, part.sizes, strict=True))] += 1
            assert any(_inside(part, each) for each in held[rank])
    assert all(bool((count == 1).all()) for count in written.values())


def _inside(part: Rectangle, other: Rectangle) -> bool:
    return part.name == other.name and all(
        w <= p and p + ps <= w + ws
        for p, ps, w, ws in zip(part.offsets, part.sizes, other.offsets, other.sizes, strict=True)
    )


def test_replicas_write_equal_shares_of_every_large_tensor() -> None:
    tensors = [Rectangle("embedding", (0, 0), (32000, 1024), 4), Rectangle("wide", (0, 0), (3, 4_000_003), 4)]
    small = [Rectangle(f"norm{n}", (0,), (1024,), 4) for n in range(33)]
    owned = assign_owners([tensors + small] * 4)
    written = [sum(part.nbytes for part in parts) for parts in owned]
    assert sum(written) == sum(each.nbytes for each in tensors + small)
    assert max(written) < 1.001 * min(written)
    assert all(each.nbytes < MIN_SPLIT_BYTES for each in small)
