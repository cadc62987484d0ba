"""Run one rank's actions of a schedule for all microbatches of a step, and record when they start and end.

Ranks send a tensor as soon as it is computed, and wait for a received one where they use it. The number, shapes and
dtypes of the tensors follow from the batch and the model, so ranks exchange no metadata. Tensors that two ranks have
for each other at the same time are sent as one batch.

[Note: sends] A sent tensor must live until it has arrived, and no longer. A backward starts at the graph edge that
produced an output, so the output itself is not kept for it. At most two exchanges with sends may be pending to each
neighbour; before it adds a third, a rank waits for the oldest. This cannot deadlock, because the orders of actions also
work with blocking sends; see `actions.add_communication`.

[Note: drain] The last action of a rank in a step is often a backward for which another rank waits. After it, this rank
would be idle until all ranks have finished. In this case the rank sends the gradient first, and reduces the stage's
gradients while other ranks still compute. In all other cases the last backward of the stage reduces them, so that the
reduction overlaps with that backward.

[Note: one clock] Times are relative to a `time.time` value, which all ranks of a node share. An action starts when its
inputs have arrived, so the gaps between actions are waiting times. On a CPU, times are taken on the host. On an
accelerator they are events in the device's stream; the device is synchronized once before such a step, since otherwise
its pending work would shift the time origin. Not yet run on a GPU.
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
    """Return the losses of the microbatches, on the rank of the last stage; other ranks return an empty list.

    With `is_training`, run backwards too, and record their times if requested.
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
    """Tensors that are being sent or received. They must live until `works` are done."""

    works: Sequence[dist.Work]
    tensors: Tensors

    def wait(self) -> Tensors:
        for work in self.works:
            work.wait()
        return self.tensors


class _PendingSends:
    """Unfinished sends to other ranks; see [Note: sends]."""

    MAX_PER_PEER = 2
    """Maximum number of unfinished transfers to one rank."""

    def __init__(self) -> None:
        self._transfers_by_peer: dict[int, deque[_PendingTransfer]] = {}

    def add(self, peer: int, transfer: _PendingTransfer) -> None:
        transfers = self._transfers_by_peer.setdefault(peer, deque())
        transfers.append(transfer)
        # Gloo does not report that a send is complete until `wait` is called. NCCL does.
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
    """Received floating-point tensors. They have gradients after the backward."""
    output_edges: Sequence[tuple[GradientEdge, torch.dtype] | None]
    """Graph edge and dtype of each floating-point output; None if it requires no gradient."""


class ScheduleRun:
    """One run of a schedule; `losses` maps microbatches to losses of the last stage, scalars without a gradient."""

    def __init__(
        self, stages: Mapping[int, PipelineStage], mesh: Mesh, *, is_training: bool, recorder: PipelineTimelineRecorder
    ) -> None:
        self._report_progress, self._recorder = mesh.world.progress.tick, recorder
        self._stages, self._group, self._device, self._is_training = stages, mesh.group("pp"), mesh.device, is_training
        self._batches: Sequence[Batch] = ()
        self._sends = _PendingSends()
        self._pending_receives: dict[Action, _PendingTransfer] = {}
        # Tensors that cross a boundary within this rank, or that are computed but not sent yet.
        self._outputs: dict[tuple[int, int], Tensors] = {}
        self._gradients: dict[tuple[int, int], Tensors] = {}
        self._in_flight: dict[tuple[int, int], _InFlightMicrobatch] = {}
        self._weight_backwards: dict[tuple[int, int], Callable[[], None]] = {}
        self.losses: dict[int, Tensor] = {}

    def __call__(self, order: Sequence[Action | P2PBatch], batches: Sequence[Batch], *, is_last: bool) -> None:
        """Run this rank's actions and wait until its sends have arrived.

        `is_last`: no later run adds to the gradients of this step.
        """
        self._batches = batches
        backwards = [each for each in order if isinstance(each, Action) and each.kind is not ActionKind.FORWARD]
        last = {action.stage: action for action in backwards} if is_last else {}
        # See [Note: drain]: if the order ends with an exchange, the rank computes nothing after it.
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
        in_flight = self._in_flight.pop(key)
        # The derivative of the loss with respect to itself, or the gradients from the next stage.
        gradients = (
            (torch.ones((), device=self._device),) if stage.is_last else self._receive(ActionKind.RECV_B, action)
        )
        self._recorder.start_action()

        def work() -> None:
            # Gradients arrive in the dtype of the boundary, which may differ from the stage's. If all earlier
            # parameters are frozen, there is nothing to do.
            pairs = [
                (output[0], given.to(output[1]))
                for output, given in zip(in_flight.output_edges, gradients, strict=True)
                if output is not None
            ]
            if pairs:
                torch.autograd.backward([edge for edge, _ in pairs], [given for _, given in pairs])

        if action.kind is ActionKind.BACKWARD:
            stage.backward(work, is_last=is_last)
        else:
            self._weight_backwards[key] = stage.backward_input(work)
        if not stage.is_first:
            received = in_flight.received
            self._gradients[key] = tuple(t.grad if t.grad is not None else torch.zeros_like(t) for t in received)

    # -- communication

    def _receive(self, kind: ActionKind, action: Action) -> Tensors:
        """Return the tensors that a neighbouring stage computed for an action, on another rank or on this one."""
        key = Action(kind, action.stage, action.microbatch)
        if key in self._pending_receives:
            return self._pending_receives.pop(key).wait()
        if kind is ActionKind.RECV_F:
            # New tensors, so that each stage has its own graph.
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
        # NCCL returns one work for the batch, gloo one for each operation.
        each = iter(works if len(works) == len(operations) else works * len(operations))
        pending = {action: _PendingTransfer([next(each) for _ in mine], mine) for action, mine in tensors.items()}
        sent = [transfer for action, transfer in pending.items() if _is_send(action)]
        self._pending_receives |= {action: transfer for action, transfer in pending.items() if not _is_send(action)}
        if sent:
            works, leaving = [w for t in sent for w in t.works], [t for transfer in sent for t in transfer.tensors]
            self._sends.add(exchange.peer, _PendingTransfer(works, tuple(leaving)))

    def _take_outgoing(self, action: Action) -> Tensors:
        outgoing = self._outputs if action.kind is ActionKind.SEND_F else self._gradients
        tensors = outgoing.pop((action.stage, action.microbatch))
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


# -- times of actions, in requested steps


class PipelineTimelineRecorder:
    """Record when the actions of a step start and end, if requested; see [Note: one clock].

    Implements `meshwright_run.run_logs.SupportsTimeline`.
    """

    def __init__(self, device: torch.device, pp_rank: int) -> None:
        self._device, self._pp_rank, self._record_event = device, pp_rank, make_event_recorder(device)
        self._is_requested = self._is_recording = False
        self._spans: list[tuple[Action, int, Any, Any]] = []
        self.planned_timeline: dict[str, Any] = {}
        self.first_microbatch = 0
        """Index in the step of the first microbatch of the current run of the schedule."""

    def record_next(self) -> None:
        self._is_requested = True

    def begin_step(self, orders: RankSchedule, *, microbatches_per_run: int, num_runs: int) -> None:
        """Begin a step of `num_runs` runs of the schedule, with `microbatches_per_run` microbatches each."""
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
        """Return kind, stage, microbatch, start and end [s] of each action of the step; wait for the device."""
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
