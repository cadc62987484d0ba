"""The forward of a micro-batch: sharding along the axes, the call of the model, and this rank's share of the loss.

Shapes: B sequences of a micro-batch, S positions of each, K ids at each position.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..base.errors import MeshwrightError, ModelError
from ..base.types import Batch, TokenStatistic
from ..mesh.mesh import Mesh
from ..step.axis import Axis, ProbeInputs
from ..step.forward_options import RopeLengthHook, enable_router_logits, get_forward_arguments, get_forward_options
from ..step.handshake import BatchRequirements
from ..step.lm_head import DeferredHead
from ..step.objective import (
    BoundObjective,
    ObjectiveAccumulator,
    check_logits_shape,
    probe_objective,
    split_unsharded_columns,
)
from ..step.router_loss import RouterLogitsRecorder, RouterLoss, find_routers
from ..step.tokens import GetStatistics, Outputs, Tokens, shift_labels, split_targets
from .chunked_cross_entropy import ChunkedCrossEntropy, RunModel
from .model_setup import fork_rng, has_router_loss

_NUM_PROBE_TOKENS = 8

CompleteBatch = Callable[[Batch], Batch]
"""Converts a sharded batch, on this rank's device, to the arguments of the module."""


class ForwardRunner:
    """Call one model with micro-batches. Create it before sharding, since its hooks must be innermost.

    `argument_names` are the names of the forward's arguments.
    """

    def __init__(
        self,
        model: nn.Module,
        head_name: str | None,
        mesh: Mesh,
        axes: Sequence[Axis],
        *,
        chunk_rows: int | None,
        is_pipeline_stage: bool,
        after_probe: Callable[[], None],
    ) -> None:
        config = getattr(model, "config", None)
        self._mesh, self._axes, self._is_pipeline_stage, self._after_probe = mesh, axes, is_pipeline_stage, after_probe
        self._router_loss = RouterLoss(config) if has_router_loss(model) and not is_pipeline_stage else None
        self._has_checked_router_loss = False
        self._router_logits: RouterLogitsRecorder | None = None
        self.argument_names = get_forward_arguments(model)
        self._options_if_partial = {each: get_forward_options(model, is_partial=each) for each in (False, True)}
        self._rope_length = RopeLengthHook(model)
        self._vocab_size: int | None = getattr(config, "vocab_size", None)
        row_head, name = DeferredHead(model, head_name) if head_name else None, type(model).__name__
        self._build_token_loss = functools.partial(
            ChunkedCrossEntropy, row_head, chunk_rows, model_name=name, vocab_size=self._vocab_size
        )

    def attach(self, module: nn.Module) -> None:
        """Set the module to call: the sharded model or a wrapper around it."""
        self._module = module
        in_parts = self._is_pipeline_stage or any(axis.shards_sequences for axis in self._axes)
        self._options = self._options_if_partial[in_parts]
        self._token_loss = self._build_token_loss(is_sharded=any(axis.shards_vocabulary for axis in self._axes))

    # -- batches

    @property
    def sequence_multiple(self) -> int:
        """Number that the length of every sequence must be a multiple of."""
        return math.prod(axis.sequence_multiple for axis in self._axes)

    @property
    def replicas(self) -> int:
        """Number of ranks that compute the same value of an objective and whose losses are summed."""
        return math.prod(axis.replicas for axis in self._axes)

    def build_requirements(
        self, check: Callable[[Sequence[Batch]], None], objective: BoundObjective | None, frozen: int
    ) -> BatchRequirements:
        return BatchRequirements(
            self._vocab_size, self.sequence_multiple, check, objective=objective, frozen_share=frozen
        )

    def check_microbatches(self, microbatches: Sequence[Batch]) -> None:
        """Raise BatchError on this rank for micro-batches that an axis cannot shard; no collective."""
        for axis, batch in itertools.product(self._axes, microbatches):
            axis.check_batch(batch)

    def shard_batch(self, batch: Batch, objective: BoundObjective | None = None) -> Batch:
        """Return this rank's shard of a micro-batch, the input of `compute_local_loss`."""
        inputs = batch if objective is None else objective.get_model_inputs(batch)
        part = functools.reduce(lambda part, axis: axis.shard_batch(part), self._axes, inputs)
        return part if objective is None else {**part, **objective.get_unsharded_columns(batch)}

    def local_mask(self, batch: Batch) -> Tensor | None:
        mask = batch.get("attention_mask")
        return None if mask is None else functools.reduce(lambda part, axis: axis.local(part), self._axes, mask)

    def to_device(self, batch: Batch) -> dict[str, Tensor]:
        return {name: tensor.to(self._mesh.device, non_blocking=True) for name, tensor in batch.items()}

    # -- forwards

    @contextmanager
    def step_context(self, max_length: int) -> Iterator[None]:
        with ExitStack() as contexts:
            contexts.enter_context(self._rope_length.step_length(max_length))
            for axis in self._axes:
                contexts.enter_context(axis.step_context())
            yield

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Context of forwards in evaluation mode that no backward follows."""
        was_training = self._module.training
        self._module.eval()
        try:
            yield
        finally:
            self._module.train(was_training)
            self._after_probe()

    def call_model(self, inputs: Batch, **options: Any) -> Any:
        """Call the module with a sharded micro-batch without labels, on this rank's device.

        `options` are passed to its forward.
        """
        with ExitStack() as contexts:
            arguments: Mapping[str, Any] = inputs
            for axis in self._axes:
                arguments = contexts.enter_context(axis.forward_context(arguments))
            return self._module(**arguments, **{**self._options, **options})

    def compute_loss(
        self, batch: Batch, num_tokens: Tensor, num_microbatches: int, accumulator: ObjectiveAccumulator | None
    ) -> Tensor:
        self._mesh.world.progress.tick()
        sharded = self.shard_batch(batch, None if accumulator is None else accumulator.objective)
        return self.compute_local_loss(sharded, num_tokens, num_microbatches=num_microbatches, accumulator=accumulator)

    def compute_local_loss(
        self,
        batch: Batch,
        num_tokens: Tensor,
        *,
        num_microbatches: int = 1,
        accumulator: ObjectiveAccumulator | None = None,
    ) -> Tensor:
        """Run the forward of a sharded micro-batch; return its share of the step's loss, router loss included."""
        columns, full_columns = split_unsharded_columns(self.to_device(batch))
        inputs, targets_BS = split_targets(columns)
        run = functools.partial(self.call_model, inputs)
        with nullcontext() if self._router_logits is None else self._router_logits.record() as recorded_logits:
            if accumulator is None:
                loss, outputs = self._token_loss.compute_token_loss(run, targets_BS, num_tokens, self._check_logits)
            else:
                value, outputs = self._evaluate_objective(accumulator, run, targets_BS, full_columns)
                loss = value / (num_tokens * self.replicas)
        if self._router_loss is None:
            return loss
        router_loss, mask = self._router_loss, self.local_mask(inputs)
        if recorded_logits is None and not self._has_checked_router_loss:
            self._mesh.world.run_on_all_ranks(lambda: router_loss.check(outputs, mask))
            self._has_checked_router_loss = True
        logits = outputs.router_logits if recorded_logits is None else recorded_logits
        sums, group = router_loss.compute_statistics(logits, mask), self._mesh.group("dp_cp")
        return loss + router_loss.compute_local_loss(sums, group=group, num_microbatches=num_microbatches)

    def _check_logits(self, shape: Sequence[int], targets_BS: Tensor) -> None:
        for axis in self._axes:
            axis.check_logits(shape, targets_BS)

    def _evaluate_objective(
        self, accumulator: ObjectiveAccumulator, run: RunModel, targets_BS: Tensor, full_columns: Batch
    ) -> tuple[Tensor, Any]:
        """Return an objective's value for one micro-batch, scalar, and the model's outputs."""
        columns = dict(full_columns)
        full_targets, positions = shift_labels(columns.pop("labels")), columns.pop("position_ids", None)
        if accumulator.objective.input_kind == "outputs":
            outputs = run()
            logits = outputs.logits.to(torch.promote_types(outputs.logits.dtype, torch.float32))
            # Logits per sequence, (B, K), are not sharded like tokens; see `Axis.shard`.
            logits = self._gather(logits, is_per_sequence=logits.dim() == 2)
            return accumulator(Outputs(full_targets, logits, positions_BS=positions), columns), outputs

        def evaluate(ask: GetStatistics) -> Tensor:
            def get_full_statistics(ids_BSK: Tensor, names: Sequence[TokenStatistic]) -> Mapping[str, Tensor]:
                local_BSK = functools.reduce(lambda part, axis: axis.shard(part), self._axes, ids_BSK)
                return {name: self._gather(statistic) for name, statistic in ask(local_BSK, names).items()}

            usual = accumulator.objective.usual_statistics
            tokens = Tokens(full_targets, get_full_statistics, positions_BS=positions, usual_statistics=usual)
            return accumulator(tokens, columns)

        return self._token_loss.compute_objective(run, targets_BS, evaluate, self._check_logits)

    def _gather(self, part: Tensor, *, is_per_sequence: bool = False) -> Tensor:
        for axis in reversed(self._axes):
            part = axis.gather_sequences(part) if is_per_sequence and axis.shards_sequences else axis.gather(part)
        return part

    # -- before the first step

    def probe_objective(
        self, microbatch: Batch, objective: BoundObjective, *, complete_batch: CompleteBatch = lambda batch: batch
    ) -> tuple[str, ...]:
        """Check, before its first step, that an objective is a sum and that the model supports it. Collective."""
        for axis in self._axes:
            if axis.shards_batches and type(axis).gather is Axis.gather:
                raise ModelError(f"{type(axis).__name__} shards batches but has no `gather`: no objective can be used.")
        with self.eval_mode(), torch.no_grad():
            logits = _call_checked(
                self.call_model,
                complete_batch(self._build_probe_batch(objective.get_model_inputs(microbatch), num_sequences=2)),
            ).logits
        check_logits_shape(objective, logits.shape, self._vocab_size)
        features = logits.shape[-1] if logits.dim() == 3 else -logits.shape[-1]
        return probe_objective(
            objective, self.to_device(microbatch), features, torch.promote_types(logits.dtype, torch.float32)
        )

    def probe(
        self,
        microbatches: Sequence[Batch],
        *,
        needs_token_loss: bool = True,
        complete_batch: CompleteBatch = lambda batch: batch,
    ) -> None:
        """Run a few tokens through the model before the first step, to learn how it behaves. Collective."""
        unprobed = [axis for axis in self._axes if axis.needs_probe()]
        must_probe_loss = needs_token_loss and self._token_loss.needs_probe
        if not unprobed and not must_probe_loss:
            return
        with self.eval_mode():
            for axis in unprobed:
                multiple = math.prod(other.sequence_multiple for other in self._axes if other is not axis)
                inputs = ProbeInputs(self.to_device(microbatches[0]), self.call_model, multiple)
                self._mesh.world.raise_on_all_ranks(axis.probe(inputs))
            if any(axis.shards_sequences for axis in unprobed) and self._router_loss is not None:
                self._router_logits = self._mesh.world.run_on_all_ranks(lambda: self._record_routers(microbatches[0]))
            if must_probe_loss:
                probe_batch = complete_batch(self._build_probe_batch(microbatches[0]))
                self._token_loss.probe(functools.partial(self.call_model, probe_batch), self._mesh.world)
        # Repeat the check, now that more is known about the model.
        self._mesh.world.run_on_all_ranks(lambda: self.check_microbatches(microbatches))

    def dry_run(self, microbatch: Batch, complete_batch: CompleteBatch = lambda batch: batch) -> None:
        """Run a forward without gradients and side effects, and without logits if possible. Collective."""
        try:
            with fork_rng(self._mesh.device), torch.no_grad():
                inputs, targets_BS = split_targets(complete_batch(self.to_device(self.shard_batch(microbatch))))
                self._token_loss.dry_run(functools.partial(self.call_model, inputs), targets_BS.numel())
        finally:
            self._after_probe()

    def _build_probe_batch(self, batch: Batch, *, num_sequences: int = 1) -> Batch:
        """Return a few tokens of some sequences (all, if an axis shards the batch dim), sharded, without labels."""
        (batch_size, full_length), multiple = batch["input_ids"].shape, self.sequence_multiple
        length = min(full_length, multiple * -(-_NUM_PROBE_TOKENS // multiple))
        shards_rows = any(axis.shards_batches and not axis.shards_sequences for axis in self._axes)
        rows = batch_size if shards_rows else num_sequences
        short = {name: _narrow_lengths(each[:rows], full_length, length) for name, each in batch.items()}
        return split_targets(self.to_device(self.shard_batch(short)))[0]

    def _record_routers(self, batch: Batch) -> RouterLogitsRecorder | None:
        """Find the routers, and record their logits in later forwards."""
        if self._router_loss is None:
            return None
        multiple = math.prod(axis.sequence_multiple for axis in self._axes if not axis.shards_sequences)
        ids_BS = batch["input_ids"][:1, : multiple * -(-_NUM_PROBE_TOKENS // multiple)].to(self._mesh.device)
        run = functools.partial(self.call_model, {"input_ids": ids_BS}, **enable_router_logits(self._options))
        with ExitStack() as contexts:
            for axis in self._axes:
                contexts.enter_context(axis.isolated())
            return find_routers(self._module, self._router_loss, run).register_hooks(self._module)


def _narrow_lengths(tensor: Tensor, full_length: int, length: int) -> Tensor:
    """Cut every dim but the first that has the full length, such as both of a mask (B, S, S)."""
    for dim in range(1, tensor.dim()):
        tensor = tensor.narrow(dim, 0, length) if tensor.shape[dim] == full_length else tensor
    return tensor


def _call_checked(call: Callable[[Batch], Any], inputs: Batch) -> Any:
    """Call a model and convert errors of its own code to ModelError: some heads fail with several sequences."""
    try:
        return call(inputs)
    except (MeshwrightError, torch.OutOfMemoryError, dist.DistError):
        raise
    except Exception as error:
        raise ModelError(
            f"the model fails with input_ids {tuple(inputs['input_ids'].shape)}: {type(error).__name__}: {error} "
            f"Change its configuration, or the batch."
        ) from error
