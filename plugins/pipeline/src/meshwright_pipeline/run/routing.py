"""The router loss over the stages of a pipeline: what each adds. The loss itself is in `meshwright.step.router_loss`.

[Note: sums that cross] Of a microbatch it takes how often each expert is chosen, their summed probabilities and the
number of tokens, over all layers. Each stage adds those of its layers to what the stage
before has sent, and sends them on beside the hidden states; the last computes the loss, and the gradient of the sums
comes back to every stage with that of the hidden states. A microbatch is one of the pipeline's, of pp_microbatch_size
sequences: the step adds the mean over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from meshwright.step.router_loss import Notes, RouterLoss, Routers


class StageRouters:
    """The routers of one stage.

    Args:
        loss: of the model.
        routers: of the whole model.
        dtype: of the sums.

    Attributes:
        kind: shape and dtype of the sums of one microbatch, (2 * E + 1,) for E experts.
    """

    def __init__(self, loss: RouterLoss, routers: Routers, dtype: torch.dtype) -> None:
        self.loss = loss
        self.kind = ((2 * routers.experts + 1,), dtype)
        self._routers = routers
        self._notes = Notes()

    def watch(self, model: nn.Module) -> None:
        """Note what the routers that the stage has give."""
        self._notes = self._routers.watch(model)

    def noting(self) -> AbstractContextManager[list[Tensor]]:
        """See `Notes.noting`."""
        return self._notes.noting()

    def added(self, before: Tensor, logits: Sequence[Tensor], mask: Tensor | None) -> Tensor:
        """The sums of all stages up to this one, (2 * E + 1,), in the dtype of `before`.

        Args:
            before: those of the stages before it, (2 * E + 1,).
            logits: floating point, (T, E) for each layer of this stage.
            mask: of the T tokens, (B, S), 0 where one does not count; None: all count.
        """
        return before + self.loss.sums(logits, mask).to(before.dtype) if logits else before
