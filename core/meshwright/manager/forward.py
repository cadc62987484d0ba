"""The forward of a microbatch: what the axes make of it, of the call of the model, and of the loss.

It shards nothing, runs no backward and knows no axis by name; see `meshwright.step.axis`.

Shapes: B sequences of a microbatch, S tokens each.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..base.errors import MeshwrightError, ModelError
from ..mesh.mesh import Mesh
from ..step.axis import Axis, Trial
from ..step.batch import Terms
from ..step.forward_options import with_router_logits
from ..step.objective import Given, Tally, split_whole
from ..step.objective_trial import check_head, tried
from ..step.rope_length import RopeLength
from ..step.router_loss import Notes, RouterLoss, find_routers
from ..step.token_loss import split_targets
from ..strategy.contract import Batch
from .row_loss import RowLoss
from .values import Values

_FEW_TOKENS = 8

Complete = Callable[[Batch], Batch]
"""Makes of a divided batch, on this rank's device, what the module is called with."""


class Forward:
    """Calls a model with microbatches.

    Args:
        module: what is called: the sharded model, or a wrapper around it.
        mesh: of the ranks that train it.
        axes: in the order in which they divide a microbatch.
        options: what the module is always called with, from `forward_options`.
        row_loss: how the token loss is computed.
        router_loss: to be added to the token loss; None: none, or a pipeline adds it.
        vocab_size: token ids must be below it; None: unknown.
        rope_length: of the model.
        after_trial: called after forwards that no backward follows.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        axes: Sequence[Axis],
        *,
        options: Mapping[str, Any],
        row_loss: RowLoss,
        router_loss: RouterLoss | None,
        vocab_size: int | None,
        rope_length: RopeLength,
        after_trial: Callable[[], None],
    ) -> None:
        self._module, self._mesh, self._axes, self._options = module, mesh, axes, options
        self._row_loss, self._rope_length, self._router_loss_is_checked = row_loss, rope_length, False
        self._values = Values(axes, row_loss, self._check_logits)
        self._router_loss, self._vocab_size, self._after_trial = router_loss, vocab_size, after_trial
        self._router_notes: Notes | None = None

    # -- batches

    @property
    def sequence_multiple(self) -> int:
        """What the length of a sequence must be a multiple of."""
        return math.prod(axis.sequence_multiple for axis in self._axes)

    def terms(self, check: Callable[[Sequence[Batch]], None], objective: Given | None) -> Terms:
        """What is asked of a step's microbatches.

        Args:
            check: what the strategy asks beside.
            objective: of the step.
        """
        return Terms(self._vocab_size, self.sequence_multiple, check, objective=objective)

    def check_division(self, microbatches: Sequence[Batch]) -> None:
        """Refuse microbatches of this rank that an axis cannot divide; no collective.

        Raises:
            BatchError: see `Axis.check_batch`.
        """
        for axis in self._axes:
            for batch in microbatches:
                axis.check_batch(batch)

    def divide(self, batch: Batch, objective: Given | None = None) -> Batch:
        """This rank's part of a microbatch, as `share_of_loss` takes it; for an objective with what that sees whole."""
        inputs = batch if objective is None else objective.inputs(batch)
        part = functools.reduce(lambda part, axis: axis.divide(part), self._axes, inputs)
        return part if objective is None else {**part, **objective.whole(batch)}

    def own_mask(self, batch: Batch) -> Tensor | None:
        """The attention mask of the positions that this rank has of a microbatch; None where it has no mask."""
        mask = batch.get("attention_mask")
        return None if mask is None else functools.reduce(lambda part, axis: axis.own(part), self._axes, mask)

    def on_device(self, batch: Batch) -> dict[str, Tensor]:
        """A microbatch on this rank's device."""
        return {name: tensor.to(self._mesh.device, non_blocking=True) for name, tensor in batch.items()}

    # -- forwards

    @property
    def sharers(self) -> int:
        """See `Values.sharers`."""
        return self._values.sharers

    @contextmanager
    def around_step(self, longest: int) -> Iterator[None]:
        """Around all forwards and backwards of a step or evaluation, whose longest row has so many tokens."""
        with ExitStack() as contexts:
            for each in (self._rope_length.within_step(longest), *(axis.around_step() for axis in self._axes)):
                contexts.enter_context(each)
            yield

    def outputs(self, inputs: Batch, **options: Any) -> Any:
        """What the module returns for a divided microbatch without labels, on this rank's device.

        Args:
            options: of its forward, beside those with which it is always called.
        """
        with ExitStack() as contexts:
            given: Mapping[str, Any] = inputs
            for axis in self._axes:
                given = contexts.enter_context(axis.around_forward(given))
            return self._module(**given, **{**self._options, **options})

    def share_of_loss(
        self, batch: Batch, num_tokens: Tensor, *, microbatches: int = 1, tally: Tally | None = None
    ) -> Tensor:
        """The forward of one microbatch: the sum of its token losses over the token count of the step, and its share of
        the router loss where the model's configuration asks for one.

        Args:
            batch: as `divide` gives it.
            microbatches: of the step; for the router loss alone, which pipelines add by themselves.
            tally: of an objective in the place of the token loss, for which the batch was divided.

        Returns:
            Scalar, with a gradient.
        """
        part, whole = split_whole(self.on_device(batch))
        inputs, targets_BS = split_targets(part)
        run = functools.partial(self.outputs, inputs)
        with nullcontext() if self._router_notes is None else self._router_notes.noting() as noted:
            if tally is None:
                loss, outputs = self._row_loss.share(run, targets_BS, num_tokens, self._check_logits)
            else:
                value, outputs = self._values.of(tally, run, targets_BS, whole)
                loss = value / (num_tokens * self.sharers)
        if self._router_loss is None:
            return loss
        router_loss, mask = self._router_loss, self.own_mask(inputs)
        if noted is None and not self._router_loss_is_checked:
            self._mesh.world.together(lambda: router_loss.check(outputs, mask))
            self._router_loss_is_checked = True
        sums = router_loss.sums(outputs.router_logits if noted is None else noted, mask)
        return loss + router_loss.share(sums, group=self._mesh.group("dp_cp"), microbatches=microbatches)

    def _check_logits(self, shape: Sequence[int], targets_BS: Tensor) -> None:
        for axis in self._axes:
            axis.check_logits(shape, targets_BS)

    # -- before the first step

    def try_objective(
        self, microbatch: Batch, given: Given, *, complete: Complete = lambda batch: batch
    ) -> tuple[str, ...]:
        """Before the first step with an objective: find out whether the model has what it asks for, and whether it is
        what it should be. Collective as the model's forward is.

        Args:
            microbatch: as it was given.
            complete: as for `try_out`.

        Returns:
            The names of its further sums, in alphabetical order.

        Raises:
            MeshwrightError: it is refused; on this rank.
        """
        self._values.check()
        was_training = self._module.training
        self._module.eval()
        try:
            with torch.no_grad():
                logits = _tried(self.outputs, complete(self._few(given.inputs(microbatch), sequences=2))).logits
        finally:
            self._module.train(was_training)
            self._after_trial()
        check_head(given, logits.shape, self._vocab_size)
        features = logits.shape[-1] if logits.dim() == 3 else -logits.shape[-1]
        return tried(given, self.on_device(microbatch), features, torch.promote_types(logits.dtype, torch.float32))

    def try_out(
        self, microbatches: Sequence[Batch], *, takes_loss: bool = True, complete: Complete = lambda batch: batch
    ) -> None:
        """Before the first step: find out what only a few tokens through the model can tell of it. Collective.

        Args:
            microbatches: as they were given.
            takes_loss: whether this part of the model will be asked for a token loss.
            complete: makes of a divided batch, on this rank's device, what the module is called with.

        Raises:
            ModelError, BatchError: on all ranks; the model, or a microbatch, cannot be divided.
        """
        is_open = [axis for axis in self._axes if axis.is_open()]
        loss_is_open = takes_loss and self._row_loss.is_open
        if not is_open and not loss_is_open:
            return
        was_training = self._module.training
        self._module.eval()
        try:
            for axis in is_open:
                self._mesh.world.raise_together(axis.try_out(self._trial(axis, microbatches[0])))
            if any(axis.divides_sequences for axis in is_open) and self._router_loss is not None:
                self._mesh.world.raise_together(self._find_routers(microbatches[0], self._router_loss))
            if loss_is_open:
                few = complete(self._few(microbatches[0]))
                self._row_loss.choose(functools.partial(self.outputs, few), self._mesh.world)
        finally:
            self._module.train(was_training)
            self._after_trial()
        # Again, now that more is known of the model.
        self._mesh.world.together(lambda: self.check_division(microbatches))

    def rehearse(self, microbatch: Batch, complete: Complete = lambda batch: batch) -> None:
        """Call the module with a microbatch as a step does, but without gradients, and without logits where the loss
        needs none; nothing of it remains. Collective.

        Args:
            microbatch: as it was given.
            complete: as for `try_out`.
        """
        device = self._mesh.device
        devices = [] if device.type == "cpu" else [torch.accelerator.current_device_index()]
        drawing = torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda")
        try:
            with drawing, torch.no_grad():
                inputs, targets_BS = split_targets(complete(self.on_device(self.divide(microbatch))))
                self._row_loss.rehearse(functools.partial(self.outputs, inputs), targets_BS.numel())
        finally:
            self._after_trial()

    def _trial(self, axis: Axis, batch: Batch) -> Trial:
        others = math.prod(other.sequence_multiple for other in self._axes if other is not axis)
        return Trial(self.on_device(batch), self.outputs, others)

    def _few(self, batch: Batch, *, sequences: int = 1) -> Batch:
        """A few tokens of some sequences, or of all where an axis divides them, divided, without labels."""
        (rows, whole), multiple = batch["input_ids"].shape, self.sequence_multiple
        length = min(whole, multiple * -(-_FEW_TOKENS // multiple))
        divides_rows = any(axis.divides_batches and not axis.divides_sequences for axis in self._axes)

        def few(tensor: Tensor) -> Tensor:
            for dim in range(1, tensor.dim()):
                tensor = tensor.narrow(dim, 0, length) if tensor.shape[dim] == whole else tensor
            return tensor[: rows if divides_rows else sequences]

        return split_targets(self.on_device(self.divide({name: few(each) for name, each in batch.items()})))[0]

    def _find_routers(self, batch: Batch, loss: RouterLoss) -> ModelError | None:
        """Where a rank has a part of the positions: note the logits of routers from now on; what is wrong with them."""
        multiple = math.prod(axis.sequence_multiple for axis in self._axes if not axis.divides_sequences)
        ids_BS = batch["input_ids"][:1, : multiple * -(-_FEW_TOKENS // multiple)].to(self._mesh.device)
        try:
            with ExitStack() as contexts:
                for axis in self._axes:
                    contexts.enter_context(axis.alone())
                run = functools.partial(self.outputs, {"input_ids": ids_BS}, **with_router_logits(self._options))
                self._router_notes = find_routers(self._module, loss, run).watch(self._module)
        except ModelError as error:
            return error
        return None


def _tried(call: Callable[[Batch], Any], inputs: Batch) -> Any:
    """What a model returns, whose own code may fail: with several sequences, some heads do."""
    try:
        return call(inputs)
    except (MeshwrightError, torch.OutOfMemoryError, dist.DistError):
        raise
    except Exception as error:
        raise ModelError(
            f"the model fails with input_ids {tuple(inputs['input_ids'].shape)}: {type(error).__name__}: {error} "
            f"Change its configuration, or the batch."
        ) from error
