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

from ..schedule.actions import Action, ActionKind, P2PBatch, bubble_fraction, compute_timeline
from .rank_schedule import RankSchedule
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
    """The losses of the microbatches, on the last stage's rank; with `is_training` there is a backward, and times where
    asked for.
    """
    length = orders.microbatches_per_run(len(batches))
    losses: list[Tensor] = []
    if is_training:
        recorder.begin_step(orders, microbatches_per_run=length, num_runs=len(batches) // length)
    for start in range(0, len(batches), length):
        recorder.first_microbatch = start
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

    MAX_PER_PEER = 2
    """How many transfers there may be to one rank."""

    def __init__(self) -> None:
        self._transfers_by_peer: dict[int, deque[_PendingTransfer]] = {}

    def add(self, peer: int, transfer: _PendingTransfer) -> None:
        transfers = self._transfers_by_peer.setdefault(peer, deque())
        transfers.append(transfer)
        # Gloo does not report that a send is done before it is waited for, NCCL does.
        while len(transfers) > self.MAX_PER_PEER or (transfers and all(w.is_completed() for w in transfers[0].works)):
            transfers.popleft().wait()

    def wait(self) -> None:
        for transfers in self._transfers_by_peer.values():
            while transfers:
                transfers.popleft().wait()


@dataclass
class _InFlightMicrobatch:
    """A microbatch between its forward and its backward."""

    received: Tensors
    """Of floating point, with gradients after the backward."""
    output_edges: Sequence[tuple[GradientEdge, torch.dtype] | None]
    """What has made each output of floating point, and its dtype; None: it has no gradient."""


class ScheduleRun:
    """One pass through a schedule; `losses` are the last stage's, by microbatch, scalars without a gradient."""

    def __init__(
        self, stages: Mapping[int, PipelineStage], mesh: Mesh, *, is_training: bool, recorder: PipelineTimelineRecorder
    ) -> None:
        self._report_progress, self._recorder = mesh.world.progress.tick, recorder
        self._stages, self._group, self._device, self._is_training = stages, mesh.group("pp"), mesh.device, is_training
        self._batches: Sequence[Batch] = ()
        self._sends = _PendingSends()
        self._pending_receives: dict[Action, _PendingTransfer] = {}
        # What crosses a boundary within this rank, or has been computed and is yet to be sent.
        self._outputs: dict[tuple[int, int], Tensors] = {}
        self._gradients: dict[tuple[int, int], Tensors] = {}
        self._in_flight: dict[tuple[int, int], _InFlightMicrobatch] = {}
        self._weight_backwards: dict[tuple[int, int], Callable[[], None]] = {}
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
        if last and isinstance(order[-1], P2PBatch) and self._stages[backwards[-1].stage].can_defer_reduction:
            late = self._stages[last.pop(backwards[-1].stage).stage]
        for each in order:
            if isinstance(each, P2PBatch):
                self._exchange(each)
                continue
            if each.kind is ActionKind.FORWARD:
                self._forward(each)
            else:
                self._backward(each, is_last=last.get(each.stage) == each)
            self._report_progress()
            if self._is_training:
                self._recorder.end_action(each)
        if late is not None:
            late.reduce_gradients()
        self._sends.wait()

    # -- computation

    def _forward(self, action: Action) -> None:
        stage, index = self._stages[action.stage], action.microbatch
        received = () if stage.is_first else self._receive(ActionKind.RECV_F, action)
        self._recorder.start_action()
        if self._is_training:
            for tensor in _select_floating_point(received):
                tensor.requires_grad_()
        output = stage.forward(self._batches[index], received)
        if stage.is_last:
            (loss,) = output
            self.losses[index] = loss.detach()
        else:
            self._outputs[action.stage, index] = tuple(tensor.detach() for tensor in output)
        if self._is_training:
            edges = [
                (get_gradient_edge(t), t.dtype) if t.requires_grad else None for t in _select_floating_point(output)
            ]
            self._in_flight[action.stage, index] = _InFlightMicrobatch(_select_floating_point(received), edges)

    def _backward(self, action: Action, *, is_last: bool) -> None:
        stage, key = self._stages[action.stage], (action.stage, action.microbatch)
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            self._recorder.start_action()
            stage.backward_weight(self._weight_backwards.pop(key), is_last=is_last)
            return
        flying = self._in_flight.pop(key)
        # The derivative of the loss by itself, or what the next stage has sent.
        gradients = (
            (torch.ones((), device=self._device),) if stage.is_last else self._receive(ActionKind.RECV_B, action)
        )
        self._recorder.start_action()

        def work() -> None:
            # Boundaries have one dtype, whatever the stage computes in. Where all that came before is frozen there is
            # nothing to do.
            pairs = [
                (output[0], given.to(output[1]))
                for output, given in zip(flying.output_edges, gradients, strict=True)
                if output is not None
            ]
            if pairs:
                torch.autograd.backward([edge for edge, _ in pairs], [given for _, given in pairs])

        if action.kind is ActionKind.BACKWARD:
            stage.backward(work, is_last=is_last)
        else:
            self._weight_backwards[key] = stage.backward_input(work)
        if not stage.is_first:
            received = flying.received
            self._gradients[key] = tuple(t.grad if t.grad is not None else torch.zeros_like(t) for t in received)

    # -- communication

    def _receive(self, kind: ActionKind, action: Action) -> Tensors:
        """What a neighbouring stage has computed for an action: from another rank, or from this one."""
        key = Action(kind, action.stage, action.microbatch)
        if key in self._pending_receives:
            return self._pending_receives.pop(key).wait()
        if kind is ActionKind.RECV_F:
            # Tensors of its own, so that each stage has its own graph.
            return tuple(tensor.detach() for tensor in self._outputs.pop((action.stage - 1, action.microbatch)))
        return self._gradients.pop((action.stage + 1, action.microbatch))

    def _exchange(self, exchange: P2PBatch) -> None:
        tensors = {
            action: self._take_outgoing(action)
            if _is_send(action)
            else tuple(
                torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._tensor_specs(action)
            )
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
        self._pending_receives |= {action: transfer for action, transfer in under_way.items() if not _is_send(action)}
        if sent:
            works, leaving = [w for t in sent for w in t.works], [t for transfer in sent for t in transfer.tensors]
            self._sends.add(exchange.peer, _PendingTransfer(works, tuple(leaving)))

    def _take_outgoing(self, action: Action) -> Tensors:
        made = self._outputs if action.kind is ActionKind.SEND_F else self._gradients
        tensors = made.pop((action.stage, action.microbatch))
        return tuple(
            t.to(dtype).contiguous() for t, (_, dtype) in zip(tensors, self._tensor_specs(action), strict=True)
        )

    def _tensor_specs(self, action: Action) -> TensorSpecs:
        stage, batch = self._stages[action.stage], self._batches[action.microbatch]
        kinds = (
            stage.output_specs(batch)
            if action.kind in (ActionKind.SEND_F, ActionKind.RECV_B)
            else stage.input_specs(batch)
        )
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
        self._device, self._pp_rank, self._record_event = device, pp_rank, make_event_recorder(device)
        self._is_requested = self._is_recording = False
        self._spans: list[tuple[Action, int, Any, Any]] = []
        self.planned_timeline: dict[str, Any] = {}
        self.first_microbatch = 0
        """The microbatch of the step that is microbatch 0 of the present run of the schedule."""

    def record_next(self) -> None:
        self._is_requested = True

    def begin_step(self, orders: RankSchedule, *, microbatches_per_run: int, num_runs: int) -> None:
        """Begin a step of so many runs of `microbatches_per_run` microbatches."""
        self._is_recording, self._is_requested, self._spans = self._is_requested, False, []
        if not self._is_recording:
            return
        self.planned_timeline = _build_planned_timeline(orders, microbatches_per_run, num_runs)
        if self._record_event is not None:
            torch.accelerator.synchronize(self._device)
        self._time = time.time()
        self._zero = self._start = self._now()

    def start_action(self) -> None:
        if self._is_recording:
            self._start = self._now()

    def end_action(self, action: Action) -> None:
        if self._is_recording:
            self._spans.append((action, self.first_microbatch + action.microbatch, self._start, self._now()))

    def pop_timeline(self) -> dict[str, Any] | None:
        """Return kind, stage, microbatch, start and end [s] of each action of the step; waits for the device."""
        if not self._is_recording:
            return None
        self._is_recording = False
        if self._record_event is not None and self._spans:
            self._spans[-1][3].synchronize()
        actions = [
            [str(action.kind), action.stage, microbatch, self._since_zero(start), self._since_zero(end)]
            for action, microbatch, start, end in self._spans
        ]
        return {"time": self._time, "pp_rank": self._pp_rank, "actions": actions}

    def _now(self) -> Any:
        return time.perf_counter() if self._record_event is None else self._record_event()

    def _since_zero(self, moment: Any) -> float:
        return float(self._zero.elapsed_time(moment) / 1e3 if self._record_event is not None else moment - self._zero)


def _build_planned_timeline(orders: RankSchedule, length: int, runs: int) -> dict[str, Any]:
    schedule = orders.build_schedule(length)
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
