"""The model that Fabric sees. It is called once per step, with all microbatches of this rank.

[Note: one call per step] Fabric's loops call the model and run a backward for each microbatch. That allows neither a
pipeline nor a loss over the tokens of the full step. Here one call computes loss and gradients, and `fabric.backward`
of exactly that loss confirms it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwright import Objective, StrategyManager
from meshwright.plugin import StrategyError


class _LossWithGradients(torch.autograd.Function):
    """A loss whose gradients have already been computed; its backward checks that the loss was not changed."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, step: StepModule) -> Tensor:
        ctx.step = step
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        (factor,) = gradients
        if float(factor) != 1.0:
            raise StrategyError(
                f"backward of the loss times {float(factor):g}: under MeshStrategy the loss of a step is complete when "
                f"the model returns it. Call fabric.backward(loss) with that loss as it is, once; it is a mean over "
                f"all tokens of the step already, and other terms belong into an objective."
            )
        ctx.step.is_backward_pending = False
        return None, None, None


class StepModule(nn.Module):
    """Run a manager's step when called; see [Note: one call per step]."""

    def __init__(self, manager: StrategyManager) -> None:
        super().__init__()
        self.model_parts = nn.ModuleList(manager.model_parts)
        self.is_backward_pending = False
        self._manager = manager
        self._anchor = torch.zeros((), requires_grad=True)

    def forward(self, *args: Any, objective: Objective | None = None, **kwargs: Any) -> Tensor:
        """Compute the loss and gradients of a step; under `torch.no_grad()`, only the loss, in evaluation mode.

        The only positional argument is the list of this data rank's microbatches, with `input_ids` and `labels`. Return
        the mean loss per token of the global batch [nats], or the objective's sum divided by its count; equal on all
        ranks.
        """
        if len(args) != 1 or kwargs or isinstance(args[0], (Mapping, Tensor)):
            raise StrategyError(
                "under MeshStrategy a model is called once a step, with the list of this rank's microbatches, each "
                "with input_ids and labels, and returns their loss: loss = model([batch, batch])."
            )
        microbatches = list(args[0])
        num_tokens = self._manager.begin_step_sync(microbatches, objective=objective)
        if not torch.is_grad_enabled():
            return self._manager.eval_loss(microbatches, num_tokens=num_tokens, objective=objective)
        loss = self._manager.forward_backward(microbatches, num_tokens=num_tokens, objective=objective)
        self.is_backward_pending = True
        checked_loss: Tensor = _LossWithGradients.apply(self._anchor, loss, self)
        return checked_loss
