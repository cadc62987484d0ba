"""The script of the README runs, and continues under another layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import trainer_cases

from meshwright.strategy.registry import get_registry
from meshwright_trainer import MeshArguments

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_script_of_the_readme_trains_and_continues_under_another_layout(tmp_path):
    (script,) = [block.split("```")[0] for block in README.split("```python\n")[1:]]
    assert script.count('"path/to/model"') == 1
    (tmp_path / "train.py").write_text(script.replace("path/to/model", "model"), encoding="utf-8")
    trainer_cases.model().save_pretrained(tmp_path / "model")
    trainer_cases.digits().save_pretrained(tmp_path / "model")
    rows = [json.dumps({"text": text}) for text in trainer_cases.numbers(40, 1)]
    (tmp_path / "texts.jsonl").write_text("\n".join(rows), encoding="utf-8")
    usual = (
        "--output_dir run --max_steps 4 --save_steps 2 --logging_steps 1 --use_cpu --bf16 False --learning_rate 1e-2"
    )
    started = "--nproc-per-node 2 train.py --strategy fsdp2 --tp_size 2"
    assert f"torchrun {started.partition(' --strategy')[0]}" in README
    run(tmp_path, f"{started} {usual}")
    whole = history(tmp_path)
    run(
        tmp_path,
        f"{started} {usual} --tp_size 1 --per_device_train_batch_size 4 --resume_from_checkpoint run/checkpoint-2",
    )
    assert [each["step"] for each in whole] == [1, 2, 3, 4]
    for one, other in zip(whole, history(tmp_path), strict=True):
        assert abs(one["loss"] - other["loss"]) < 1e-5
    assert whole[-1]["loss"] < whole[0]["loss"]
    assert (tmp_path / "trained" / "model.safetensors").is_file()


def run(directory: Path, arguments: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(directory / "cache"), "TQDM_DISABLE": "1"}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]


def history(directory: Path) -> list[dict[str, float]]:
    found = json.loads((directory / "run" / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    return [each for each in found if "loss" in each]


def test_the_readme_names_every_flag_and_strategies_that_exist():
    rows = [line.split(" | ") for line in README.splitlines() if line.startswith("| `")]
    assert {word for row in rows for word in row[0].strip("| ").replace("`", "").split(", ")} == set(
        MeshArguments.__dataclass_fields__
    )
    for name in rows[0][1].partition(", or one")[0].replace("`", "").split(", "):
        get_registry().get(name)
