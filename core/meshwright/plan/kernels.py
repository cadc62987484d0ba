"""What an operator costs on a device, by a roofline.

[Note: causal attention] An attention has two products of each pair of a query and a key that act on each other, and its
backward five (Dao, arXiv 2307.08691). With neither a mask nor `is_causal` all pairs act. A mask is taken for the causal
one whose last query is that of the last key, as parts of a sequence have it under context parallelism.

[Note: groups] A product of groups, as experts have it, is given where each ends, and reaches what a product of one of
them would: the rows of all, which are the largest of its sizes, by their number.

[Note: fusion] Compiled code runs operators without products as one kernel, as far as they follow each other: it reads
what they have not made themselves, and writes what is read later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .device import Device
from .trace import Operation

VIEW_COST = 0.2
"""Of an operator that issues no kernel, for the host, in operators."""
ALLOCATES = ("aten.empty", "aten.new_empty", "aten.lift_fresh", "prim.")
_PICKS = ("embedding", "index_select", "index.Tensor", "gather.default", "slice_scatter")


def is_kernel(operation: Operation) -> bool:
    """Whether a device has something to do: views and empty tensors are made by the host alone."""
    return bool(operation.writes) and not operation.name.startswith(ALLOCATES)


def seconds(operation: Operation, device: Device, pace: float = 1.0) -> float:
    """Of an operator by itself.

    Args:
        pace: of arithmetic, which is what differs between devices of one kind.
    """
    moved = sum(size for _, size in (*operation.reads, *operation.writes))
    if any(name in operation.name for name in _PICKS):
        moved = min(moved, 2 * sum(size for _, size in operation.writes))
    memory = moved / (device.bandwidth * device.bandwidth_efficiency)
    return max(device.kernel_s, memory, _arithmetic(operation, device) / pace)


def _arithmetic(operation: Operation, device: Device) -> float:
    if not operation.flops:
        return 0.0
    dtype = str(operation.dtype).removeprefix("torch.")
    dtype = "float8" if dtype.startswith("float8") else dtype
    known = dtype if dtype in device.flops else "float32"
    if "attention" in operation.name:
        is_backward = "backward" in operation.name
        reached = device.attention_backward_efficiency if is_backward else device.attention_efficiency
        return operation.flops / (device.flops[known] * reached)
    return operation.flops / device.matmul_rate(known, _smallest(operation.shapes))


def _smallest(shapes: Sequence[Sequence[int]]) -> int:
    """Of the sizes of a product; see [Note: groups]."""
    sizes = [size for shape in [each for each in shapes if len(each) > 1][-2:] for size in shape[-2:]]
    groups = next((shape[0] for shape in shapes[2:] if len(shape) == 1), 1)
    return min([*sizes, max(sizes) // groups], default=1) if sizes else 1


def fused(operations: Sequence[Operation]) -> list[Operation]:
    """The same as compiled code would run them; see [Note: fusion]."""
    last = {block: place for place, each in enumerate(operations) for block, _ in (*each.reads, *each.writes)}
    found: list[Operation] = []
    chain: list[Operation] = []
    for place, each in enumerate(operations):
        if each.flops or each.call is not None or each.name.startswith("fsdp."):
            found += _joined(chain, place, last)
            found.append(each)
            chain = []
        else:
            chain.append(each)
    return found + _joined(chain, len(operations), last)


def _joined(chain: Iterable[Operation], end: int, last: dict[int, int]) -> list[Operation]:
    """One operation for all of a chain that ends before the place `end`."""
    kernels = [each for each in chain if is_kernel(each)]
    if not kernels:
        return []
    reads: dict[int, int] = {}
    writes: dict[int, int] = {}
    for each in kernels:
        for block, size in each.reads:
            if block not in writes:
                reads[block] = max(reads.get(block, 0), size)
        for block, size in each.writes:
            writes[block] = max(writes.get(block, 0), size)
    kept = tuple((block, size) for block, size in writes.items() if last[block] >= end)
    size = sum(reads.values()) + sum(size for _, size in kept)
    if not kept:
        return []
    logged, phase = kernels[-1].logged, kernels[-1].phase
    return [
        Operation("fused", 0, size, (), kernels[0].dtype, None, tuple(reads.items()), kept, logged=logged, phase=phase)
    ]
