"""Run one rank's actions of a schedule.

Tensors go from rank to rank as soon as they are there, and are waited for where they are used. Their shapes and dtype
follow from the batch and the model, so ranks agree on nothing first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.contract import Batch

from .schedules import Action, Kind


class Stage(Protocol):
    """What the runtime needs of a stage."""

    is_first: bool
    is_last: bool

    def forward(self, batch: Batch, received: Tensor | None) -> Tensor:
        """The hidden states that leave the stage, or of the last one the microbatch's share of the loss."""

    def backward(self, work: Callable[[], object], *, is_last: bool) -> None:
        """Run `work`, a whole backward; `is_last` for the last that adds to the stage's gradients in this step."""

    def backward_input(self, work: Callable[[], object]) -> Callable[[], None]:
        """Run `work`, a backward, without the weights, and return what is left of it."""

    def backward_weight(self, rest: Callable[[], object], *, is_last: bool) -> None:
        """Run the rest of a backward."""

    def hidden_shape(self, batch: Batch) -> tuple[int, ...]:
        """Of what crosses a boundary."""


@dataclass
class _InFlight:
    """A microbatch between its forward and its backward."""

    received: Tensor | None
    output: Tensor


class Run:
    """One pass through a schedule.

    Args:
        stages: of this rank, by their index.
        placement: rank along `pp` of each stage.
        group: of the axis `pp`.
        dtype: of hidden states.
        device: of this rank.
        train: whether there is a backward.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        placement: Sequence[int],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
        *,
        train: bool,
    ) -> None:
        self._stages, self._placement, self._group = stages, placement, group
        self._dtype, self._device, self._train = dtype, device, train
        self._batches: Sequence[Batch] = ()
        self._sending: list[tuple[dist.Work, Tensor]] = []
        self._arriving: dict[Action, tuple[dist.Work, Tensor]] = {}
        # What crosses a boundary within this rank, or has been computed and is yet to be sent.
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self._gradients: dict[tuple[int, int], Tensor] = {}
        self._flying: dict[tuple[int, int], _InFlight] = {}
        self._rest: dict[tuple[int, int], Callable[[], None]] = {}
        self.losses: dict[int, Tensor] = {}

    def __call__(self, actions: Sequence[Action], batches: Sequence[Batch], *, is_last: bool) -> None:
        """Run all actions and wait until what they send is on its way.

        Args:
            actions: of this rank.
            batches: the microbatches, on this rank's device.
            is_last: whether no other run adds to the gradients of the step.
        """
        self._batches = batches
        last = {}
        for action in actions:
            if is_last and action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
                last[action.stage] = action
        for action in actions:
            match action.kind:
                case Kind.FORWARD:
                    self._forward(action)
                case Kind.BACKWARD | Kind.BACKWARD_INPUT:
                    self._backward(action, is_last=last.get(action.stage) == action)
                case Kind.BACKWARD_WEIGHT:
                    rest = self._rest.pop((action.stage, action.microbatch))
                    self._stages[action.stage].backward_weight(rest, is_last=last.get(action.stage) == action)
                case Kind.SEND_F:
                    self._send(self._outputs.pop((action.stage, action.microbatch)), action)
                case Kind.SEND_B:
                    self._send(self._gradients.pop((action.stage, action.microbatch)), action)
                case Kind.RECV_F | Kind.RECV_B:
                    self._receive(action)
        for work, _ in self._sending:
            work.wait()

    # -- computation

    def _forward(self, action: Action) -> None:
        stage, index = self._stages[action.stage], action.microbatch
        received = None if stage.is_first else self._arrived(Kind.RECV_F, action)
        if received is not None and self._train:
            received.requires_grad_()
        output = stage.forward(self._batches[index], received)
        if stage.is_last:
            self.losses[index] = output.detach()
        else:
            self._outputs[action.stage, index] = output.detach()
        if self._train:
            self._flying[action.stage, index] = _InFlight(received, output)

    def _backward(self, action: Action, *, is_last: bool) -> None:
        stage, key = self._stages[action.stage], (action.stage, action.microbatch)
        flying = self._flying.pop(key)
        gradient = None if stage.is_last else self._arrived(Kind.RECV_B, action)

        def work() -> None:
            # Nothing to do where all that came before is frozen.
            if flying.output.requires_grad:
                # Boundaries have one dtype, whatever the stage computes in.
                given = gradient.to(flying.output.dtype) if gradient is not None else None
                torch.autograd.backward(flying.output, given)

        if action.kind is Kind.BACKWARD:
            stage.backward(work, is_last=is_last)
        else:
            self._rest[key] = stage.backward_input(work)
        if flying.received is not None:
            received = flying.received
            self._gradients[key] = received.grad if received.grad is not None else torch.zeros_like(received)

    # -- communication

    def _arrived(self, kind: Kind, action: Action) -> Tensor:
        """What a neighbouring stage has computed for an action: from another rank, or from this one."""
        key = Action(kind, action.stage, action.microbatch)
        if key in self._arriving:
            work, tensor = self._arriving.pop(key)
            work.wait()
            return tensor
        if kind is Kind.RECV_F:
            # A tensor of its own, so that each stage has its own graph.
            return self._outputs.pop((action.stage - 1, action.microbatch)).detach()
        return self._gradients.pop((action.stage + 1, action.microbatch))

    def _send(self, tensor: Tensor, action: Action) -> None:
        tensor = tensor.to(self._dtype).contiguous()
        work = dist.isend(tensor, group=self._group, group_dst=self._placement[action.peer_stage])
        if work is not None:
            # With the tensor, which must live until then.
            self._sending.append((work, tensor))

    def _receive(self, action: Action) -> None:
        shape = self._stages[action.stage].hidden_shape(self._batches[action.microbatch])
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        work = dist.irecv(tensor, group=self._group, group_src=self._placement[action.peer_stage])
        if work is not None:
            self._arriving[action] = (work, tensor)
