"""Which memory an operator reads and writes: from this follows what waits for what.

Memory is known by the numbers of its blocks; see `meshwright.testing.meter`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from .._compat.torch import written_arguments
from ..tensors.ops import is_on_meta, tensors_in
from ..testing._compat import bound_arguments
from ..testing.meter import Meter, storage_of

Touched = tuple[tuple[int, int], ...]
"""(block, bytes of it), each block once."""


def touched(
    meter: Meter, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> tuple[Touched, Touched]:
    """What an operator has read, and what it has written; views write nothing."""
    read: list[Tensor] = []
    written: list[Tensor] = []
    changes = _changes(operation)
    for place, value in (*enumerate(args), *kwargs.items()):
        tensors = list(tensors_in(value))
        if place in changes:
            written += tensors
        if place not in changes or place != "out":
            read += tensors
    if operation.namespace in ("c10d", "fsdp"):
        given = bound_arguments(operation, args, kwargs)
        written += tensors_in([value for name, value in given.items() if _receives(operation, name)])
    reads, changed = _blocks(meter, read), _blocks(meter, written)
    # What a view gives is what it was given.
    known = {block for block, _ in (*reads, *changed)}
    made = tuple(each for each in _blocks(meter, tensors_in(result)) if each[0] not in known)
    return reads, (*changed, *made)


@functools.cache
def _changes(operation: Any) -> frozenset[int | str]:
    return frozenset(written_arguments(operation))


def _receives(operation: Any, argument: str) -> bool:
    """Whether an operator writes an argument though its schema does not tell, as collectives do."""
    name = operation.overloadpacket.__name__
    if operation.namespace == "c10d":
        return not argument.startswith("input") and name != "send"
    return name == "all_gather_copy_in" and argument == "all_gather_output"


def peer_of(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """The place in its group of whom a message is for, or from; None for what is no message between two."""
    given = bound_arguments(operation, args, kwargs) if operation.namespace == "c10d" else {}
    return next((given[name] for name in ("dst", "src") if name in given), None)


def _blocks(meter: Meter, tensors: Iterable[Tensor]) -> Touched:
    found: dict[int, int] = {}
    for tensor in tensors:
        block = None if is_on_meta(tensor) else meter.live.get(id(storage_of(tensor)))
        if block is not None:
            # Several parts of one block, as those of a split that are put together again.
            size = found.get(block.number, 0) + tensor.numel() * tensor.element_size()
            found[block.number] = min(size, block.size)
    return tuple(found.items())
