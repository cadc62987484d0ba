"""What a rank does in a stretch of time: it computes, waits for messages alone, or does neither.

[Note: exposed communication] A message is under way while a kernel of NCCL runs; on a CPU while a thread of gloo is at
a collective, or the main thread waits for what other ranks have to say of the step. What of it is exposed is the time
in which nothing is computed meanwhile: in which no other kernel (or copy) runs on the device, or on a CPU no operator
on the main thread. Operators that issue messages or wait for them compute nothing. Time in which nothing is under way
and nothing is computed is the host's: it prepares what comes next. So computing, exposed and host add up to the whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .intervals import Intervals, length, union, without
from .spans import ON_DEVICE, OPERATOR, Span


@dataclass(frozen=True)
class Activity:
    """See [Note: exposed communication].

    Attributes:
        computing, communicating: when.
        is_on_device: whether it is an accelerator's; else the main thread's.
    """

    computing: Intervals
    communicating: Intervals
    is_on_device: bool

    @property
    def exposed(self) -> Intervals:
        return without(self.communicating, self.computing)


def activity(spans: Sequence[Span]) -> Activity:
    """What a rank did, from all that its profiler has seen."""
    messages = union((each.start, each.end) for each in spans if each.is_communication)
    on_device = [each for each in spans if each.kind in ON_DEVICE]
    if on_device:
        return Activity(_covered(each for each in on_device if not each.is_communication), messages, True)
    main = main_thread(spans)
    of_main = [each for each in spans if each.thread == main]
    computing = _covered(each for each in of_main if each.computes)
    # An operator on sharded tensors waits within for what it has sent.
    return Activity(without(computing, _covered(each for each in of_main if each.sends)), messages, False)


def exposed_communication(spans: Sequence[Span]) -> float:
    """Seconds in which a rank waits for messages and computes nothing; see [Note: exposed communication]."""
    return length(activity(spans).exposed)


def main_thread(spans: Iterable[Span]) -> int | str | None:
    """The thread of the steps; where none is marked, the one with the most operators."""
    operators: Counter[int | str] = Counter()
    for each in spans:
        if each.step is not None:
            return each.thread
        if each.kind == OPERATOR:
            operators[each.thread] += 1
    return operators.most_common(1)[0][0] if operators else None


def _covered(spans: Iterable[Span]) -> Intervals:
    return union((each.start, each.end) for each in spans)
