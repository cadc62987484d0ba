"""Which memory an operator reads and writes: from this follows what waits for what.

Memory is known by the numbers of its blocks; see `meshwright.testing.meter`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ..tensors.nested import tensors_in
from ..testing.collectives import NAMESPACES
from ..testing.meter import Meter, storage_of

Touched = tuple[tuple[int, int], ...]
"""(block, bytes of it), each block once."""


def touched(
    meter: Meter, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> tuple[Touched, Touched]:
    """What an operator has read, and what it has written.

    A collective of torch.distributed does not say which of its tensors it writes: all count.
    """
    read: list[Tensor] = []
    written = list(tensors_in(result))
    arguments = operation._schema.arguments
    named = {argument.name: argument for argument in arguments}
    given = [*zip(arguments, args, strict=False), *((named.get(name), value) for name, value in kwargs.items())]
    for argument, value in given:
        tensors = list(tensors_in(value))
        is_written = argument is not None and argument.alias_info is not None and argument.alias_info.is_write
        if is_written or operation.namespace in NAMESPACES:
            written += tensors
        if not (is_written and argument is not None and argument.is_out):
            read += tensors
    return _blocks(meter, read), _blocks(meter, written)


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
