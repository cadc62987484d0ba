"""Initialize a model on the meta device without ever holding all of its weights.

A model of transformers initializes its weights while it is built. Here it is built a second time, on the CPU, and each
operator on a large tensor is recorded. So the memory of any tensor can be freed, and its value, or that of a shard,
recomputed from its own operators.

With a seed, an operator that fills a large tensor is recorded but not run: its values are sampled in tiles ([Note:
tiles] in `random_tiles`) when they are read. They are the same on every device and under every layout, but differ from
those of transformers. Values that depend on others (such as orthogonal matrices) are computed in full, from the same
tiles.

Without a seed, operators run immediately on torch's own generator, whose state is recorded. Values are bitwise
identical to those of transformers, but every rank samples all of them, and samples them again when they are read.
Source: the deferred initialization of torchdistx (Meta, 2022).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.torch import (
    TorchDispatchMode,
    get_mutated_arguments,
    get_operator_name,
    get_schema_argument_names,
    get_storage_key,
)
from ..base.errors import ModelError
from ..tensors.chunks import to_slices
from ..tensors.ops import list_tensors
from .random_tiles import FillOp, FillRecipe, TileGrid

MIN_TRACKED_BYTES = 1 << 14
"""Smaller storages are never freed."""
MAX_RESIDENT_BYTES = 1 << 28
"""Maximum total size of large storages in memory; beyond it, the least recently used are freed."""
_ELEMENTWISE_NAMES = (
    "abs",
    "add",
    "clamp",
    "div",
    "erfinv",
    "exp",
    "fill",
    "log",
    "mul",
    "neg",
    "pow",
    "sqrt",
    "sub",
    "zero",
)
_ELEMENTWISE_OPS = frozenset(f"aten::{name}_" for name in _ELEMENTWISE_NAMES)
"""Operators that write each element of a tensor independently, if all other arguments are numbers."""
_CONSTANT_OPS = ("aten::fill_", "aten::zero_")


@dataclass(frozen=True)
class _TensorRef:
    key: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def view(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class _RecordedOp:
    operator: Any
    args: Any
    kwargs: Any
    reads: set[int]
    writes: set[int]
    outputs: tuple[_TensorRef | None, ...]
    """Its results that are new large storages."""
    rng_state: Tensor | None
    """State of the random generator before the call."""
    first_tile: int | None = None
    """Number of its first tile, if it samples in tiles."""
    filled_storage: int | None = None
    """The storage that it fills completely."""


class _InitRecorder(TorchDispatchMode):
    """Record how large tensors get their values, and free their memory until it is needed again."""

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self._seed, self._num_tiles = seed, 0
        self._ops_by_storage: dict[int, list[_RecordedOp]] = {}
        self._ops: list[_RecordedOp] = []
        # Kept alive, since the key of a deleted storage may be reused; and its number of elements and dtype.
        self._storages: dict[int, Any] = {}
        self._lengths: dict[int, tuple[int, torch.dtype]] = {}
        # In the order of last use.
        self._resident: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._seed is not None and self._can_defer(func, args, kwargs):
            self._defer(func, args, kwargs)
            return args[0]
        used = {key for key, _ in map(get_storage_key, list_tensors((args, kwargs)))} & self._storages.keys()
        for key in used:
            self._restore(key)
        refs, named = self._replace_by_refs(args), self._replace_by_refs(kwargs)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        state = torch.get_rng_state() if is_random else None
        result = func(*args, **kwargs)
        outputs = tuple(self._track(each) if isinstance(each, Tensor) else None for each in _to_tuple(result))
        written = (
            args[argument] if isinstance(argument, int) else kwargs[argument]
            for argument in get_mutated_arguments(func)
        )
        writes = {get_storage_key(each)[0] for each in written} & used
        writes |= {ref.key for ref in outputs if ref is not None}
        if writes:
            self._record(_RecordedOp(func, refs, named, used, writes, outputs, state))
        self._evict(keep=used | writes)
        return result

    def read(self, tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        key, _ = get_storage_key(tensor)
        recipe = self._find_recipe(key)
        if recipe is not None and recipe.shape == tensor.shape and tensor.is_contiguous():
            return recipe.read(offsets, sizes)
        if key in self._storages:
            self._restore(key)
            self._evict(keep={key})
        return tensor[to_slices(offsets, sizes)]

    def _can_defer(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return whether an operator fills a large tensor from numbers alone."""
        if not args or not isinstance(args[0], Tensor):
            return False
        key = get_storage_key(args[0])[0]
        if key not in self._storages or get_mutated_arguments(func) != (0,) or list_tensors((args[1:], kwargs)):
            return False
        if torch.Tag.nondeterministic_seeded in func.tags:
            return "generator" in get_schema_argument_names(func) and kwargs.get("generator") is None
        # A tensor whose values are in memory is modified immediately.
        return get_operator_name(func) in _ELEMENTWISE_OPS and (
            key not in self._resident or get_operator_name(func) in _CONSTANT_OPS
        )

    def _defer(self, func: Any, args: Any, kwargs: Any) -> None:
        ref = self._make_ref(args[0])
        stream = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            stream, self._num_tiles = self._num_tiles, self._num_tiles + TileGrid.from_shape(ref.size).num_tiles
        is_full = args[0].numel() == self._lengths[ref.key][0] and args[0].is_contiguous()
        fills = ref.key if is_full and (stream is not None or get_operator_name(func) in _CONSTANT_OPS) else None
        self._record(_RecordedOp(func, (ref, *args[1:]), kwargs, {ref.key}, {ref.key}, (None,), None, stream, fills))
        self._storages[ref.key].resize_(0)
        self._resident.pop(ref.key, None)

    def _record(self, step: _RecordedOp) -> None:
        self._ops.append(step)
        for key in step.writes:
            self._ops_by_storage.setdefault(key, []).append(step)

    def _find_recipe(self, key: int) -> FillRecipe | None:
        """Return how a storage is filled in tiles; None if it is not."""
        steps = self._ops_by_storage.get(key, [])
        first = max((index for index, step in enumerate(steps) if step.filled_storage == key), default=None)
        if self._seed is None or first is None:
            return None
        shape = tuple(steps[first].args[0].size)
        fills = [fill for step in steps[first:] if (fill := _to_fill(step, shape)) is not None]
        if len(fills) < len(steps) - first:
            return None
        return FillRecipe(shape, self._lengths[key][1], tuple(fills), self._seed)

    def _track(self, tensor: Tensor) -> _TensorRef | None:
        """Track a new large storage; return None for a small one or a view of a known one."""
        key, storage = get_storage_key(tensor)
        # Memory that torch does not own (numpy arrays) cannot be freed.
        if key in self._storages or storage.nbytes() < MIN_TRACKED_BYTES or not storage.resizable():
            return None
        self._storages[key] = storage
        self._lengths[key] = (storage.nbytes() // tensor.element_size(), tensor.dtype)
        self._resident[key] = storage.nbytes()
        return self._make_ref(tensor)

    def _evict(self, keep: set[int]) -> None:
        for key in list(self._resident):
            if sum(self._resident.values()) <= MAX_RESIDENT_BYTES:
                return
            if key not in keep:
                self._storages[key].resize_(0)
                del self._resident[key]

    def _restore(self, key: int) -> None:
        size = self._resident.pop(key, None)
        if size is None:
            flat, storage = self._recompute(key), self._storages[key]
            size = flat.nbytes
            storage.resize_(size)
            storage.copy_(flat.untyped_storage())
        self._resident[key] = size

    def _recompute(self, wanted: int) -> Tensor:
        recipe = self._find_recipe(wanted)
        if recipe is not None:
            return recipe.read([0] * len(recipe.shape), recipe.shape).flatten()
        needed, involved = {wanted}, {wanted}
        needed_ops = []
        for step in reversed(self._ops):
            if step.writes & needed:
                needed_ops.append(step)
                # The contents of a storage before it is filled completely are not needed.
                needed = needed - {step.filled_storage} if step.filled_storage is not None else needed | step.reads
                involved |= needed
        memory = {key: torch.empty(self._lengths[key][0], dtype=self._lengths[key][1]) for key in involved}

        def resolve(value: Any) -> Any:
            return value.view(memory[value.key]) if isinstance(value, _TensorRef) else value

        state = torch.get_rng_state()
        for step in reversed(needed_ops):
            if step.first_tile is not None and self._seed is not None:
                target: Tensor = resolve(step.args[0])
                fill = FillOp(step.operator, step.args[1:], step.kwargs, step.first_tile)
                fill_recipe = FillRecipe(tuple(target.shape), target.dtype, (fill,), self._seed)
                target.copy_(fill_recipe.read([0] * target.dim(), target.shape))
                continue
            if step.rng_state is not None:
                torch.set_rng_state(step.rng_state)
            result = step.operator(*_map(resolve, step.args), **_map(resolve, step.kwargs))
            for ref, each in zip(step.outputs, _to_tuple(result), strict=True):
                if ref is not None and ref.key in memory:
                    resolve(ref).copy_(each)
        torch.set_rng_state(state)
        return memory[wanted]

    def _replace_by_refs(self, value: Any) -> Any:
        """Replace large tensors by references, and small ones by copies, since they may change later."""

        def replace(each: Any) -> Any:
            if not isinstance(each, Tensor):
                return each
            return self._make_ref(each) if get_storage_key(each)[0] in self._storages else each.detach().clone()

        return _map(replace, value)

    def _make_ref(self, tensor: Tensor) -> _TensorRef:
        key, _ = get_storage_key(tensor)
        _, dtype = self._lengths[key]
        if dtype != tensor.dtype:
            raise ModelError(
                f"the model looks at a {dtype} tensor as {tensor.dtype} while it is built, which cannot be repeated "
                f"for a part of it. Build the model without `torch.device('meta')`."
            )
        return _TensorRef(key, tensor.size(), tensor.stride(), tensor.storage_offset())


class DeferredWeights:
    """Initial values of all parameters and buffers of a model on the meta device; implements `Weights`.

    Args:
        model: as built under `torch.device("meta")`, before any change.
        seed: seed of large tensors, which are sampled in tiles. None: all values are those of transformers, and the
            CPU's generator advances as if the model had been built with memory.

    Raises:
        ModelError: the model cannot be initialized this way.
    """

    def __init__(self, model: nn.Module, *, seed: int | None = None) -> None:
        with_memory = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
        if with_memory:
            raise ModelError(
                f"the model is on the meta device in part: {with_memory[0]} has memory. Build it under "
                f"`torch.device('meta')` as a whole, or without."
            )
        config = getattr(model, "config", None)
        if config is None or not callable(getattr(model, "initialize_weights", None)):
            raise ModelError(
                f"{type(model).__name__} is on the meta device and no model of transformers, so there is no saying "
                f"what weights it starts from. Build it without `torch.device('meta')`."
            )
        self._recorder = _InitRecorder(seed)
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(next(p.dtype for p in model.parameters() if p.is_floating_point()))
        try:
            with self._recorder:
                built = type(model)(copy.deepcopy(config))
        except Exception as error:
            # A class may read values that do not exist, and raise any error.
            reason = f"{type(error).__name__}: {error}".split("\n")[0]
            raise ModelError(
                f"{type(model).__name__} cannot be built from the meta device ({reason}). "
                f"Build it without `torch.device('meta')`."
            ) from error
        finally:
            torch.set_default_dtype(dtype)
        self._values = dict(_named_tensors(built))
        expected, found = ({(name, p.shape, p.dtype) for name, p in _named_tensors(each)} for each in (built, model))
        if expected != found:
            name = min(each[0] for each in expected ^ found)
            raise ModelError(
                f"the model on the meta device is not what its configuration gives: {name} differs. Change the "
                f"configuration instead, or build the model without `torch.device('meta')`."
            )

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        return self._recorder.read(self._values[name].detach(), offsets, sizes)


def _to_fill(step: _RecordedOp, shape: tuple[int, ...]) -> FillOp | None:
    """Return a recorded operator as an elementwise fill of a tensor of this shape; None if it is not one."""
    args, target = step.args[1:], step.args[0]
    if (
        step.first_tile is None and get_operator_name(step.operator) not in _ELEMENTWISE_OPS
    ) or step.rng_state is not None:
        return None
    if any(isinstance(each, Tensor | _TensorRef) for each in _list_leaves((args, step.kwargs))):
        return None
    if tuple(target.stride) != torch.empty(target.size, device="meta").stride():
        return None
    if tuple(target.size) == shape:
        return FillOp(step.operator, args, step.kwargs, step.first_tile)
    # Some rows, such as that of a padding token.
    columns, elements = shape[-1], target.size.numel()
    if step.first_tile is not None or len(shape) < 2 or target.offset % columns or elements % columns:
        return None
    rows = slice(target.offset // columns, (target.offset + elements) // columns)
    return FillOp(step.operator, args, step.kwargs, rows=rows)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_map(change, each) for each in value)
    if isinstance(value, dict):
        return {key: _map(change, each) for key, each in value.items()}
    return change(value)


def _list_leaves(value: Any) -> list[Any]:
    leaves: list[Any] = []
    _map(leaves.append, value)
    return leaves


def _to_tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)
