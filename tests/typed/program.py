"""A user's program over the public names, which type checkers read in `tests/contract/test_public_types.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import meshwright as mw
from meshwright_ddp import DDPConfig
from meshwright_fsdp2 import FSDP2Config


def loop_of_ones_own() -> float:
    """A loop by hand, as in README."""
    with mw.open_world() as world:
        stack, degrees = mw.resolve("fsdp2", mw.MeshSizes(tp_size=2), world.size, config=FSDP2Config())
        mesh = mw.Mesh(degrees, world)
        manager: mw.StrategyManager = stack.build(mesh)
        manager.parallelize(torch.nn.Linear(2, 2))
        manager.build_optimizer(mw.optimizer_factory(mw.OptimizerConfig(lr=3e-3)))
        ids = torch.zeros(4, 64, dtype=torch.int64)
        batch: list[mw.Batch] = [{"input_ids": ids, "labels": ids}]
        loss: Tensor = manager.forward_backward(batch, num_tokens=manager.begin_step_sync(batch))
        norm: Tensor = manager.clip_grad_norm(1.0)
        manager.optimizer_step()
        place: int = mesh.data_rank + world.rank
        return loss.item() + norm.item() + place


def policy_loss(tokens: mw.Tokens, batch: mw.Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """An objective, with a further sum."""
    ratio = (tokens.log_probs - batch["old_log_probs"]).exp()
    return -(ratio * tokens.mask).sum(), {"entropy": (tokens.entropy * tokens.mask).sum()}


class Notes:
    """An observer of runs."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    @mw.hookimpl
    def on_step_end(self, result: mw.StepResult) -> None:
        """Keep the loss."""
        self.losses[result.step] = result.loss


class PlainConfig(mw.StrategyConfig):
    """Options of a strategy."""

    bucket_mb: float = 25.0


class PlainManager(mw.DataParallelManager):
    """A strategy of one's own."""

    def shard(self, model: torch.nn.Module) -> torch.nn.Module:
        """Copies on every rank."""
        return model.to(self.mesh.device)

    def after_backward(self, *, is_last: bool) -> None:
        """Sum gradients."""
        if is_last:
            self.gradients.fill_missing()


@mw.hookimpl
def register_strategies() -> list[mw.StrategySpec]:
    """The strategies of this package."""
    return [
        mw.StrategySpec(
            name="plain",
            summary="One all-reduce per parameter.",
            axes=frozenset({"dp_replicate"}),
            config_cls=PlainConfig,
            build=PlainManager,
        )
    ]


def fine_tune(path: Path, loader: DataLoader[Mapping[str, Tensor]]) -> list[str]:
    """A pretrained model, trained by the loop of the library."""
    with mw.open_world():
        manager = mw.from_pretrained(path, "ddp", config=DDPConfig(), dtype="bfloat16")
        manager.build_optimizer(mw.optimizer_factory(mw.OptimizerConfig(lr=1e-5)))
        batch: list[mw.Batch] = [{"input_ids": torch.zeros(1, 8, dtype=torch.int64)}]
        (before,) = manager.token_stats(batch, ["log_probs"])
        known: Tensor = before["log_probs"]
        manager.forward_backward(batch, num_tokens=mw.count_tokens(batch, manager.mesh), objective=policy_loss)
        sums: Mapping[str, Tensor] = manager.last_sums
        mw.fit(manager, mw.Loop(batches=loader, epochs=1, early_stopping=mw.EarlyStopping("dev")))
        names = [name for name, _ in manager.iter_parameters(bucket_bytes=1 << 20)]
        return [*names, *sums, *mw.list_strategies(), str(known.shape)]


def run_file_of_ones_own() -> mw.RunConfig:
    """A run file that Python writes."""
    return mw.RunConfig(model={"model_type": "llama"}, steps=10, batch_size=8, optimizer=mw.OptimizerConfig(lr=1e-3))


def mistakes() -> list[str]:
    """Errors are one family, with exit codes."""
    try:
        mw.get_strategy("nothing")
    except mw.UnknownStrategyError as error:
        code: int = error.exit_code
        return [str(code)]
    return []
