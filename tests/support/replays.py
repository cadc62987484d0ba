"""Runs and their replays in the ranks of a pool, with hardware and code that compute wrongly where a test wants it."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.runs import run_rank_capturing, without_launcher
from torch import nn

from meshwright_diagnose.replay.replay import ReplayResult, replay_on_rank, replay_step
from meshwright_diagnose.replay.request import ReplayRequest
from meshwright_run import loop_setup
from meshwright_run.run_file import load_run
from meshwright_testing import pool

STEPS = 6


def _train_with_fault(path: str, kill_after: int | None, fault: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[fault](patch)
        _, error, _ = run_rank_capturing(path, kill_after)
        assert error in ("", "killed"), error


def _replay_with_fault(order: ReplayRequest, fault: str) -> dict[str, Any]:
    with redirect_stdout(io.StringIO()), without_launcher() as patch:
        FAULTS[fault](patch)
        replay_on_rank(None, order)
    return order.results[-1]


def write_run_file(workplace: Path, name: str, **changes: Any) -> Path:
    """Write a run with dropout and checkpoints in `workplace / name`, and return its run file."""
    values = yaml.safe_load((workplace / "run.yaml").read_text())
    values["model"] = {**values["model"], "attention_dropout": 0.2, **changes.pop("model", {})}
    values["data"] = {**values["data"], **changes.pop("data", {})}
    values |= {"steps": STEPS, "sample": None, "eval": {"every": 3, "max_sequences": 4}, "strategy_config": {}}
    values |= {"checkpoint": {"every": 2, "keep_last": None}, "schedule": {"warmup_steps": 2}}
    values |= {"output_dir": str(workplace / name), **changes}
    path = workplace / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def train_run(path: Path, *, kill_after: int | None = None, fault: str = "none") -> Path:
    """Train a run of 2 to 4 ranks, and return its directory."""
    config = load_run(path)
    assert isinstance(config.nproc, int)
    pool(config.nproc).run(_train_with_fault, str(path), kill_after, fault)
    return Path(config.output_dir)


def copy_run(run: Path, to: Path, **changes: Any) -> Path:
    """Copy a run, and change its run file."""
    shutil.copytree(run, to)
    if changes:
        (to / "run.yaml").write_text(yaml.safe_dump(yaml.safe_load((run / "run.yaml").read_text()) | changes))
    return to


def build_performer(fault: str = "none") -> Callable[[ReplayRequest], dict[str, Any]]:
    """Return a function that does a replay in a pool, all ranks of which find the same."""

    def perform(order: ReplayRequest) -> dict[str, Any]:
        found = pool(order.world_size).run(_replay_with_fault, order, fault)
        assert all(each == found[0] for each in found)
        return found[0]

    return perform


def replay_in_pool(directory: Path, step: int, fault: str = "none", **options: Any) -> ReplayResult:
    return replay_step(directory, step, runner=build_performer(fault), **options)


# -- faults


class _FlipGradientBit(torch.autograd.Function):
    """Flips the last bit of the first element of a gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        wrong = gradient.clone()
        wrong.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
        return wrong


def _flip_gradients(patch: pytest.MonkeyPatch, rank: int, every: int = 1) -> None:
    """On one rank, in the gradients of down projections."""
    if torch.distributed.get_rank() != rank:
        return
    plain, calls = nn.Linear.forward, [0]

    def forward(self: nn.Linear, value: torch.Tensor) -> torch.Tensor:
        if self.in_features != 24 or not torch.is_grad_enabled():
            return plain(self, value)
        calls[0] += 1
        weight = _FlipGradientBit.apply(self.weight) if calls[0] % every == 0 else self.weight
        return nn.functional.linear(value, weight, self.bias)

    patch.setattr(nn.Linear, "forward", forward)


def _freeze_learning_rate(patch: pytest.MonkeyPatch) -> None:
    """A run that resumes keeps the rate that it had reached."""

    def frozen(scheduler: Any, step: int) -> None:
        rates = [base * factor(step) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
        scheduler.lr_lambdas = [lambda _, factor=factor: factor(step) for factor in scheduler.lr_lambdas]
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler.last_epoch, scheduler._last_lr = step, rates

    patch.setattr(loop_setup, "set_scheduler_step", frozen)


def _halve_gradients(patch: pytest.MonkeyPatch) -> None:
    """Gradients of one layer are summed with another scale."""
    from meshwright_fsdp2.manager import FSDP2Manager

    plain = FSDP2Manager.report_gradients

    def check_gradients(self: FSDP2Manager) -> Any:
        found = plain(self)
        for name, parameter in self.named_trainable_parameters():
            if "layers.1.mlp.up_proj" in name and parameter.grad is not None:
                parameter.grad.mul_(0.5)
        return found

    patch.setattr(FSDP2Manager, "report_gradients", check_gradients)


def _scale_activations(patch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain = LlamaMLP.forward
    patch.setattr(LlamaMLP, "forward", lambda self, value: plain(self, value) * 1.25)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "none": lambda patch: None,
    "rank 0 flips": lambda patch: _flip_gradients(patch, 0),
    "rank 1 flips": lambda patch: _flip_gradients(patch, 1),
    "rank 2 flips": lambda patch: _flip_gradients(patch, 2),
    "rank 1 flips at times": lambda patch: _flip_gradients(patch, 1, every=3),
    "rates freeze": _freeze_learning_rate,
    "gradients are halved": _halve_gradients,
    "activations are more": _scale_activations,
}
