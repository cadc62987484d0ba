"""The forward of a microbatch: division by the axes, the call of the model, and its share of the loss.

Shapes: B sequences of a microbatch, S positions of each, K ids at each position.
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
"""Turns a divided batch, on this rank's device, into what the module is called with."""


class ForwardRunner:
    """Calls one model with microbatches; made before sharding, since its hooks must be the innermost.

    One thing, since each method is a part of the same forward. `taken` holds the names of the forward's arguments.
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
        """Call `module`, the sharded model or a wrapper around it, later."""
        self._module = module
        in_parts = self._is_pipeline_stage or any(axis.shards_sequences for axis in self._axes)
        self._options = self._options_if_partial[in_parts]
        self._token_loss = self._build_token_loss(is_sharded=any(axis.shards_vocabulary for axis in self._axes))

    # -- batches

    @property
    def sequence_multiple(self) -> int:
        """Divisor that the length of every sequence must have."""
        return math.prod(axis.sequence_multiple for axis in self._axes)

    @property
    def replicas(self) -> int:
        """Number of ranks that compute the same value of an objective, and whose losses are added up."""
        return math.prod(axis.replicas for axis in self._axes)

    def build_requirements(
        self, check: Callable[[Sequence[Batch]], None], objective: BoundObjective | None, frozen: int
    ) -> BatchRequirements:
        return BatchRequirements(
            self._vocab_size, self.sequence_multiple, check, objective=objective, frozen_share=frozen
        )

    def check_microbatches(self, microbatches: Sequence[Batch]) -> None:
        """Refuse microbatches that an axis cannot divide; BatchError on this rank, no collective."""
        for axis, batch in itertools.product(self._axes, microbatches):
            axis.check_batch(batch)

    def shard_batch(self, batch: Batch, objective: BoundObjective | None = None) -> Batch:
        """Return this rank's part of a microbatch, as `compute_local_loss` takes it."""
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
        """Context of forwards in evaluation mode, which no backward follows."""
        was_training = self._module.training
        self._module.eval()
        try:
            yield
        finally:
            self._module.train(was_training)
            self._after_probe()

    def call_model(self, inputs: Batch, **options: Any) -> Any:
        """Call the module with a divided microbatch without labels, on this rank's device; `options` go to forward."""
        with ExitStack() as contexts:
            given: Mapping[str, Any] = inputs
            for axis in self._axes:
                given = contexts.enter_context(axis.forward_context(given))
            return self._module(**given, **{**self._options, **options})

    def compute_loss(
        self, batch: Batch, num_tokens: Tensor, num_microbatches: int, accumulator: ObjectiveAccumulator | None
    ) -> Tensor:
        self._mesh.world.progress.tick()
        divided = self.shard_batch(batch, None if accumulator is None else accumulator.objective)
        return self.compute_local_loss(divided, num_tokens, num_microbatches=num_microbatches, accumulator=accumulator)

    def compute_local_loss(
        self,
        batch: Batch,
        num_tokens: Tensor,
        *,
        num_microbatches: int = 1,
        accumulator: ObjectiveAccumulator | None = None,
    ) -> Tensor:
        """Run the forward of a divided microbatch; return its share of the step's loss, router loss included."""
        part, whole = split_unsharded_columns(self.to_device(batch))
        inputs, targets_BS = split_targets(part)
        run = functools.partial(self.call_model, inputs)
        with nullcontext() if self._router_logits is None else self._router_logits.record() as noted:
            if accumulator is None:
                loss, outputs = self._token_loss.compute_token_loss(run, targets_BS, num_tokens, self._check_logits)
            else:
                value, outputs = self._evaluate_objective(accumulator, run, targets_BS, whole)
                loss = value / (num_tokens * self.replicas)
        if self._router_loss is None:
            return loss
        router_loss, mask = self._router_loss, self.local_mask(inputs)
        if noted is None and not self._has_checked_router_loss:
            self._mesh.world.run_on_all_ranks(lambda: router_loss.check(outputs, mask))
            self._has_checked_router_loss = True
        sums = router_loss.compute_statistics(outputs.router_logits if noted is None else noted, mask)
        return loss + router_loss.compute_local_loss(
            sums, group=self._mesh.group("dp_cp"), num_microbatches=num_microbatches
        )

    def _check_logits(self, shape: Sequence[int], targets_BS: Tensor) -> None:
        for axis in self._axes:
            axis.check_logits(shape, targets_BS)

    def _evaluate_objective(
        self, accumulator: ObjectiveAccumulator, run: RunModel, targets_BS: Tensor, full_columns: Batch
    ) -> tuple[Tensor, Any]:
        """Return an objective's value for one microbatch, scalar, and the model's outputs."""
        columns = dict(full_columns)
        targets_whole, positions = shift_labels(columns.pop("labels")), columns.pop("position_ids", None)
        if accumulator.objective.input_kind == "outputs":
            outputs = run()
            wide = outputs.logits.to(torch.promote_types(outputs.logits.dtype, torch.float32))
            # Logits of whole sequences, (B, K), are not divided as `Axis.parted` divides.
            wide = self._gather(wide, is_per_sequence=wide.dim() == 2)
            return accumulator(Outputs(targets_whole, wide, positions_BS=positions), columns), outputs

        def value(ask: GetStatistics) -> Tensor:
            def ask_whole(ids_BSK: Tensor, names: Sequence[TokenStatistic]) -> Mapping[str, Tensor]:
                own_BSK = functools.reduce(lambda part, axis: axis.shard(part), self._axes, ids_BSK)
                return {name: self._gather(found) for name, found in ask(own_BSK, names).items()}

            return accumulator(
                Tokens(
                    targets_whole,
                    ask_whole,
                    positions_BS=positions,
                    usual_statistics=accumulator.objective.usual_statistics,
                ),
                columns,
            )

        return self._token_loss.compute_objective(run, targets_BS, value, self._check_logits)

    def _gather(self, part: Tensor, *, is_per_sequence: bool = False) -> Tensor:
        for axis in reversed(self._axes):
            part = axis.gather_sequences(part) if is_per_sequence and axis.shards_sequences else axis.gather(part)
        return part

    # -- before the first step

    def probe_objective(
        self, microbatch: Batch, objective: BoundObjective, *, complete_batch: CompleteBatch = lambda batch: batch
    ) -> tuple[str, ...]:
        """Check, before its first step, that the model can serve an objective and that it is a sum. Collective."""
        for axis in self._axes:
            if axis.shards_batches and type(axis).gather is Axis.gather:
                raise ModelError(
                    f"{type(axis).__name__} divides batches and brings no `joined`: it takes no objective."
                )
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
        """Run a few tokens through the model before the first step, to learn what only that can tell. Collective."""
        is_open = [axis for axis in self._axes if axis.needs_probe()]
        loss_is_open = needs_token_loss and self._token_loss.needs_probe
        if not is_open and not loss_is_open:
            return
        with self.eval_mode():
            for axis in is_open:
                multiple = math.prod(other.sequence_multiple for other in self._axes if other is not axis)
                trial = ProbeInputs(self.to_device(microbatches[0]), self.call_model, multiple)
                self._mesh.world.raise_on_all_ranks(axis.probe(trial))
            if any(axis.shards_sequences for axis in is_open) and self._router_loss is not None:
                self._mesh.world.raise_on_all_ranks(self._find_routers(microbatches[0], self._router_loss))
            if loss_is_open:
                few = complete_batch(self._build_probe_batch(microbatches[0]))
                self._token_loss.probe(functools.partial(self.call_model, few), self._mesh.world)
        # Again, now that more is known of the model.
        self._mesh.world.run_on_all_ranks(lambda: self.check_microbatches(microbatches))

    def dry_run(self, microbatch: Batch, complete_batch: CompleteBatch = lambda batch: batch) -> None:
        """Run the forward of a microbatch without gradients, side effects, and logits if possible. Collective."""
        try:
            with fork_rng(self._mesh.device), torch.no_grad():
                inputs, targets_BS = split_targets(complete_batch(self.to_device(self.shard_batch(microbatch))))
                self._token_loss.dry_run(functools.partial(self.call_model, inputs), targets_BS.numel())
        finally:
            self._after_probe()

    def _build_probe_batch(self, batch: Batch, *, num_sequences: int = 1) -> Batch:
        """Return a few tokens of some sequences (of all, if an axis divides them), divided, without labels."""
        (rows, whole), multiple = batch["input_ids"].shape, self.sequence_multiple
        length = min(whole, multiple * -(-_NUM_PROBE_TOKENS // multiple))
        divides_rows = any(axis.shards_batches and not axis.shards_sequences for axis in self._axes)

        def few(tensor: Tensor) -> Tensor:
            for dim in range(1, tensor.dim()):
                tensor = tensor.narrow(dim, 0, length) if tensor.shape[dim] == whole else tensor
            return tensor[: rows if divides_rows else num_sequences]

        return split_targets(self.to_device(self.shard_batch({name: few(each) for name, each in batch.items()})))[0]

    def _find_routers(self, batch: Batch, loss: RouterLoss) -> ModelError | None:
        """Find the routers, whose logits are recorded later; return what is wrong with them."""
        multiple = math.prod(axis.sequence_multiple for axis in self._axes if not axis.shards_sequences)
        ids_BS = batch["input_ids"][:1, : multiple * -(-_NUM_PROBE_TOKENS // multiple)].to(self._mesh.device)
        try:
            with ExitStack() as contexts:
                for axis in self._axes:
                    contexts.enter_context(axis.isolated())
                run = functools.partial(self.call_model, {"input_ids": ids_BS}, **enable_router_logits(self._options))
                self._router_logits = find_routers(self._module, loss, run).register_hooks(self._module)
        except ModelError as error:
            return error
        return None


def _call_checked(call: Callable[[Batch], Any], inputs: Batch) -> Any:
    """Call a model whose own code may fail, as that of some heads does with several sequences."""
    try:
        return call(inputs)
    except (MeshwrightError, torch.OutOfMemoryError, dist.DistError):
        raise
    except Exception as error:
        raise ModelError(
            f"the model fails with input_ids {tuple(inputs['input_ids'].shape)}: {type(error).__name__}: {error} "
            f"Change its configuration, or the batch."
        ) from error
