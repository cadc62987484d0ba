"""Run one rank's actions of the schedule, for all microbatches of a step, and note when each starts and ends.

Tensors go from rank to rank as soon as they are there, and are waited for where they are used. Their number, shapes and
dtypes follow from the batch and the model, so ranks agree on nothing first. What two ranks have for each other at one
moment goes as one batch.

[Note: sends] What is sent must live until it has arrived, and no longer. A backward begins at the edge of the graph
that has made an output, so the output itself is not kept for it. To each neighbour two exchanges with sends may be on
their way, one that travels and one behind it: beyond that, a rank waits for the older one. That cannot end in a circle,
since the orders allow for sends that block; see `order.add_communication`.

[Note: drain] The last thing that a rank computes in a step is often a backward for which another rank waits, and behind
it, that rank is idle until all have finished. There the gradient goes out first, and the stage's gradients are reduced
while others still compute. Elsewhere they are reduced within the last backward of the stage, where the reduction
overlaps with the rest of it.

[Note: one clock] Times count from a moment of `time.time`, which the ranks of one node share. An action starts when
what it waits for has arrived, so that waiting is what lies between actions. On a CPU these are moments of the host. On
an accelerator they are events in the device's stream, and the device is waited for once before such a step, or the
moment that they count from would be lost in what it has yet to do. Never run on a GPU yet.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.plugin import Batch, Mesh, make_event_recorder

from ..schedule.order import Action, ActionKind, P2PBatch, bubble_fraction, compute_timeline
from .orders import RankSchedule
from .stage import PipelineStage, Tensors, TensorSpecs


def run_step(
    stages: Mapping[int, PipelineStage],
    orders: RankSchedule,
    mesh: Mesh,
    batches: Sequence[Batch],
    *,
    is_training: bool,
    recorder: PipelineTimelineRecorder,
) -> list[Tensor]:
    """The losses of the microbatches, on the last stage's rank; with `is_training` there is a backward, and times where asked
    for.
    """
    length = orders.run_length(len(batches))
    losses: list[Tensor] = []
    if is_training:
        recorder.begin(orders, microbatches_per_run=length, num_runs=len(batches) // length)
    for start in range(0, len(batches), length):
        recorder.first = start
        run = ScheduleRun(stages, mesh, is_training=is_training, recorder=recorder)
        is_last = start + length >= len(batches)
        run(orders.actions(length, is_training=is_training), batches[start : start + length], is_last=is_last)
        losses += [run.losses[index] for index in sorted(run.losses)]
    return losses


@dataclass(frozen=True)
class _PendingTransfer:
    """What is on its way. The tensors must live until the works are done."""

    works: Sequence[dist.Work]
    tensors: Tensors

    def wait(self) -> Tensors:
        for work in self.works:
            work.wait()
        return self.tensors


class _PendingSends:
    """What is on its way to other ranks; see [Note: sends]."""

    LIMIT = 2
    """How many transfers there may be to one rank."""

    def __init__(self) -> None:
        self._under_way: dict[int, deque[_PendingTransfer]] = {}

    def add(self, peer: int, transfer: _PendingTransfer) -> None:
        transfers = self._under_way.setdefault(peer, deque())
        transfers.append(transfer)
        # Gloo does not report that a send is done before it is waited for, NCCL does.
        while len(transfers) > self.LIMIT or (transfers and all(w.is_completed() for w in transfers[0].works)):
            transfers.popleft().wait()

    def wait(self) -> None:
        for transfers in self._under_way.values():
            while transfers:
                transfers.popleft().wait()


@dataclass
class _InFlightMicrobatch:
    """A microbatch between its forward and its backward."""

    received: Tensors
    """Of floating point, with gradients after the backward."""
    output: Sequence[tuple[GradientEdge, torch.dtype] | None]
    """What has made each output of floating point, and its dtype; None: it has no gradient."""


class ScheduleRun:
    """One pass through a schedule; `losses` are the last stage's, by microbatch, scalars without a gradient."""

    def __init__(
        self, stages: Mapping[int, PipelineStage], mesh: Mesh, *, is_training: bool, recorder: PipelineTimelineRecorder
    ) -> None:
        self._moved, self._recorder = mesh.world.progress.move, recorder
        self._stages, self._group, self._device, self._train = stages, mesh.group("pp"), mesh.device, is_training
        self._batches: Sequence[Batch] = ()
        self._sends = _PendingSends()
        self._arriving: dict[Action, _PendingTransfer] = {}
        # What crosses a boundary within this rank, or has been computed and is yet to be sent.
        self._outputs: dict[tuple[int, int], Tensors] = {}
        self._gradients: dict[tuple[int, int], Tensors] = {}
        self._flying: dict[tuple[int, int], _InFlightMicrobatch] = {}
        self._rest: dict[tuple[int, int], Callable[[], None]] = {}
        self.losses: dict[int, Tensor] = {}

    def __call__(self, order: Sequence[Action | P2PBatch], batches: Sequence[Batch], *, is_last: bool) -> None:
        """Run this rank's order and wait until what it sends has arrived; `is_last`: no other run adds to the
        gradients.
        """
        self._batches = batches
        backwards = [each for each in order if isinstance(each, Action) and each.kind is not ActionKind.FORWARD]
        last = {action.stage: action for action in backwards} if is_last else {}
        # See [Note: drain]: nothing is computed behind an exchange that is the last of all.
        late: PipelineStage | None = None
        if last and isinstance(order[-1], P2PBatch) and self._stages[backwards[-1].stage].reduces_later:
            late = self._stages[last.pop(backwards[-1].stage).stage]
        for each in order:
            if isinstance(each, P2PBatch):
                self._exchange(each)
                continue
            if each.kind is ActionKind.FORWARD:
                self._forward(each)
            else:
                self._backward(each, is_last=last.get(each.stage) == each)
            self._moved()
            if self._train:
                self._recorder.end(each)
        if late is not None:
            late.reduce()
        self._sends.wait()

    # -- computation

    def _forward(self, action: Action) -> None:
        stage, index = self._stages[action.stage], action.microbatch
        received = () if stage.is_first else self._arrived(ActionKind.RECV_F, action)
        self._recorder.start()
        if self._train:
            for tensor in _select_floating_point(received):
                tensor.requires_grad_()
        output = stage.forward(self._batches[index], received)
        if stage.is_last:
            (loss,) = output
            self.losses[index] = loss.detach()
        else:
            self._outputs[action.stage, index] = tuple(tensor.detach() for tensor in output)
        if self._train:
            edges = [
                (get_gradient_edge(t), t.dtype) if t.requires_grad else None for t in _select_floating_point(output)
            ]
            self._flying[action.stage, index] = _InFlightMicrobatch(_select_floating_point(received), edges)

    def _backward(self, action: Action, *, is_last: bool) -> None:
        stage, key = self._stages[action.stage], (action.stage, action.microbatch)
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            self._recorder.start()
            stage.backward_weight(self._rest.pop(key), is_last=is_last)
            return
        flying = self._flying.pop(key)
        # The derivative of the loss by itself, or what the next stage has sent.
        gradients = (
            (torch.ones((), device=self._device),) if stage.is_last else self._arrived(ActionKind.RECV_B, action)
        )
        self._recorder.start()

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

        if action.kind is ActionKind.BACKWARD:
            stage.backward(work, is_last=is_last)
        else:
            self._rest[key] = stage.backward_input(work)
        if not stage.is_first:
            received = flying.received
            self._gradients[key] = tuple(t.grad if t.grad is not None else torch.zeros_like(t) for t in received)

    # -- communication

    def _arrived(self, kind: ActionKind, action: Action) -> Tensors:
        """What a neighbouring stage has computed for an action: from another rank, or from this one."""
        key = Action(kind, action.stage, action.microbatch)
        if key in self._arriving:
            return self._arriving.pop(key).wait()
        if kind is ActionKind.RECV_F:
            # Tensors of its own, so that each stage has its own graph.
            return tuple(tensor.detach() for tensor in self._outputs.pop((action.stage - 1, action.microbatch)))
        return self._gradients.pop((action.stage + 1, action.microbatch))

    def _exchange(self, exchange: P2PBatch) -> None:
        tensors = {
            action: self._leaving(action)
            if _is_send(action)
            else tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._kinds(action))
            for action in exchange.transfers
        }
        operations = [
            dist.P2POp(dist.isend if _is_send(action) else dist.irecv, t, group=self._group, group_peer=exchange.peer)
            for action in exchange.transfers
            for t in tensors[action]
        ]
        works = dist.batch_isend_irecv(operations)
        # NCCL has one work for the whole batch, gloo one for each operation.
        each = iter(works if len(works) == len(operations) else works * len(operations))
        under_way = {action: _PendingTransfer([next(each) for _ in mine], mine) for action, mine in tensors.items()}
        sent = [transfer for action, transfer in under_way.items() if _is_send(action)]
        self._arriving |= {action: transfer for action, transfer in under_way.items() if not _is_send(action)}
        if sent:
            works, leaving = [w for t in sent for w in t.works], [t for transfer in sent for t in transfer.tensors]
            self._sends.add(exchange.peer, _PendingTransfer(works, tuple(leaving)))

    def _leaving(self, action: Action) -> Tensors:
        made = self._outputs if action.kind is ActionKind.SEND_F else self._gradients
        tensors = made.pop((action.stage, action.microbatch))
        return tuple(t.to(dtype).contiguous() for t, (_, dtype) in zip(tensors, self._kinds(action), strict=True))

    def _kinds(self, action: Action) -> TensorSpecs:
        stage, batch = self._stages[action.stage], self._batches[action.microbatch]
        kinds = stage.leaving(batch) if action.kind in (ActionKind.SEND_F, ActionKind.RECV_B) else stage.entering(batch)
        if action.kind in (ActionKind.SEND_F, ActionKind.RECV_F):
            return kinds
        return [(shape, dtype) for shape, dtype in kinds if dtype.is_floating_point]


def _is_send(action: Action) -> bool:
    return action.kind in (ActionKind.SEND_F, ActionKind.SEND_B)


def _select_floating_point(tensors: Sequence[Tensor]) -> Tensors:
    return tuple(tensor for tensor in tensors if tensor.is_floating_point())


# -- times of actions, in steps that are asked for


class PipelineTimelineRecorder:
    """Records when actions of a step start and end, where it is asked to: see [Note: one clock].

    See also `meshwright_run.journal.TimelineRecorder`.
    """

    def __init__(self, device: torch.device, pp_rank: int) -> None:
        self._device, self._pp_rank, self._moment = device, pp_rank, make_event_recorder(device)
        self._is_wanted = self._is_on = False
        self._spans: list[tuple[Action, int, Any, Any]] = []
        self.planned: dict[str, Any] = {}
        self.first = 0
        """The microbatch of the step that is microbatch 0 of the present run of the schedule."""

    def record_next(self) -> None:
        self._is_wanted = True

    def begin(self, orders: RankSchedule, *, microbatches_per_run: int, num_runs: int) -> None:
        """Begin a step of so many runs of `microbatches_per_run` microbatches."""
        self._is_on, self._is_wanted, self._spans = self._is_wanted, False, []
        if not self._is_on:
            return
        self.planned = _build_planned_timeline(orders, microbatches_per_run, num_runs)
        if self._moment is not None:
            torch.accelerator.synchronize(self._device)
        self._time = time.time()
        self._zero = self._start = self._now()

    def start(self) -> None:
        if self._is_on:
            self._start = self._now()

    def end(self, action: Action) -> None:
        if self._is_on:
            self._spans.append((action, self.first + action.microbatch, self._start, self._now()))

    def take(self) -> dict[str, Any] | None:
        """Return kind, stage, microbatch, start and end [s] of each action of the step; waits for the device."""
        if not self._is_on:
            return None
        self._is_on = False
        if self._moment is not None and self._spans:
            self._spans[-1][3].synchronize()
        actions = [
            [str(action.kind), action.stage, microbatch, self._since_zero(start), self._since_zero(end)]
            for action, microbatch, start, end in self._spans
        ]
        return {"time": self._time, "pp_rank": self._pp_rank, "actions": actions}

    def _now(self) -> Any:
        return time.perf_counter() if self._moment is None else self._moment()

    def _since_zero(self, moment: Any) -> float:
        return float(self._zero.elapsed_time(moment) / 1e3 if self._moment is not None else moment - self._zero)


def _build_planned_timeline(orders: RankSchedule, length: int, runs: int) -> dict[str, Any]:
    schedule = orders.schedule(length)
    times = compute_timeline(schedule)
    end = max(rank[-1][2] for rank in times)
    return {
        "schedule": schedule.name,
        "unit": "forwards",
        "bubble": bubble_fraction(schedule),
        "ranks": [
            [
                [str(action.kind), action.stage, action.microbatch + run * length, start + run * end, stop + run * end]
                for run in range(runs)
                for action, start, stop in rank
            ]
            for rank in times
        ],
    }
