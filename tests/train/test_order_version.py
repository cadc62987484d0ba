"""A run goes on in the order of the data in which it began, also where its checkpoints tell of none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from support.commands import command, write_run

from meshwright.checkpoint.manifest import MANIFEST, digest, text_of


def _losses(directory: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def _train(path: Path, values: dict[str, Any]) -> list[float]:
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    done = command("train", str(path))
    assert done.returncode == 0, done.stderr
    return _losses(Path(values["output_dir"]))


def test_a_run_whose_checkpoints_tell_no_order_goes_on_in_the_first_one(tmp_path: Path) -> None:
    path, directory = write_run(tmp_path), tmp_path / "out"
    values = yaml.safe_load(path.read_text())
    del values["sample"], values["strategy_config"]
    values |= {"strategy": "single", "nproc": 1, "steps": 4, "checkpoint": {"every": 2, "keep_last": 5}}
    whole = _train(path, values)
    (found,) = (directory / "checkpoints").glob("step-*2")
    content = json.loads((found / MANIFEST).read_text())
    assert content["extra"]["identity"].pop("order") == 2

    # As a release that knew one order alone would have left it, when it was killed after two steps.
    rest = {name: value for name, value in content.items() if name not in ("format", "sha256")}
    (found / MANIFEST).write_text(text_of({**content, "sha256": digest(rest)}))
    (directory / "summary.json").unlink()
    (last,) = (directory / "checkpoints").glob("step-*4")
    last.rename(tmp_path / "aside")

    again = _train(path, values)
    assert again[:2] == whole[:2]
    # Other sequences, so other losses; the first order is told from now on.
    assert again[2:] != whole[2:]
    assert json.loads((last / MANIFEST).read_text())["extra"]["identity"]["order"] == 1
