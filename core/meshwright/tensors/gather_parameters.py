"""Gather full parameters on every rank, one at a time, in bounded memory: see `StrategyManager.iter_parameters`.

Ranks exchange their inventories once, so all of them know what each rank sends in each bucket. Only the smallest group
of ranks that together have all parameters communicates. Elements are copied bitwise.

For each bucket, a rank fills its segment of a buffer. A bucket holds as many tensors as fit. A larger tensor takes
several buckets, each with the next range of every owner's elements. Segments are padded to equal length for an
all-gather. If that would double the traffic, for example if one pipeline stage has the tensor, segments are broadcast.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.errors import ConfigError, StrategyError
from ..mesh.mesh import Mesh
from ..mesh.world import World
from .chunks import ChunkedTensor, Rectangle, assign_owners, split_flat_range
from .ops import all_gather_single, copy_all

CANDIDATE_AXES = ("tp", "pp", "dp_shard_cp")
"""Mesh axes whose ranks may together have all parameters."""

ParameterChunks = Mapping[str, ChunkedTensor | None]


class ParamMeta(NamedTuple):
    """Shape of a full parameter, and the requested dtype."""

    shape: torch.Size
    dtype: torch.dtype


class RankInventory(NamedTuple):
    """The arguments of one rank's call, the parameters of which it has chunks, all names in order, and its chunks."""

    request: tuple[int, torch.dtype | None]
    metas: dict[str, ParamMeta]
    names: tuple[str, ...]
    rectangles: tuple[Rectangle, ...]


def iter_full_parameters(
    get_chunks: Callable[[], ParameterChunks], mesh: Mesh, *, bucket_bytes: int, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield every full parameter on every rank, one at a time, for example to feed an inference engine.

    Frozen parameters are included, buffers are not; a tied parameter comes once, under its first name. Names and order
    are those of `named_parameters` of the unwrapped model. Values are those of `state_dict(full=True)`, or rounded once
    to `dtype`. The call does not change training.

    The call and each step of the iterator are collective. All ranks must take the same number of steps, and may stop
    early.

    Args:
        get_chunks: `StrategyManager.parameter_chunks`.
        mesh: the mesh of the ranks.
        bucket_bytes: size of the communication buffer, at least 1, equal on all ranks. In addition to its shards, a
            rank holds this buffer and the next parameter.
        dtype: dtype of the yielded floating-point parameters, equal on all ranks; None: their own.

    Returns:
        (name, tensor) pairs; the tensors are on the mesh's device and belong to the caller.

    Raises:
        ConfigError: an argument is invalid or differs between ranks. Raised by the call, on all ranks.
        StrategyError: `parallelize` has not been called, or the ranks together do not have all of a parameter.
    """
    world = mesh.world
    world.run_on_all_ranks(lambda: _check_arguments(bucket_bytes, dtype))
    chunks = get_chunks()
    inventories: list[Any] = [None] * world.size
    dist.all_gather_object(inventories, _build_inventory(chunks, bucket_bytes, dtype), group=world.group)
    metas = _merge_inventories(inventories)
    group = _find_smallest_group(inventories, metas, mesh)
    gatherer = _ParameterGatherer(chunks, metas, mesh.device)
    if group is None:
        return gatherer.iter_local()
    owned = assign_owners([inventories[rank].rectangles for rank in _get_world_ranks(group, world)])
    return gatherer.iter_gathered(owned, group, bucket_bytes)


def _check_arguments(bucket_bytes: Any, dtype: Any) -> None:
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ConfigError(f"bucket_bytes={bucket_bytes!r} must be a whole number of bytes, at least 1.")
    converts = dtype is None
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        # Some dtypes pack several numbers into one element.
        with suppress(NotImplementedError, RuntimeError):
            converts = torch.zeros(1).to(dtype).dtype is dtype
    if not converts:
        raise ConfigError(
            f"dtype={dtype!r} is no floating-point dtype into which tensors convert. Use one of torch, such as "
            f"torch.bfloat16, or None for the parameters' own."
        )


# -- inventories of the ranks


def _build_inventory(pieces: ParameterChunks, bucket_bytes: int, dtype: torch.dtype | None) -> RankInventory:
    metas, rectangles = {}, []
    for name, sharded in pieces.items():
        if sharded is not None:
            target_dtype = dtype if dtype is not None and sharded.dtype.is_floating_point else sharded.dtype
            metas[name] = ParamMeta(sharded.shape, target_dtype)
            rectangles += [Rectangle(name, tuple(p.offsets), p.sizes, target_dtype.itemsize) for p in sharded.chunks]
    return RankInventory((bucket_bytes, dtype), metas, tuple(pieces), tuple(dict.fromkeys(rectangles)))


def _merge_inventories(inventories: Sequence[RankInventory]) -> dict[str, ParamMeta]:
    """Return shape and dtype of each parameter, in order; errors are equal on all ranks."""
    requests = sorted({f"bucket_bytes={each.request[0]}, dtype={each.request[1]}" for each in inventories})
    if len(requests) > 1:
        raise ConfigError(f"iter_parameters was called with {' and '.join(requests)}. Give the same on all ranks.")
    known: dict[str, ParamMeta] = {}
    for each in inventories:
        for name, meta in each.metas.items():
            if known.setdefault(name, meta) != meta:
                raise StrategyError(f"{name} is {tuple(meta)} on one rank and {tuple(known[name])} on another.")
    metas = {name: known[name] for each in inventories for name in each.names if name in known}
    missing = _find_missing(inventories, metas) or sorted(
        {name for each in inventories for name in each.names} - known.keys()
    )
    if missing:
        raise StrategyError(f"the ranks together do not have all of {', '.join(missing[:3])}: see parameter_chunks.")
    return metas


def _find_missing(inventories: Sequence[RankInventory], kinds: Mapping[str, ParamMeta]) -> list[str]:
    """Return the parameters of which these ranks together do not have all elements."""
    counts = dict.fromkeys(kinds, 0)
    for rectangle in {rectangle for each in inventories for rectangle in each.rectangles}:
        counts[rectangle.name] += math.prod(rectangle.sizes)
    return [name for name, count in counts.items() if count < kinds[name].shape.numel()]


def _find_smallest_group(
    inventories: Sequence[RankInventory], kinds: Mapping[str, ParamMeta], mesh: Mesh
) -> dist.ProcessGroup | None:
    """Return the smallest group whose ranks together have all parameters, on all ranks; None if each rank has them."""
    world = mesh.world
    candidates = sorted((mesh.group(axis) for axis in CANDIDATE_AXES), key=lambda group: group.size())
    members = [[world.rank], *(_get_world_ranks(group, world) for group in candidates)]
    is_enough = [int(not _find_missing([inventories[rank] for rank in ranks], kinds)) for ranks in members]
    is_enough_everywhere = world.reduce_ints(is_enough, dist.ReduceOp.MIN)
    smallest = next((index for index, each in enumerate(is_enough_everywhere) if each), None)
    if smallest is None:
        return world.group or dist.group.WORLD
    return None if smallest == 0 else candidates[smallest - 1]


def _get_world_ranks(group: dist.ProcessGroup, world: World) -> list[int]:
    """Return the ranks of a group within the world, in the group's order."""
    world_ranks = dist.get_process_group_ranks(world.group or dist.group.WORLD)
    return [world_ranks.index(rank) for rank in dist.get_process_group_ranks(group)]


# -- planning of buckets, without tensors


class BucketSlice(NamedTuple):
    """A rectangle of a tensor, and its bytes [begin, end) in a rank's segment."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class GatherBucket:
    """Tensors that are sent at once: `names` in order, and their slices in every rank's segment.

    Attributes:
        is_last: the tensors are complete after this bucket; otherwise its only tensor needs more buckets.
        starts: start of each segment, and the size of the buffer.
        uses_all_gather: all segments have the same length.
    """

    names: tuple[str, ...]
    is_last: bool
    segments: Sequence[Mapping[str, Sequence[BucketSlice]]]
    starts: tuple[int, ...]
    uses_all_gather: bool

    @property
    def nbytes(self) -> int:
        """Size of the buffer."""
        return self.starts[-1]


def plan_buckets(
    names: Sequence[str], owned: Sequence[Sequence[Rectangle]], bucket_bytes: int
) -> Iterator[GatherBucket]:
    """Yield the buckets that gather the rectangles that each rank owns; each element is in exactly one bucket.

    An empty tensor is also in a bucket. The buffer has `bucket_bytes`, or more if one element of each rank needs more.
    """
    ranks = len(owned)
    owned_by_name: dict[str, list[list[Rectangle]]] = {name: [[] for _ in range(ranks)] for name in names}
    for rank, rectangles in enumerate(owned):
        for each in rectangles:
            owned_by_name[each.name][rank].append(each)
    builder = _BucketBuilder(ranks)
    for name in names:
        if builder.names and builder.get_size_with(owned_by_name[name]) > bucket_bytes:
            yield builder.build(is_last=True)
            builder = _BucketBuilder(ranks)
        if builder.names or builder.get_size_with(owned_by_name[name]) <= bucket_bytes:
            builder.add(name, owned_by_name[name])
        else:
            yield from _plan_large_tensor(name, owned_by_name[name], bucket_bytes)
    if builder.names:
        yield builder.build(is_last=True)


def _plan_large_tensor(name: str, given: Sequence[Sequence[Rectangle]], bucket_bytes: int) -> Iterator[GatherBucket]:
    counts = [sum(math.prod(each.sizes) for each in rectangles) for rectangles in given]
    is_gathered = _should_all_gather(counts)
    width = len(given) if is_gathered else sum(count > 0 for count in counts)
    itemsize = next(each.itemsize for rectangles in given for each in rectangles)
    step = max(1, bucket_bytes // (width * itemsize))
    for begin in range(0, max(counts), step):
        builder = _BucketBuilder(len(given))
        builder.add(name, [list(_slice_rectangles(rectangles, begin, begin + step)) for rectangles in given])
        yield builder.build(is_last=begin + step >= max(counts), is_gathered=is_gathered)


def _slice_rectangles(rectangles: Sequence[Rectangle], begin: int, end: int) -> Iterator[Rectangle]:
    """Yield the rectangles of elements [begin, end) of the flattened and concatenated rectangles."""
    before = 0
    for each in rectangles:
        count = math.prod(each.sizes)
        first, last = max(begin - before, 0), min(end - before, count)
        for _, offsets, sizes in split_flat_range(first, last, each.sizes):
            global_offsets = tuple(a + b for a, b in zip(each.offsets, offsets, strict=True))
            yield each._replace(offsets=global_offsets, sizes=sizes)
        before += count


class _BucketBuilder:
    def __init__(self, ranks: int) -> None:
        self.names: list[str] = []
        self._parts: list[dict[str, list[BucketSlice]]] = [{} for _ in range(ranks)]
        self._ends = [0] * ranks
        self._itemsize = 1

    def add(self, name: str, given: Sequence[Sequence[Rectangle]]) -> None:
        self.names.append(name)
        for rank, rectangles in enumerate(given):
            for each in rectangles:
                begin = _round_up(self._ends[rank], each.itemsize)
                self._ends[rank] = begin + each.nbytes
                self._itemsize = max(self._itemsize, each.itemsize)
                self._parts[rank].setdefault(name, []).append(
                    BucketSlice(each.offsets, each.sizes, begin, self._ends[rank])
                )

    def get_size_with(self, given: Sequence[Sequence[Rectangle]]) -> int:
        ends, itemsize = list(self._ends), self._itemsize
        for rank, rectangles in enumerate(given):
            for each in rectangles:
                ends[rank] = _round_up(ends[rank], each.itemsize) + each.nbytes
                itemsize = max(itemsize, each.itemsize)
        lengths = [_round_up(end, itemsize) for end in ends]
        return len(lengths) * max(lengths) if _should_all_gather(lengths) else sum(lengths)

    def build(self, *, is_last: bool, is_gathered: bool | None = None) -> GatherBucket:
        # Align segments to the largest element size, so that an element of any tensor may start at a segment.
        lengths = [_round_up(end, self._itemsize) for end in self._ends]
        is_gathered = _should_all_gather(lengths) if is_gathered is None else is_gathered
        if is_gathered:
            lengths = [max(lengths)] * len(lengths)
        starts = tuple(itertools.accumulate(lengths, initial=0))
        return GatherBucket(tuple(self.names), is_last, self._parts, starts, is_gathered)


def _should_all_gather(lengths: Sequence[int]) -> bool:
    return len(lengths) * max(lengths) < 2 * sum(lengths)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# -- communication


class _ParameterGatherer:
    """The parameters of one call, in the order of `metas`."""

    def __init__(self, pieces: ParameterChunks, kinds: Mapping[str, ParamMeta], device: torch.device) -> None:
        self._chunks = {name: sharded for name, sharded in pieces.items() if sharded is not None}
        self._metas, self._device = kinds, device

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._metas:
            value = self._allocate(name)
            if name in self._chunks:
                _copy_rectangles(value, [(piece.offsets, piece.tensor) for piece in self._chunks[name].chunks])
            yield name, value
            del value

    def iter_gathered(
        self, owned: Sequence[Sequence[Rectangle]], group: dist.ProcessGroup, bucket_bytes: int
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters that the ranks of a group have together. Only the buffer is kept between two steps."""
        names = list(self._metas)
        size = max((each.nbytes for each in plan_buckets(names, owned, bucket_bytes)), default=0)
        # One buffer for all buckets: a backend may keep a sent tensor slightly longer.
        bucket = torch.empty(size, dtype=torch.uint8, device=self._device)
        incomplete: Tensor | None = None
        for each in plan_buckets(names, owned, bucket_bytes):
            self._communicate(each, bucket, group)
            for name in each.names:
                value, incomplete = self._allocate(name) if incomplete is None else incomplete, None
                _copy_rectangles(value, self._get_received(name, each, bucket))
                if each.is_last:
                    yield name, value
                else:
                    incomplete = value
                del value

    def _communicate(self, bucket_plan: GatherBucket, bucket: Tensor, group: dist.ProcessGroup) -> None:
        segments = [bucket[start:end] for start, end in itertools.pairwise(bucket_plan.starts)]
        rank = group.rank()
        targets, sources = [], []
        for name, parts in bucket_plan.segments[rank].items():
            targets += [self._view(segments[rank], name, part) for part in parts]
            sources += [self._chunks[name].find_view(part.offsets, part.sizes) for part in parts]
        if targets:
            copy_all(targets, sources)
        if not bucket_plan.uses_all_gather:
            for source, segment in enumerate(segments):
                if segment.numel():
                    dist.broadcast(segment, group=group, group_src=source)
        elif bucket_plan.nbytes:
            all_gather_single(bucket[: bucket_plan.nbytes], segments[rank], group=group)

    def _get_received(self, name: str, each: GatherBucket, bucket: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
        return [
            (part.offsets, self._view(bucket[start:], name, part))
            for start, segment in zip(each.starts, each.segments, strict=False)
            for part in segment.get(name, ())
        ]

    def _view(self, segment: Tensor, name: str, part: BucketSlice) -> Tensor:
        return segment[part.begin : part.end].view(self._metas[name].dtype).view(part.sizes)

    def _allocate(self, name: str) -> Tensor:
        shape, dtype = self._metas[name]
        return torch.empty(shape, dtype=dtype, device=self._device)


def _copy_rectangles(value: Tensor, rectangles: Sequence[tuple[Sequence[int], Tensor]]) -> None:
    """Copy rectangles into a full tensor at their offsets, rounded to its dtype."""
    if rectangles:
        targets = [
            value[tuple(slice(start, start + size) for start, size in zip(offsets, tensor.shape, strict=True))]
            for offsets, tensor in rectangles
        ]
        copy_all(targets, [tensor for _, tensor in rectangles])
