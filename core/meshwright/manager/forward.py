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
from torch import Tensor, nn

from ..base.errors import ModelError
from ..mesh.mesh import Mesh
from ..step.axis import Axis, Trial
from ..step.batch import Terms
from ..step.forward_options import with_router_logits
from ..step.router_loss import Notes, RouterLoss, find_routers
from ..step.token_loss import split_targets
from ..step.token_statistics import Statistic
from ..strategy.contract import Batch
from .ending import Ending
from .row_loss import Ask, RowLoss

_FEW_TOKENS = 8


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
        after_trial: Callable[[], None],
    ) -> None:
        self._module, self._mesh, self._axes, self._options = module, mesh, axes, options
        self._row_loss = row_loss
        self._router_loss, self._vocab_size, self._after_trial = router_loss, vocab_size, after_trial
        self._router_loss_is_checked = False
        self._router_notes: Notes | None = None

    # -- batches

    @property
    def sequence_multiple(self) -> int:
        """What the length of a sequence must be a multiple of."""
        return math.prod(axis.sequence_multiple for axis in self._axes)

    def terms(self, check: Callable[[Sequence[Batch]], None]) -> Terms:
        """What is asked of a step's microbatches.

        Args:
            check: what the strategy asks beside.
        """
        return Terms(self._vocab_size, self.sequence_multiple, check)

    def check_division(self, microbatches: Sequence[Batch]) -> None:
        """Refuse microbatches of this rank that an axis cannot divide; no collective.

        Raises:
            BatchError: see `Axis.check_batch`.
        """
        for axis in self._axes:
            for batch in microbatches:
                axis.check_batch(batch)

    def divide(self, batch: Batch) -> Batch:
        """This rank's part of a microbatch, as `share_of_loss` takes it."""
        return functools.reduce(lambda part, axis: axis.divide(part), self._axes, batch)

    def own_mask(self, batch: Batch) -> Tensor | None:
        """The attention mask of the positions that this rank has of a microbatch; None where it has no mask."""
        mask = batch.get("attention_mask")
        return mask if mask is None else functools.reduce(lambda part, axis: axis.own(part), self._axes, mask)

    def on_device(self, batch: Batch) -> dict[str, Tensor]:
        """A microbatch on this rank's device."""
        return {name: tensor.to(self._mesh.device, non_blocking=True) for name, tensor in batch.items()}

    # -- forwards

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Around all forwards and backwards of a step or evaluation."""
        with ExitStack() as contexts:
            for axis in self._axes:
                contexts.enter_context(axis.around_step())
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

    def share_of_loss(self, batch: Batch, num_tokens: Tensor, *, microbatches: int = 1) -> Tensor:
        """The forward of one microbatch: the sum of its token losses over the token count of the step, and its share of
        the router loss where the model's configuration asks for one.

        Args:
            batch: as `divide` gives it.
            microbatches: of the step; for the router loss alone, which pipelines add by themselves.

        Returns:
            Scalar, with a gradient.
        """
        inputs, targets_BS = split_targets(self.on_device(batch))
        with nullcontext() if self._router_notes is None else self._router_notes.noting() as noted:
            loss, outputs = self._row_loss.share(
                functools.partial(self.outputs, inputs), targets_BS, num_tokens, self._check_logits
            )
        if self._router_loss is None:
            return loss
        router_loss, mask = self._router_loss, self.own_mask(inputs)
        if noted is None and not self._router_loss_is_checked:
            self._mesh.world.together(lambda: router_loss.check(outputs, mask))
            self._router_loss_is_checked = True
        sums = router_loss.sums(outputs.router_logits if noted is None else noted, mask)
        return loss + router_loss.share(sums, group=self._mesh.group("dp_cp"), microbatches=microbatches)

    def statistics(self, batch: Batch, names: Sequence[Statistic]) -> dict[str, Tensor]:
        """Statistics of the tokens of one microbatch, with gradients; see `meshwright.step.token_statistics`.

        Args:
            batch: as `divide` gives it. Log-probabilities are those of its labels, 0 where a position predicts none.
            names: of the statistics.

        Returns:
            For each name (B, S): of what follows each position.
        """
        inputs, targets_BS = split_targets(self.on_device(batch))

        def stack(ask: Ask) -> Tensor:
            found = ask(targets_BS[..., None], names)
            return torch.stack([found[name].view_as(targets_BS) for name in names])

        run = functools.partial(self.outputs, inputs)
        values, _ = self._row_loss.of_tokens(run, targets_BS, stack, self._check_logits)
        return {name: each.bool() if name == "is_top1" else each for name, each in zip(names, values, strict=True)}

    def _check_logits(self, shape: Sequence[int], targets_BS: Tensor) -> None:
        for axis in self._axes:
            axis.check_logits(shape, targets_BS)

    def sum_over_ranks(self, losses: Sequence[Tensor], ending: Ending) -> Tensor:
        """The loss of a step from the shares of this rank's microbatches; scalar, equal on all ranks. Collective.

        Args:
            ending: what ranks tell each other beside.
        """
        alike = self._mesh.group("tp") if self._mesh.degrees.tp > 1 else None
        total = ending.add_up(losses, losses[0].device, over=self._mesh.group("dp_cp"), alike=alike)
        for axis in self._axes:
            axis.add_losses(total)
        return total.to(losses[0].dtype)

    # -- before the first step

    def try_out(self, microbatches: Sequence[Batch], *, takes_loss: bool = True) -> None:
        """Before the first step: find out what only a few tokens through the model can tell of it. Collective.

        Args:
            microbatches: as they were given.
            takes_loss: whether this part of the model will be asked for a loss.

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
                few = self._few(microbatches[0])
                self._row_loss.choose(functools.partial(self.outputs, few), self._mesh.world)
        finally:
            self._module.train(was_training)
            self._after_trial()
        # Again, now that more is known of the model.
        self._mesh.world.together(lambda: self.check_division(microbatches))

    def rehearse(self, microbatch: Batch, given: Callable[[Batch], Batch] = lambda batch: batch) -> None:
        """Call the module with a microbatch as a step does, but without gradients, and without logits where the loss
        needs none; nothing of it remains. Collective.

        Args:
            microbatch: as it was given.
            given: makes of what it is divided into, on this rank's device, what the module is called with.
        """
        device = self._mesh.device
        devices = [] if device.type == "cpu" else [torch.accelerator.current_device_index()]
        drawing = torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda")
        try:
            with drawing, torch.no_grad():
                inputs, targets_BS = split_targets(given(self.on_device(self.divide(microbatch))))
                self._row_loss.rehearse(functools.partial(self.outputs, inputs), targets_BS.numel())
        finally:
            self._after_trial()

    def _trial(self, axis: Axis, batch: Batch) -> Trial:
        others = math.prod(other.sequence_multiple for other in self._axes if other is not axis)
        return Trial(self.on_device(batch), self.outputs, others)

    def _few(self, batch: Batch) -> Batch:
        """A few tokens of one sequence, divided, without labels."""
        shape, multiple = batch["input_ids"].shape, self.sequence_multiple
        length = min(shape[1], multiple * -(-_FEW_TOKENS // multiple))
        few = {name: tensor[:1, :length] if tensor.shape[:2] == shape else tensor[:1] for name, tensor in batch.items()}
        return split_targets(self.on_device(self.divide(few)))[0]

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
