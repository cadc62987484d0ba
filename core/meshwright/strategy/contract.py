"""What a strategy is: a spec that describes it and a manager that does its work.

[Note: the gradient rule] The loss of a step is the sum of the token losses over all unmasked tokens of the global
batch, divided by their global count. Each rank computes its own tokens' share of that fraction, and every strategy
reduces gradients by SUM over every axis that saw different tokens. No averaging by world size anywhere, so every
layout computes the same gradient, with ragged masks, accumulation and uneven ranks.

[Note: equal on every rank] What a user can get wrong is found before the first collective of the call it would
break, and raised on all ranks with the same text; never on one while its peers wait.

This module imports no torch, so that strategies can be listed and configs validated without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic import BaseModel, Field

from ..base.validation import FrozenModel

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ..mesh.mesh import Mesh
    from ..mesh.sizes import Degrees
    from ..model.weights import Weights
    from ..tensors.state import OptimizerState, ShardedState, TensorKind

Batch: TypeAlias = "Mapping[str, Tensor]"
"""`input_ids` and `labels`, int64, (B, S); labels of -100 are masked. Further tensors go to the model's forward."""

IGNORED_LABEL = -100
"""The label of a token that counts for no loss."""

ROUNDS_ANEW = "rounds anew"
"""Annotates an option of a config, `Annotated[bool, ROUNDS_ANEW]`, under which the parts that a model computes in
float32 are rounded in other places. The conformance suite tries it on a model that has no such parts."""

OptimizerFactory: TypeAlias = "Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]"
"""Makes an optimizer from (fully qualified name, parameter) pairs; see `meshwright.train.optim.optimizer_factory`."""


class StrategyConfig(FrozenModel):
    """Base for strategy configs: frozen, unknown fields refused. Third parties may use any pydantic model."""

    reduce_dtype: Literal["float32", "float64"] | None = Field(
        None,
        description="Dtype in which gradients are accumulated over microbatches and summed over ranks; null: the "
        "gradients' own. float64 under float32 gradients makes the sum independent of its order, so that every "
        "strategy and world size prints the same losses.",
    )


DistributedConfig = StrategyConfig
"""The reference's name for the options of any strategy but a pipeline."""


@dataclass(frozen=True)
class ModelSize:
    """What an estimate needs to know of a model."""

    parameters: int
    """All elements; a tied weight counts once."""
    trainable: int
    largest_block: int
    """Elements of the largest unit that is gathered at once."""
    bytes_per_element: int


@dataclass(frozen=True)
class Estimate:
    """Bytes that each rank holds throughout a run with AdamW; activations come on top."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int = 0
    """Peak of parameters that are gathered for use."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.gathered


@dataclass(frozen=True)
class StrategySpec:
    """A strategy as the registry knows it.

    Attributes:
        name: lower-case identifier; users choose the strategy by it.
        summary: one line for `meshwright strategies`.
        axes: the axes it shards, out of `meshwright.mesh.sizes.CLAIMABLE_AXES`. A degree above 1 on any other axis is
            an error unless a wrapping strategy claims that axis.
        config_cls: a pydantic model of its options.
        build: `build(config, mesh) -> StrategyManager`; for `wraps`, `build(config, mesh, inner)` with
            `inner: Callable[[Mesh], StrategyManager]`, called once for each model part with the mesh it trains on.
        aliases: other names for it.
        wraps: it claims its axes around another strategy, which does the rest.
        estimate: `estimate(config, degrees, model_size) -> Estimate | None`, or None when it has no say.
    """

    name: str
    summary: str
    axes: frozenset[str]
    config_cls: type[BaseModel]
    build: Callable[..., StrategyManager]
    aliases: tuple[str, ...] = ()
    wraps: bool = False
    estimate: Callable[[Any, Degrees, ModelSize], Estimate | None] | None = None


class StrategyManager(ABC):
    """Trains one model under one strategy on one mesh; see [Note: the gradient rule].

    Made by `StrategySpec.build`. Call `parallelize`, then `build_optimizer`, then the others as often as needed.
    Every method is collective: all ranks of the mesh call it, in the same order.
    """

    config: BaseModel
    mesh: Mesh
    strategy: str = ""
    """The whole stack, such as "pipeline over fsdp2"; set by `Stack.build`."""

    @property
    @abstractmethod
    def model_parts(self) -> Sequence[nn.Module]:
        """The modules on this rank, with the names of the unwrapped Hugging Face model; one per local stage."""

    @abstractmethod
    def parallelize(self, model: nn.Module, weights: Weights | None = None) -> nn.Module:
        """Shard or replicate `model` in place and return the module to call in a hand-written loop.

        Ranks that hold copies start from the same weights, those of the first rank.

        Args:
            model: with memory, or built under `torch.device("meta")`, so that a rank never holds more of it than what
                the strategy keeps there.
            weights: its values, the same on every rank; None: those that it has, or, on the meta device, those that
                its class draws.

        Raises:
            ModelError: the model cannot be trained under this strategy.
        """

    @abstractmethod
    def build_optimizer(self, factory: OptimizerFactory) -> Optimizer:
        """Make the optimizer over the parameters as they are after sharding; the manager owns it from here on.

        A schedule sets rates in the `param_groups` of what is returned, and every step is made with these, also after
        state has been loaded, which gives torch's optimizers new groups: a wrapper looks them up, and keeps none.
        """

    @abstractmethod
    def forward_backward(self, microbatches: Sequence[Batch], *, num_tokens: Tensor) -> Tensor:
        """Accumulate the gradients of one optimizer step.

        Args:
            microbatches: this data-parallel rank's share, at least one; each holds `input_ids` and `labels`,
                int64, (B, S), and what else the model's forward takes.
            num_tokens: unmasked targets in the global batch, int64 scalar, equal on all ranks; see
                `meshwright.step.batch.count_tokens`.

        Returns:
            Mean loss per token of the global batch [nats], scalar, equal on all ranks; float32, or float64 for a
            float64 model.

        Raises:
            BatchError: a microbatch is malformed, or ranks disagree on the number of microbatches or tokens
                (raised on all of them, before any other collective).
        """

    @abstractmethod
    def eval_loss(self, microbatches: Sequence[Batch], *, num_tokens: Tensor) -> Tensor:
        """Return what `forward_backward` would, in evaluation mode, without gradients."""

    @abstractmethod
    def clip_grad_norm(self, max_norm: float | None, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their total norm is at most `max_norm`.

        Args:
            max_norm: limit, > 0; None only measures.
            norm_type: p of the p-norm, > 0, or inf.

        Returns:
            Total norm of the whole model's gradient before clipping, scalar, equal on all ranks.
        """

    @abstractmethod
    def optimizer_step(self) -> None:
        """Step the optimizer and drop the gradients."""

    @abstractmethod
    def unshard(self) -> AbstractContextManager[Sequence[nn.Module]]:
        """Hold the full parameters of `model_parts`, for log-probabilities, generation or comparison.

        The context gives `model_parts`. Training goes on afterwards as if it had not been entered.
        """

    @abstractmethod
    def state_dict(self, *, full: bool = False) -> dict[str, Any]:
        """Return `{"model": ..., "optimizer": ...}` under the names of the unwrapped Hugging Face model.

        Args:
            full: False gives each tensor as it lies (a DTensor where sharded), without communication. True gives
                whole tensors on the CPU of rank 0 and empty mappings elsewhere.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any], *, full: bool = False) -> None:
        """Load what `state_dict` of the same `full` gave, under any strategy when `full`.

        Args:
            state: with `full`, rank 0's is used and the others' may be empty.
        """

    @abstractmethod
    def sharded_state(self) -> ShardedState:
        """This rank's pieces of model and optimizer, as views of its memory: what a checkpoint is written from.

        A rank may have any pieces, as long as all ranks together have the whole; pieces that several ranks have are
        the same rectangles on each.
        """

    @abstractmethod
    def loading(self, optimizer: OptimizerState[TensorKind] | None) -> AbstractContextManager[ShardedState]:
        """Take state from a checkpoint: the context gives the pieces to write into, and leaving it puts them to use.

        Args:
            optimizer: what the checkpoint has of the optimizer, all of it on every rank; None leaves the optimizer as
                it is.

        Raises:
            StrategyError: the state is not of this model and optimizer; before anything is changed.
        """
