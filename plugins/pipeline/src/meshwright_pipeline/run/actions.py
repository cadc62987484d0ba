"""Run one rank's actions of a schedule. What a stage computes is in `stage`, which actions there are in `orders`.

Tensors go from rank to rank as soon as they are there, and are waited for where they are used. Their number, shapes and
dtypes follow from the batch and the model, so ranks agree on nothing first. What two ranks have for each other at one
moment goes as one batch.

[Note: sends] What is sent must live until it has arrived, and no longer. A backward begins at the edge of the graph
that has made an output, so the output itself is not kept for it. To each neighbour two exchanges with sends may be on
their way, one that travels and one behind it: beyond that, a rank waits for the older one. That cannot end in a circle,
since the orders allow for sends that block; see `timeline.with_communication`.

[Note: drain] The last thing that a rank computes in a step is often a backward for which another rank waits, and behind
it, that rank is idle until all have finished. There the gradient goes out first, and the stage's gradients are reduced
while others still compute. Elsewhere they are reduced within the last backward of the stage, where the reduction
overlaps with the rest of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.base.types import Batch

from ..schedule.order import Action, Exchange, Kind
from .action_times import ActionTimes

Tensors = tuple[Tensor, ...]
"""What crosses a boundary for one microbatch; gradients, of those of floating point."""
Kinds = Sequence[tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each of them."""


@dataclass(frozen=True)
class Transfer:
    """What is on its way. The tensors must live until the works are done."""

    works: Sequence[dist.Work]
    tensors: Tensors

    def is_done(self) -> bool:
        """Whether the backend says so already."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> Tensors:
        """The tensors, when they are there."""
        for work in self.works:
            work.wait()
        return self.tensors


class Stage(Protocol):
    """What the runtime needs of a stage."""

    is_first: bool
    is_last: bool

    @property
    def reduces_later(self) -> bool:
        """Whether a last backward would wait for its reductions, and may be run as others are, with `reduce` later."""

    def forward(self, batch: Batch, received: Tensors) -> Tensors:
        """What leaves the stage, or of the last one the microbatch's share of the loss, a scalar.

        Args:
            batch: int64 tensors of (B, S), on this rank's device.
            received: what crosses the boundary before the stage, of the kinds of `entering`; nothing for the first.
        """

    def backward(self, work: Callable[[], object], *, is_last: bool) -> None:
        """Run `work`, a whole backward; if it `is_last`, the stage's gradients are reduced in it."""

    def backward_input(self, work: Callable[[], object]) -> Callable[[], None]:
        """Run `work`, a backward, without the weights, and return what is left of it."""

    def backward_weight(self, rest: Callable[[], object], *, is_last: bool) -> None:
        """Run the rest of a backward; if it `is_last`, the stage's gradients are reduced after it."""

    def reduce(self) -> None:
        """Reduce the stage's gradients, when all are there that no last backward has reduced."""

    def entering(self, batch: Batch) -> Kinds:
        """Shapes and dtypes of what crosses the boundary before the stage."""

    def leaving(self, batch: Batch) -> Kinds:
        """Shapes and dtypes of what crosses the boundary behind it."""


@dataclass
class _InFlight:
    """A microbatch between its forward and its backward.

    Attributes:
        received: of floating point, with gradients after the backward.
        output: what has made each output of floating point, and its dtype; None: it has no gradient.
    """

    received: Tensors
    output: Sequence[tuple[GradientEdge, torch.dtype] | None]


class Sends:
    """What is on its way to other ranks; see [Note: sends]."""

    LIMIT = 2
    """How many transfers there may be to one rank."""

    def __init__(self) -> None:
        self._under_way: dict[int, deque[Transfer]] = {}

    def add(self, peer: int, transfer: Transfer) -> None:
        """Keep the tensors of a transfer until it is done."""
        transfers = self._under_way.setdefault(peer, deque())
        transfers.append(transfer)
        # Gloo does not report that a send is done before it is waited for, NCCL does.
        while len(transfers) > self.LIMIT or (transfers and transfers[0].is_done()):
            transfers.popleft().wait()

    def wait(self) -> None:
        """Wait until all is done."""
        for transfers in self._under_way.values():
            while transfers:
                transfers.popleft().wait()


class Run:
    """One pass through a schedule.

    Args:
        stages: of this rank, by their index.
        placement: rank along `pp` of each stage.
        group: of the axis `pp`.
        device: of this rank.
        train: whether there is a backward.
        moved: called after each action.
        times: notes when actions start and end; None: nobody asks.

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
        moved: Callable[[], object] = lambda: None,
        times: ActionTimes | None = None,
    ) -> None:
        self._moved, self._times = moved, times
        self._stages, self._placement, self._group = stages, placement, group
        self._device, self._train = device, train
        self._batches: Sequence[Batch] = ()
        self._sends = Sends()
        self._arriving: dict[Action, Transfer] = {}
        # What crosses a boundary within this rank, or has been computed and is yet to be sent.
        self._outputs: dict[tuple[int, int], Tensors] = {}
        self._gradients: dict[tuple[int, int], Tensors] = {}
        self._flying: dict[tuple[int, int], _InFlight] = {}
        self._rest: dict[tuple[int, int], Callable[[], None]] = {}
        self.losses: dict[int, Tensor] = {}

    def __call__(self, order: Sequence[Action | Exchange], batches: Sequence[Batch], *, is_last: bool) -> None:
        """Run all of an order, and wait until what it sends has arrived.

        Args:
            order: of this rank.
            batches: the microbatches, on this rank's device.
            is_last: whether no other run adds to the gradients of the step.
        """
        self._batches = batches
        backwards = [each for each in order if isinstance(each, Action) and each.kind is not Kind.FORWARD]
        last = {action.stage: action for action in backwards} if is_last else {}
        # See [Note: drain]: nothing is computed behind an exchange that is the last of all.
        late: Stage | None = None
        if last and isinstance(order[-1], Exchange) and self._stages[backwards[-1].stage].reduces_later:
            late = self._stages[last.pop(backwards[-1].stage).stage]
        for each in order:
            if isinstance(each, Exchange):
                self._exchange(each)
                continue
            if each.kind is Kind.FORWARD:
                self._forward(each)
            else:
                self._backward(each, is_last=last.get(each.stage) == each)
            self._moved()
            if self._times is not None:
                self._times.end(each)
        if late is not None:
            late.reduce()
        self._sends.wait()

    # -- computation

    def _forward(self, action: Action) -> None:
        stage, index = self._stages[action.stage], action.microbatch
        received = () if stage.is_first else self._arrived(Kind.RECV_F, action)
        self._starts()
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
            edges = [(get_gradient_edge(t), t.dtype) if t.requires_grad else None for t in _floating(output)]
            self._flying[action.stage, index] = _InFlight(_floating(received), edges)

    def _backward(self, action: Action, *, is_last: bool) -> None:
        stage, key = self._stages[action.stage], (action.stage, action.microbatch)
        if action.kind is Kind.BACKWARD_WEIGHT:
            self._starts()
            stage.backward_weight(self._rest.pop(key), is_last=is_last)
            return
        flying = self._flying.pop(key)
        # The derivative of the loss by itself, or what the next stage has sent.
        gradients = (torch.ones((), device=self._device),) if stage.is_last else self._arrived(Kind.RECV_B, action)
        self._starts()

        def work() -> None:
            # Boundaries have one dtype, whatever the stage computes in. Where all that came before is frozen there is
            # nothing to do.
            pairs = [
                (output[0], given.to(output[1]))
                for output, given in zip(flying.output, gradients, strict=True)
                if output is not None
            ]
            if pairs:
                torch.autograd.backward([edge for edge, _ in pairs], [given for _, given in pairs])

        if action.kind is Kind.BACKWARD:
            stage.backward(work, is_last=is_last)
        else:
            self._rest[key] = stage.backward_input(work)
        if not stage.is_first:
            received = flying.received
            self._gradients[key] = tuple(t.grad if t.grad is not None else torch.zeros_like(t) for t in received)

    def _starts(self) -> None:
        """All is there that an action needs."""
        if self._times is not None:
            self._times.start()

    # -- communication

    def _arrived(self, kind: Kind, action: Action) -> Tensors:
        """What a neighbouring stage has computed for an action: from another rank, or from this one."""
        key = Action(kind, action.stage, action.microbatch)
        if key in self._arriving:
            return self._arriving.pop(key).wait()
        if kind is Kind.RECV_F:
            # Tensors of its own, so that each stage has its own graph.
            return tuple(tensor.detach() for tensor in self._outputs.pop((action.stage - 1, action.microbatch)))
        return self._gradients.pop((action.stage + 1, action.microbatch))

    def _exchange(self, exchange: Exchange) -> None:
        """Send and receive all of it as one batch."""
        tensors = {
            action: self._leaving(action) if _is_send(action) else self._room(action) for action in exchange.transfers
        }
        operations = [
            dist.P2POp(dist.isend if _is_send(action) else dist.irecv, t, group=self._group, group_peer=exchange.peer)
            for action in exchange.transfers
            for t in tensors[action]
        ]
        works = dist.batch_isend_irecv(operations)
        # NCCL has one work for the whole batch, gloo one for each operation.
        each = iter(works if len(works) == len(operations) else works * len(operations))
        under_way = {action: Transfer([next(each) for _ in mine], mine) for action, mine in tensors.items()}
        sent = [transfer for action, transfer in under_way.items() if _is_send(action)]
        self._arriving |= {action: transfer for action, transfer in under_way.items() if not _is_send(action)}
        if sent:
            works, leaving = [w for t in sent for w in t.works], [t for transfer in sent for t in transfer.tensors]
            self._sends.add(exchange.peer, Transfer(works, tuple(leaving)))

    def _leaving(self, action: Action) -> Tensors:
        """What an action sends."""
        made = self._outputs if action.kind is Kind.SEND_F else self._gradients
        tensors = made.pop((action.stage, action.microbatch))
        return tuple(t.to(dtype).contiguous() for t, (_, dtype) in zip(tensors, self._kinds(action), strict=True))

    def _room(self, action: Action) -> Tensors:
        """For what an action receives."""
        return tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._kinds(action))

    def _kinds(self, action: Action) -> Kinds:
        """Of what an action sends or receives."""
        stage, batch = self._stages[action.stage], self._batches[action.microbatch]
        kinds = stage.leaving(batch) if action.kind in (Kind.SEND_F, Kind.RECV_B) else stage.entering(batch)
        if action.kind in (Kind.SEND_F, Kind.RECV_F):
            return kinds
        return [(shape, dtype) for shape, dtype in kinds if dtype.is_floating_point]


def _is_send(action: Action) -> bool:
    return action.kind in (Kind.SEND_F, Kind.SEND_B)


def _floating(tensors: Sequence[Tensor]) -> Tensors:
    """Those that have gradients."""
    return tuple(tensor for tensor in tensors if tensor.is_floating_point())
