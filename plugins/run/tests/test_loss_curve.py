"""The plot of the losses."""

from __future__ import annotations

from pathlib import Path

from meshwright.events.step import StepResult
from meshwright_run.loss_curve import plot_loss_curve


def test_a_name_of_an_evaluation_set_is_plain_text(tmp_path: Path) -> None:
    """matplotlib reads text between dollar signs as a formula, and rejects a wrong one."""
    plain = {"step": 1, "num_steps": 1, "loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0, "num_tokens": 1}
    result = StepResult(**plain, seconds=1.0, rank=0, evaluations={r"$\frac{$": 1.0, "held_out": 2.0})
    plot_loss_curve([result], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
