"""While our commands run, nothing of theirs waits for connections of other machines.

README.md in this directory has the table of all sockets.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from security.listening_sockets import beyond_loopback, listening
from security.small_run import write_small_run
from support.launched_processes import find_free_port

from meshwright.launch.store import host_store, restrict_to_loopback

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


def waiting(place: Path, *commands: tuple[str, ...], until: int | None = None, **environment: str) -> set[str]:
    """Every address on which commands of Python, run at the same time, and what they have started were seen waiting.

    With variables, the N-th is rank N. They run until they end, which must be well, or have so many addresses.
    """
    kept = {key: value for key, value in os.environ.items() if not key.endswith("_SOCKET_IFNAME")} | environment
    log, started, found = place.with_name(f"{place.name}.log"), [], set[str]()
    try:
        for rank, command in enumerate(commands):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if environment else {}
            env = {**kept, "OMP_NUM_THREADS": "1", **own}
            words = [sys.executable, *command]
            with log.open("ab") as file:
                started.append(subprocess.Popen(words, stdout=file, stderr=file, env=env, cwd=place))
        deadline = time.monotonic() + TIME_LIMIT_S
        while any(each.poll() is None for each in started):
            assert time.monotonic() < deadline, log.read_text()
            is_over = until is not None and len(found) >= until
            # What opens a socket a little later is seen, too.
            time.sleep(1 if is_over else 0.05)
            found = found.union(*(listening(each.pid) for each in started))
            if is_over:
                return found
        assert {each.poll() for each in started} == {0}, log.read_text()
        return found
    finally:
        for each in started:
            each.terminate()
            with suppress(subprocess.TimeoutExpired):
                each.wait(20)
            each.kill()


@pytest.mark.slow
def test_a_run_and_its_replay_wait_on_loopback_alone(tmp_path: Path) -> None:
    checkpoint = {"every": 10, "replicate": "neighbor"}
    run = write_small_run(tmp_path, strategy="fsdp2", nproc=2, max_restarts=1, steps=30, checkpoint=checkpoint)
    for command in (("train", str(run)), ("replay", str(tmp_path / "out"), "--step", "12")):
        found = waiting(tmp_path, ("-m", "meshwright", *command))
        # The store, and at least one socket of gloo for each rank.
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
def test_other_commands_wait_on_loopback_alone(arguments: tuple[str, ...], sockets: int, tmp_path: Path) -> None:
    command = ("-m", "meshwright", *(each.replace("PORT", str(find_free_port())) for each in arguments))
    found = waiting(tmp_path, command, until=sockets)
    assert len(found) >= sockets
    assert not beyond_loopback(found)


@pytest.mark.slow
def test_ranks_of_another_launcher_wait_where_it_says(tmp_path: Path) -> None:
    port = str(find_free_port())
    of_all = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    found = waiting(tmp_path, ("-c", LOOP), ("-c", LOOP), **of_all)
    assert f"127.0.0.1:{port}" in found
    assert not beyond_loopback(found)


def test_between_machines_a_store_waits_where_the_ranks_are_reported() -> None:
    addresses = [each.address for of in psutil.net_if_addrs().values() for each in of if each.family == socket.AF_INET]
    own_address = next((each for each in addresses if not each.startswith("127.")), None)
    if own_address is None:
        pytest.skip("this machine has loopback alone")
    before = listening(os.getpid())
    store = host_store(own_address, 0, timeout_s=10, spans_machines=True)
    assert store is not None
    store.set("key", "value")
    assert listening(os.getpid()) - before == {f"{own_address}:{store.port}"}
    assert store.get("key") == b"value"


def test_a_store_is_left_to_torch_where_its_address_is_not_this_machines_and_a_port_that_is_taken_is_an_error() -> None:
    # A forwarded port; and a machine that knows itself by its loopback.
    for address in ("192.0.2.1", "127.0.0.1"):
        assert host_store(address, find_free_port(), timeout_s=10, spans_machines=True) is None
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        host_store("127.0.0.1", taken.getsockname()[1], timeout_s=10)


def test_an_interface_that_the_user_names_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    restrict_to_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert os.environ.pop("NCCL_SOCKET_IFNAME") in ("lo", "lo0")
