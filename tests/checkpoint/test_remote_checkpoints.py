"""Checkpoints behind a URL: real runs that save to a real server of S3, over a socket."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checkpoint_runs import CheckpointRuns, FinishedRun
from support.commands import invoke_in_process

from meshwright.base.errors import ConfigError
from meshwright.checkpoint.manifest import MANIFEST_FILE
from meshwright.checkpoint.remote_storage import RemoteStorage, open_storage

pytest.importorskip("s3fs")
server_of_moto = pytest.importorskip("moto.server")

STEPS = 6
BUCKET = "s3://checkpoints"


class Server:
    """A server of S3 that can be stopped, and started again on its port."""

    def __init__(self) -> None:
        self.port = 0
        self.start()

    def start(self) -> None:
        self.server = server_of_moto.ThreadedMotoServer(ip_address="127.0.0.1", port=self.port)
        self.server.start()
        _, self.port = self.server.get_host_and_port()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = Server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{started.port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "someone")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "something")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        # meshwright retries by itself.
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        import s3fs

        s3fs.S3FileSystem().mkdir("checkpoints")
        yield started
    started.server.stop()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, server: Server) -> CheckpointRuns:
    return CheckpointRuns(tmp_path_factory.mktemp("runs"), STEPS)


@pytest.fixture(scope="module")
def local(runs: CheckpointRuns) -> FinishedRun:
    """A run that saves to its directory."""
    ended = runs("local")
    assert ended.code == 0, ended.output
    return ended


def _steps(name: str) -> list[str]:
    return sorted(open_storage(f"{BUCKET}/{name}").list_children())


def _sizes(name: str) -> dict[str, Any]:
    return {step: open_storage(f"{BUCKET}/{name}/{step}").list_file_sizes() for step in _steps(name)}


def _await_step_2(name: str) -> None:
    deadline = time.monotonic() + 120
    while open_storage(f"{BUCKET}/{name}/step-00000002").list_file_sizes() is None and time.monotonic() < deadline:
        time.sleep(0.02)


def _again(ended: FinishedRun, local: FinishedRun, reported: str) -> None:
    """Check that a run resumed, and ended with the weights of the undisturbed one."""
    assert (ended.code, reported in ended.output) == (0, True), ended.output
    assert ended.reproducible_results[1] == local.reproducible_results[1]


@pytest.mark.slow
def test_a_killed_run_resumes_from_the_server_bit_for_bit(
    runs: CheckpointRuns, local: FinishedRun, tmp_path: Path
) -> None:
    url = f"{BUCKET}/killed"
    options: Any = {"keep_last": 2, "path": url}
    process = runs.start(runs.write_run_file("killed", **options))
    _await_step_2("killed")
    os.killpg(process.pid, signal.SIGKILL)
    directory = runs.wait("killed", process).directory
    assert not (directory / "summary.json").exists()
    # An incomplete checkpoint, whether the kill has left one or not.
    RemoteStorage(f"{url}/step-00000005").write_file("tensors-00000.bin", [b"half"])
    ended = runs("killed", **options)
    assert ended.code == 0, ended.output
    assert ended.reproducible_results == local.reproducible_results
    assert _steps("killed") == ["step-00000004", "step-00000006"]
    assert not (directory / "checkpoints").exists()

    # All commands take the URL.
    code, output = invoke_in_process("checkpoint", "verify", url)
    assert (code, f"{url}/step-00000006: valid" in output) == (0, True)
    assert invoke_in_process("checkpoint", "show", url)[0] == 0
    out = tmp_path / "exported"
    assert invoke_in_process("export", f"{url}/step-00000006", str(out))[0] == 0
    assert (out / "model.safetensors").read_bytes() == (local.directory / "model/model.safetensors").read_bytes()
    assert (out / "tokenizer.json").exists()

    # From an earlier one, named by its URL; the later one is set aside.
    for name in ("summary.json", "model"):
        (directory / name).rename(tmp_path / name)
    ended = runs("killed", "--set", f"resume={url}/step-00000004", **options)
    _again(ended, local, f"resuming from {url}/step-00000004, after step 4")
    assert "abandoned-1" in _steps("killed")
    assert invoke_in_process("checkpoint", "verify", f"{url}/abandoned-1")[0] == 0

    # And back to what was set aside, with its metrics.
    for name in ("metrics.jsonl", "summary.json"):
        (directory / name).unlink()
    more = ("--set", f"resume={url}/abandoned-1/step-00000006", "--set", f"steps={STEPS + 1}")
    ended = runs("killed", *more, **options)
    assert ended.code == 0, ended.output
    assert f"resuming from {url}/abandoned-1/step-00000006, after step 6" in ended.output
    metrics = ended.reproducible_results[0]
    assert ([each["step"] for each in metrics], metrics[:STEPS]) == (
        [*range(1, STEPS + 2)],
        local.reproducible_results[0],
    )


@pytest.mark.slow
def test_what_another_run_has_saved_is_neither_continued_from_nor_replaced_unasked(
    runs: CheckpointRuns, local: FinishedRun
) -> None:
    to = f"{BUCKET}/first"
    assert runs("first", path=to).code == 0
    RemoteStorage(to).write_file("notes/of.txt", [b"of somebody"])
    before, again = _sizes("first"), ("--set", "resume=never")
    for more, reported in (
        (again, "holds step-00000006 of an earlier run. Name another location, or set overwrite=true"),
        ((*again, "--set", "overwrite=true"), "step-00000006 belongs to the run with output_dir="),
    ):
        refused = runs("second", *more, path=to)
        refused.assert_fails(2, reported)
        assert _sizes("first") == before
        assert not (refused.directory / "metrics.jsonl").exists()
    # Its own it replaces when reported to, and nothing else that is there.
    ended = runs("first", *again, "--set", "overwrite=true", every=3, path=to)
    _again(ended, local, "")
    assert "continuing" not in ended.output
    assert _steps("first") == ["notes", "step-00000003", "step-00000006"]


@pytest.mark.slow
def test_incomplete_and_foreign_objects_are_found(runs: CheckpointRuns, local: FinishedRun, tmp_path: Path) -> None:
    key, other, url = tmp_path / "key", tmp_path / "other", f"{BUCKET}/signed"
    key.write_bytes(b"k" * 32)
    other.write_bytes(b"o" * 32)
    directory = runs("signed", key_file=str(key), path=url).directory
    assert "signed with this key" in invoke_in_process("checkpoint", "verify", url, "--key-file", str(key))[1]
    assert "k" * 32 not in (directory / "run.yaml").read_text()
    assert invoke_in_process("checkpoint", "verify", url, "--key-file", str(other))[0] == 2

    # A byte of the newest is changed: it is reported, and an older one is taken.
    newest = RemoteStorage(f"{url}/step-00000006")
    with newest.open("tensors-00001.bin") as file:
        content = bytearray(file.read())
    content[-1] ^= 1
    newest.write_file("tensors-00001.bin", [content])
    code, output = invoke_in_process("checkpoint", "verify", url)
    assert code == 1
    assert "the contents of tensors-00001.bin have changed since it was written" in output
    (directory / "summary.json").unlink()
    _again(runs("signed", key_file=str(key), path=url), local, "An older one is tried")

    # Another key is refused before anything starts, and nothing is lost.
    (directory / "summary.json").unlink()
    before = _sizes("signed")
    more = ("--set", "resume=never", "--set", "overwrite=true")
    runs("signed", *more, key_file=str(other), path=url).assert_fails(2, "is signed with another key")
    assert _sizes("signed") == before


@pytest.mark.slow
def test_a_server_that_goes_away_is_reported_and_tried_again(
    runs: CheckpointRuns, local: FinishedRun, server: Server
) -> None:
    process = runs.start(runs.write_run_file("lost", on_error="continue", retries=1, path=f"{BUCKET}/lost"))
    _await_step_2("lost")
    server.server.stop()
    try:
        ended = runs.wait("lost", process)
    finally:
        server.start()
    ended.assert_fails(0, "Trying again in")
    assert re.search(r"step-0000000\d could not be written|step-0000000\d cannot be written", ended.output)
    assert ended.reproducible_results == local.reproducible_results


@pytest.mark.slow
def test_bad_urls_are_refused_before_anything_starts(runs: CheckpointRuns) -> None:
    for to, reported in (
        ("memory://x", "is in the memory of one process, but the run has 2 ranks"),
        ("s33://bucket/x", "Did you mean 's3'?"),
        ("s3://", "names no place"),
        ("gs://bucket/x", "needs a package that is not installed"),
        ("s3://no-such-bucket/x", "s3://no-such-bucket/x cannot be read: The specified bucket does not exist"),
    ):
        code, output = invoke_in_process("train", str(runs.write_run_file("bad", path=to)))
        assert (code, reported in output, "Traceback" in output) == (2, True, False), output
        assert not (runs.directory / "bad").exists()


def test_without_fsspec_a_url_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    for url, extra in (("s3://bucket/x", "s3"), ("gs://bucket/x", "remote")):
        with pytest.raises(ConfigError, match=rf"needs the package fsspec.* pip install -e '\.\[{extra}\]' in a clone"):
            open_storage(url)


def test_objects_are_read_in_parts_and_a_write_that_fails_leaves_none(server: Server) -> None:
    folder = RemoteStorage(f"{BUCKET}/parts")
    folder.write_file("a/b.bin", [bytes(range(100)), bytes(range(100, 200))])
    assert folder.list_file_sizes() == {"a/b.bin": 200}
    with folder.open("a/b.bin") as file:
        file.seek(50)
        found = bytearray(100)
        assert file.readinto(found) == 100  # type: ignore[attr-defined]
    assert found == bytes(range(50, 150))

    def failing() -> Iterator[bytes]:
        yield b"some"
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        folder.write_file(MANIFEST_FILE, failing())
    assert folder.list_file_sizes() == {"a/b.bin": 200}
    folder.move_to(RemoteStorage(f"{BUCKET}/moved"))
    assert (folder.list_file_sizes(), RemoteStorage(f"{BUCKET}/moved").list_file_sizes()) == (None, {"a/b.bin": 200})
