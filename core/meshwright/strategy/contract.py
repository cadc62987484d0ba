"""The contract of strategies: their managers, configs and descriptions. Imports no torch.

[Note: the gradient rule] The loss of a step is the sum of the token losses over all unmasked tokens of the global
batch, divided by their global count. Each rank computes its own tokens' share of that fraction, and every strategy
reduces gradients by SUM over every axis that saw different tokens. No averaging by world size anywhere, so every layout
computes the same gradient, with ragged masks, accumulation and uneven ranks.

[Note: equal on every rank] What a user can get wrong is found before the first collective of the call it would break,
and raised on all ranks with the same text; never on one while its peers wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field

from ..base.errors import StrategyError
from ..base.types import Batch, Objective, OptimizerFactory, TokenStatistic
from ..base.validation import FrozenModel

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ..mesh.mesh import Mesh
    from ..mesh.sizes import Degrees
    from ..model.merge import AdapterMode
    from ..model.weights import Weights
    from ..tensors.chunks import ChunkedTensor
    from ..tensors.state import OptimizerState, ShardedState, TensorMeta


class StrategyManager(ABC):
    """Trains one model under one strategy on one mesh; see [Note: the gradient rule].

    Made by `StrategySpec.build`. Call `parallelize`, then `build_optimizer`, then the others as often as needed. Every
    method is collective: all ranks of the mesh call it, in the same order.
    """

    config: BaseModel
    mesh: Mesh
    strategy: str = ""
    """The whole stack, such as "pipeline over fsdp2"; set by `Stack.build`."""
    steady_after_steps: int = 1
    """Steps after which each sends and holds what the next one does; a plan is of the step behind them."""

    @property
    @abstractmethod
    def model_parts(self) -> Sequence[nn.Module]:
        """The modules on this rank, with the names of the unwrapped Hugging Face model; one per local stage."""

    @abstractmethod
    def parallelize(self, model: nn.Module, weights: Weights | None = None) -> nn.Module:
        """Shard or replicate `model` in place and return the module to call in a hand-written loop.

        Copies on several ranks start from the weights of the first.

        Args:
            model: with memory, or on the meta device, so that a rank never holds more of it than the strategy keeps
                there.
            weights: the same on every rank; None: those that the model has, or, on the meta device, those that its
                class draws.

        Raises:
            ModelError: the model cannot be trained under this strategy.
        """

    @abstractmethod
    def build_optimizer(self, factory: OptimizerFactory) -> Optimizer:
        """Make the optimizer over the sharded parameters; the manager owns it.

        A schedule sets rates in the `param_groups` of what is returned. Loading state replaces the groups of torch's
        optimizers, so look them up each time.
        """

    @property
    @abstractmethod
    def optimizer(self) -> Optimizer:
        """The result of `build_optimizer`; StrategyError before."""

    @abstractmethod
    def forward_backward(
        self, microbatches: Sequence[Batch], *, num_tokens: Tensor, objective: Objective | None = None
    ) -> Tensor:
        """Accumulate the gradients of one optimizer step.

        Args:
            microbatches: this data-parallel rank's share, at least one; each holds `input_ids` and `labels`, int64, (B,
                S), other arguments of the model's forward, and the columns of the objective.
            num_tokens: unmasked targets in the global batch, or the divisor of the objective's sum; int64 scalar, equal
                on all ranks; see `announce`, or `meshwright.step.agreement.count_tokens`.
            objective: called as `objective(tokens, columns)` for each microbatch in place of the token loss; see [Note:
                objectives] in `meshwright.step.objective`.

        Returns:
            Mean loss per token of the global batch [nats], or the objective's sum over `num_tokens`; scalar, equal on
            all ranks; float32, or float64 for a float64 model.

        Raises:
            BatchError: a microbatch is malformed, or ranks disagree on the number of microbatches or tokens, or on the
                objective or its columns (on all ranks, before any other collective).
            ConfigError, TrainingError: the objective fails on a rank, is no sum, or is not finite; on all ranks, before
                the first step, when the step is read, or before the optimizer steps. Nothing was trained.
        """

    @abstractmethod
    def eval_loss(
        self, microbatches: Sequence[Batch], *, num_tokens: Tensor, objective: Objective | None = None
    ) -> Tensor:
        """Return what `forward_backward` would, in evaluation mode, without gradients."""

    @abstractmethod
    def token_stats(self, microbatches: Sequence[Batch], names: Sequence[TokenStatistic]) -> list[dict[str, Tensor]]:
        """Return statistics of each token, in evaluation mode, without gradients.

        Args:
            microbatches: as in `forward_backward`; columns of an objective are ignored.
            names: properties of `meshwright.step.tokens.Tokens`.

        Returns:
            For each microbatch of this data-parallel rank the statistics by name, (B, S), of whole sequences, on all
            ranks that share it.

        Raises:
            BatchError: a microbatch is malformed, or a name is unknown; on all ranks.
        """

    @property
    @abstractmethod
    def last_sums(self) -> Mapping[str, Tensor]:
        """The further sums of the objective in the last call, over all ranks: float64 scalars by name."""

    @abstractmethod
    def clip_grad_norm(self, max_norm: float | None, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their total norm is at most `max_norm`.

        Args:
            max_norm: limit, > 0; None only measures.
            norm_type: p of the p-norm, > 0, or inf.

        Returns:
            Total norm of the whole model's gradient before clipping, scalar, equal on all ranks.
        """

    def gradient_norms(self) -> dict[str, float]:
        """Return the 2-norms of the gradients of each part of the model, between `forward_backward` and
        `clip_grad_norm`.

        Waits for the device. StrategyError if the strategy does not support it.

        Returns:
            By the name of each block, and by "embedding", "head" and "other", as far as they train; equal on all ranks.
            Every parameter that trains counts in one of them, under the first of its names.
        """
        raise StrategyError(
            f"{type(self).__name__} does not tell gradient norms by block. Leave out norms_every (in a run file, "
            f"metrics.norms_every), or derive the strategy from DataParallelManager, which tells them."
        )

    @abstractmethod
    def optimizer_step(self) -> None:
        """Step the optimizer and drop the gradients."""

    def drop_gradients(self) -> None:
        """Drop the gradients of a step that is skipped. StrategyError if a strategy cannot."""
        raise StrategyError(
            f"{type(self).__name__} has no drop_gradients, which leaves steps out. Set on_bad_step: stop."
        )

    @abstractmethod
    def begin_step_sync(self, microbatches: Sequence[Batch], *, objective: Objective | None = None) -> Tensor:
        """Begin to agree with the other ranks on the next step, while the device computes this one.

        Errors in the microbatches are raised by the step.

        Args:
            microbatches: pass this very sequence to the next `forward_backward` or `eval_loss`.
            objective: as well; it may say what is counted.

        Returns:
            `num_tokens` of that call; reading it is optional on every rank.
        """

    def read_scalars(self, *values: Tensor) -> list[float]:
        """Read scalars that are equal on all ranks, such as the loss and the norm of a step, with one wait for the
        device.

        Errors that a strategy finds on the device are read at the same time; without this call, the optimizer's step
        waits for them.

        Raises:
            MeshwrightError: a gradient of the step is not what the strategy's options ask for; on all ranks. Nothing
                was trained.
        """
        return [float(value) for value in values]

    @abstractmethod
    def unshard(self) -> AbstractContextManager[Sequence[nn.Module]]:
        """Hold the full parameters of `model_parts`, which the context yields, to generate or compare."""

    def iter_parameters(
        self, *, bucket_bytes: int, dtype: torch.dtype | None = None, adapters: AdapterMode = "apart"
    ) -> Iterator[tuple[str, Tensor]]:
        """Iterate over all parameters, unsharded, on every rank; see `meshwright.model.merge.iter_parameters`."""
        from ..model.merge import iter_parameters

        return iter_parameters(self, bucket_bytes=bucket_bytes, dtype=dtype, adapters=adapters)

    def parameter_chunks(self) -> Mapping[str, ChunkedTensor | None]:
        """Return this rank's pieces of all parameters, each under the first of its names, in the order of the model.

        These are values that the model computes with, if it trains others; a piece may have another dtype than its
        `ChunkedTensor`, to which it is to be rounded. None for parameters on other ranks alone. If ranks have different
        names, those of the first come first.
        """
        state = self.sharded_state().model
        named = (part.named_parameters(remove_duplicate=False) for part in self.model_parts)
        return {name: state[name] for each in named for name, _ in each if name in state}

    @abstractmethod
    def state_dict(self, *, full: bool = False) -> dict[str, Any]:
        """Return `{"model": ..., "optimizer": ...}` under the names of the unwrapped Hugging Face model.

        Args:
            full: False returns each tensor as it is (a DTensor if sharded), without communication. True returns full
                tensors on the CPU of rank 0 and empty mappings elsewhere.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any], *, full: bool = False) -> None:
        """Load what `state_dict` of the same `full` returned, under any strategy if `full`.

        Args:
            state: with `full`, rank 0's is used and the others' may be empty.
        """

    @abstractmethod
    def sharded_state(self) -> ShardedState:
        """Return this rank's pieces of model and optimizer, as views of its memory, from which checkpoints are written.

        A rank may have any pieces, as long as all ranks together have the whole; pieces that several ranks have are the
        same rectangles on each.
        """

    @abstractmethod
    def load_sharded_state(self, optimizer: OptimizerState[TensorMeta] | None) -> AbstractContextManager[ShardedState]:
        """Load state from a checkpoint: the context yields the pieces to write into; leaving it puts them to use.

        Args:
            optimizer: the checkpoint's state of the whole optimizer, on every rank; None leaves the optimizer as it is.

        Raises:
            StrategyError: the state is not of this model and optimizer; before anything is changed.
        """


CHANGES_ROUNDING = "rounds again"
"""Annotates an option of a config, `Annotated[bool, CHANGES_ROUNDING]`, under which the parts that a model computes in
float32 are rounded in other places. The conformance suite tries it on a model that has no such parts."""


class StrategyConfig(FrozenModel):
    """Base of strategy configs: frozen, unknown fields refused. Third parties may use any pydantic model."""

    reduce_dtype: Literal["float32", "float64"] | None = Field(
        default=None,
        description="Dtype in which gradients are accumulated over microbatches and summed over ranks; null: the "
        "gradients' own. float64 under float32 gradients makes the sum independent of its order, so that every "
        "strategy and world size prints the same losses.",
    )
    loss_chunk_rows: int | None = Field(
        default=None,
        ge=0,
        description="Compute the loss for so many positions of a microbatch at a time, so that logits are held for "
        "these alone. null: half as many as a position has hidden features, at least 512, where logits are large. 0: "
        "for all at once.",
    )


DistributedConfig = StrategyConfig
"""The reference's name for the options of any strategy but a pipeline."""


@dataclass(frozen=True)
class StrategySpec:
    """A strategy as the registry knows it.

    Attributes:
        name: lower-case identifier; users choose the strategy by it.
        summary: one line for `meshwright strategies`.
        axes: the axes it shards, out of `meshwright.mesh.sizes.CLAIMABLE_AXES`. A degree above 1 on any other axis is
            an error unless a wrapping strategy claims that axis.
        config_cls: a pydantic model of its options.
        build: `build(config, mesh) -> StrategyManager`; for `wraps`, `build(config, mesh, inner)` with `inner:
            Callable[[Mesh], StrategyManager]`, called once for each model part with the mesh it trains on.
        aliases: other names for it.
        is_wrapper: it claims its axes around another strategy, which does the rest.
        check: `check(config, degrees)` raises a MeshwrightError if the config cannot act on a mesh of these degrees;
            without torch, since it is called before ranks start.
    """

    name: str
    summary: str
    axes: frozenset[str]
    config_cls: type[BaseModel]
    build: Callable[..., StrategyManager]
    aliases: tuple[str, ...] = ()
    is_wrapper: bool = False
    check: Callable[[Any, Degrees], None] | None = None
