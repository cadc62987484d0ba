"""Keepers and what they hold: who is let in, what is kept and dropped, and what is read of it."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.bit_flip_runs import FLIPPED_AFTER, run_with_bit_flip
from support.commands import write_run
from support.runs import RunWorkspace, run_rank_capturing

from meshwright.base.errors import ConfigError
from meshwright.checkpoint.manifest import Manifest, StoredFile, read_manifest, serialize_manifest, verify_files
from meshwright.checkpoint.storage import DEFAULT_OPTIONS
from meshwright_replicate import client, protocol
from meshwright_replicate.client import ReplicaClient, ReplicaNode, find_replicas
from meshwright_replicate.protocol import Connection
from meshwright_replicate.replicator import DoubleBuffer, StateReplicator
from meshwright_replicate.server import ReplicaServer
from meshwright_run.run_action import check_restarts
from meshwright_run.run_file import RunConfig
from meshwright_run.run_sections import CheckpointConfig
from meshwright_run.start import find_rank_counts
from meshwright_testing import pool

TOKEN = "a token"


class Local:
    """A keeper in this process, with connections as of its own node and of another."""

    def __init__(self) -> None:
        self.keeper = ReplicaServer()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._name = f"\0meshwright-test-{self.keeper.server_id}"
        self._listener.bind(self._name)
        self._listener.listen()
        self.keeper.listen(self._listener, is_local=True)
        self.near = self.connected()
        self.port = int(self.near.request("listen", host="127.0.0.1", token=TOKEN)["port"])
        self.far = Connection(self.introduced(TOKEN))

    def connected(self) -> Connection:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(self._name)
        return Connection(connection)

    def introduced(self, token: str) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=5)
        protocol.authenticate_to_server(connection, token)
        return connection

    def put(self, step: int, name: str, content: bytes, link: Connection | None = None, run: str = "run") -> None:
        reported: dict[str, Any] = {"run": run, "step": step, "name": name, "size": len(content)}
        if link is None:
            (room,) = [DoubleBuffer().fill_next([torch.tensor(list(content), dtype=torch.uint8)])]
            self.near.request("put", room.fd, **reported)
        else:
            link.request("put", None, [memoryview(content)], **reported)

    def seal(self, step: int, manifest: str = "{}") -> None:
        self.near.request("commit", run="run", step=step, manifest=manifest)

    def listed(self) -> dict[str, Any]:
        return dict(self.near.request("list")["steps"])

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.fixture
def local() -> Iterator[Local]:
    found = Local()
    found.near.request("discard_stale", run="run", step=0)
    yield found
    found.close()


# -- who is let in


@pytest.mark.parametrize("token", ["", "another", TOKEN + " "])
def test_who_has_not_the_token_is_refused(local: Local, token: str) -> None:
    with pytest.raises(OSError, match="token"):
        local.introduced(token)
    with socket.create_connection(("127.0.0.1", local.port), timeout=5) as connection:
        protocol.receive_message(connection)
        protocol.send_message(connection, {"command": "list"})
        assert protocol.receive_message(connection)[0].keys() == {"error"}
        with pytest.raises(OSError, match="closed"):
            protocol.receive_message(connection)


def test_a_process_of_another_user_is_refused(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(OSError, match=r"closed|reset|Broken"):
        local.connected().request("list")


def test_a_keeper_without_the_token_is_not_believed() -> None:
    ours, theirs = socket.socketpair()

    def impostor() -> None:
        protocol.send_message(theirs, {"nonce": "0"})
        protocol.receive_message(theirs)
        protocol.send_message(theirs, {"proof": "0"})

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(PermissionError, match="the replica server has another token"):
        protocol.authenticate_to_server(ours, TOKEN)
    thread.join()


def test_other_nodes_bring_and_take_files_and_no_more_and_nonsense_is_refused(local: Local) -> None:
    for what in ("discard_stale", "commit", "listen"):
        with pytest.raises(OSError, match=f"command {what} is not accepted"):
            local.far.request(what, run="run", step=0, manifest="", host="", token="")
    for reported in ({"step": 1}, {"run": "run"}, {"run": "run", "step": 1, "name": "a", "size": "many"}):
        with pytest.raises(OSError, match="rejected the request"):
            local.near.request("put" if "size" in reported else "commit", **reported)
    assert (local.far.request("list")["id"], local.near.request("list")["run"]) == (local.keeper.server_id, "run")


# -- what is kept


def test_the_last_sealed_step_is_kept_and_the_one_that_is_written(local: Local) -> None:
    for step in (1, 2, 3):
        local.put(step, "near", bytes([step]) * 10)
        local.put(step, "far", bytes([step]) * 20, local.far)
        assert sorted(local.listed(), key=int) == [str(each) for each in (step - 1, step) if each]
        local.seal(step)
        assert local.listed() == {str(step): {"manifest": "{}", "files": {"near": 10, "far": 20}}}
    room = memoryview(bytearray(5))
    local.far.request_into(room, "read", step=3, name="near", begin=5, size=5)
    assert bytes(room) == bytes([3]) * 5
    file = local.near.request_file("read", step=3, name="far")
    assert os.pread(file, 100, 0) == bytes([3]) * 20
    os.close(file)
    for step, name, begin, size in ((2, "near", 0, 1), (3, "other", 0, 1), (3, "near", 6, 5), (3, "near", -1, 1)):
        with pytest.raises(OSError, match="rejected"):
            local.far.request_into(memoryview(bytearray(size)), "read", step=step, name=name, begin=begin, size=size)


def test_another_run_a_step_that_is_sealed_and_a_file_that_breaks_off_are_refused(local: Local) -> None:
    local.put(1, "a", b"x")
    with pytest.raises(OSError, match="step 1 of run 'other' is not expected"):
        local.put(1, "a", b"y", local.far, run="other")
    local.seal(1)
    with pytest.raises(OSError, match="is not expected"):
        local.put(1, "b", b"y", local.far)
    with pytest.raises(OSError, match="step 2 of run 'run' is not stored here"):
        local.seal(2)
    connection = local.introduced(TOKEN)
    protocol.send_message(connection, {"command": "put", "run": "run", "step": 3, "name": "a", "size": 100})
    connection.sendall(b"x" * 50)
    connection.close()
    time.sleep(0.1)
    assert list(local.listed()) == ["1"]


def test_a_keeper_ends_if_who_it_is_for_has(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "meshwright_replicate.server", str(tmp_path / "keeper.sock")]
    subprocess.run([*command, str(os.getpid()), "another process"], timeout=20, check=True)
    assert not list(tmp_path.iterdir())


def test_what_a_run_does_not_resume_from_is_let_go(local: Local) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for step in (4, 5):
        local.put(step, "a", b"x")
    local.near.request("discard_stale", run="run", step=4)
    assert list(local.listed()) == ["4"]
    local.near.request("discard_stale", run="next", step=9)
    assert not local.listed()
    assert len(os.listdir("/proc/self/fd")) <= before


# -- what is read


def _listed(*kept: dict[str, int], run: str = "run", step: int = 7, manifest: bool = True) -> list[dict[str, Any]]:
    stored = {
        f"tensors-0000{rank}.bin": StoredFile(10 + rank, hashlib.sha256(bytes(10 + rank)).hexdigest())
        for rank in (0, 1)
    }
    text = serialize_manifest(Manifest(step, "fsdp2", {}, 2, {}, files=stored), None)
    return [
        {"run": run, "steps": {str(step): {"manifest": text if manifest else None, "files": each}}} for each in kept
    ]


NODES = (ReplicaNode("a", (0,)), ReplicaNode("b", (1,)))
FIRST, SECOND = {"tensors-00000.bin": 10}, {"tensors-00001.bin": 11}
WHOLE = FIRST | SECOND


@pytest.mark.parametrize(
    ("kept", "holders"),
    [
        ([WHOLE, WHOLE], [[0, 1], [1, 0]]),
        ([WHOLE, {}], [[0, 0]]),
        ([FIRST, SECOND], [[0, 1]]),
        ([SECOND, FIRST], [[1, 0]]),
        ([FIRST, {}], []),
        ([FIRST, {"tensors-00001.bin": 12}], []),
    ],
    ids=str,
)
def test_a_step_is_whole_where_some_keeper_has_each_file(kept: list[dict[str, int]], holders: list[list[int]]) -> None:
    # All ranks read a file from the same keeper.
    for here in (0, 1):
        found = find_replicas(ReplicaClient(NODES, here, TOKEN), _listed(*kept), "run", DEFAULT_OPTIONS)
        assert [[each.file_nodes[f"tensors-0000{rank}.bin"] for rank in (0, 1)] for each in found] == holders
        assert {each.step for each in found} <= {7}
        # Nor are other runs, and steps that are not sealed.
        for unlike in ({"run": "other"}, {"manifest": False}):
            assert not find_replicas(
                ReplicaClient(NODES, here, TOKEN), _listed(*kept, **unlike), "run", DEFAULT_OPTIONS
            )


def test_the_newest_step_is_first() -> None:
    steps = _listed(WHOLE, {}, step=6)[0]["steps"] | _listed(WHOLE, {}, step=10)[0]["steps"]
    listed = [{"run": "run", "steps": steps}, {"run": "", "steps": {}}]
    found = find_replicas(ReplicaClient(NODES, 0, TOKEN), listed, "run", DEFAULT_OPTIONS)
    assert [each.step for each in found] == [10, 6]


@pytest.mark.parametrize("near", [True, False])
def test_a_step_in_memory_is_read_as_a_checkpoint(local: Local, near: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(range(200)) * 2000
    stored = {"tensors-00000.bin": StoredFile(len(content), hashlib.sha256(content).hexdigest())}
    local.put(3, "tensors-00000.bin", content, local.far)
    local.seal(3, serialize_manifest(Manifest(3, "ddp", {}, 1, {}, files=stored), None))
    monkeypatch.setattr(
        ReplicaClient, "connect", lambda *_: local.connected() if near else Connection(local.introduced(TOKEN))
    )
    keepers = ReplicaClient((ReplicaNode("a", (0,)),), 0 if near else 1, TOKEN)
    (place,) = find_replicas(keepers, [local.near.request("list")], "run", DEFAULT_OPTIONS)
    manifest = read_manifest(place)
    assert (manifest.step, manifest.strategy) == (3, "ddp")
    verify_files(place, manifest, list(manifest.files))
    with place.open("tensors-00000.bin") as one, place.open("tensors-00000.bin") as other:
        one.seek(150)
        assert (other.read(3), one.read(3)) == (bytes([0, 1, 2]), bytes([150, 151, 152]))
        one.seek(-1, os.SEEK_END)
        assert one.read() == content[-1:]


# -- what is copied, and how fast


def test_rooms_hold_tensors_as_a_checkpoint_does_and_are_taken_in_turn() -> None:
    rooms = DoubleBuffer()
    odd = torch.arange(3, dtype=torch.uint8)
    tensors = [odd, torch.randn(4, 6)[:, 1:4], torch.tensor(2.5, dtype=torch.bfloat16), torch.empty(0)]
    wanted = b"".join(each.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for each in tensors)
    first = rooms.fill_next(tensors)
    assert bytes(first.view) == os.pread(first.fd, 1000, 0) == wanted
    second = rooms.fill_next([torch.zeros(len(wanted), dtype=torch.uint8)])
    assert bytes(first.view) == wanted
    assert rooms.fill_next(tensors) is first
    assert rooms.fill_next(tensors) is second


def _copied_here(path: str, flips: bool) -> tuple[str, int]:
    """Run with a keeper in the process of the rank; return error and exit code."""
    local = Local()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "_connect_local", local.connected)
        error, code = run_with_bit_flip(path) if flips else run_rank_capturing(path, None)[1:]
    local.close()
    return error, code


def _run(place: Path, every: int, *, flips: bool) -> tuple[str, int]:
    write_run(place)
    checkpoint = {"every": 1000, "replicate": {"every": every}}
    more = {"verify_every": 1000} if flips else {}
    file = RunWorkspace(place, place).write_run_file(steps=8, max_restarts=1, checkpoint=checkpoint, **more)
    found: tuple[str, int] = pool(1).run(_copied_here, str(file), flips)[0]
    return found


@pytest.mark.parametrize(("every", "due", "found_after"), [(1, 8, FLIPPED_AFTER), (3, 2, 3)])
def test_state_is_copied_after_every_so_many_steps_but_not_what_a_bit_has_changed(
    every: int, due: int, found_after: int, tmp_path: Path
) -> None:
    for name in ("whole", "flipped"):
        (tmp_path / name).mkdir()
    assert _run(tmp_path / "whole", every, flips=False) == ("", 0)
    events = [json.loads(line) for line in (tmp_path / "whole" / "out" / "events.jsonl").read_text().splitlines()]
    # The last one, when the run ends; others are of steps that were due before the last copy was done.
    reported = [event for event in events if event["event"] == "replication"][-1]
    assert (reported["num_copied"] >= 1, reported["num_copied"] + reported["num_skipped"]) == (True, due)
    error, code = _run(tmp_path / "flipped", every, flips=True)
    assert (code, f"silent corruption, found after step {found_after}:" in error) == (1, True)


# -- what is asked for


def test_values_that_make_no_sense_are_refused() -> None:
    for replicate, match in (
        ("everywhere", "neighbor"),
        ({"every": 0}, "greater than or equal to 1"),
        ({"max_bandwidth": "fast"}, "max_bandwidth"),
        ({"max_bandwidth": "0GB"}, "sends nothing"),
        ({"rate": 3}, "rate"),
    ):
        with pytest.raises(ValueError, match=match):
            CheckpointConfig(replicate=replicate)
    for bandwidth, expected in (("2.5MB/s", 2.5e6), (3, 3.0), (None, None)):
        assert CheckpointConfig(replicate={"max_bandwidth": bandwidth}).replicate_config.bytes_per_s == expected
    assert CheckpointConfig(replicate="neighbor").replicate_config == CheckpointConfig(replicate={}).replicate_config


def test_copies_that_nobody_would_resume_from_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(**values: Any) -> RunConfig:
        fixed = {"model": {"model_type": "llama"}, "steps": 9, "batch_size": 4, "nproc": 2}
        return RunConfig.model_validate({**fixed, "checkpoint": {"every": 3, "replicate": "neighbor"}, **values})

    with pytest.raises(ConfigError, match="max_restarts=0"):
        find_rank_counts(config())
    assert find_rank_counts(config(max_restarts=1)) == [2]
    with pytest.raises(ConfigError, match="saves no checkpoints"):
        find_rank_counts(config(checkpoint={"replicate": "neighbor"}, max_restarts=1))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    with pytest.raises(ConfigError, match="torchrun --max-restarts=3"):
        check_restarts(config())
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    check_restarts(config())
    with pytest.raises(ValueError, match="on_bad_step=rollback needs checkpoints of this attempt"):
        config(on_bad_step="rollback")


def test_copies_that_do_not_fit_into_a_node_are_refused_with_both_numbers() -> None:
    """Two copies of the ranks here, and two of those of the node before."""
    errors: list[Any] = []
    world = SimpleNamespace(size=3, raise_on_all_ranks=errors.append)
    nodes = (*NODES, ReplicaNode("c", (2,)))
    for here, expected in ((0, 2 * (10 + 30)), (1, 2 * (20 + 10)), (2, 2 * (30 + 20))):
        for limit in (expected, expected - 1):
            copier: Any = SimpleNamespace(
                _checked_agreement=0, _agreement=SimpleNamespace(num_plans=1), _memory_bytes=limit
            )
            copier._manager = SimpleNamespace(mesh=SimpleNamespace(world=world))
            copier._client, copier._gather_sizes = ReplicaClient(nodes, here, TOKEN), lambda _: [10, 20, 30]
            StateReplicator._check_memory(copier, 0)
            assert (errors[-1] is not None) == (limit < expected)
    assert "checkpoint.replicate holds 2 copies" in str(errors[1])
