"""The strategy contract: `StrategyManager`, `StrategyConfig` and `StrategySpec`. Imports no torch.

[Note: the gradient rule] The loss of a step is the sum of the token losses over all unmasked tokens of the global
batch, divided by their global count. Each rank computes its own tokens' share of that fraction, and every strategy
reduces gradients by SUM over every axis that saw different tokens. No averaging by world size anywhere, so every layout
computes the same gradient, with ragged masks, accumulation and uneven ranks.

[Note: equal on every rank] User errors are detected before the first collective of the call that they would break. They
are raised on all ranks with the same text, never on one rank while its peers wait.
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
    """Train one model under one strategy on one mesh; see [Note: the gradient rule].

    Created by `StrategySpec.build`. Call `parallelize`, then `build_optimizer`, then the other methods in any order.
    Every method is collective: all ranks of the mesh call it, in the same order.
    """

    config: BaseModel
    mesh: Mesh
    strategy: str = ""
    """The full stack, such as "pipeline over fsdp2"; set by `Stack.build`."""
    steady_after_steps: int = 1
    """Number of warm-up steps before communication and memory are equal in every step. A plan describes the step after
    them."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.mesh}, {self.config!r})"

    @property
    @abstractmethod
    def model_parts(self) -> Sequence[nn.Module]:
        """The modules on this rank, one per local stage. Their names are those of the unwrapped Hugging Face model."""

    @abstractmethod
    def parallelize(self, model: nn.Module, weights: Weights | None = None) -> nn.Module:
        """Shard or replicate `model` in place and return the module to call in a custom training loop.

        Replicas start from the weights of their lowest rank.

        Args:
            model: a materialized model, or one on the meta device. From the meta device, a rank never holds more of the
                model than the strategy keeps there.
            weights: the initial weights, equal on every rank. None: the model's own or, on the meta device, those that
                the model class initializes.

        Raises:
            ModelError: the model cannot be trained under this strategy.
        """

    @abstractmethod
    def build_optimizer(self, factory: OptimizerFactory) -> Optimizer:
        """Build the optimizer over the sharded parameters; the manager owns it.

        A scheduler sets learning rates in the `param_groups` of the returned optimizer. Loading state replaces the
        groups of torch's optimizers, so look them up each time.
        """

    @property
    @abstractmethod
    def optimizer(self) -> Optimizer:
        """The result of `build_optimizer`; raises StrategyError before that call."""

    @abstractmethod
    def forward_backward(
        self, microbatches: Sequence[Batch], *, num_tokens: Tensor, objective: Objective | None = None
    ) -> Tensor:
        """Accumulate the gradients of one optimizer step.

        Args:
            microbatches: this data-parallel rank's share, at least one. Each holds `input_ids` and `labels`, int64, (B,
                S), other arguments of the model's forward, and the columns of the objective.
            num_tokens: unmasked targets in the global batch, or the divisor of the objective's sum. int64 scalar, equal
                on all ranks; see `begin_step_sync`, or `meshwright.step.handshake.count_tokens`.
            objective: called as `objective(tokens, columns)` for each microbatch instead of the token loss; see [Note:
                objectives] in `meshwright.step.objective`.

        Returns:
            Mean loss per token of the global batch [nats], or the objective's sum divided by `num_tokens`. Scalar,
            equal on all ranks; float32, or float64 for a float64 model.

        Raises:
            BatchError: a microbatch is malformed, or ranks disagree on the number of microbatches or tokens, or on the
                objective or its columns. Raised on all ranks, before any other collective.
            ConfigError, TrainingError: the objective fails on a rank, is not a sum, or is not finite. Raised on all
                ranks: before the first step, in `read_scalars`, or in `optimizer_step`. No parameter has changed.
        """

    @abstractmethod
    def eval_loss(
        self, microbatches: Sequence[Batch], *, num_tokens: Tensor, objective: Objective | None = None
    ) -> Tensor:
        """Return the loss as `forward_backward` does, in evaluation mode and without gradients."""

    @abstractmethod
    def token_stats(self, microbatches: Sequence[Batch], names: Sequence[TokenStatistic]) -> list[dict[str, Tensor]]:
        """Return statistics of each token, in evaluation mode and without gradients.

        Args:
            microbatches: as in `forward_backward`; columns of an objective are ignored.
            names: properties of `meshwright.step.tokens.Tokens`.

        Returns:
            For each microbatch of this data-parallel rank, the statistics by name: (B, S), of full sequences, equal on
            all ranks that process the same microbatch.

        Raises:
            BatchError: a microbatch is malformed, or a name is unknown; on all ranks.
        """

    @property
    @abstractmethod
    def last_sums(self) -> Mapping[str, Tensor]:
        """The objective's extra sums in the last call, over all ranks: float64 scalars by name."""

    @abstractmethod
    def clip_grad_norm(self, max_norm: float | None, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their total norm is at most `max_norm`.

        Args:
            max_norm: limit, > 0; None: measure only.
            norm_type: p of the p-norm, > 0, or inf.

        Returns:
            Total norm of the full model's gradient before clipping, scalar, equal on all ranks.
        """

    def gradient_norms(self) -> dict[str, float]:
        """Return the 2-norm of the gradients of each part of the model; waits for the device.

        Call it between `forward_backward` and `clip_grad_norm`. Raises StrategyError if the strategy does not support
        it.

        Returns:
            Norms by block name, and by "embedding", "head" and "other", for parts with trainable parameters; equal on
            all ranks. Every trainable parameter counts in exactly one part, by the first of its names.
        """
        raise StrategyError(
            f"{type(self).__name__} does not support gradient norms by block. Leave out norms_every (in a run file, "
            f"metrics.norms_every), or derive the strategy from DataParallelManager, which supports them."
        )

    @abstractmethod
    def optimizer_step(self) -> None:
        """Step the optimizer and clear the gradients."""

    def drop_gradients(self) -> None:
        """Clear the gradients of a step that is skipped; StrategyError if the strategy does not support it."""
        raise StrategyError(
            f"{type(self).__name__} has no drop_gradients, so it cannot skip steps. Set on_bad_step: stop."
        )

    @abstractmethod
    def begin_step_sync(self, microbatches: Sequence[Batch], *, objective: Objective | None = None) -> Tensor:
        """Start the handshake of the next step with the other ranks, while the device computes the current one.

        Errors in the microbatches are raised by the next step, not here.

        Args:
            microbatches: pass this same object to the next `forward_backward` or `eval_loss`.
            objective: pass it to that call too; it may define what is counted.

        Returns:
            `num_tokens` for that call. Each rank may read it or not.
        """

    def read_scalars(self, *values: Tensor) -> list[float]:
        """Read scalars that are equal on all ranks, such as a step's loss and gradient norm, in one device sync.

        The same sync reads errors that the strategy has recorded on the device. Without this call, the optimizer step
        waits for them.

        Raises:
            MeshwrightError: a gradient of the step violates the strategy's options. Raised on all ranks; no parameter
                has changed.
        """
        return [float(value) for value in values]

    @abstractmethod
    def unshard(self) -> AbstractContextManager[Sequence[nn.Module]]:
        """Context with the full parameters in `model_parts`, which it yields, for generation or comparison."""

    def iter_parameters(
        self, *, bucket_bytes: int, dtype: torch.dtype | None = None, adapters: AdapterMode = "apart"
    ) -> Iterator[tuple[str, Tensor]]:
        """Iterate over all full parameters, on every rank; see `meshwright.model.merge.iter_parameters`."""
        from ..model.merge import iter_parameters

        return iter_parameters(self, bucket_bytes=bucket_bytes, dtype=dtype, adapters=adapters)

    def parameter_chunks(self) -> Mapping[str, ChunkedTensor | None]:
        """Return this rank's chunks of all parameters, each under the first of its names, in model order.

        The values are those that the model computes with, which may differ from the trained ones. A chunk may have
        another dtype than its `ChunkedTensor`; round it to that dtype. None for parameters that are only on other
        ranks. If ranks have different names, those of rank 0 come first.
        """
        state = self.sharded_state().model
        parameters = (part.named_parameters(remove_duplicate=False) for part in self.model_parts)
        return {name: state[name] for each in parameters for name, _ in each if name in state}

    @abstractmethod
    def state_dict(self, *, full: bool = False) -> dict[str, Any]:
        """Return `{"model": ..., "optimizer": ...}` under the names of the unwrapped Hugging Face model.

        Args:
            full: False: return each tensor as it is (a DTensor if sharded), without communication. True: return full
                tensors on the CPU of rank 0, and empty mappings on the other ranks.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any], *, full: bool = False) -> None:
        """Load the result of `state_dict` with the same `full`. With `full`, it may come from any strategy.

        Args:
            state: with `full`, only that of rank 0 is used.
        """

    @abstractmethod
    def sharded_state(self) -> ShardedState:
        """Return this rank's chunks of model and optimizer state, as views of its memory, to write a checkpoint.

        A rank may have any chunks, as long as those of all ranks cover every tensor. A chunk that several ranks have is
        the same rectangle on each.
        """

    @abstractmethod
    def load_sharded_state(self, optimizer: OptimizerState[TensorMeta] | None) -> AbstractContextManager[ShardedState]:
        """Load state from a checkpoint: the context yields the chunks to write into, and applies them on exit.

        Args:
            optimizer: the checkpoint's state of the full optimizer, on every rank; None: keep the optimizer as it is.

        Raises:
            StrategyError: the state does not match this model and optimizer. Raised before any change.
        """


CHANGES_ROUNDING = "rounds again"
"""Annotation of a config option, as `Annotated[bool, CHANGES_ROUNDING]`. The option changes where values are rounded in
the parts that a model computes in float32. The conformance suite tests it on a model without such parts."""


class StrategyConfig(FrozenModel):
    """Base class of strategy configs: frozen, rejects unknown fields. Third parties may use any pydantic model."""

    reduce_dtype: Literal["float32", "float64"] | None = Field(
        default=None,
        description="Dtype in which gradients are accumulated over micro-batches and summed over ranks; null: that of "
        "the gradients. float64 for float32 gradients makes the sum independent of its order, so that every "
        "strategy and world size prints the same losses.",
    )
    loss_chunk_rows: int | None = Field(
        default=None,
        ge=0,
        description="Number of positions of a micro-batch for which the loss is computed at a time, so that only their "
        "logits are held. null: half the number of hidden features, at least 512, if logits are large. 0: all "
        "positions at once.",
    )


DistributedConfig = StrategyConfig
"""Alias: the reference implementation's name for the options of every strategy except the pipeline."""


@dataclass(frozen=True)
class StrategySpec:
    """Description of a strategy in the registry.

    Attributes:
        name: lower-case identifier by which users choose the strategy.
        summary: one line for `meshwright strategies`.
        axes: the axes it shards, out of `meshwright.mesh.sizes.CLAIMABLE_AXES`. A degree above 1 on any other axis is
            an error unless a wrapping strategy claims that axis.
        config_cls: the pydantic model of its options.
        build: `build(config, mesh) -> StrategyManager`; with `is_wrapper`, `build(config, mesh, inner)`, where `inner:
            Callable[[Mesh], StrategyManager]` is called once for each model part with the mesh it trains on.
        aliases: other names for it.
        is_wrapper: the strategy wraps another one: it shards its own axes, and the inner strategy shards the rest.
        check: `check(config, degrees)` raises a MeshwrightError if the config is invalid on a mesh of these degrees. It
            must not import torch, since it is called before ranks start.
    """

    name: str
    summary: str
    axes: frozenset[str]
    config_cls: type[BaseModel]
    build: Callable[..., StrategyManager]
    aliases: tuple[str, ...] = ()
    is_wrapper: bool = False
    check: Callable[[Any, Degrees], None] | None = None
