"""The command line: bad input is one clear error, and a small run leaves behind what it promises.

The version, and completion in shells: known without torch, and complete with the subcommands of plugins.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.commands import leave_launcher, run_command, write_run
from typer.testing import CliRunner

import meshwright
from meshwright.cli import main as cli
from meshwright_run import start
from meshwright_run.launch import local as launch
from meshwright_run.run_file import load_run


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("bad_input")
    write_run(directory)
    (directory / "no_config").mkdir()
    (directory / "full").mkdir()
    (directory / "earlier" / "model").mkdir(parents=True)
    (directory / "full" / "notes.txt").write_text("keep")
    (directory / "lone").mkdir()
    (directory / "lone" / "a.txt").write_text("one document")
    (directory / "broken.yaml").write_text("steps: [1")
    return directory


@pytest.fixture
def train(monkeypatch, workplace):
    """`meshwright train` in this process, which fails if it gets so far as to start ranks."""
    leave_launcher(monkeypatch)

    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(launch, "start_fork_server", lambda *_: None)
    monkeypatch.setattr(launch, "launch_ranks", started)
    monkeypatch.setattr(start, "run_guarded", started)
    monkeypatch.chdir(workplace)

    def invoke(*assignments: str, path: str = "run.yaml", more: tuple[str, ...] = ()) -> Any:
        options = [option for assignment in assignments for option in ("--set", assignment)]
        return CliRunner().invoke(cli.app, ["train", path, *options, *more])

    return invoke


BAD_INPUT = {
    "unknown key": (["stratgy=ddp"], ["stratgy: unknown key. Did you mean 'strategy'?"]),
    "unknown strategy option": (
        ["strategy_config.reduce_dtpye=float64"],
        ["strategy_config of 'fsdp2'", "reduce_dtpye: unknown key. Did you mean 'reduce_dtype'?"],
    ),
    "unknown model field": (["model.num_hiden_layers=1"], ["Did you mean 'num_hidden_layers'?"]),
    "unknown optimizer argument": (["optimizer.options.beta=1"], ["Did you mean 'betas'?"]),
    "unknown optimizer": (["optimizer.name=AdmaW"], ["Did you mean 'AdamW'?"]),
    "unknown schedule option": (["schedule.options.cycles=2"], ["schedule 'cosine' refuses"]),
    "unknown strategy": (["strategy=fsdp3"], ["'fsdp3' is not installed. Did you mean 'fsdp2'?"]),
    "unknown model type": (["model.model_type=lama"], ["Did you mean 'llama'?"]),
    "unknown device": (["device=gpu0"], ["device", "gpu0"]),
    "bad value": (["steps=0"], ["steps: Input should be greater than or equal to 1 (got 0)"]),
    "bad assignment": (["steps"], ["is not of the form key=value"]),
    "sizes that do not fill the world": (["dp_size=3"], ["dp_size=3", "= 3, but the world size is 2", "Set dp_size=2"]),
    "sizes that do not divide the world": (["tp_size=3"], ["does not divide the world size 2"]),
    "an axis nobody claims": (
        ["cp_size=2", "strategy=ddp", "strategy_config={}"],
        ["cp=2, but ddp shards", "Or set cp_size=1."],
    ),
    "a schedule that nobody knows": (
        ["pp_size=2", "wrapper_config={pipeline: {pp_schedule: 1b1f}}"],
        ["pp_schedule='1b1f' is unknown", "Allowed, in any case: GPipe, 1F1B"],
    ),
    "single on two ranks": (["strategy=single", "strategy_config={}"], ["dp_shard=2", "single shards no axis"]),
    "missing corpus": (["data.corpus=nowhere/*.txt"], ["corpus glob 'nowhere/*.txt' matches no file"]),
    "corpus of one document": (["data.corpus=lone/*.txt"], ["1 document, but needs at least 2"]),
    "empty split": (
        ["data.seq_len=5000", "model.max_position_embeddings=5000"],
        ["split does not fill one sequence", "seq_len=5000"],
    ),
    "too little held out": (
        ["eval.max_sequences=100000"],
        ["eval.max_sequences=100000, but the largest evaluation set has"],
    ),
    "batch not divisible by ranks": (["batch_size=3"], ["batch_size=3 does not divide", "set it to 2 or 4"]),
    "model directory without a config": (["model={path: no_config}"], ["'no_config' holds no config.json"]),
    "model directory missing": (["model={path: ./nowhere}"], ["'./nowhere' is not a directory"]),
    "vocabulary too small": (["model.vocab_size=10"], ["vocabulary has 10 entries"]),
    "positions too few": (["model.max_position_embeddings=8"], ["holds 8 positions, but data.seq_len is 16"]),
    "results in the way": (["output_dir=full"], ["holds the results of an earlier run", "overwrite=true"]),
    "a model that the run would replace": (
        ["output_dir=earlier", "overwrite=true", "model={path: earlier/model}"],
        ["model.path='earlier/model' is inside earlier/model, which this run replaces"],
    ),
    "a tokenizer that the run would replace": (
        ["output_dir=earlier", "overwrite=true", "data.tokenizer=earlier/model/../model", "data.vocab_size=1024"],
        ["data.tokenizer='earlier/model/../model' is inside earlier/model, which this run replaces"],
    ),
    "output is a file": (["output_dir=0.txt"], ["is a file"]),
    "output lies in a file": (["output_dir=0.txt/a/b"], ["0.txt, which is a file"]),
}


@pytest.mark.parametrize(("assignments", "texts"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_one_error_before_anything_is_started_or_written(assignments, texts, train, workplace):
    result = train(*assignments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("error: ") == 1
    assert "Traceback" not in result.stderr
    for text in texts:
        assert text in result.stderr
    assert not (workplace / "out").exists()
    assert [path.name for path in (workplace / "full").iterdir()] == ["notes.txt"]


def test_a_run_file_that_cannot_be_read_is_one_error_and_a_traceback_comes_before_it_if_asked_for(train):
    for path, text in (("nowhere.yaml", "cannot read the run file nowhere.yaml"), ("broken.yaml", "is not valid YAML")):
        result = train(path=path)
        assert (result.exit_code, result.stderr.count("error: ")) == (2, 1)
        assert text in result.stderr
        assert "Traceback" not in result.stderr
    assignments, texts = BAD_INPUT["unknown key"]
    result = train(*assignments, more=("--traceback",))
    assert result.exit_code == 2
    assert result.stderr.startswith("Traceback (most recent call last):")
    assert result.stderr.count(texts[0]) == 1
    assert "\nerror: " in result.stderr


def test_only_the_first_rank_of_each_node_tells_the_error(train, monkeypatch):
    for local_rank, reported in (("0", 1), ("1", 0)):
        world = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        for name, value in {**world, "LOCAL_RANK": local_rank}.items():
            monkeypatch.setenv(name, value)
        result = train("stratgy=ddp")
        assert (result.exit_code, result.stderr.count("error: ")) == (2, reported)


def test_a_good_run_gets_past_all_checks(train, workplace):
    result = train()
    assert str(result.exception) == "ranks were started"
    assert not (workplace / "out").exists()


# -- real processes


@pytest.mark.slow
def test_bad_input_under_torchrun_is_reported_once(workplace):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run_command("train", str(workplace / "run.yaml"), "--set", "dp_size=3", launcher=torchrun)
    assert done.returncode != 0
    assert done.stderr.count("error: sizes do not fill the world") == 1
    assert "exitcode  : 2" in done.stderr
    assert not (workplace / "out").exists()


CONFIGS = {"single": {"strategy": "single", "nproc": 1}, "ddp": {"strategy": "ddp", "nproc": 2}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Run files and output of a run under each strategy, made when asked for."""
    directory = tmp_path_factory.mktemp("trained")
    path, done = write_run(directory), {}

    def make(name: str) -> tuple[Path, str]:
        if name not in done:
            values = {**CONFIGS[name], "output_dir": str(directory / name)}
            options = [option for key, value in values.items() for option in ("--set", f"{key}={value}")]
            result = run_command("train", str(path), *options)
            assert result.returncode == 0, result.stderr
            done[name] = directory / name, result.stdout
        return done[name]

    return make


def metrics(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def held_out_loss(directory: Path) -> float:
    """The loss that plain transformers finds for the written model on the held-out sequences of its summary."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory / "model")
    held_out = json.loads((directory / "summary.json").read_text())["held_out"]
    tokens = torch.from_numpy(np.load(held_out["tokens_file"]).astype(np.int64))
    rows = tokens[: held_out["sequences"] * held_out["seq_len"]].view(held_out["sequences"], held_out["seq_len"])
    with torch.no_grad():
        return float(model(input_ids=rows, labels=rows).loss)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_run_leaves_metrics_curve_model_and_summary(name, trained):
    directory, output = trained(name)
    names = ".lock .written.json metrics.jsonl events.jsonl loss.png model ranks summary.json run.yaml"
    assert {path.name for path in directory.iterdir()} == set(names.split())
    records = metrics(directory)
    assert [record["step"] for record in records] == [1, 2]
    names = {"step", "loss", "grad_norm", "learning_rate", "num_tokens", "tokens_per_second", "seconds"}
    names |= {"tokens_per_second_per_device", "time", "world_size", "times", "learning_rates", "memory", "flops"}
    names |= {"num_input_tokens"}
    assert records[0].keys() == names
    assert records[1].pop("evaluations") == {"held_out": records[1]["held_out_loss"]}
    assert records[1].keys() == names | {"held_out_loss"}
    mappings = ("times", "learning_rates", "memory")
    assert all(math.isfinite(value) for each in records for name in mappings for value in each.pop(name).values())
    assert all(math.isfinite(value) for record in records for value in record.values())
    assert (directory / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    for text in ("step 1/2", "step 2/2", "held-out loss", "sample\n4 is ", "meshwright chat", "meshwright eval"):
        assert text in output
    assert load_run(directory / "run.yaml").output_dir == str(directory)
    # Plain transformers loads the model, and finds the same loss.
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["held_out_loss"] == metrics(directory)[-1]["held_out_loss"]
    assert held_out_loss(directory) == pytest.approx(summary["held_out_loss"], rel=1e-5)


@pytest.mark.slow
def test_one_rank_and_two_print_the_same_losses(trained):
    one, two = (metrics(trained(name)[0]) for name in CONFIGS)
    for key in ("loss", "grad_norm"):
        assert [record[key] for record in one] == pytest.approx([record[key] for record in two], rel=1e-6)
    assert one[-1]["held_out_loss"] == pytest.approx(two[-1]["held_out_loss"], rel=1e-6)


@pytest.mark.slow
def test_a_second_run_does_not_replace_the_first_unasked(trained):
    directory, _ = trained("single")
    before = (directory / "metrics.jsonl").read_bytes()
    same = run_command("train", str(directory / "run.yaml"))
    assert same.returncode == 0
    assert "this run has finished" in same.stdout
    done = run_command("train", str(directory / "run.yaml"), "--set", "seed=1")
    assert done.returncode == 2
    assert "overwrite=true" in done.stderr
    assert (directory / "metrics.jsonl").read_bytes() == before


BIN = Path(sys.executable).parent


def run(line: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **variables}
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False, env=environment)


def imported(done: subprocess.CompletedProcess[str]) -> set[str]:
    return {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


def test_the_version_is_reported_without_torch():
    done = run([sys.executable, "-X", "importtime", "-m", "meshwright", "--version"])
    assert done.stdout == f"meshwright {meshwright.__version__}\n"
    # No command's implementation, nor torch.
    heavy = {"torch", "transformers", "matplotlib", "meshwright_plan.planner", "meshwright_watch.server"}
    assert not imported(done) & heavy


def test_bash_completes_commands_options_settings_and_checkpoints_by_the_script_that_is_shown(tmp_path):
    script = """
        eval "$(meshwright --show-completion)"
        for words in "meshwright tra" "meshwright train --plan" "meshwright train x.yaml --set optimizer.w" \
            "meshwright train x.yaml --set strategy=pi" "meshwright checkpoint show $PLACE/ru"; do
            COMP_WORDS=($words); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
            _meshwright_completion meshwright
            echo "${COMPREPLY[@]}"
        done
    """
    (tmp_path / "runs" / "a" / "checkpoints" / "step-00000002").mkdir(parents=True)
    done = run(["bash", "--norc", "-c", script], PLACE=str(tmp_path))
    settings = ["optimizer.weight_decay=", "strategy=pipeline"]
    assert done.stdout.split() == ["train", "--plan-only", *settings, f"{tmp_path}/runs/"], done.stderr
