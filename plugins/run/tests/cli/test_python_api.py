"""`mw.train` and `mw.Run`: a run file is trained from Python as by the command, and its results are read back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import run_command, write_run

import meshwright as mw

VOLATILE = ("seconds", "time", "times", "memory", "tokens_per_second", "world_size")


@pytest.fixture(autouse=True)
def _without_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)


def stable(metrics: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{name: value for name, value in each.items() if not name.startswith(VOLATILE)} for each in metrics]


@pytest.mark.slow
def test_a_run_of_python_is_that_of_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    settings = {"optimizer.lr": 2e-3, "checkpoint": {"every": 2}, "optimizer.options": {"betas": (0.9, 0.95)}}
    run = mw.train("run.yaml", settings, steps=4, output_dir="python")
    assert "step 4/4" in capsys.readouterr().out
    words = ["optimizer.lr=2e-3", "checkpoint.every=2", "optimizer.options={betas: [0.9, 0.95]}", "steps=4"]
    options = [word for each in (*words, f"output_dir={tmp_path / 'command'}") for word in ("--set", each)]
    run_command("train", str(tmp_path / "run.yaml"), *options).check_returncode()
    command = mw.Run(tmp_path / "command")
    assert stable(run.metrics) == stable(command.metrics)
    assert [each["step"] for each in run.metrics] == [1, 2, 3, 4]
    assert {"loss", "evaluations.held_out", "times.data", "learning_rates.0"} <= run.metrics[-1].keys()
    assert not any(isinstance(value, dict) for each in run.metrics for value in each.values())
    assert run.summary["train_loss"] == command.summary["train_loss"]
    assert run.output_dir == Path("python")
    assert run.config.optimizer.lr == 2e-3
    assert run.model_dir == Path("python/model")
    assert json.loads((run.model_dir / "config.json").read_text())["model_type"] == "llama"
    assert [Path(each).name for each in run.checkpoints] == ["step-00000002", "step-00000004"]
    assert repr(run).startswith("Run('python', step 4 of 4, train_loss=5.")

    # The same call does nothing; more steps resume.
    assert mw.train("run.yaml", settings, steps=4, output_dir="python").summary == run.summary
    assert "this run has finished" in capsys.readouterr().out
    assert len(mw.train("run.yaml", settings, steps=5, output_dir="python").metrics) == 5


@pytest.mark.slow
def test_the_error_that_ends_a_run_is_raised(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(mw.DataError, match=r"corpus glob 'nowhere/\*\.txt' matches no file"):
        mw.train("run.yaml", {"data.corpus": ["nowhere/*.txt"]})
    assert "matches no file" not in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_of_a_launcher_are_joined_and_report_a_failure_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os\nimport meshwright as mw\n"
        "for steps in (2, 3):\n"
        "    run = mw.train('run.yaml', steps=steps, output_dir=f'joined-{steps}')\n"
        "    print(f'rank {os.environ[\"RANK\"]}: {run.output_dir}')\n"
        "mw.train('run.yaml', {'data.corpus': ['nowhere/*.txt']}, output_dir='failed')\n"
        "print('not reached')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert {f"rank {rank}: joined-{steps}" for rank in (0, 1) for steps in (2, 3)} <= set(done.stdout.splitlines())
    assert done.stdout.count("fsdp2 on dp_shard=2 (cpu)") == 2
    assert "not reached" not in done.stdout
    assert done.stderr.count("error: corpus glob 'nowhere/*.txt' matches no file") == 1
    assert mw.Run("joined-3").summary["step"] == 3


def test_invalid_calls_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(mw.ConfigError, match=r"stepz: unknown key\. Did you mean 'steps'\?"):
        mw.train("run.yaml", stepz=3)
    with pytest.raises(mw.ConfigError, match=r"cannot read the run file nowhere\.yaml"):
        mw.train("nowhere.yaml")
    with pytest.raises(mw.ConfigError, match=r"steps=<object object at .* cannot be written in a run file"):
        mw.train("run.yaml", steps=object())
    with pytest.raises(mw.ConfigError, match="'nowhere' is not a run directory"):
        mw.Run("nowhere")


def test_train_is_refused_in_an_open_world() -> None:
    code = "import meshwright as mw\nwith mw.open_world('cpu'):\n    mw.train('run.yaml')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "ConfigError: this process has a process group" in done.stderr


def test_an_unfinished_run_can_be_opened(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "run.yaml").rename(tmp_path / "out" / "run.yaml")
    run = mw.Run("out")
    assert (run.metrics, run.summary, run.model_dir, run.checkpoints) == ([], {}, None, [])
    assert repr(run) == "Run('out', not finished)"
    (tmp_path / "out" / "summary.json").write_text("[1")
    assert repr(run) == "Run('out')"
    with pytest.raises(mw.ConfigError, match=r"summary\.json cannot be read"):
        _ = run.summary
