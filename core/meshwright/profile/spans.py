"""What a profiler has seen, one by one, and what each of it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ..events.step import MARK, WAIT

OPERATOR, ANNOTATION, KERNEL = "cpu_op", "user_annotation", "kernel"
"""Kinds of spans, as Kineto's categories."""
ON_DEVICE = (KERNEL, "gpu_memcpy", "gpu_memset")
"""Kinds of what an accelerator does."""

_STEP = re.compile(rf"(?:{MARK}step |ProfilerStep#)(\d+)$")
_SENDS = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "c10d_functional::")
"""Operators that issue communication, or wait for it."""
_WRAPPERS = ("autograd::", "torch::autograd::", "profiler::")
"""Operators that do nothing themselves, and may wait for something within."""
_COMPILED = ("Torch-Compiled Region", "## Call CompiledFxGraph")


class Span(NamedTuple):
    """One event with a duration; a tuple, since a step has thousands.

    Attributes:
        kind: an operator, an annotation (`record_function`), a kernel, ...: Kineto's category.
        start, end: seconds since any moment, the same of all spans.
        thread: where it ran; of an accelerator, its stream.
        operator: number of the operator that it is, or that has launched it; 0: none is known.
        details: what else the profiler knows, as in the trace's `args`.
    """

    name: str
    kind: str
    start: float
    end: float
    thread: int | str = 0
    operator: int = 0
    details: Mapping[str, Any] = MappingProxyType({})

    @property
    def is_communication(self) -> bool:
        """Whether it is a message under way: a kernel of NCCL, what a thread of gloo does for a collective, or a wait
        for what other ranks have to say of a step."""
        if self.kind == KERNEL:
            return self.name.startswith("nccl")
        return self.kind == ANNOTATION and (self.name.startswith("gloo:") or self.name == WAIT)

    @property
    def sends(self) -> bool:
        """Whether it is an operator that issues messages, or waits for them."""
        return self.kind == OPERATOR and self.name.startswith(_SENDS)

    @property
    def computes(self) -> bool:
        """Whether it is an operator that does work of its own."""
        if self.kind not in (OPERATOR, ANNOTATION):
            return False
        if self.name.startswith(_COMPILED):
            return True
        return self.kind == OPERATOR and "::" in self.name and not self.name.startswith((*_SENDS, *_WRAPPERS))

    @property
    def step(self) -> int | None:
        """The number of the step that it marks."""
        found = _STEP.match(self.name) if self.kind == ANNOTATION else None
        return int(found[1]) if found else None

    @property
    def part(self) -> str | None:
        """The part of a step that it marks."""
        is_mark = self.kind == ANNOTATION and self.name.startswith(MARK)
        if not is_mark or self.name == WAIT or self.step is not None:
            return None
        return self.name.removeprefix(MARK)
