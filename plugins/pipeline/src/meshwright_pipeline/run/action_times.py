"""When each action of a step starts and ends on this rank, in steps that are asked for.

[Note: one clock] Times count from a moment of `time.time`, which the ranks of one node share. An action starts when
what it waits for has arrived, so that waiting is what lies between actions. On a CPU these are moments of the host. On
an accelerator they are events in the device's stream, and the device is waited for once before such a step, or the
moment that they count from would be lost in what it has yet to do. Never run on a GPU yet.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from meshwright.tensors.ops import moments_of

from ..schedule.order import Action
from ..schedule.timeline import bubble_fraction, timeline
from .orders import Orders


class ActionTimes:
    """Of one step.

    Args:
        device: that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._moment = moments_of(device)
        if self._moment is not None:
            torch.accelerator.synchronize(device)
        self.time = time.time()
        """Moment from which times count [s since 1970]."""
        self._zero = self._start = self._now()
        self._spans: list[tuple[Action, int, Any, Any]] = []
        self._first = 0

    def begin_run(self, first: int) -> None:
        """A run of the schedule begins, whose microbatch 0 is this one of the step."""
        self._first = first

    def start(self) -> None:
        """An action starts."""
        self._start = self._now()

    def end(self, action: Action) -> None:
        """It has ended, as far as the host issues it."""
        self._spans.append((action, self._first + action.microbatch, self._start, self._now()))

    def read(self) -> list[list[Any]]:
        """Kind, stage, microbatch, start and end [s] of each action; waits for the device."""
        if self._moment is not None and self._spans:
            self._spans[-1][3].synchronize()
        return [
            [str(action.kind), action.stage, microbatch, self._since_zero(start), self._since_zero(end)]
            for action, microbatch, start, end in self._spans
        ]

    def _now(self) -> Any:
        return time.perf_counter() if self._moment is None else self._moment()

    def _since_zero(self, moment: Any) -> float:
        return float(self._zero.elapsed_time(moment) / 1e3 if self._moment is not None else moment - self._zero)


class TimelineRecorder:
    """Records the steps that it is asked for; see `meshwright.train.run.rank_log.TimelineRecorder`.

    Args:
        device: that computes.
        pp_rank: of this rank along `pp`.
    """

    def __init__(self, device: torch.device, pp_rank: int) -> None:
        self._device, self._pp_rank = device, pp_rank
        self._is_wanted = False
        self._times: ActionTimes | None = None
        self._planned: dict[str, Any] = {}

    def record_next(self) -> None:
        self._is_wanted = True

    def begin(self, orders: Orders, *, length: int, runs: int) -> ActionTimes | None:
        """A step begins; what is to note its times, if they are asked for.

        Args:
            length: microbatches of one run of the schedule.
            runs: of the step.
        """
        self._times = ActionTimes(self._device) if self._is_wanted else None
        if self._is_wanted:
            self._planned = _planned(orders, length, runs)
        self._is_wanted = False
        return self._times

    def take(self) -> dict[str, Any] | None:
        times, self._times = self._times, None
        if times is None:
            return None
        return {"time": times.time, "pp_rank": self._pp_rank, "actions": times.read()}

    @property
    def planned(self) -> dict[str, Any]:
        return self._planned


def _planned(orders: Orders, length: int, runs: int) -> dict[str, Any]:
    schedule = orders.schedule(length)
    times = timeline(schedule)
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
