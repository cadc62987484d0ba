"""A pipeline stage: part of a model under a manager of the inner strategy. Also the activation budget of all stages.

[Note: input hook] `meshwright.step.forward_order` lists all wrappers of forwards and their order. After them, the first
block of a stage gets a forward pre-hook that runs before all others and inserts the received tensors. Sharding then
treats these as the block's own input.

[Note: router sums] The router loss of a microbatch needs, over all layers, the number of tokens per expert, the summed
probabilities per expert, and the number of tokens. Each stage adds the sums of its layers to those of the previous
stage and sends them on with the hidden states. The last stage computes the loss. The gradient of the sums returns to
every stage with the gradient of the hidden states. The loss is computed for each microbatch of pp_microbatch_size
sequences; a step adds the mean over these.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.plugin import (
    BackwardStart,
    Batch,
    BoundObjective,
    BudgetedBlocks,
    ConfigError,
    DataParallelManager,
    DeferredWeightGradients,
    ObjectiveAccumulator,
    Outputs,
    RouterLogitsRecorder,
    RouterLoss,
    RouterModules,
    Tokens,
    Weights,
    World,
    choose_saved_activations,
    find_undecided,
    split_targets,
)

from ..partition.boundary import BoundaryTensor, ModelPartition, StageBoundary
from ..partition.stage_model import register_input_hook
from ..partition.trial_runs import with_inputs_embeds
from ..schedule.actions import Action, ActionKind
from .rank_schedule import PaddingMicrobatch, RankSchedule

Tensors = tuple[Tensor, ...]
"""Tensors that cross a boundary for one microbatch, or the gradients of the floating-point ones."""
TensorSpecs = Sequence[tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each tensor."""


@dataclass(frozen=True)
class StageRouters:
    """Routers of the full model and their loss; see [Note: router sums]."""

    loss: RouterLoss
    routers: RouterModules
    dtype: torch.dtype
    """Dtype of the sums."""

    @property
    def sums_spec(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of the sums of one microbatch: (2 * E + 1,) for E experts."""
        return (2 * self.routers.num_experts + 1,), self.dtype


class PipelineStage:
    """One stage on this rank.

    The first stage takes tokens instead of hidden states; the last computes the loss. `manager` is a manager of the
    inner strategy that has no model yet. Floating-point tensors cross boundaries in `dtype`, or, if None, in their own.
    """

    def __init__(
        self,
        manager: DataParallelManager,
        boundary: StageBoundary,
        *,
        is_first: bool,
        is_last: bool,
        dtype: torch.dtype | None,
        splits_backward: bool,
        routers: StageRouters | None = None,
    ) -> None:
        self.manager, self.is_first, self.is_last = manager, is_first, is_last
        self._num_tokens = torch.ones(())
        self._microbatches = 1
        self._accumulator: ObjectiveAccumulator | None = None
        self._padding_accumulator: ObjectiveAccumulator | None = None
        self._boundary, self._dtype, self._splits_backward, self._routers = boundary, dtype, splits_backward, routers
        self._weight_gradients, self._router_logits = DeferredWeightGradients(), RouterLogitsRecorder()

    @property
    def can_defer_reduction(self) -> bool:
        """Whether the last backward may run without reductions, with `reduce_gradients` called later."""
        return self.manager.can_defer_reduction

    def parallelize(self, model: nn.Module, cut: ModelPartition, blocks: range, weights: Weights | None) -> None:
        """Shard a model that `reduce_to_stage` reduced to this stage; see [Note: input hook].

        `blocks` are the stage's blocks. `weights` are those of the full model; None if `model` has its weights."""
        for block in blocks if self._splits_backward else ():
            self._weight_gradients.attach(model.get_submodule(cut.blocks[block]))
        self.manager.parallelize_stage(model, weights)
        if not self.is_first:
            register_input_hook(model, cut, blocks, self._boundary)
        if self._routers is not None:
            self._router_logits = self._routers.routers.register_hooks(model)

    def begin_step(self, num_tokens: Tensor, *, microbatches: int) -> None:
        """Set the number of unmasked targets in the global batch, an int64 scalar, and of microbatches, not padded."""
        self._num_tokens, self._microbatches = num_tokens, microbatches

    def set_objective(self, tally: ObjectiveAccumulator | None) -> None:
        """Set the accumulator of an objective, which replaces the token loss; None restores the token loss."""
        self._accumulator = tally
        self._padding_accumulator = (
            None if tally is None else _PaddingAccumulator(tally.objective, (), self.manager.mesh.device)
        )

    def forward(self, batch: Batch, received: Tensors) -> Tensors:
        """Return the outputs of the stage; the last stage returns the microbatch's share of the loss, a scalar.

        `batch` has int64 tensors (B, S) on this rank's device. `received` are the tensors from the previous stage, as
        in `input_specs`. With a router loss, its sums are the last of the tensors that cross.
        """
        routers = self._routers
        if routers is None:
            return self._forward(batch, received)
        shape, dtype = routers.sums_spec
        before = torch.zeros(shape, dtype=dtype, device=self.manager.mesh.device) if self.is_first else received[-1]
        with self._router_logits.record() as logits:
            output = self._forward(batch, received[:-1])
        mask = (
            torch.zeros_like(batch["input_ids"])
            if isinstance(batch, PaddingMicrobatch)
            else self.manager.forward_runner.local_mask(batch)
        )
        sums = before + routers.loss.compute_statistics(logits, mask).to(before.dtype) if logits else before
        if not self.is_last:
            return (*output, sums)
        group = self.manager.mesh.group("dp_cp")
        return (output[0] + routers.loss.compute_local_loss(sums, group=group, num_microbatches=self._microbatches),)

    def _forward(self, batch: Batch, received: Tensors) -> Tensors:
        self._boundary.begin_forward(batch, received)
        try:
            given = self._build_inputs(batch, received)
            if self.is_last:
                tally = self._padding_accumulator if isinstance(batch, PaddingMicrobatch) else self._accumulator
                return (self.manager.forward_runner.compute_local_loss(given, self._num_tokens, accumulator=tally),)
            outputs = self.manager.forward_runner.call_model(split_targets(given)[0])
            return outputs if isinstance(outputs, tuple) else (outputs,)
        finally:
            self._boundary.end_forward()

    def _build_inputs(self, batch: Batch, received: Tensors) -> Batch:
        return batch

    def probe(self, batch: Batch, *, takes_loss: bool) -> None:
        """See `ForwardRunner.probe`."""
        takes_loss = self.is_last and takes_loss
        with self._with_random_inputs():
            self.manager.forward_runner.probe(
                [batch], needs_token_loss=takes_loss, complete_batch=self._complete_inputs
            )

    def probe_objective(self, batch: Batch, given: BoundObjective) -> tuple[str, ...]:
        """See `ForwardRunner.probe_objective`. Only for the last stage."""
        with self._with_random_inputs():
            return self.manager.forward_runner.probe_objective(batch, given, complete_batch=self._complete_inputs)

    def dry_run(self, batch: Batch) -> None:
        """See `ForwardRunner.dry_run`."""
        with self._with_random_inputs():
            self.manager.forward_runner.dry_run(batch, self._complete_inputs)

    def _complete_inputs(self, divided: Batch) -> Batch:
        return divided

    @contextmanager
    def _with_random_inputs(self) -> Iterator[None]:
        """Let forwards of the module receive random hidden states within the context."""

        def receive(module: nn.Module, args: Any, kwargs: Any) -> None:
            device = kwargs["input_ids"].device
            # Integer tensors may be indices, which must be valid: zeros are.
            received = [
                (torch.randn if dtype.is_floating_point else torch.zeros)(shape, dtype=dtype, device=device)
                for shape, dtype in self._tensor_specs(self._boundary.inputs, kwargs)
            ]
            self._boundary.begin_forward(kwargs, received)

        hook = self.manager.module.register_forward_pre_hook(receive, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
            self._boundary.end_forward()

    def backward(self, run_backward: Callable[[], object], *, is_last: bool) -> None:
        """Run `run_backward`, a full backward. If `is_last`, it also reduces the stage's gradients."""
        with self.manager.microbatch_context(is_last=is_last):
            run_backward()
        self.manager.after_backward(is_last=is_last)

    def backward_input(self, run_backward: Callable[[], object]) -> Callable[[], None]:
        """Run `run_backward` without the weight gradients of linear layers in blocks.

        Return a function that computes these."""
        with self.manager.input_backward_context(), self._weight_gradients.collecting() as rest:
            run_backward()
        self.manager.after_backward(is_last=False)

        def finish() -> None:
            for each in rest:
                each()

        return finish

    def backward_weight(self, run_weight_backward: Callable[[], object], *, is_last: bool) -> None:
        """Run the deferred part of a backward. If `is_last`, reduce the stage's gradients afterwards."""
        with self.manager.microbatch_context(is_last=False):
            run_weight_backward()
        if is_last:
            self.manager.after_backward(is_last=False)
            self.reduce_gradients()
        else:
            self.manager.after_weight_backward()

    def reduce_gradients(self) -> None:
        """Reduce the stage's gradients over its ranks, after backwards that all ran with `is_last=False`."""
        self.manager.reduce_gradients()

    def input_specs(self, batch: Batch) -> TensorSpecs:
        """Return shape and dtype of each tensor from the previous stage."""
        return [*self._tensor_specs(self._boundary.inputs, batch), *self._router_sum_specs]

    def output_specs(self, batch: Batch) -> TensorSpecs:
        """Return shape and dtype of each tensor for the next stage."""
        return [*self._tensor_specs(self._boundary.outputs, batch), *self._router_sum_specs]

    @property
    def _router_sum_specs(self) -> TensorSpecs:
        return [self._routers.sums_spec] if self._routers is not None else []

    def _tensor_specs(self, crossings: Sequence[BoundaryTensor], batch: Batch) -> TensorSpecs:
        size, dtype = batch["input_ids"].shape, self._dtype
        return [
            (each.shape(*size), dtype if dtype and each.dtype.is_floating_point else each.dtype) for each in crossings
        ]


class _PaddingAccumulator(ObjectiveAccumulator):
    """Accumulator for padding microbatches, which contribute zero."""

    def __call__(self, seen: Tokens | Outputs, columns: Mapping[str, Tensor]) -> Tensor:
        return seen.zero_with_grad()


class UserStage(PipelineStage):
    """Stage that the user supplies; see [Note: user stages] in `partition.trial_runs`."""

    def parallelize_user_stage(self, model: nn.Module, weights: Weights | None) -> None:
        if self._splits_backward:
            self._weight_gradients.attach(model)
        self.manager.parallelize_stage(model, weights)

    @contextmanager
    def _with_random_inputs(self) -> Iterator[None]:
        yield

    def _complete_inputs(self, divided: Batch) -> Batch:
        """Add random hidden states, if this is not the first stage."""
        kinds, device = self._tensor_specs(self._boundary.inputs, divided), divided["input_ids"].device
        return self._build_inputs(
            divided, tuple(torch.randn(shape, dtype=dtype, device=device) for shape, dtype in kinds)
        )

    def _build_inputs(self, batch: Batch, received: Tensors) -> Batch:
        return batch if self.is_first else with_inputs_embeds(batch, received[0])


# -- activation budget, by the number of microbatches in flight per stage


def check_activation_budget(stages: Mapping[int, PipelineStage], orders: RankSchedule, schedule: str | None) -> None:
    """Raise ConfigError, on all ranks, if the schedule cannot respect an activation budget."""
    if orders.splits_backward and _find_budgeted_blocks(stages):
        raise ConfigError(
            f"pp_schedule={schedule} defers weight gradients and keeps their activations after a backward, which "
            f"budget_gb of activation_checkpointing does not account for. Use a schedule that does not split "
            f"backwards, such as 1f1b or interleaved1f1b, or set activation_checkpointing to full or selective."
        )


def choose_activations(
    stages: Mapping[int, PipelineStage], orders: RankSchedule, pieces: Sequence[Batch], world: World
) -> None:
    """Choose which activations the blocks save under a budget, by the first step's microbatches. Collective, once."""
    budgeted = _find_budgeted_blocks(stages)
    if not budgeted:
        return
    order = orders.actions(orders.microbatches_per_run(len(pieces)), is_training=True)
    actions = [action for action in order if isinstance(action, Action)]
    real = [piece for piece in pieces if not isinstance(piece, PaddingMicrobatch)]
    largest = max(real, key=lambda piece: piece["input_ids"].numel())
    rehearsals = [functools.partial(stage.dry_run, largest) for stage in stages.values()]
    worlds = [stage.manager.mesh.world for stage in stages.values()]
    choose_saved_activations(budgeted, rehearsals, worlds, _find_peak_moments(actions, list(stages)), world)


def _find_budgeted_blocks(stages: Mapping[int, PipelineStage]) -> list[BudgetedBlocks]:
    return find_undecided([stage.manager.checkpointed_blocks for stage in stages.values()])


def _find_peak_moments(actions: Sequence[Action], stages: Sequence[int]) -> list[BackwardStart]:
    """Return the backward starts at which activation memory may be highest, for these actions on these stages."""
    in_flight: Counter[int] = Counter()
    moments: dict[BackwardStart, None] = {}
    for action in actions:
        if action.kind is ActionKind.FORWARD:
            in_flight[action.stage] += 1
        elif action.kind is ActionKind.BACKWARD:
            moments[BackwardStart(tuple(in_flight[stage] for stage in stages), stages.index(action.stage))] = None
            in_flight[action.stage] -= 1
    return [each for each in moments if not any(_dominates(other, each) for other in moments if other != each)]


def _dominates(other: BackwardStart, each: BackwardStart) -> bool:
    same = other.stage == each.stage
    return same and all(a >= b for a, b in zip(other.num_in_flight, each.num_in_flight, strict=True))
