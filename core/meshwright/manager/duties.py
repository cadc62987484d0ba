"""What a strategy says of itself to the part that strategies share; see `data_parallel`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from torch import nn

from ..strategy.contract import Batch
from .ending import Findings
from .forward import Forward
from .gradients import Gradients
from .stateful import StatefulManager


class Duties(StatefulManager):
    """`shard`, and what else a strategy may replace.

    Attributes:
        forward: calls the module, and knows the axes; there after `parallelize`.
    """

    forward: Forward
    shards_on_meta: ClassVar[bool] = False
    """Whether `shard` takes a model on the meta device, which gets memory and values afterwards; else it gets them
    before, and `shard` sees a whole model."""
    runs_in_pipeline: ClassVar[bool] = False
    """Whether the strategy heeds `in_pipeline`."""

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model that the strategy cannot train, before anything is changed; also for all the stages of a
        pipeline, which then are not asked.

        Raises:
            ModelError: on all ranks alike.
        """

    @abstractmethod
    def shard(self, model: nn.Module) -> nn.Module:
        """Lay `model` out over the mesh, gradients reduced by SUM, and return the module to call."""

    def sync_gradients(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one microbatch; defers the reduction unless `is_last`."""
        return nullcontext()

    def after_backward(self, *, is_last: bool) -> None:
        """Called after each microbatch's backward, and after each part of it that a pipeline runs by itself."""

    def without_weights(self) -> AbstractContextManager[None]:
        """Around a backward of which a pipeline puts off gradients of weights."""
        return self.sync_gradients(is_last=False)

    def after_weights(self) -> None:
        """Called after weights' gradients that a pipeline has put off, but those after which it reduces them all."""
        self.after_backward(is_last=False)

    def check_batches(self, microbatches: Sequence[Batch]) -> None:
        """Refuse microbatches of this rank that the strategy cannot train on; no collective.

        Raises:
            BatchError: as it is told on all ranks.
        """
        self.forward.check_division(microbatches)

    def around_step(self, microbatches: Sequence[Batch]) -> AbstractContextManager[None]:
        """Around all forwards and backwards of a step or evaluation."""
        return nullcontext()

    def after_eval(self) -> None:
        """Called after forwards that no backward follows."""

    @property
    def parameters_on(self) -> torch.device:
        """Where parameters lie after `shard`; the mesh's device unless they are offloaded."""
        return self.mesh.device

    @property
    def reduces_once(self) -> bool:
        """Whether gradients are reduced in the last backward of a step only."""
        return True

    @property
    def sums_dtype(self) -> str | None:
        """The dtype in which gradients are summed; None: their own."""
        return getattr(self.config, "reduce_dtype", None)

    def make_gradients(self) -> Gradients:
        """What is clipped; for strategies to replace whose gradients are divided in their own way."""
        wide = self.sums_dtype is not None
        # Who asks for sums that do not depend on the layout wants the same of the factor that clips them.
        return Gradients(self.trainable, self.parts, self.mesh, wide=wide)

    @property
    def reduces_later(self) -> bool:
        """In a pipeline: whether a last backward would wait for its reductions, and may be run as others are, with
        `reduce_gradients` to follow when what it gives to the stage before is on its way."""
        return False

    def reduce_gradients(self) -> None:
        """In a pipeline whose backwards were all run with `is_last=False`: what the last one does. Collective."""

    def check_gradients(self) -> Findings | None:
        """Called after the last microbatch, when gradients are reduced.

        Returns:
            Which of them this rank has used, and what may be wrong with them, to be told to all; None: nothing.
        """
        return None
