"""A pair weighs as much in a smaller last microbatch as in any other: over a mesh, not in TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trainer_cases import in_float64, made

from meshwright.launch.open_world import open_world

PAIRS = 5


def first_step(kind: str, mesh: Any, directory: Path, batch: int, accumulated: int) -> dict[str, float]:
    """Loss and norm of one step of five pairs, in microbatches of so many."""
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated, "max_steps": 1}
    trainer = made(kind, mesh, directory, 1, **sizes, eval_strategy="no")
    trainer.train_dataset = trainer.train_dataset.select(range(PAIRS))
    trainer.train()
    (logged,) = [each for each in trainer.state.log_history if "grad_norm" in each]
    return {key: float(logged[key]) for key in ("loss", "grad_norm")}


@pytest.mark.parametrize("kind", ["dpo", "reward"])
def test_a_pair_of_a_smaller_last_microbatch_weighs_as_much_as_others(kind: str, tmp_path: Path) -> None:
    with open_world("cpu"), in_float64():
        whole = first_step(kind, None, tmp_path / "whole", PAIRS, 1)
        theirs = first_step(kind, None, tmp_path / "theirs", 2, 3)
        ours = first_step(kind, {"strategy": "ddp"}, tmp_path / "ours", 2, 3)
    assert ours == pytest.approx(whole, rel=1e-9)
    # When this fails, TRL weighs pairs alike, and documents need not say that it differs.
    assert abs(theirs["grad_norm"] / whole["grad_norm"] - 1) > 1e-3
