"""The token loss of a model whose head is sharded along the vocabulary, and whether it may take the shards.

How the loss of sharded logits is computed is in `sharded_loss`; how the head gathers them in `styles`.

Shapes: B sequences of a microbatch, S tokens each, V entries of the vocabulary, L of them on this rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..._compat.torch import is_elementwise
from ...step.token_loss import target_loss_sum
from .collectives import chunk_sizes
from .sharded_loss import sharded_target_loss_sum


class HeadLoss:
    """The loss behind one head.

    Args:
        head: a layer that is sharded along its output, which it gathers; None: the loss takes whole logits.
        mesh: the axis `tp`.
    """

    def __init__(self, head: nn.Module | None, mesh: DeviceMesh) -> None:
        self._head, self._mesh = head, mesh
        self._keeps_logits = False
        self._logits: Tensor | None = None
        self._takes_shards: bool | None = None if head is not None else False

    @property
    def is_open(self) -> bool:
        """Whether `choose` has still to be called."""
        return self._takes_shards is None

    def choose(self, compute_logits: Callable[[], Tensor]) -> None:
        """Find out whether the loss can take sharded logits.

        It can where what the model makes of the head's answer treats every entry alike, which the autograd graph of a
        small forward tells.

        Args:
            compute_logits: the model's answer to a few tokens, with gradients. Nothing remains of it.
        """
        devices = [] if self._mesh.device_type == "cpu" else [torch.accelerator.current_device_index()]
        with (
            torch.random.fork_rng(devices=devices),
            torch.compiler.set_stance("force_eager"),
            torch.enable_grad(),
        ):
            logits = compute_logits()
        self._takes_shards = self._logits is not None and is_elementwise(logits, self._logits)
        self._logits = None

    def sum(
        self,
        compute_logits: Callable[[], Tensor],
        targets_BS: Tensor,
        check_length: Callable[[Tensor, Tensor], None],
    ) -> Tensor:
        """The sum of the cross entropy over unmasked targets [nats], scalar.

        Args:
            compute_logits: runs the model; (B, S, V), or (B, S, L) where the loss takes shards.
            targets_BS: int64, the label that each position predicts.
            check_length: is given both, to refuse logits of other positions.
        """
        if self._takes_shards and self._head is not None:
            self._keeps_logits = True
            try:
                logits_BSL = compute_logits()
            finally:
                self._keeps_logits = False
            check_length(logits_BSL, targets_BS)
            sizes = chunk_sizes(int(self._head.out_features), self._mesh.size())
            return sharded_target_loss_sum(
                logits_BSL, targets_BS, sum(sizes[: self._mesh.get_local_rank()]), self._mesh.get_group()
            )
        logits_BSV = compute_logits()
        check_length(logits_BSV, targets_BS)
        return target_loss_sum(logits_BSV, targets_BS)

    def keeps_sharded(self, module: nn.Module) -> bool:
        """Whether a layer that gathers its output should not, since it is the head and the loss takes shards."""
        return self._keeps_logits and module is self._head

    def note(self, module: nn.Module, logits: Tensor) -> None:
        """Take what a layer has answered, in case it is the head."""
        if module is self._head and self.is_open:
            self._logits = logits
