"""Checkpoints behind a URL: real runs that save to a real server of S3, over a socket."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.commands import LAUNCHER_VARIABLES, write_run
from typer.testing import CliRunner

from meshwright.base.errors import ConfigError
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.checkpoint.opening import place_of
from meshwright.checkpoint.places import Access
from meshwright.checkpoint.remote import RemoteFolder
from meshwright.cli import main as cli
from meshwright.train.report import MEASURED

pytest.importorskip("s3fs")
server_of_moto = pytest.importorskip("moto.server")

STEPS = 6
BUCKET = "s3://checkpoints"


class Server:
    """A server of S3 that can be stopped, and started again on its port."""

    def __init__(self) -> None:
        self.server = server_of_moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
        self.server.start()
        _, self.port = self.server.get_host_and_port()

    def stop(self) -> None:
        self.server.stop()

    def start(self) -> None:
        self.server = server_of_moto.ThreadedMotoServer(ip_address="127.0.0.1", port=self.port)
        self.server.start()

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "something",
            "AWS_DEFAULT_REGION": "us-east-1",
            # What is refused is refused at once: meshwright tries again by itself.
            "AWS_MAX_ATTEMPTS": "1",
        }


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = Server()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in started.environment.items():
            patch.setenv(name, value)
        import s3fs

        s3fs.S3FileSystem().mkdir("checkpoints")
        yield started
    started.stop()


class Runs:
    def __init__(self, directory: Path) -> None:
        self.directory, self.file = directory, write_run(directory)

    def write(self, name: str, **checkpoint: Any) -> Path:
        values = yaml.safe_load(self.file.read_text())
        values |= {"plan": {"enabled": False}, "steps": STEPS, "output_dir": str(self.directory / name), "sample": None}
        values["checkpoint"] = {"every": 2, "keep_last": None, "to": f"{BUCKET}/{name}", **checkpoint}
        file = self.directory / f"{name}.yaml"
        file.write_text(yaml.safe_dump(values))
        return file

    def begin(self, file: Path, *more: str) -> subprocess.Popen[str]:
        environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
        command = [sys.executable, "-m", "meshwright", "train", str(file), *more]
        return subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def __call__(self, name: str, *more: str, **checkpoint: Any) -> tuple[int, str]:
        process = self.begin(self.write(name, **checkpoint), *more)
        output, _ = process.communicate(timeout=240)
        return process.returncode, output

    def numbers(self, name: str) -> list[dict[str, Any]]:
        lines = (self.directory / name / "metrics.jsonl").read_text().splitlines()
        return [{key: value for key, value in json.loads(line).items() if key not in MEASURED} for line in lines]

    def weights(self, name: str) -> bytes:
        return (self.directory / name / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def local(runs: Runs) -> str:
    """A run that saves to its directory."""
    code, output = runs("local", to=None)
    assert code == 0, output
    return "local"


def _steps(name: str) -> list[str]:
    return sorted(place_of(f"{BUCKET}/{name}").names())


def _command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(arguments))
    return result.exit_code, result.output


def test_a_killed_run_goes_on_from_the_server_bit_for_bit(runs: Runs, local: str, tmp_path: Path) -> None:
    process = runs.begin(runs.write("killed", keep_last=2))
    deadline = time.monotonic() + 120
    while place_of(f"{BUCKET}/killed/step-00000002").sizes() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (runs.directory / "killed" / "summary.json").exists()
    # What was half written, whether the kill has left such or not.
    RemoteFolder(f"{BUCKET}/killed/step-00000005").put("tensors-00000.bin", [b"half"])
    code, output = runs("killed", keep_last=2)
    assert code == 0, output
    assert (runs.numbers("killed"), runs.weights("killed")) == (runs.numbers(local), runs.weights(local))
    assert _steps("killed") == ["step-00000004", "step-00000006"]
    assert not (runs.directory / "killed" / "checkpoints").exists()

    # All commands take the URL.
    url = f"{BUCKET}/killed"
    code, output = _command("checkpoint", "verify", url)
    assert code == 0
    assert f"{url}/step-00000006: whole" in output
    assert _command("checkpoint", "show", url)[0] == 0
    out = tmp_path / "exported"
    code, output = _command("export", f"{url}/step-00000006", str(out))
    assert code == 0, output
    assert (out / "model.safetensors").read_bytes() == runs.weights(local)
    assert (out / "tokenizer.json").exists()

    # From an earlier one, named by its URL; the later one is set aside.
    for name in ("summary.json", "model"):
        (runs.directory / "killed" / name).rename(tmp_path / name)
    code, output = runs("killed", "--set", f"resume={url}/step-00000004", keep_last=2)
    assert code == 0, output
    assert f"going on from {url}/step-00000004, after step 4" in output
    assert runs.weights("killed") == runs.weights(local)
    assert "abandoned-1" in _steps("killed")
    assert _command("checkpoint", "verify", f"{url}/abandoned-1")[0] == 0

    # And back to what was set aside, with its metrics.
    for name in ("metrics.jsonl", "summary.json"):
        (runs.directory / "killed" / name).unlink()
    back = f"resume={url}/abandoned-1/step-00000006"
    code, output = runs("killed", "--set", back, "--set", f"steps={STEPS + 1}", keep_last=2)
    assert code == 0, output
    assert f"going on from {url}/abandoned-1/step-00000006, after step 6" in output
    numbers = runs.numbers("killed")
    assert ([each["step"] for each in numbers], numbers[:STEPS]) == ([*range(1, STEPS + 2)], runs.numbers(local))


def test_what_another_run_has_saved_is_neither_gone_on_from_nor_replaced_unasked(
    runs: Runs, local: str, tmp_path: Path
) -> None:
    assert runs("first")[0] == 0
    to = f"{BUCKET}/first"
    RemoteFolder(to).put("notes/of.txt", [b"of somebody"])
    before = {name: place_of(f"{to}/{name}").sizes() for name in _steps("first")}
    anew = ("--set", "resume=never")
    for more, told in (
        (anew, "holds step-00000006 of an earlier run. Name another place, or set overwrite=true"),
        ((*anew, "--set", "overwrite=true"), "step-00000006 is of the run with output_dir="),
    ):
        code, output = runs("second", *more, to=to)
        assert (code, told in output, "Traceback" in output) == (2, True, False), output
        assert {name: place_of(f"{to}/{name}").sizes() for name in _steps("first")} == before
        assert not (runs.directory / "second" / "metrics.jsonl").exists()

    # Its own it replaces when told to, and nothing else that is there.
    code, output = runs("first", *anew, "--set", "overwrite=true", every=3)
    assert code == 0, output
    assert "going on" not in output
    assert _steps("first") == ["notes", "step-00000003", "step-00000006"]
    assert runs.weights("first") == runs.weights(local)


def test_torn_and_foreign_objects_are_found(runs: Runs, local: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    assert runs("signed", key_file=str(key))[0] == 0
    url = f"{BUCKET}/signed"
    assert "signed with this key" in _command("checkpoint", "verify", url, "--key-file", str(key))[1]
    assert "k" * 32 not in (runs.directory / "signed" / "run.yaml").read_text()
    other = tmp_path / "other"
    other.write_bytes(b"o" * 32)
    assert _command("checkpoint", "verify", url, "--key-file", str(other))[0] == 2

    # A byte of the newest is changed: it is told, and an older one is taken.
    newest = place_of(f"{url}/step-00000006")
    assert isinstance(newest, RemoteFolder)
    with newest.open("tensors-00001.bin") as file:
        content = bytearray(file.read())
    content[-1] ^= 1
    newest.put("tensors-00001.bin", [content])
    code, output = _command("checkpoint", "verify", url)
    assert code == 1
    assert "the contents of tensors-00001.bin have changed since it was written" in output
    (runs.directory / "signed" / "summary.json").unlink()
    code, output = runs("signed", key_file=str(key))
    assert code == 0, output
    assert "An older one is tried" in output
    assert runs.weights("signed") == runs.weights(local)

    # Another key is refused before anything starts, and nothing is lost.
    (runs.directory / "signed" / "summary.json").unlink()
    before = {name: place_of(f"{url}/{name}").sizes() for name in _steps("signed")}
    for more in ((), ("--set", "resume=never", "--set", "overwrite=true")):
        code, output = runs("signed", *more, key_file=str(other))
        assert code == 2
        assert "is signed with another key" in output
    assert {name: place_of(f"{url}/{name}").sizes() for name in _steps("signed")} == before


def test_adapters_are_exported_and_merged_from_a_url(runs: Runs, local: str, tmp_path: Path) -> None:
    file = runs.write("adapted")
    values = yaml.safe_load(file.read_text())
    values["data"].pop("vocab_size")
    base = runs.directory / local / "model"
    values["model"] = {"path": str(base), "peft": {"type": "lora", "r": 2, "target_modules": "all-linear"}}
    file.write_text(yaml.safe_dump(values))
    process = runs.begin(file)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    url = f"{BUCKET}/adapted/step-00000006"
    adapter, written = (
        (place / "adapter_model.safetensors").read_bytes()
        for place in (runs.directory / "adapted" / "model", _exported(url, tmp_path / "adapter"))
    )
    assert adapter == written
    merged = _exported(url, tmp_path / "merged", "--merge")
    of_directory = _exported(str(runs.directory / "adapted" / "model"), tmp_path / "other", "--merge")
    weights = [(place / "model.safetensors").read_bytes() for place in (merged, of_directory, base)]
    assert weights[0] == weights[1] != weights[2]


def _exported(source: str, output: Path, *more: str) -> Path:
    code, told = _command("export", *more, source, str(output))
    assert code == 0, told
    return output


@pytest.mark.parametrize("on_error", ["continue", "stop"])
def test_a_server_that_goes_away_is_told_and_tried_again(on_error: str, runs: Runs, local: str, server: Server) -> None:
    name = f"lost-{on_error}"
    process = runs.begin(runs.write(name, on_error=on_error, retries=1))
    deadline = time.monotonic() + 120
    while place_of(f"{BUCKET}/{name}/step-00000002", Access()).sizes() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    server.stop()
    try:
        output, _ = process.communicate(timeout=200)
    finally:
        server.start()
    assert "Trying again in" in output
    assert re.search(r"step-0000000\d could not be written|step-0000000\d cannot be written", output), output
    assert "Traceback" not in output
    if on_error == "continue":
        assert process.returncode == 0, output
        assert (runs.numbers(name), runs.weights(name)) == (runs.numbers(local), runs.weights(local))
    else:
        assert process.returncode == 1, output
        assert re.search(r"error: the checkpoint \S+ c\w+ (not )?be written", output)


def test_bad_urls_are_refused_before_anything_starts(runs: Runs) -> None:
    for to, told in (
        ("memory://x", "is in the memory of one process, and the run has 2 ranks"),
        ("s33://bucket/x", "Did you mean 's3'?"),
        ("s3://", "names no place"),
        ("gs://bucket/x", "needs a package that is not installed"),
        ("s3://no-such-bucket/x", "s3://no-such-bucket/x cannot be read: The specified bucket does not exist"),
    ):
        code, output = _command("train", str(runs.write("bad", to=to)))
        assert (code, told in output, "Traceback" in output) == (2, True, False), output
        assert not (runs.directory / "bad").exists()


def test_without_fsspec_a_url_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    for url, extra in (("s3://bucket/x", "s3"), ("gs://bucket/x", "remote")):
        with pytest.raises(ConfigError, match=rf"needs the package fsspec.* pip install -e '\.\[{extra}\]' in a clone"):
            place_of(url)


def test_objects_are_read_in_parts_and_a_write_that_fails_leaves_none(server: Server) -> None:
    folder = RemoteFolder(f"{BUCKET}/parts")
    folder.put("a/b.bin", [bytes(range(100)), bytes(range(100, 200))])
    assert folder.sizes() == {"a/b.bin": 200}
    with folder.open("a/b.bin") as file:
        file.seek(50)
        found = bytearray(100)
        assert file.readinto(found) == 100  # type: ignore[attr-defined]
    assert found == bytes(range(50, 150))

    def failing() -> Iterator[bytes]:
        yield b"some"
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        folder.put(MANIFEST, failing())
    assert folder.sizes() == {"a/b.bin": 200}
    folder.move(RemoteFolder(f"{BUCKET}/moved"))
    assert (folder.sizes(), RemoteFolder(f"{BUCKET}/moved").sizes()) == (None, {"a/b.bin": 200})


def test_what_a_broken_connection_leaves_behind_is_no_traceback_and_what_else_fails_is(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    files, _ = RemoteFolder(f"{BUCKET}/tasks")._opened()
    done = threading.Event()
    for error in (ConnectionResetError("Cannot write to closing transport"), KeyError("x")):
        context = {"message": "never retrieved", "exception": error}
        files.loop.call_soon_threadsafe(files.loop.call_exception_handler, context)
    files.loop.call_soon_threadsafe(done.set)
    assert done.wait(10)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError]
