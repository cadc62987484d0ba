"""`meshwright eval`: the losses of a run, of its checkpoint and of its files, under other layouts and on other data."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.checkpoints import rewrite_manifest
from support.commands import run_command, write_run
from support.tiers import mark_mostly_slow
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshwright.checkpoint.manifest import ADAPTER_FORMAT, MANIFEST_FILE
from meshwright_run.evaluate import build_eval_job

RELATIVE = 1e-6
PEFT = {"type": "lora", "r": 4, "target_modules": "all-linear"}


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_run(tmp_path_factory.mktemp("evaluated"))
    values = yaml.safe_load(path.read_text()) | {"checkpoint": {"every": 1}}
    path.write_text(yaml.safe_dump(values))
    found = run_command("train", str(path))
    assert found.returncode == 0, found.stderr
    return path


def evaluate(*arguments: str) -> dict[str, Any]:
    found = run_command("eval", *arguments, "--json", "-")
    assert found.returncode == 0, found.stderr
    sets: dict[str, Any] = json.loads(found.stdout)["sets"]
    return sets


PLACES, LAYOUTS = (
    ("out", "out/checkpoints/step-00000002"),
    ("nproc=2", "nproc=1", "strategy=single nproc=1", "tp_size=2"),
)


@pytest.mark.parametrize(
    ("place", "layout"),
    mark_mostly_slow([*itertools.product(PLACES, LAYOUTS)], ("out", "tp_size=2"), (PLACES[1], "nproc=1")),
)
def test_a_run_and_its_checkpoint_have_the_loss_that_the_run_reported(run_file: Path, place: str, layout: str) -> None:
    options = [each for value in layout.split() for each in ("--set", value)]
    if "strategy=single" in layout:
        options += ["--set", "strategy_config={}"]
    found = evaluate(str(run_file.parent / place), *options)["held_out"]
    summary = json.loads((run_file.parent / "out" / "summary.json").read_text())
    assert found["loss"] == pytest.approx(summary["held_out_loss"], rel=RELATIVE)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]), rel=RELATIVE)


def test_a_model_is_evaluated_on_files_as_transformers_computes_it(run_file: Path, tmp_path: Path) -> None:
    texts = ["4 is odd, 7 is even", "other words"]
    (tmp_path / "news.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    directory = run_file.parent / "out" / "model"
    options = ["--set", "nproc=2", "--set", "data.packing=none", "--set", "device=cpu"]
    found = evaluate(str(directory), "--data", f"news={tmp_path / 'news.jsonl'}", *options)["news"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    nll, correct, tokens = 0.0, 0, 0
    for text in texts:
        ids = tokenizer(text + tokenizer.eos_token, return_tensors="pt")["input_ids"][:, :32]
        with torch.no_grad():
            log_probs = model(ids).logits[0, :-1].double().log_softmax(-1)
        nll -= float(log_probs.gather(1, ids[0, 1:, None]).sum())
        correct += int((log_probs.argmax(-1) == ids[0, 1:]).sum())
        tokens += ids.shape[1] - 1
    assert (found["tokens"], found["accuracy"]) == (tokens, pytest.approx(correct / tokens))
    assert found["loss"] == pytest.approx(nll / tokens, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{out}/model"], "is a model, so it names no data. Give files: --data"),
        (["no/such-run"], "there is no run, checkpoint or model directory no/such-run."),
        (["{out}", "--data", "missing/*.txt"], "missing/*.txt"),
        (["{out}", "--data", "a.txt", "--data", "b/a.txt"], "two sets are called 'a'"),
        (["{out}", "--set", "tp_size=3"], "tp_size"),
        (["{out}", "--json", "{out}/none/results.json"], "lies in a directory that does not exist"),
        (["{out}/checkpoints/step-00000009"], "step-00000009"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(run_file: Path, arguments: list[str], message: str) -> None:
    out = str(run_file.parent / "out")
    found = run_command("eval", *(each.format(out=out) for each in arguments))
    assert (found.returncode, message in found.stderr) == (2, True), found.stderr
    assert "Traceback" not in found.stderr


def test_a_checkpoint_does_not_decide_which_code_runs(run_file: Path, tmp_path: Path) -> None:
    directory = tmp_path / "step-00000002"
    shutil.copytree(run_file.parent / "out" / "checkpoints" / "step-00000002", directory)
    content = json.loads((directory / MANIFEST_FILE).read_text()) | {"format": ADAPTER_FORMAT}
    (directory / MANIFEST_FILE).write_text(json.dumps(content))
    model = {"path": "somebody/model", "peft": PEFT, "trust_remote_code": "0" * 40, "allow_pickle": True}
    extra = {**content["extra"], "run": {**content["extra"]["run"], "model": model}}
    rewrite_manifest(directory, extra=extra, base={"path": "somebody/model"})
    section = build_eval_job(str(directory)).config.model
    assert section == {"path": "somebody/model", "peft": PEFT}
    given = build_eval_job(str(directory), assignments=["model.trust_remote_code=" + "a" * 40])
    assert given.config.model["trust_remote_code"] == "a" * 40


def test_a_run_directory_that_was_moved_has_its_own_checkpoints(run_file: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    values = yaml.safe_load((run_file.parent / "out" / "run.yaml").read_text())
    (moved / "run.yaml").write_text(yaml.safe_dump(values | {"output_dir": str(tmp_path / "gone")}))
    (moved / "checkpoints").symlink_to(run_file.parent / "out" / "checkpoints")
    assert build_eval_job(str(moved)).checkpoint == str(moved / "checkpoints" / "step-00000002")
