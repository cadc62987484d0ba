"""What is private in transformers' Trainer and in TRL, and needed: each with its reason.

Tried with transformers 5.17 to 5.23 and trl 1.16; `tests/test_compat.py` fails where one of them is no longer there,
or is called in another way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from meshwright.strategy.contract import StrategyManager

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object

PRIVATE = {
    "_move_model_to_device": "each rank gets what it keeps of the model, and no more",
    "_prepare_for_training": "the manager shards the model and owns the optimizer",
    "_clip_grad_norm": "the norm is that of the whole model, wherever its gradients are",
    "_get_grad_norm": "likewise",
    "_save_optimizer_and_scheduler": "a checkpoint is read under any layout",
    "_save_rng_state": "it has the generators",
    "_load_rng_state": "likewise",
    "_load_from_checkpoint": "it is read when the model is sharded",
    "_load_best_model": "likewise",
}
"""Methods of `transformers.Trainer` that are overridden, and why."""


class PrivateMethods(Trainer):
    """`PRIVATE`, of a mixin that has a manager."""

    # Trainer's and TRL's.
    model: Any
    ref_model: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    _metrics: Any
    _total_train_tokens: Any

    @property
    def manager(self) -> StrategyManager:
        raise NotImplementedError

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        pass

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        self.begin_training(max_steps, resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self.manager.clip_grad_norm(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        norm = self.manager.clip_grad_norm(None) if grad_norm is None else grad_norm
        return self.manager.read(norm)[0]

    def begin_training(self, max_steps: int, checkpoint: str | None) -> None:
        """Have optimizer and schedule, and the state of a checkpoint."""
        raise NotImplementedError

    def load_state(self, directory: str) -> None:
        """Load a checkpoint."""
        raise NotImplementedError

    def restore_generators(self) -> None:
        """Put the generators back to where the checkpoint had them."""
        raise NotImplementedError

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        pass

    def _save_rng_state(self, output_dir: str) -> None:
        pass

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.restore_generators()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        pass

    def _load_best_model(self) -> None:
        self.load_state(self.state.best_model_checkpoint)


def without_fused_head(model: Any) -> None:
    """Undo TRL's `add_fused_lm_head`, a forward on the instance: the manager computes the same statistics."""
    if model is not None:
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        base.__dict__.pop("forward", None)


def one_device(args: Any) -> None:
    """Let a process without a launcher use one device, where Trainer would use all of them (torch's DataParallel)."""
    args._setup_devices  # noqa: B018  finds them
    args._n_gpu = min(args._n_gpu, 1)


@contextmanager
def without_adapters(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Around forwards of the base of adapted models. peft's own way freezes and thaws parameters, which a sharded model
    does not bear; so only the switch is set that its layers read."""
    layers = [each for part in parts for each in part.modules() if hasattr(each, "disable_adapters")]
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer._disable_adapters = was
