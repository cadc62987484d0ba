"""Trainers over a mesh log what they log on one process: losses, norms, rates and metrics of each step, in float64."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trainer_cases

KINDS = ("trainer", "sft", "packed", "lora", "dpo", "reward")
BUCKETED = {"engine": "bucketed", "use_distributed_optimizer": True, "overlap_grad_reduce": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"strategy": "ddp"}),
    "ddp_bucketed": (2, {"strategy": "ddp", "strategy_config": BUCKETED}),
    "fsdp2": (2, {"strategy": "fsdp2"}),
    "hsdp": (4, {"strategy": "fsdp2", "dp_replicate_size": 2}),
    "tp2": (2, {"strategy": "fsdp2", "tp_size": 2}),
    "cp2": (2, {"strategy": "fsdp2", "cp_size": 2}),
    "pp2": (2, {"strategy": "fsdp2", "pp_size": 2}),
    "megatron_fsdp": (2, {"strategy": "megatron_fsdp"}),
}
TOLERANCE = 1e-6
"""Relative; Trainer adds up losses in float32, and models have parts that compute in it."""


@functools.cache
def plain(kind: str, directory: Path) -> list[dict[str, float]]:
    """What a trainer logs on one process."""
    with trainer_cases.in_float64():
        return trainer_cases.history(trainer_cases.made(kind, None, directory / kind, 1))


def ranks(count: int, script: str, *arguments: str) -> None:
    """Run a script of this folder on so many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), "--standalone"]
    folder = Path(__file__).parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(
        [*command, str(folder / script), *arguments], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trainers_log_what_they_log_on_one_process(layout, tmp_path, tmp_path_factory):
    world, mesh = LAYOUTS[layout]
    ranks(world, "trainer_cases.py", str(tmp_path), json.dumps(mesh), *KINDS)
    directory = tmp_path_factory.getbasetemp()
    wrong = {kind: differences(plain(kind, directory), (tmp_path / f"{kind}.json").read_text()) for kind in KINDS}
    assert not {kind: texts for kind, texts in wrong.items() if texts}


def differences(wanted: list[dict[str, float]], told: str) -> list[str]:
    found = json.loads(told)
    if isinstance(found, str):
        return [found]
    if len(found) != len(wanted):
        return [f"{len(found)} entries, not {len(wanted)}"]
    texts = []
    for one, other in zip(wanted, found, strict=True):
        if one.keys() != other.keys():
            texts.append(f"step {one['step']}: {sorted(one.keys() ^ other.keys())}")
        texts += [
            f"step {one['step']} {name}: {other[name]} and not {value}"
            for name, value in one.items()
            if name in other and abs(other[name] - value) > TOLERANCE * max(abs(value), 1e-3)
        ]
    return texts
