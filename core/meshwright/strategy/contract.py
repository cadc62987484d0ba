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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic import BaseModel

from ..base.errors import StrategyError
from ..events.step import StepResult as StepResult

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ..mesh.mesh import Mesh
    from ..model.merge import Adapters
    from ..model.weights import Weights
    from ..tensors.pieces import Sharded
    from ..tensors.state import OptimizerState, ShardedState, TensorKind

Batch: TypeAlias = "Mapping[str, Tensor]"
"""`input_ids` and `labels`, int64, (B, S); labels of -100 are masked. Further tensors go to the model's forward."""

IGNORED_LABEL = -100
"""The label of a token that counts for no loss."""

Objective: TypeAlias = "Callable[[Any, Mapping[str, Tensor]], Tensor | tuple[Tensor, Mapping[str, Tensor]]]"
"""What is minimized in the place of the token loss; see `StrategyManager.forward_backward`."""

TokenStatistic: TypeAlias = Literal["log_probs", "logsumexp", "entropy", "mean_logit", "is_top1"]
"""What is known of a token; see `meshwright.step.tokens.Tokens`."""

OptimizerFactory: TypeAlias = "Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]"
"""Makes an optimizer from (fully qualified name, parameter) pairs; see `meshwright.train.optim.optimizer_factory`."""


class StrategyManager(ABC):
    """Trains one model under one strategy on one mesh; see [Note: the gradient rule].

    Made by `StrategySpec.build`. Call `parallelize`, then `build_optimizer`, then the others as often as needed.
    Every method is collective: all ranks of the mesh call it, in the same order.
    """

    config: BaseModel
    mesh: Mesh
    strategy: str = ""
    """The whole stack, such as "pipeline over fsdp2"; set by `Stack.build`."""
    settles_after: int = 1
    """Steps after which each sends and holds what the next one does; a plan is of the step behind them."""

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

    @property
    @abstractmethod
    def optimizer(self) -> Optimizer:
        """What `build_optimizer` has returned; StrategyError before."""

    @abstractmethod
    def forward_backward(
        self, microbatches: Sequence[Batch], *, num_tokens: Tensor, objective: Objective | None = None
    ) -> Tensor:
        """Accumulate the gradients of one optimizer step.

        Args:
            microbatches: this data-parallel rank's share, at least one; each holds `input_ids` and `labels`,
                int64, (B, S), what else the model's forward takes, and the columns of the objective.
            num_tokens: unmasked targets in the global batch, or by what else the objective's sum is divided; int64
                scalar, equal on all ranks; see `announce`, or `meshwright.step.agreement.count_tokens`.
            objective: called as `objective(tokens, columns)` for each microbatch, in the place of the cross entropy of
                the labels; see [Note: objectives] in `meshwright.step.objective`.

        Returns:
            Mean loss per token of the global batch [nats], or the objective's sum over `num_tokens`; scalar, equal on
            all ranks; float32, or float64 for a float64 model.

        Raises:
            BatchError: a microbatch is malformed, or ranks disagree on the number of microbatches or tokens, or on the
                objective or its columns (raised on all of them, before any other collective).
            ConfigError, TrainingError: the objective fails on a rank, is no sum, or is not finite; on all of them,
                before the first step, or when the step is read, or before the optimizer steps. Nothing was trained.
        """

    @abstractmethod
    def eval_loss(
        self, microbatches: Sequence[Batch], *, num_tokens: Tensor, objective: Objective | None = None
    ) -> Tensor:
        """Return what `forward_backward` would, in evaluation mode, without gradients."""

    @abstractmethod
    def token_stats(self, microbatches: Sequence[Batch], names: Sequence[TokenStatistic]) -> list[dict[str, Tensor]]:
        """What is known of each token, in evaluation mode, without gradients: for each microbatch of this data-parallel
        rank the statistics by name, (B, S), of whole sequences, on all ranks that share it.

        Args:
            microbatches: as `forward_backward` takes them; columns of an objective are left aside.
            names: properties of `meshwright.step.tokens.Tokens`.

        Raises:
            BatchError: a microbatch is malformed, or a name is not known; on all ranks.
        """

    @property
    @abstractmethod
    def last_sums(self) -> Mapping[str, Tensor]:
        """The further sums that the objective of the last `forward_backward` or `eval_loss` has returned, over all
        microbatches and ranks: float64 scalars by name, equal on all ranks; none without an objective."""

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
        """The 2-norms of the gradients of each part of the whole model, between `forward_backward` and
        `clip_grad_norm`; it changes nothing, and waits for the device. StrategyError where a strategy tells none.

        Returns:
            Under the name of each block, and under "embedding", "head" and "other", as far as they train; equal on all
            ranks. Every parameter that trains is in one of them, under the first of its names.
        """
        raise StrategyError(
            f"{type(self).__name__} does not tell gradient norms by block. Leave out norms_every (in a run file, "
            f"metrics.norms_every), or derive the strategy from DataParallelManager, which tells them."
        )

    @abstractmethod
    def optimizer_step(self) -> None:
        """Step the optimizer and drop the gradients."""

    def drop_gradients(self) -> None:
        """Drop the gradients of a step that is not made. Collective. StrategyError where a strategy cannot."""
        raise StrategyError(
            f"{type(self).__name__} has no drop_gradients, which leaves steps out. Set on_bad_step: stop."
        )

    @abstractmethod
    def announce(self, microbatches: Sequence[Batch], *, objective: Objective | None = None) -> Tensor:
        """Begin to agree with the other ranks on the next step, while the device computes this one. Collective.

        What is wrong with the microbatches is told by the step.

        Args:
            microbatches: this very sequence is to be given to the next `forward_backward` or `eval_loss`.
            objective: likewise; it may say what is counted.

        Returns:
            `num_tokens` of that call, which any rank may read before, or none.
        """

    def read(self, *values: Tensor) -> list[float]:
        """The values of scalars, such as the loss and the norm of a step, with one wait for the device.

        What a strategy finds out of a step with the device is read at the same time; who does not call this between
        `forward_backward` and the optimizer's step waits there. Not for what differs between ranks.

        Args:
            values: scalars, equal on all ranks.

        Raises:
            MeshwrightError: a gradient of the step is not what the strategy's options ask for; on all ranks. Nothing
                was trained.
        """
        return [float(value) for value in values]

    @abstractmethod
    def unshard(self) -> AbstractContextManager[Sequence[nn.Module]]:
        """Hold the full parameters of `model_parts`, for log-probabilities, generation or comparison.

        The context gives `model_parts`. Training goes on afterwards as if it had not been entered.
        """

    def iter_parameters(
        self, *, bucket_bytes: int, dtype: torch.dtype | None = None, adapters: Adapters = "apart"
    ) -> Iterator[tuple[str, Tensor]]:
        """Every parameter whole, on every rank, one after the other, in bounded memory: what an inference engine is fed
        with, adapters apart or "merged"; see `meshwright.model.merge.given_parameters`. Collective, each step too."""
        from ..model.merge import given_parameters

        return given_parameters(self, bucket_bytes=bucket_bytes, dtype=dtype, adapters=adapters)

    def parameter_pieces(self) -> Mapping[str, Sharded | None]:
        """This rank's pieces of all parameters, each under the first of its names, in the order of the whole model.

        Of values that the model computes with, where it trains others; a piece may be of another dtype than its
        `Sharded`, to which it is to be rounded. None of parameters that are on other ranks alone. If ranks have
        different names, those of the first come first. This default takes what `sharded_state` has.
        """
        state = self.sharded_state().model
        named = (part.named_parameters(remove_duplicate=False) for part in self.model_parts)
        return {name: state[name] for each in named for name, _ in each if name in state}

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
