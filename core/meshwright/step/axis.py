"""What a step asks of each axis along which ranks share a microbatch or the model.

A manager holds a list of axes and knows none by name. An axis divides parameters when it is made; the reduction of
gradients over data-parallel ranks belongs to the strategy.

Shapes: B sequences of a microbatch, S tokens each, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..base.errors import MeshwrightError, ModelError
from ..base.types import Batch
from ..tensors.state import ShardLayout


@dataclass(frozen=True)
class ProbeInputs:
    """What an axis may try: an undivided microbatch, the model, and the divisor that other axes require."""

    microbatch: Batch
    call_model: Callable[..., Any]
    length_multiple: int


class Axis:
    """One axis of the mesh as a step sees it. Each method does nothing unless an axis replaces it.

    Attributes:
        shards_batches: `divide` does something, so each microbatch is checked before.
        shards_sequences: `divide` leaves each rank a part of every sequence, so no rank has what the model's own code
            computes over a whole sequence.
        shards_vocabulary: each rank computes a part of the logits; see `meshwright.step.lm_head`.
        replicas: ranks that have the same after `joined`, and whose losses are added up.
    """

    shards_batches: bool = False
    shards_sequences: bool = False
    shards_vocabulary: bool = False
    replicas: int = 1

    @property
    def sequence_multiple(self) -> int:
        return 1

    # -- batches

    def check_batch(self, batch: Batch) -> None:
        """Refuse what `divide` cannot divide, with a BatchError; no collective."""

    def shard_batch(self, batch: Batch) -> Batch:
        """Return this rank's part of a microbatch; `token_loss.TARGETS`, shifted, may replace its `labels`."""
        return batch

    def local(self, full: Tensor) -> Tensor:
        """Return this rank's positions of a tensor (B, S, ...) that was left undivided, such as an attention mask."""
        return full

    def shard(self, full: Tensor) -> Tensor:
        """Return what this rank has, after division, of a tensor (B, S, ...) of the whole microbatch."""
        return self.local(full)

    def gather(self, local: Tensor) -> Tensor:
        """Gather a tensor divided as by `parted`, with a gradient summed over ranks. Collective. Objectives need it."""
        return local

    def gather_sequences(self, local: Tensor) -> Tensor:
        """Return outputs for each sequence, (B, K), from those for each rank's positions. Collective; as `joined`."""
        raise ModelError(
            f"{type(self).__name__} divides sequences and brings no `gather_sequences`: it takes no model that gives "
            f"one thing for each sequence."
        )

    # -- forwards and backwards

    def step_context(self) -> AbstractContextManager[None]:
        """Context of all forwards and backwards of a step or evaluation."""
        return nullcontext()

    def forward_context(self, inputs: Batch) -> AbstractContextManager[Mapping[str, Any]]:
        """Context of one forward with a divided batch without labels; gives what the model is called with."""
        return nullcontext(inputs)

    def isolated(self) -> AbstractContextManager[Any]:
        """Context of trial forwards, in which this rank computes without the others of the axis if it can."""
        return nullcontext()

    def check_logits(self, shape: Sequence[int], targets_BS: Tensor) -> None:
        """Refuse logits, (B, S, V) or this rank's part, that are not those of `targets_BS`, with a ModelError."""

    def reduce_losses(self, total: Tensor) -> None:
        """Add up, in place, the losses of ranks with different parts of a microbatch; float64, 1-D. Collective."""

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up gradients over the axis if the strategy's reduction does not; after the last backward. Collective."""

    def unsharded(self) -> AbstractContextManager[None]:
        """Context with full parameters in the modules, which compute without the others of the axis. Collective."""
        return nullcontext()

    # -- before and after the first step

    def needs_probe(self) -> bool:
        """Return whether `probe` has still to be called."""
        return False

    def probe(self, inputs: ProbeInputs) -> MeshwrightError | None:
        """Try on a few tokens what cannot be known of the model otherwise; return what is wrong with it."""
        return None

    def find_gradient_error(self, shard_layout: ShardLayout) -> MeshwrightError | None:
        """Return what the first step's gradients, divided by `shard_layout`, show to be wrong with the model.
        Collective."""
        return None
