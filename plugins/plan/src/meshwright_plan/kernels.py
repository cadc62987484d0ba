"""What an operator costs on a device, by a roofline.

[Note: causal attention] An attention has two products of each pair of a query and a key that act on each other, and its
backward five (Dao, arXiv 2307.08691). With neither a mask nor `is_causal` all pairs act. A mask is taken for the causal
one whose last query is that of the last key, as parts of a sequence have it under context parallelism.

[Note: groups] A grouped product, as experts have it, is given the end of each group, and is as fast as the product of
one group: the rows of all, which are the largest size, divided by the number of groups.

[Note: fusion] Compiled code runs consecutive operators without products as one kernel, which reads what they have not
made themselves and writes what is read later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .device import Device
from .trace import Operation

VIEW_COST = 0.2
"""Host time of an operator that issues no kernel, in operators."""
ALLOCATES = ("aten.empty", "aten.new_empty", "aten.lift_fresh", "prim.")
_PICKS = ("embedding", "index_select", "index.Tensor", "gather.default", "slice_scatter")


def is_kernel(operation: Operation) -> bool:
    """Return whether the device has work to do: the host alone makes views and empty tensors."""
    return bool(operation.writes) and not operation.name.startswith(ALLOCATES)


def seconds(operation: Operation, device: Device, pace: float = 1.0) -> float:
    """Return the time of an operator by itself; its arithmetic runs at `pace` times the speed of the device."""
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
    """Return the smallest size of a product; see [Note: groups]."""
    sizes = [size for shape in [each for each in shapes if len(each) > 1][-2:] for size in shape[-2:]]
    groups = next((shape[0] for shape in shapes[2:] if len(shape) == 1), 1)
    return min([*sizes, max(sizes) // groups], default=1) if sizes else 1


def fused(operations: Sequence[Operation]) -> list[Operation]:
    """Return the operations that compiled code runs; see [Note: fusion]."""
    last = {block: place for place, each in enumerate(operations) for block, _ in (*each.reads, *each.writes)}
    found: list[Operation] = []
    chain: list[Operation] = []
    for place, each in enumerate(operations):
        if each.flops or each.call is not None or each.name.startswith("fsdp."):
            found += [*_joined(chain, place, last), each]
            chain = []
        else:
            chain.append(each)
    return found + _joined(chain, len(operations), last)


def _joined(chain: Iterable[Operation], end: int, last: dict[int, int]) -> list[Operation]:
    """Join a chain that ends before the place `end` into one operation; none if it writes nothing that is read."""
    kernels = [each for each in chain if is_kernel(each)]
    reads: dict[int, int] = {}
    writes: dict[int, int] = {}
    for each in kernels:
        for block, size in each.reads:
            if block not in writes:
                reads[block] = max(reads.get(block, 0), size)
        for block, size in each.writes:
            writes[block] = max(writes.get(block, 0), size)
    kept = tuple((block, size) for block, size in writes.items() if last[block] >= end)
    if not kept:
        return []
    size = sum(reads.values()) + sum(size for _, size in kept)
    dtype, logged, phase = kernels[0].dtype, kernels[-1].logged, kernels[-1].phase
    return [Operation("fused", 0, size, (), dtype, None, tuple(reads.items()), kept, logged=logged, phase=phase)]
