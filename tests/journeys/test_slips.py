"""What newcomers write by mistake, or as in another library: the answer says what to write instead."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.base.errors import ConfigError
from meshwright.cli.main import _invoke, build_app
from meshwright.files.command_helpers import exit_on_error
from meshwright.files.parsing import apply_assignments
from meshwright_run.other_names import OTHER_NAMES
from meshwright_run.run_file import load_run
from meshwright_run.run_schema import run_schema

REPOSITORY = Path(__file__).parents[2]
SLIPS: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "slips.yaml").read_text())


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a directory without runs, beside the examples."""
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    monkeypatch.chdir(tmp_path)


def invoke(line: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command line in this process, as `meshwright.cli.main.main` does; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["meshwright", *line.replace("FILE", "examples/stdlib.yaml").split()])
    with pytest.raises(SystemExit) as end, exit_on_error(show_traceback=False):
        raise SystemExit(_invoke(build_app()))
    return int(end.value.code)  # type: ignore[arg-type]


@pytest.mark.parametrize("slip", SLIPS["slips"], ids=lambda slip: slip["line"])
def test_the_answer_to_a_slip_says_what_to_write(
    slip: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(slip["line"], monkeypatch) == 2
    output, error = capsys.readouterr()
    assert slip["answer"] in error
    assert error.startswith("error: ")
    assert not output


@pytest.mark.parametrize("key", ["data.sources.0.files", "data.sources[0].files", "data.sources.files"])
def test_a_key_into_an_empty_list_is_answered_with_the_whole_list(key: str) -> None:
    with pytest.raises(ConfigError, match=r"write --set 'data\.sources=\[\{files: x\}\]'"):
        apply_assignments({"data": {"sources": []}}, [f"{key}=x"])


@pytest.mark.parametrize("setting", SLIPS["accepted"])
def test_another_way_to_write_a_value_is_accepted(setting: str) -> None:
    load_run(REPOSITORY / "examples/stdlib.yaml", [setting])


def test_what_is_accepted_is_what_it_means() -> None:
    settings = ["optimizer.name=adamw", "max_grad_norm=None", "checkpoint=null", "epochs=2", "model.dtype=bf16"]
    config = load_run(REPOSITORY / "examples/stdlib.yaml", settings)
    assert (config.optimizer.name, config.max_grad_norm, config.checkpoint.is_enabled) == ("AdamW", None, False)
    assert (config.steps, config.epochs, config.model["dtype"]) == (None, 2.0, "bfloat16")


def test_the_names_of_other_libraries_lead_to_keys_that_exist() -> None:
    schema = run_schema()
    keys = {note.removeprefix("Here it is ") for note in OTHER_NAMES.values() if note.startswith("Here it is ")}
    assert len(keys) > 30
    for key in keys:
        section, _, rest = key.partition(".")
        assert section in schema["properties"], key
        if rest and section not in ("strategy_config", "model"):
            assert f'"{rest}"' in str(schema["$defs"]).replace("'", '"'), key
    assert not set(OTHER_NAMES) & set(schema["properties"])


@pytest.mark.parametrize(
    ("line", "answers"),
    [
        (
            "train FILE --set steps=10 --set on_bad_step=rollback --set checkpoint={} --set eval.every=3 --set seed=x "
            "--set lr=1",
            ["seed: Input should be", "lr: unknown key"],
        ),
        (
            "train FILE --set steps=10 --set on_bad_step=rollback --set checkpoint={} "
            "--set eval.early_stopping.eval_set=no",
            ["steps=10; lower it", "on_bad_step=rollback needs checkpoints", "'no' is not an evaluation set"],
        ),
        (
            "launch FILE --to kubernetes --nodes 2 --gpus-per-node 8 --set checkpoint={}",
            ["launch.kubernetes.image", "launch.kubernetes.volume_claim", "saves no checkpoints", "is relative"],
        ),
    ],
)
def test_all_problems_are_listed_at_once(
    line: str, answers: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(line, monkeypatch) == 2
    error = capsys.readouterr().err
    assert [answer for answer in answers if answer not in error] == []
    assert error.count("\n  ") >= len(answers)


def test_a_path_is_relative_to_the_run_file_and_another_meaning_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "project" / "run.yaml"
    (run.parent / "chats").mkdir(parents=True)
    (run.parent / "chats" / "a.jsonl").touch()
    run.write_text(
        "model: {path: organization/name}\ndata: {sources: [{files: [chats/*.jsonl, other.txt], format: messages}]}\n"
        "steps: 1\nbatch_size: 1\noutput_dir: runs/x\n"
    )
    monkeypatch.chdir(tmp_path)
    config = load_run(run)
    assert config.data.sources[0].files == [str(run.parent / "chats/*.jsonl"), "other.txt"]
    assert (config.model["path"], config.output_dir, capsys.readouterr().err) == ("organization/name", "runs/x", "")
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "b.jsonl").touch()
    assert load_run(run) == config
    note = capsys.readouterr().err
    assert note.startswith(f"note: data.sources.0.files='chats/*.jsonl' is {run.parent / 'chats/*.jsonl'}, beside")
    assert str(tmp_path / "chats/*.jsonl") in note
    # On the command line, a path is relative to the current directory.
    other = load_run(run, ["data.sources.0.files=chats/*.jsonl"])
    assert other.data.sources[0].files == "chats/*.jsonl"
    # The copy in a run's directory was resolved when the run started.
    (run.parent / ".written.json").touch()
    assert load_run(run).data.sources[0].files == ["chats/*.jsonl", "other.txt"]
