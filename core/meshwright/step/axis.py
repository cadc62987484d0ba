"""Interface between a step and a mesh axis that shards microbatches or the model.

A manager holds a list of axes and does not refer to any by name. An axis shards parameters when it is created. Gradient
reduction over data-parallel ranks belongs to the strategy.

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
    """Inputs of `Axis.probe`: an unsharded microbatch, the model, and the sequence multiple that other axes require."""

    microbatch: Batch
    call_model: Callable[..., Any]
    length_multiple: int


class Axis:
    """One mesh axis as a step sees it. By default, each method does nothing; an axis overrides those it needs.

    Attributes:
        shards_batches: `shard_batch` changes microbatches, so each is checked first.
        shards_sequences: `shard_batch` gives each rank a part of every sequence, so no rank can run model code that
            needs a full sequence.
        shards_vocabulary: each rank computes a part of the logits; see `meshwright.step.lm_head`.
        replicas: number of ranks that have equal tensors after `gather`, and whose losses are summed.
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
        """Raise BatchError for a batch that `shard_batch` cannot shard; no collective."""

    def shard_batch(self, batch: Batch) -> Batch:
        """Return this rank's shard of a microbatch; `tokens.TARGETS`, already shifted, may replace its `labels`."""
        return batch

    def local(self, full: Tensor) -> Tensor:
        """Return this rank's positions of a tensor (B, S, ...) that was not sharded, such as an attention mask."""
        return full

    def shard(self, full: Tensor) -> Tensor:
        """Return this rank's shard of a tensor (B, S, ...) of the full microbatch."""
        return self.local(full)

    def gather(self, local: Tensor) -> Tensor:
        """Gather a tensor sharded as by `shard`; its gradient is summed over ranks. Collective. Used by objectives."""
        return local

    def gather_sequences(self, local: Tensor) -> Tensor:
        """Gather the outputs of a sequence head, (B, K), from those of each rank's positions, as `gather` does."""
        raise ModelError(
            f"{type(self).__name__} divides sequences and brings no `gather_sequences`: it takes no model that gives "
            f"one thing for each sequence."
        )

    # -- forwards and backwards

    def step_context(self) -> AbstractContextManager[None]:
        """Context around all forwards and backwards of a step or evaluation."""
        return nullcontext()

    def forward_context(self, inputs: Batch) -> AbstractContextManager[Mapping[str, Any]]:
        """Context around one forward of a sharded batch without labels; yields the model's arguments."""
        return nullcontext(inputs)

    def isolated(self) -> AbstractContextManager[Any]:
        """Context around trial forwards, in which this rank computes without the other ranks of the axis if it can."""
        return nullcontext()

    def check_logits(self, shape: Sequence[int], targets_BS: Tensor) -> None:
        """Raise ModelError if logits, (B, S, V) or this rank's shard, do not match `targets_BS`."""

    def reduce_losses(self, total: Tensor) -> None:
        """Sum in place the losses, float64, 1-D, of ranks with different shards of a microbatch. Collective."""

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum gradients over the axis if the strategy does not. Called after the last backward. Collective."""

    def unsharded(self) -> AbstractContextManager[None]:
        """Context with full parameters in the modules, which compute without other ranks of the axis. Collective."""
        return nullcontext()

    # -- before and after the first step

    def needs_probe(self) -> bool:
        """Return whether `probe` must still be called."""
        return False

    def probe(self, inputs: ProbeInputs) -> MeshwrightError | None:
        """Run the model on a few tokens to check what cannot be inspected otherwise; return an error or None."""
        return None

    def find_gradient_error(self, shard_layout: ShardLayout) -> MeshwrightError | None:
        """Return a model error that the first step's gradients, sharded by `shard_layout`, reveal. Collective."""
        return None
