"""Which memory an operator reads and writes: from this follows what waits for what.

Memory is known by the numbers of its blocks; see `meshwright.testing.meter`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ..tensors.nested import tensors_in
from ..testing.meter import Meter, storage_of

Touched = tuple[tuple[int, int], ...]
"""(block, bytes of it), each block once."""


def touched(
    meter: Meter, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> tuple[Touched, Touched]:
    """What an operator has read, and what it has written; views write nothing."""
    read: list[Tensor] = []
    written: list[Tensor] = []
    arguments = operation._schema.arguments
    named = {argument.name: argument for argument in arguments}
    given = [*zip(arguments, args, strict=False), *((named[name], value) for name, value in kwargs.items())]
    for argument, value in given:
        tensors = list(tensors_in(value))
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written or _receives(operation, argument.name):
            written += tensors
        if not (is_written and argument.is_out):
            read += tensors
    reads, changed = _blocks(meter, read), _blocks(meter, written)
    # What a view gives is what it was given.
    known = {block for block, _ in (*reads, *changed)}
    made = tuple(each for each in _blocks(meter, tensors_in(result)) if each[0] not in known)
    return reads, (*changed, *made)


def _receives(operation: Any, argument: str) -> bool:
    """Whether an operator writes an argument though its schema does not tell, as collectives do."""
    name = operation.overloadpacket.__name__
    if operation.namespace == "c10d":
        return not argument.startswith("input") and name != "send"
    return name == "all_gather_copy_in" and argument == "all_gather_output"


def peer_of(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """The place in its group of whom a message is for, or from; None for what is no message between two."""
    for place, argument in enumerate(operation._schema.arguments):
        if operation.namespace == "c10d" and argument.name in ("dst", "src", "srcs"):
            value = kwargs.get(argument.name, args[place] if place < len(args) else None)
            return value if isinstance(value, int) else None
    return None


def _blocks(meter: Meter, tensors: Iterable[Tensor]) -> Touched:
    found: dict[int, int] = {}
    for tensor in tensors:
        block = None if tensor.is_meta else meter.live.get(id(storage_of(tensor)))
        if block is not None:
            size = min(tensor.numel() * tensor.element_size(), block.size)
            found[block.number] = max(found.get(block.number, 0), size)
    return tuple(found.items())
