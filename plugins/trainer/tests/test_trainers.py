"""Trainers over a mesh log what they log on one process: losses, norms, rates and metrics of each step, in float64."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import trainer_cases

from meshwright.launch.open_world import open_world
from meshwright_testing import pool

KINDS = ("trainer", "sft", "packed", "lora", "dpo", "reward")
BUCKETED = {"engine": "bucketed", "use_distributed_optimizer": True, "overlap_grad_reduce": True}


@functools.cache
def plain(kind: str, directory: Path) -> list[dict[str, float]]:
    """What a trainer logs on one process."""
    with trainer_cases.in_float64():
        return trainer_cases.history(trainer_cases.made(kind, None, directory / kind, 1))


@pytest.mark.parametrize(
    ("ranks", "mesh", "kinds"),
    [
        pytest.param(2, {"strategy": "fsdp2", "tp_size": 2}, ("sft", "dpo"), id="tp2-few"),
        pytest.param(2, {"strategy": "ddp"}, KINDS, id="ddp", marks=pytest.mark.slow),
        pytest.param(2, {"strategy": "ddp", "strategy_config": BUCKETED}, KINDS, id="bucketed", marks=pytest.mark.slow),
        pytest.param(2, {"strategy": "fsdp2"}, KINDS, id="fsdp2", marks=pytest.mark.slow),
        pytest.param(4, {"strategy": "fsdp2", "dp_replicate_size": 2}, KINDS, id="hsdp", marks=pytest.mark.slow),
        pytest.param(2, {"strategy": "fsdp2", "tp_size": 2}, KINDS, id="tp2", marks=pytest.mark.slow),
        pytest.param(2, {"strategy": "fsdp2", "cp_size": 2}, KINDS, id="cp2", marks=pytest.mark.slow),
        pytest.param(2, {"strategy": "fsdp2", "pp_size": 2}, KINDS, id="pp2", marks=pytest.mark.slow),
        pytest.param(2, {"strategy": "megatron_fsdp"}, KINDS, id="megatron_fsdp", marks=pytest.mark.slow),
    ],
)
def test_trainers_log_what_they_log_on_one_process(ranks, mesh, kinds, tmp_path, tmp_path_factory):
    found = pool(ranks).run(trainer_cases.histories, mesh, tmp_path, kinds)[0]
    directory = tmp_path_factory.getbasetemp()
    wrong = {kind: trainer_cases.differences(plain(kind, directory), found[kind]) for kind in kinds}
    assert not {kind: texts for kind, texts in wrong.items() if texts}


PAIRS = 5


def first_step(kind: str, mesh: Any, directory: Path, batch: int, accumulated: int) -> dict[str, float]:
    """Loss and norm of one step of five pairs, in microbatches of so many."""
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated, "max_steps": 1}
    trainer = trainer_cases.made(kind, mesh, directory, 1, **sizes, eval_strategy="no")
    trainer.train_dataset = trainer.train_dataset.select(range(PAIRS))
    trainer.train()
    (logged,) = [each for each in trainer.state.log_history if "grad_norm" in each]
    return {key: float(logged[key]) for key in ("loss", "grad_norm")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "reward"])
def test_a_pair_of_a_smaller_last_microbatch_weighs_as_much_as_others_unlike_in_trl(kind, tmp_path):
    with open_world("cpu"), trainer_cases.in_float64():
        whole = first_step(kind, None, tmp_path / "whole", PAIRS, 1)
        theirs = first_step(kind, None, tmp_path / "theirs", 2, 3)
        ours = first_step(kind, {"strategy": "ddp"}, tmp_path / "ours", 2, 3)
    assert ours == pytest.approx(whole, rel=1e-9)
    # When this fails, TRL weighs pairs alike, and documents need not say that it differs.
    assert abs(theirs["grad_norm"] / whole["grad_norm"] - 1) > 1e-3
