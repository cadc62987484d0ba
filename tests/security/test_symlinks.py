"""A run does not write through links that are in its directory."""

from __future__ import annotations

import ast
import os
import re
from contextlib import suppress
from pathlib import Path

import pytest
from security.small_run import write_small_run
from support.commands import run_command

from meshwright.base.errors import CheckpointError, ConfigError
from meshwright.checkpoint.lifecycle import LocalCheckpointWriter
from meshwright.checkpoint.storage import LocalStorage
from meshwright.files.parsing import time_limit
from meshwright.files.writing import append_text, atomic_writer, open_for_append, remove_existing, write_atomically
from meshwright_run import run_directory as files

CORE = Path(files.__file__).parents[2]
MODE = re.compile(r"[wax][bt+]*|r[bt]*\+[bt]*")
SECRET = "what the user has written\n"
FILES = [
    files.METRICS,
    files.LOSS_CURVE,
    files.EVENTS,
    files.REFERENCE,
    files.SUMMARY,
    files.RUN_FILE,
    files.LOCK_OWNER,
    files.LOCK,
]
DIRECTORIES = [
    *(files.CHECKPOINTS, files.MODEL, files.AVERAGED_MODEL, files.RANK_LOGS, files.TIMELINE, "profile", "faults"),
    *(f"{files.MODEL}.writing", f"{files.MODEL}.replaced", f"{files.MODEL}.checkpoint"),
    f"{files.CHECKPOINTS}/step-00000001.writing",
]


def _refused(out: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a link|is neither"), files.RunDirectory(out).lock(timeout_s=0):
        pass


OF_TRACKERS = ["tensorboard", "wandb", "mlflow.db", "mlflow.db-wal", "mlartifacts", "a tracker's"]


def test_a_link_in_the_directory_of_a_run_is_refused_and_what_it_points_to_stays(tmp_path: Path) -> None:
    file, directory = tmp_path / "file", tmp_path / "directory"
    file.write_text(SECRET)
    directory.mkdir()
    (directory / "file").write_text(SECRET)
    for number, name in enumerate([*FILES, *OF_TRACKERS, *DIRECTORIES]):
        link = tmp_path / str(number) / name
        link.parent.mkdir(parents=True)
        link.symlink_to(directory if name in DIRECTORIES else file)
        _refused(tmp_path / str(number))
        assert file.read_text() == SECRET
        assert [path.name for path in directory.iterdir()] == ["file"]


@pytest.mark.parametrize("name", [files.METRICS, files.EVENTS, files.SUMMARY, files.RUN_FILE, "mlflow.db"])
def test_a_pipe_in_the_directory_of_a_run_is_refused(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    _refused(tmp_path)
    with pytest.raises(OSError, match=r"it is no file|No such device"), time_limit(20, "the pipe"):
        append_text(tmp_path / name, "text")


@pytest.mark.slow
def test_a_run_refuses_links_and_replaces_those_of_names_on_the_way(tmp_path: Path) -> None:
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.write_text(SECRET)
    # A link to the directory itself is followed.
    (tmp_path / "disk").mkdir()
    out.symlink_to(tmp_path / "disk")
    for name in FILES:
        (out / f"{name}.tmp").symlink_to(victim)
    (out / files.METRICS).symlink_to(victim)
    run = str(write_small_run(tmp_path, output_dir=str(out), overwrite=True))
    done = run_command("train", run)
    assert (done.returncode, "no run created" in done.stderr) == (2, True), done.stderr
    (out / files.METRICS).unlink()
    done = run_command("train", run)
    assert done.returncode == 0, done.stderr
    assert victim.read_text() == SECRET
    assert (tmp_path / "disk" / files.SUMMARY).is_file()


# -- the functions that write


def test_files_that_grow_are_not_opened_through_links(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text(SECRET)
    link.symlink_to(victim)
    for opened in (lambda: open_for_append(link), lambda: append_text(link, "more")):
        with pytest.raises(OSError, match="symbolic link"):
            opened()
    assert victim.read_text() == SECRET
    (tmp_path / "victims").mkdir()
    (tmp_path / "step.writing").symlink_to(tmp_path / "victims")
    with pytest.raises(CheckpointError, match="is a link"):
        LocalCheckpointWriter(LocalStorage(tmp_path / "step")).prepare()


def test_files_that_are_written_whole_replace_links(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text(SECRET)
    for name in ("file", "file.tmp"):
        (tmp_path / name).symlink_to(victim)
    write_atomically(tmp_path / "file", "new")
    assert (victim.read_text(), (tmp_path / "file").read_text()) == (SECRET, "new")
    assert not (tmp_path / "file").is_symlink()
    (tmp_path / "other").symlink_to(victim)
    assert not remove_existing(tmp_path / "other").is_symlink()
    # One that fails on the way leaves what was there.
    with suppress(KeyboardInterrupt), atomic_writer(tmp_path / "file") as file:
        file.write(b"newer")
        raise KeyboardInterrupt
    assert (tmp_path / "file").read_text() == "new"
    assert {each.name for each in tmp_path.iterdir()} == {"file", "victim"}


def _writes(tree: ast.AST) -> list[int]:
    """Lines on which a file is written by other means."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        texts = [each.value for each in values if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        if name in ("write_text", "write_bytes") or (name == "open" and any(MODE.fullmatch(each) for each in texts)):
            found.append(node.lineno)
    return found


@pytest.mark.parametrize("room", ["train", "profile"])
def test_all_that_is_written_into_a_run_goes_through_these_functions(room: str) -> None:
    found = {path.name: _writes(ast.parse(path.read_text())) for path in (CORE / room).rglob("*.py")}
    assert not {name: lines for name, lines in found.items() if lines}
    known = "path.write_text('')\npath.open('a')\nopen(path, mode='wb')\npath.open('rb')"
    assert _writes(ast.parse(known)) == [1, 2, 3]
