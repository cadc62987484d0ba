"""The process that holds copies of state: what strangers cost it, and who may enter the place of its socket."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from meshwright.base.processes import get_process_identity
from meshwright_replicate import client, protocol, server
from meshwright_replicate.protocol import get_socket_path, listen_on_socket, remove_socket

TOKEN = "a token"
MARGIN_MB = 30
SLACK_S = 10.0
"""For a busy machine."""


class Process:
    """A keeper in a process of its own, and the port at which it answers other nodes."""

    def __init__(self, place: Path) -> None:
        self.path = place / "keeper.sock"
        me = os.getpid()
        command = [
            sys.executable,
            "-m",
            "meshwright_replicate.server",
            str(self.path),
            str(me),
            get_process_identity(me),
        ]
        self.process = subprocess.Popen(command)
        until = time.monotonic() + 30
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            if connection.connect_ex(str(self.path)) == 0:
                break
            connection.close()
            assert time.monotonic() < until
            time.sleep(0.02)
        self.near = protocol.Connection(connection)
        self.port = int(self.near.request("listen", host="127.0.0.1", token=TOKEN)["port"])

    def number(self, field: str) -> int:
        """Of /proc/PID/status: `Threads`, or `VmRSS` in kB."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))

    def connection(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    found = Process(tmp_path)
    yield found
    found.near.close()
    found.process.kill()
    found.process.wait()


def test_a_stranger_makes_a_keeper_hold_a_few_kilobytes(process: Process) -> None:
    before = process.number("VmRSS")
    sent: list[int] = []

    def send_on(connection: socket.socket) -> None:
        """All that the other takes."""
        connection.sendall(struct.pack(">Q", 1 << 28))
        with suppress(OSError):
            for _ in range(256):
                connection.sendall(b"x" * (1 << 20))
                sent.append(1 << 20)

    with ExitStack() as open_ones, ThreadPoolExecutor(8) as pool:
        connections = [open_ones.enter_context(process.connection()) for _ in range(8)]
        assert not wait(
            [pool.submit(send_on, each) for each in connections], protocol.AUTH_TIMEOUT_S + SLACK_S
        ).not_done
        assert process.number("VmRSS") - before < MARGIN_MB * 1000
    # What the system itself buffers.
    assert sum(sent) < 8 * (64 << 20)


@pytest.mark.slow
def test_silent_strangers_are_few_and_leave_soon_and_who_has_the_token_comes_through(process: Process) -> None:
    before = process.number("Threads")
    with ExitStack() as open_ones:
        silent = [open_ones.enter_context(process.connection()) for _ in range(200)]
        time.sleep(0.5)
        assert process.number("Threads") - before <= server.MAX_UNAUTHENTICATED
        link = process.connection()
        protocol.authenticate_to_server(link, TOKEN)
        assert protocol.Connection(link).request("list")["steps"] == {}
        link.close()
        until = time.monotonic() + 4 * protocol.AUTH_TIMEOUT_S + SLACK_S
        while process.number("Threads") > before and time.monotonic() < until:
            time.sleep(0.1)
        assert process.number("Threads") <= before
        # The first of them have been left.
        silent[0].settimeout(5)
        while silent[0].recv(1 << 12):
            pass


@pytest.mark.slow
def test_a_byte_now_and_then_wins_no_time(process: Process) -> None:
    with process.connection() as connection:
        began = time.monotonic()
        protocol.receive_message(connection)
        text = json.dumps({"nonce": "0", "proof": "0"}).encode()
        with suppress(OSError):
            for byte in struct.pack(">Q", len(text) + 1000) + text + b" " * 1000:
                connection.sendall(bytes([byte]))
                time.sleep(0.2)
        assert time.monotonic() - began < protocol.AUTH_TIMEOUT_S + SLACK_S


@pytest.mark.parametrize(
    "text",
    [b"[" * 4000, b'{"nonce": "\\ud800", "proof": "\\ud800"}', b'{"nonce": 1e999, "proof": null}', b"\xff", b"[]", b""],
)
def test_what_is_no_proof_ends_the_connection_and_nothing_else(process: Process, text: bytes) -> None:
    with process.connection() as connection:
        protocol.receive_message(connection)
        connection.sendall(struct.pack(">Q", len(text)) + text)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(SLACK_S)
        while connection.recv(1 << 12):
            pass
    with process.connection() as connection:
        protocol.authenticate_to_server(connection, TOKEN)
    assert process.process.poll() is None


# -- where its socket is


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files, with a short path, and no other."""
    found = tmp_path_factory.mktemp("t")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(found))
    return found


@pytest.mark.parametrize("how", ["open", "link", "file", "owner"])
def test_a_directory_that_another_user_has_made_is_refused(place: Path, how: str) -> None:
    if how == "owner" and os.geteuid():
        pytest.skip("only root can give it away")
    path = place / f"meshwright-{os.geteuid()}"
    if how == "link":
        (place / "other").mkdir(mode=0o700)
        path.symlink_to(place / "other")
    elif how == "file":
        path.touch(0o600)
    else:
        path.mkdir()
        path.chmod(0o700 if how == "owner" else 0o770)
    if how == "owner":
        os.chown(path, 65534, 65534)
    with pytest.raises(OSError, match=r"another user|File exists"):
        get_socket_path("name")
    with pytest.raises(client.ConfigError, match=r"cannot create its socket"):
        client._find_or_start_server()


def test_a_runtime_directory_of_the_user_is_taken(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = place / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert get_socket_path("name").is_relative_to(runtime)
    runtime.chmod(0o777)
    assert not get_socket_path("name").is_relative_to(runtime)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_user_does_not_reach_the_socket(place: Path) -> None:
    place.chmod(0o777)
    path = get_socket_path("name")
    listener = listen_on_socket(path)
    assert listener is not None
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setuid(65534)
            socket.socket(socket.AF_UNIX).connect(str(path))
        except PermissionError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    listener.close()


def test_one_keeper_for_one_name_in_a_directory_of_the_users_alone_and_dead_ones_leave_nothing(place: Path) -> None:
    path = get_socket_path("name")
    assert path.parent.parent == place
    assert path.parent.stat().st_mode & 0o777 == 0o700
    dead = path.with_name("dead.sock")
    code = "import sys, pathlib, meshwright_replicate.protocol as s; s.listen_on_socket(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(dead)], check=True)
    assert dead.exists()
    first = listen_on_socket(path)
    assert first is not None
    assert listen_on_socket(path) is None
    assert not dead.exists()
    remove_socket(path)
    assert not list(path.parent.iterdir())
    first.close()
