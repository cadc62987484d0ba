"""The mesh on real ranks: degrees, views, groups, data coordinates, the expert mesh and agreement between ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launched_processes import find_free_port

from meshwright import Mesh, MeshError, MeshSizes, open_world
from meshwright.base.errors import DataError
from meshwright_testing import pool


def _mesh(sizes: dict[str, Any]) -> Mesh:
    world = open_world("cpu")
    return Mesh(MeshSizes(**sizes).resolve(world.size), world)


def _sums(sizes: dict[str, Any], names: list[str]) -> dict[str, list[int]]:
    """For each axis or view: the ranks of this rank's group, found by communicating."""
    mesh = _mesh(sizes)
    found = {}
    for name in names:
        group = mesh.group(name)
        mine = torch.tensor([mesh.rank])
        parts = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine, group=group)
        found[name] = [int(part) for part in parts]
    return found


@pytest.mark.slow
def test_axes_are_laid_out_with_pp_outermost_and_tp_innermost() -> None:
    groups = pool(4).run(_sums, {"pp_size": 2, "tp_size": 2}, ["pp", "tp", "dp", "cp"])
    assert groups[0] == {"pp": [0, 2], "tp": [0, 1], "dp": [0], "cp": [0]}
    assert groups[3] == {"pp": [1, 3], "tp": [2, 3], "dp": [3], "cp": [3]}


@pytest.mark.slow
def test_views_join_neighbouring_axes() -> None:
    sizes = {"dp_replicate_size": 2, "cp_size": 2, "dp_size": 2}
    groups = pool(4).run(_sums, sizes, ["dp", "dp_cp", "dp_shard_cp", "dp_replicate"])
    assert groups[1] == {"dp": [1, 3], "dp_cp": [0, 1, 2, 3], "dp_shard_cp": [0, 1], "dp_replicate": [1, 3]}


def _data_coordinates(sizes: dict[str, Any]) -> tuple[int, int, bool]:
    mesh = _mesh(sizes)
    return mesh.data_rank, mesh.data_size, mesh.is_data_leader


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"tp_size": 2}, [(0, 2, True), (0, 2, False), (1, 2, True), (1, 2, False)]),
        ({"pp_size": 2}, [(0, 2, True), (1, 2, True), (0, 2, False), (1, 2, False)]),
        ({"cp_size": 4}, [(0, 1, True), (0, 1, False), (0, 1, False), (0, 1, False)]),
        ({"dp_replicate_size": 2}, [(0, 4, True), (1, 4, True), (2, 4, True), (3, 4, True)]),
    ],
)
def test_ranks_that_must_see_one_batch_share_a_data_rank(sizes: dict[str, Any], expected: list[Any]) -> None:
    assert pool(4).run(_data_coordinates, sizes) == expected


def _expert_ranks(sizes: dict[str, Any]) -> dict[str, list[int]]:
    mesh = _mesh(sizes)
    return {axis: mesh.expert_mesh[axis].mesh.tolist() for axis in ("pp", "dp_replicate", "ep_shard", "ep")}


@pytest.mark.slow
def test_expert_mesh_covers_the_same_ranks() -> None:
    first, *_, last = pool(4).run(_expert_ranks, {"tp_size": 2, "ep_size": 2})
    assert first == {"pp": [0], "dp_replicate": [0], "ep_shard": [0, 2], "ep": [0, 1]}
    assert last == {"pp": [3], "dp_replicate": [3], "ep_shard": [1, 3], "ep": [2, 3]}


def _refused() -> None:
    with pytest.raises(MeshError, match=r"'dp_cq'.*dp_shard_cp"):
        _mesh({})["dp_cq"]
    with pytest.raises(MeshError, match=r"3 ranks.*the world has 1"):
        Mesh(MeshSizes().resolve(3), open_world("cpu"))


def test_an_unknown_view_and_degrees_that_do_not_fill_the_world_are_refused() -> None:
    pool(1).run(_refused)


# -- worlds


def test_a_process_without_launcher_is_a_world_of_one_and_ends_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with open_world("cpu") as world:
        assert (world.rank, world.size, world.owns_group) == (0, 1, True)
        assert dist.is_initialized()
        with open_world("cpu") as inner:
            assert not inner.owns_group
        assert dist.is_initialized(), "a world that was joined must not be ended"
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="looks at a machine without accelerator")
def test_a_device_that_is_not_there_is_refused() -> None:
    for device, text in (("cuda:0", r"not available here\. Available: cpu"), ("gpu", "'gpu' is not a device name")):
        with pytest.raises(MeshError, match=text):
            open_world(device)


# -- several worlds in one process


def _worlds(port: int, file: str | None) -> list[tuple[float, float]]:
    """Open worlds one after the other; for each, when this rank had connected, and when its world was open."""
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    store = None if file is None else dist.FileStore(file, 2)
    init, connected, times = dist.init_process_group, 0.0, []

    def init_slowly(*args: Any, **kwargs: Any) -> None:
        nonlocal connected
        init(*args, **kwargs)
        time.sleep(0.3 * ((dist.get_rank() + number) % 2))
        connected = time.time()

    dist.init_process_group = init_slowly
    try:
        for number in range(4):
            with open_world("cpu", store=store, timeout_s=20) as world:
                times.append((connected, time.time()))
                assert world.reduce_ints([number]) == [2 * number]
    finally:
        dist.init_process_group = init
    return times


@pytest.mark.parametrize("door", ["environment", "store"])
def test_worlds_of_one_process_meet_in_turn_and_each_opens_once_all_have_connected(door: str, tmp_path: Path) -> None:
    first, second = pool(2).run(_worlds, find_free_port(), str(tmp_path / "store") if door == "store" else None)
    for mine, other in zip(first, second, strict=True):
        assert max(mine[0], other[0]) <= min(mine[1], other[1])


# -- agreement


def _together(culprits: tuple[int, ...], text: str) -> str:
    world = open_world("cpu")

    def work() -> int:
        if world.rank in culprits:
            raise DataError(text.format(rank=world.rank))
        return world.rank

    try:
        return str(world.run_on_all_ranks(work))
    except DataError as error:
        return f"raised {error}"


@pytest.mark.slow
def test_an_error_of_one_rank_is_raised_on_all_with_one_text() -> None:
    texts = pool(4).run(_together, (2,), "corpus missing on {rank}")
    assert len(set(texts)) == 1
    assert "corpus missing on 2" in texts[0]
    assert "found on rank 2" in texts[0]
