"""What files hold does not reach a terminal but as text: no escapes, no markup, and no traceback for want of either."""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

import meshwright
from meshwright.base.errors import ConfigError, escape_unprintable
from meshwright.cli.main import app
from meshwright.files.terminal import create_console, echo, escape_markup, parse_markup, warn
from meshwright_run.data import progress as data_progress

CORE = Path(meshwright.__file__).parent
ROOT = CORE.parents[1]
HOSTILE = [
    "\x1b[2J\x1b[H",
    "\x1b]0;title\x07",
    "\x1b]8;;http://x\x07link\x1b]8;;\x07",
    "\x9b2J",
    "\x1bc",
    "\u202egnp.exe",
    "\ud800",
    "\x00\x08\x7f",
    "\r\x1b[K",
    "\u2028\u2029\x85",
    "[/x] [bold]b[/bold] [link=http://x]y[/link]",
    "[/]",
    "[red",
    ":bomb: :warning:",
    "%s %(x)s {x}",
]
STEERING = {*map(chr, range(32)), *map(chr, range(127, 160)), "\u202e", "\u2028", "\u2029"} - {"\n", "\t"}


def _is_text(written: str) -> bool:
    return not STEERING & {*written}


@pytest.mark.parametrize("text", HOSTILE, ids=map(str, range(len(HOSTILE))))
def test_text_is_written_as_text(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    echo(f"{text}\n")
    echo(f"{text}\n", stderr=True)
    out, err = capsys.readouterr()
    assert out == err == escape_unprintable(f"{text}\n").encode("utf-8", "backslashreplace").decode()
    assert _is_text(out)
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        warn(text)
    assert _is_text(str(reported[0].message))
    assert reported[0].filename == __file__
    assert _is_text(str(ConfigError(text)))


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("text", HOSTILE, ids=map(str, range(len(HOSTILE))))
def test_a_console_writes_text_in_all_that_it_shows(text: str, is_terminal: bool) -> None:
    # Without colors, a terminal gets no escape of rich's own for these.
    file = io.StringIO()
    console = create_console(file=file, width=200, force_terminal=is_terminal, color_system=None)
    table = Table(title=text)
    table.add_column(text)
    table.add_row(text)
    for each in (text, Text(text), table, parse_markup(f"[bold]{escape_markup(text)}[/bold]")):
        console.print(each)
    assert _is_text(file.getvalue())
    assert "[/x]" not in text or file.getvalue().count("[/x]") >= 5


MESSAGES = """
import logging, sys, warnings
from meshwright.files.terminal import install_output_escaping
import transformers
install_output_escaping()
install_output_escaping()
text = sys.argv[1]
transformers.logging.get_logger("transformers.x").warning_once(text)
logging.getLogger("datasets").error("quotes %s", text)
warnings.warn(text)
"""


def test_what_libraries_log_and_warn_of_is_escaped() -> None:
    text = "\x1b]0;title\x07 \x9b2J \u202e"
    done = subprocess.run([sys.executable, "-c", MESSAGES, text], capture_output=True, text=True, check=True)
    assert _is_text(done.stderr)
    assert done.stderr.count("title") == 3, done.stderr


def test_the_name_of_a_source_is_text_in_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    # rich draws what is alive behind what a console escapes.
    file = io.StringIO()
    monkeypatch.setattr(data_progress, "CONSOLE", create_console(file=file, force_terminal=True))
    with data_progress.show_progress("\x1b[2J", data_progress.ReadProgress(total=2)) as advance:
        advance(1)
    assert "\x1b[2J" not in file.getvalue()
    assert "\\x1b[2J" in file.getvalue()


# -- nothing else writes


WRITES = {"print", "input", "Console", "Continuing", "rich.console.Console", "rich.print", "typer.echo", "click.echo"}
WRITES |= {"warnings.warn", "warnings.warn_explicit", "Text.from_markup"}
OF_STREAMS = {"stdout", "stderr", "__stdout__", "__stderr__"}
MARKUP = {
    "core/meshwright/files/terminal.py",
    "plugins/diagnose/src/meshwright_diagnose/replay/render.py",
    "plugins/run/src/meshwright_run/output.py",
    "plugins/run/src/meshwright_run/profile/render.py",
    "plugins/testing/src/meshwright_testing/check_report.py",
}


def _others(tree: ast.AST) -> list[str]:
    """Ways to write to a terminal beside those of `files.terminal`."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        last = called.rpartition(".")[2]
        if called in WRITES or (last in ("write", "writelines") and {*called.split(".")} & OF_STREAMS):
            found.append(called)
        if any(each.arg == "markup" and ast.unparse(each.value) != "False" for each in node.keywords):
            found.append(f"{called}(markup=...)")
    return found


def test_nothing_else_writes_to_a_terminal() -> None:
    known = "print('')\nsys.stdout.write('')\nConsole()\nwarnings.warn('')\nc.print(x, markup=True)"
    assert len(_others(ast.parse(known))) == 5
    texts = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for place in (CORE, *ROOT.glob("plugins/*/src"))
        for path in place.rglob("*.py")
    }
    found = {path: others for path, text in texts.items() if (others := _others(ast.parse(text)))}
    # The prompt of `input` is a constant.
    chat = "plugins/run/src/meshwright_run/chat.py"
    assert found == {
        "core/meshwright/files/terminal.py": ["warnings.warn", "Continuing", "Text.from_markup"],
        chat: ["input"],
    }
    assert "input(_PROMPT)" in texts[chat]
    assert {path for path, text in texts.items() if "parse_markup(" in text} == MARKUP


# -- where it goes


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
@pytest.mark.parametrize("name", ["--version", "strategies"])
def test_output_that_fails_is_one_line_and_exit_code_1(name: str) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "meshwright", name]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: the output cannot be written: No space left on device.\n")


def test_a_directory_that_was_removed_is_reported(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    command = 'cd "$0" && rmdir "$0" && exec "$1" -m meshwright strategies'
    reported = ["bash", "-c", command, str(tmp_path / "gone"), sys.executable]
    done = subprocess.run(reported, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the current directory is not there any more")


# -- commands


def _commands(place: Path, text: str) -> list[tuple[str, ...]]:
    """Commands on files in which each value is hostile that may be any text."""
    run = place / "run"
    event = {"ph": "X", "cat": "cpu_op", "name": text, "pid": 1, "tid": 1, "ts": 1, "dur": 5}
    about = {"run": text, "strategy": text, "mesh": text, "rank": 0, "world_size": 1, "window": [1, 1]}
    contents: dict[str, Any] = {
        "run.yaml": {"strategy": text, "model": {"model_type": text}, text: text},
        "events.jsonl": {"time": 1.0, "event": text, text: text},
        "summary.json": {text: text},
        ".lock.json": {"pid": text, "host": text, "started": text},
        "checkpoints/step-00000001/checkpoint.json": {"format": 2, "sha256": text, "versions": text},
        "profile/rank-00000.json": {"traceEvents": [event], "meshwright": about},
        "device.yaml": {"name": text, text: text},
        "metrics.jsonl": {"step": 1, "loss": 1.0, text: text, "num_tokens": 1},
    }
    for name, content in contents.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(json.dumps(content) + "\n")
    run = str(run)
    return [
        ("train", f"{run}/run.yaml"),
        ("plan", f"{run}/run.yaml", "--world", "2"),
        ("plan", f"{run}/run.yaml", "--world", "2", "--device", f"{run}/device.yaml"),
        ("replay", run, "--step", "1"),
        ("diff", run, run),
        ("checkpoint", "show", f"{run}/checkpoints"),
        ("checkpoint", "verify", f"{run}/checkpoints"),
        ("export", f"{run}/checkpoints/step-00000001", str(place / "out")),
        ("profile", "show", f"{run}/profile"),
        ("profile", "compare", run, run),
        ("data", "show", f"{run}/run.yaml"),
        ("launch", f"{run}/run.yaml", "--to", "slurm", "--dry-run"),
        ("train", str(place / text.replace("/", "_"))),
    ]


@pytest.mark.slow
def test_commands_write_what_files_hold_as_text(tmp_path: Path) -> None:
    for number, text in enumerate(each for each in HOSTILE if "\ud800" not in each and "\x00" not in each):
        (tmp_path / str(number)).mkdir()
        for command in _commands(tmp_path / str(number), text):
            result = CliRunner().invoke(app, command)
            assert result.exception is None or isinstance(result.exception, SystemExit), (command, result.exception)
            assert result.exit_code in (0, 1, 2), command
            assert _is_text(result.output), (command, result.output)
