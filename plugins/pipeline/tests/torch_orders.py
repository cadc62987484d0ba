"""The compute orders of torch's own pipeline schedules, to compare with. Only tests use this; no process group."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules as theirs

SINGLE_STAGE = ("GPipe", "1F1B")
COMPUTE = ("F", "B", "I", "W")


def torch_orders(name: str, *, num_ranks: int, num_stages: int, num_microbatches: int) -> tuple[tuple[str, ...], ...]:
    """Per rank, the computing actions of `torch.distributed.pipelining`, printed as torch does ("0F0").

    The classes read no more of a stage than its numbers, so plain objects stand for the stages of rank 0; they work
    out the order of every rank from these.

    Raises:
        ValueError: torch refuses these numbers.
    """
    cls: Any = theirs.get_schedule_class(name)
    logging.getLogger(theirs.__name__).setLevel(logging.ERROR)
    fakes = [
        SimpleNamespace(
            num_stages=num_stages,
            group_size=num_ranks,
            group_rank=0,
            stage_index=index,
            is_first=index == 0,
            is_last=False,
            has_backward=True,
            submod=None,
        )
        for index in range(num_stages // num_ranks)
    ]
    first = next(iter(list(inspect.signature(cls.__init__).parameters)[1:]))
    made = cls(fakes[0] if first == "stage" else fakes, num_microbatches)
    return tuple(
        tuple(str(action) for each in made.pipeline_order[rank] for action in _flat(each)) for rank in range(num_ranks)
    )


def _flat(action: Any) -> Iterator[Any]:
    if action is None:
        return
    for each in action.sub_actions or [action]:
        if each.computation_type.value in COMPUTE:
            yield each
