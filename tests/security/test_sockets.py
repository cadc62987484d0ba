"""While our commands run, nothing of theirs waits for connections of other machines.

README.md in this directory has the table of all sockets.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from security.listening import beyond_loopback, descendants, listening
from security.small_run import write_small_run
from support.starts import free_port

from meshwright.launch.store import host_store, keep_to_loopback

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="sockets are listed by /proc")
TIME_LIMIT_S = 240.0
LOOP = """
import time
import torch
import meshwright as mw

with mw.open_world("cpu"):
    torch.distributed.barrier()
    time.sleep(3)
"""


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sockets")
    checkpoint = {"every": 10, "replicate": "neighbour"}
    return write_small_run(place, strategy="fsdp2", nproc=2, max_restarts=1, steps=30, checkpoint=checkpoint)


def environment(**more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.endswith("_SOCKET_IFNAME")}
    return kept | {"OMP_NUM_THREADS": "1"} | more


def watched(
    *commands: tuple[list[str], dict[str, str]], until: int | None = None
) -> tuple[list[int | None], str, dict[str, int]]:
    """Exit codes, output, and every address on which the commands, or what they have started, were seen waiting.

    The commands run at the same time, until they end, or have so many addresses.
    """
    log = Path(f"/tmp/meshwright-sockets-{os.getpid()}")
    started = []
    found: dict[str, int] = {}
    try:
        for command, environ in commands:
            with log.open("ab") as file:
                started.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environ))
        deadline = time.monotonic() + TIME_LIMIT_S
        while any(each.poll() is None for each in started):
            assert time.monotonic() < deadline, log.read_text()
            is_over = until is not None and len(found) >= until
            # What opens a socket a little later is seen, too.
            time.sleep(1 if is_over else 0.05)
            for each in started:
                found |= listening(descendants(each.pid))
            if is_over:
                break
        return [each.poll() for each in started], log.read_text(), found
    finally:
        for each in started:
            each.terminate()
            with suppress(subprocess.TimeoutExpired):
                each.wait(20)
            each.kill()
        log.unlink(missing_ok=True)


def meshwright(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "meshwright", *arguments]


@pytest.fixture(scope="module")
def trained(run_file: Path) -> dict[str, int]:
    codes, output, found = watched((meshwright("train", str(run_file)), environment()))
    assert codes == [0], output
    return found


@pytest.mark.slow
def test_a_run_waits_on_loopback_alone(trained: dict[str, int]) -> None:
    # The store, and at least one socket of gloo for each rank.
    assert len(trained) >= 3
    assert not beyond_loopback(trained)


@pytest.mark.slow
def test_a_replay_waits_on_loopback_alone(trained: dict[str, int], run_file: Path) -> None:
    codes, output, found = watched((meshwright("replay", str(run_file.parent / "out"), "--step", "12"), environment()))
    assert codes == [0], output
    assert len(found) >= 3
    assert not beyond_loopback(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sockets"),
    [
        (("plan", "--calibrate", "machine.yaml", "--ranks", "2"), 3),
        (("check", "ddp", "--ranks", "2"), 3),
        (("watch", ".", "--port", "PORT"), 1),
    ],
    ids=["calibration", "check", "watch"],
)
def test_other_commands_wait_on_loopback_alone(
    arguments: tuple[str, ...], sockets: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = meshwright(*(each.replace("PORT", str(free_port())) for each in arguments))
    _, output, found = watched((command, environment()), until=sockets)
    assert len(found) >= sockets, output
    assert not beyond_loopback(found)


@pytest.mark.slow
def test_ranks_of_another_launcher_wait_where_it_says(tmp_path: Path) -> None:
    program, port = tmp_path / "loop.py", str(free_port())
    program.write_text(LOOP)
    of_all = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environments = [environment(**of_all, RANK=rank, LOCAL_RANK=rank) for rank in "01"]
    commands = [([sys.executable, str(program)], each) for each in environments]
    codes, output, found = watched(*commands)
    assert codes == [0, 0], output
    assert f"127.0.0.1:{port}" in found
    assert not beyond_loopback(found)


@pytest.fixture
def own_address() -> Iterator[str]:
    """Of this machine, beside loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has loopback alone")
        yield probe.getsockname()[0]


def test_between_machines_a_store_waits_where_the_ranks_are_told(own_address: str) -> None:
    before = listening({os.getpid()})
    store = host_store(own_address, 0, timeout_s=10, spans_machines=True)
    assert store is not None
    store.set("key", "value")
    assert listening({os.getpid()}).keys() - before.keys() == {f"{own_address}:{store.port}"}
    assert store.get("key") == b"value"


def test_a_store_is_left_to_torch_where_its_address_is_not_this_machines() -> None:
    # A forwarded port; and a machine that knows itself by its loopback.
    assert host_store("192.0.2.1", free_port(), timeout_s=10, spans_machines=True) is None
    assert host_store("127.0.0.1", free_port(), timeout_s=10, spans_machines=True) is None


def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        host_store("127.0.0.1", taken.getsockname()[1], timeout_s=10)


def test_an_interface_that_the_user_names_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    keep_to_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert os.environ.pop("NCCL_SOCKET_IFNAME") in ("lo", "lo0")
