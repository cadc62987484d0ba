"""Run one rank's actions of a schedule. What a stage computes is in `stage`, which actions there are in `orders`.

Tensors go from rank to rank as soon as they are there, and are waited for where they are used. Their number, shapes and
dtypes follow from the batch and the model, so ranks agree on nothing first.

[Note: sends] What is sent must live until it has arrived. A rank has at most as many transfers on their way as the
pipeline has stages: beyond that, it waits for the oldest. That cannot end in a circle, since the orders allow for
sends that block; see `timeline.with_communication`. And it costs no time: a neighbour that is so many transfers behind
is what the rank would wait for next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.strategy.contract import Batch

from ..schedule.order import Action, Kind

Tensors = tuple[Tensor, ...]
"""What crosses a boundary for one microbatch; gradients, of those of floating point."""
Kinds = Sequence[tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each of them."""
Transfer = Sequence[tuple[dist.Work, Tensor]]
"""What one action sends or receives. The tensors must live until the works are done."""


class Stage(Protocol):
    """What the runtime needs of a stage."""

    is_first: bool
    is_last: bool

    def forward(self, batch: Batch, received: Tensors) -> Tensors:
        """What leaves the stage, or of the last one the microbatch's share of the loss, a scalar.

        Args:
            batch: int64 tensors of (B, S), on this rank's device.
            received: what crosses the boundary before the stage, of the kinds of `entering`; nothing for the first.
        """

    def backward(self, work: Callable[[], object], *, is_last: bool) -> None:
        """Run `work`, a whole backward; `is_last` for the last that adds to the stage's gradients in this step."""

    def backward_input(self, work: Callable[[], object]) -> Callable[[], None]:
        """Run `work`, a backward, without the weights, and return what is left of it."""

    def backward_weight(self, rest: Callable[[], object], *, is_last: bool) -> None:
        """Run the rest of a backward."""

    def entering(self, batch: Batch) -> Kinds:
        """Shapes and dtypes of what crosses the boundary before the stage."""

    def leaving(self, batch: Batch) -> Kinds:
        """Shapes and dtypes of what crosses the boundary behind it."""


@dataclass
class _InFlight:
    """A microbatch between its forward and its backward."""

    received: Tensors
    output: Tensors


class Sends:
    """What is on its way to other ranks, the oldest transfer first; see [Note: sends].

    Args:
        limit: how many transfers there may be.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._under_way: deque[Transfer] = deque()

    def add(self, transfer: Transfer) -> None:
        """Keep the tensors of a transfer until it is done."""
        self._under_way.append(transfer)
        # Gloo does not report that a send is done before it is waited for, NCCL does.
        while len(self._under_way) > self._limit or (self._under_way and _is_done(self._under_way[0])):
            _wait(self._under_way.popleft())

    def wait(self) -> None:
        """Wait until all is done."""
        while self._under_way:
            _wait(self._under_way.popleft())


def _is_done(transfer: Transfer) -> bool:
    return all(work.is_completed() for work, _ in transfer)


def _wait(transfer: Transfer) -> None:
    for work, _ in transfer:
        work.wait()


class Run:
    """One pass through a schedule.

    Args:
        stages: of this rank, by their index.
        placement: rank along `pp` of each stage.
        group: of the axis `pp`.
        device: of this rank.
        train: whether there is a backward.

    Attributes:
        losses: by microbatch, what the last stage's forward gave: scalars without a gradient; empty on other ranks.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        placement: Sequence[int],
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        train: bool,
    ) -> None:
        self._stages, self._placement, self._group = stages, placement, group
        self._device, self._train = device, train
        self._batches: Sequence[Batch] = ()
        self._sends = Sends(limit=len(placement))
        self._arriving: dict[Action, list[tuple[dist.Work, Tensor]]] = {}
        # What crosses a boundary within this rank, or has been computed and is yet to be sent.
        self._outputs: dict[tuple[int, int], Tensors] = {}
        self._gradients: dict[tuple[int, int], Tensors] = {}
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
        self._sends.wait()

    # -- computation

    def _forward(self, action: Action) -> None:
        stage, index = self._stages[action.stage], action.microbatch
        received = () if stage.is_first else self._arrived(Kind.RECV_F, action)
        if self._train:
            for tensor in _floating(received):
                tensor.requires_grad_()
        output = stage.forward(self._batches[index], received)
        if stage.is_last:
            (loss,) = output
            self.losses[index] = loss.detach()
        else:
            self._outputs[action.stage, index] = tuple(tensor.detach() for tensor in output)
        if self._train:
            self._flying[action.stage, index] = _InFlight(_floating(received), _floating(output))

    def _backward(self, action: Action, *, is_last: bool) -> None:
        stage, key = self._stages[action.stage], (action.stage, action.microbatch)
        flying = self._flying.pop(key)
        gradients: Sequence[Tensor | None]
        gradients = [None] if stage.is_last else self._arrived(Kind.RECV_B, action)

        def work() -> None:
            # Boundaries have one dtype, whatever the stage computes in. Where all that came before is frozen there is
            # nothing to do.
            pairs = [
                (output, given.to(output.dtype) if given is not None else None)
                for output, given in zip(flying.output, gradients, strict=True)
                if output.requires_grad
            ]
            if pairs:
                torch.autograd.backward([output for output, _ in pairs], [given for _, given in pairs])

        if action.kind is Kind.BACKWARD:
            stage.backward(work, is_last=is_last)
        else:
            self._rest[key] = stage.backward_input(work)
        if not stage.is_first:
            received = flying.received
            self._gradients[key] = tuple(t.grad if t.grad is not None else torch.zeros_like(t) for t in received)

    # -- communication

    def _arrived(self, kind: Kind, action: Action) -> Tensors:
        """What a neighbouring stage has computed for an action: from another rank, or from this one."""
        key = Action(kind, action.stage, action.microbatch)
        if key in self._arriving:
            arriving = self._arriving.pop(key)
            _wait(arriving)
            return tuple(tensor for _, tensor in arriving)
        if kind is Kind.RECV_F:
            # Tensors of its own, so that each stage has its own graph.
            return tuple(tensor.detach() for tensor in self._outputs.pop((action.stage - 1, action.microbatch)))
        return self._gradients.pop((action.stage + 1, action.microbatch))

    def _send(self, tensors: Tensors, action: Action) -> None:
        transfer = []
        for tensor, (_, dtype) in zip(tensors, self._kinds(action), strict=True):
            tensor = tensor.to(dtype).contiguous()
            work = dist.isend(tensor, group=self._group, group_dst=self._placement[action.peer_stage])
            if work is not None:
                transfer.append((work, tensor))
        self._sends.add(transfer)

    def _receive(self, action: Action) -> None:
        self._arriving[action] = []
        for shape, dtype in self._kinds(action):
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            work = dist.irecv(tensor, group=self._group, group_src=self._placement[action.peer_stage])
            if work is not None:
                self._arriving[action].append((work, tensor))

    def _kinds(self, action: Action) -> Kinds:
        """Of what an action sends or receives."""
        stage, batch = self._stages[action.stage], self._batches[action.microbatch]
        kinds = stage.leaving(batch) if action.kind in (Kind.SEND_F, Kind.RECV_B) else stage.entering(batch)
        if action.kind in (Kind.SEND_F, Kind.RECV_F):
            return kinds
        return [(shape, dtype) for shape, dtype in kinds if dtype.is_floating_point]


def _floating(tensors: Sequence[Tensor]) -> Tensors:
    """Those that have gradients."""
    return tuple(tensor for tensor in tensors if tensor.is_floating_point())
