"""Tensors that record how they are computed from stored ones, so that any rectangle can be read without the rest.

A `LazyTensor` has a shape and a dtype but no values; results of torch functions on it are `LazyTensor`s too. Reading a
rectangle traverses the functions backwards. Functions that only move values (stack, concatenate, split, transpose,
reshape) read the rectangles of their arguments that they need; all others read their arguments in full. So
transformers' own loading, which renames, merges, splits and casts stored tensors, runs on tensors that have not been
read. Source: https://pytorch.org/docs/stable/notes/extending.html#subclassing-torch-tensor.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..tensors.chunks import to_slices
from .model_files import InMemoryReader, TensorReader

COMPARE_CHUNK_BYTES = 16 * 2**20
"""Approximate size of the chunks in which two lazy tensors are compared."""


class LazyTensor(Tensor):
    """A tensor on the meta device with a source of its values. It reports the CPU, where they are read, as device."""

    source: TensorReader

    @staticmethod
    def from_source(source: TensorReader) -> LazyTensor:
        lazy = torch.empty(source.shape, dtype=source.dtype, device="meta").as_subclass(LazyTensor)
        lazy.source = source
        return lazy

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "cpu":
            return args[0]
        if name == "equal":
            return _equal(*args)
        if name in _VALUE_OPS:
            return func(*_materialize(args), **_materialize(kwargs))
        if name.endswith("_like"):
            # Depends only on the shape, and gets its own values.
            blank = (
                torch.empty(each.shape, dtype=each.dtype) if isinstance(each, LazyTensor) else each for each in args
            )
            return func(*blank, **kwargs)
        # Ignore devices: values are read on the CPU. Functions on weights take no strings but devices.
        args = tuple(each for each in args if not isinstance(each, torch.device | str))
        kwargs.pop("device", None)
        try:
            result = super().__torch_function__(func, types, args, kwargs)
        except RuntimeError:
            # A function that needs values gets them, or raises its own error.
            return func(*_materialize(args), **_materialize(kwargs))
        if func is Tensor.data.__set__:
            args[0].source = _get_source(args[1])
        outputs = result if isinstance(result, (tuple, list)) else [result]
        shapes = [each.shape for each in outputs if isinstance(each, Tensor)]
        for index, each in enumerate(outputs):
            if not isinstance(each, LazyTensor):
                continue
            if any(each is argument for argument in args):
                if name.endswith("_") and name not in _METADATA_OPS:
                    raise TypeError(f"{name} writes into weights that are still in their files")
                continue  # `to` with the same dtype, `contiguous`
            output_index = index if outputs is result else None
            each.source = LazyCall(func, args, kwargs, output_index, each.shape, each.dtype, tuple(shapes))
        return result


_METADATA_OPS = ("requires_grad_",)
# On the meta device some of these fail, and some return values of unrelated memory.
_VALUE_OPS = {"item", "tolist", "numpy", "allclose", "is_nonzero"}
_VALUE_OPS |= {"__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__"}


def _get_source(value: Tensor) -> TensorReader:
    return value.source if isinstance(value, LazyTensor) else InMemoryReader(value)


def read_full(source: TensorReader) -> Tensor:
    return source.read([0] * len(source.shape), list(source.shape))


def _materialize(value: Any) -> Any:
    if isinstance(value, LazyTensor):
        return read_full(value.source)
    if isinstance(value, (list, tuple)):
        return type(value)(_materialize(each) for each in value)
    if isinstance(value, Mapping):
        return {key: _materialize(each) for key, each in value.items()}
    return value


def _equal(one: Tensor, two: Tensor) -> bool:
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    sources = _get_source(one), _get_source(two)
    if one.dim() == 0 or one.numel() == 0:
        return torch.equal(*map(read_full, sources))
    length, *rest = one.shape
    rows = max(1, COMPARE_CHUNK_BYTES // max(1, one[0].numel() * one.element_size()))
    rectangles = (([start, *[0] * len(rest)], [min(rows, length - start), *rest]) for start in range(0, length, rows))
    return all(torch.equal(*(each.read(*rectangle) for each in sources)) for rectangle in rectangles)


@dataclass(frozen=True)
class LazyCall:
    """One output of a torch function: output `index` of several with these `shapes`, or the only one (None)."""

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    index: int | None
    shape: torch.Size
    dtype: torch.dtype
    shapes: tuple[torch.Size, ...]

    def read(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        if 0 in sizes:
            return torch.empty(tuple(sizes), dtype=self.dtype)
        rule = _RULES.get(getattr(self.func, "__name__", ""))
        value = rule(self, list(offsets), list(sizes)) if rule is not None and self.shape else None
        if value is None:
            result = self.func(*_materialize(self.args), **_materialize(self.kwargs))
            value = (result if self.index is None else result[self.index])[to_slices(offsets, sizes)]
        return value


# -- rules: each returns a rectangle of a call's output, or None if the output must be computed in full


def _read_same(call: LazyCall, offsets: list[int], sizes: list[int]) -> Tensor:
    return _read(call.args[0], offsets, sizes)


def _read_cast(call: LazyCall, offsets: list[int], sizes: list[int]) -> Tensor:
    return _read_same(call, offsets, sizes).to(call.dtype)


def _read_getitem(call: LazyCall, offsets: list[int], sizes: list[int]) -> Tensor | None:
    return _read_same(call, offsets, sizes) if call.args[1] is Ellipsis else None


def _get_dim(call: LazyCall, ndim: int, position: int = 1) -> int:
    """Return the argument `dim` of a call, whose position is given."""
    dim = call.args[position] if len(call.args) > position else call.kwargs.get("dim", 0)
    return int(dim) % ndim


def _get_tensors(call: LazyCall) -> Any:
    return call.args[0] if call.args else call.kwargs["tensors"]


def _read_cat(call: LazyCall, offsets: list[int], sizes: list[int]) -> Tensor | None:
    dim, tensors = _get_dim(call, len(call.shape)), _get_tensors(call)
    if any(len(tensor.shape) != len(call.shape) for tensor in tensors):
        return None  # empty 1-D tensors are ignored
    start, parts = 0, []
    for tensor in tensors:
        first = max(offsets[dim], start)
        last = min(offsets[dim] + sizes[dim], start + tensor.shape[dim])
        if first < last:
            parts.append(
                _read(tensor, _replace_dim(offsets, dim, first - start), _replace_dim(sizes, dim, last - first))
            )
        start += tensor.shape[dim]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _read_stack(call: LazyCall, offsets: list[int], sizes: list[int]) -> Tensor:
    dim = _get_dim(call, len(call.shape))
    sources = _get_tensors(call)[offsets[dim] : offsets[dim] + sizes[dim]]
    result = torch.empty(sizes, dtype=call.dtype)
    del offsets[dim], sizes[dim]
    for target, tensor in zip(result.unbind(dim), sources, strict=True):
        target.copy_(_read(tensor, offsets, sizes))
    return result


def _read_split(call: LazyCall, offsets: list[int], sizes: list[int]) -> Tensor:
    """`chunk`, `split` and `tensor_split`, for any form of their sizes: offsets follow from the outputs."""
    dim = _get_dim(call, len(call.shape), position=2)
    offsets[dim] += sum(shape[dim] for shape in call.shapes[: call.index])
    return _read_same(call, offsets, sizes)


def _read_unbind(call: LazyCall, offsets: list[int], sizes: list[int]) -> Tensor:
    dim = _get_dim(call, len(call.args[0].shape))
    offsets.insert(dim, int(call.index or 0))
    sizes.insert(dim, 1)
    return _read_same(call, offsets, sizes).squeeze(dim)


def _read_transpose(call: LazyCall, offsets: list[int], sizes: list[int]) -> Tensor:
    """`transpose`, and `t`, which takes no dims."""
    dims = [*call.args[1:], *(call.kwargs[name] for name in ("dim0", "dim1") if name in call.kwargs)] or (0, -1)
    one, two = (int(dim) % len(call.shape) for dim in dims)
    for values in (offsets, sizes):
        values[one], values[two] = values[two], values[one]
    return _read_same(call, offsets, sizes).transpose(one, two)


def _read_reshape(call: LazyCall, offsets: list[int], sizes: list[int]) -> Tensor | None:
    """Read full rows of each group of dims that a reshape merges or splits."""
    if any(isinstance(each, torch.dtype) for each in call.args):
        return None  # `view` as another dtype
    source, shape = call.args[0].shape, call.shape
    if 0 in source:
        return None
    read_offsets, read_sizes = [0] * len(source), [1] * len(source)
    # The first dim of each group is cut when it is read; the others are read in full.
    lengths, cuts, rows, begin = list[int](), list[slice](), list(shape), list(offsets)
    for ins, outs in _group_dims(source, shape):
        in_row, out_row = (math.prod(of[dim] for dim in dims[1:]) for of, dims in ((source, ins), (shape, outs)))
        start, count = offsets[outs[0]] * out_row, sizes[outs[0]] * out_row
        first, last = start // in_row, -(-(start + count) // in_row)
        for dim in ins[1:]:
            read_sizes[dim] = source[dim]
        read_offsets[ins[0]], read_sizes[ins[0]] = first, last - first
        lengths.append((last - first) * in_row)
        cuts.append(slice(start - first * in_row, start - first * in_row + count))
        rows[outs[0]], begin[outs[0]] = sizes[outs[0]], 0
    flat = _read_same(call, read_offsets, read_sizes).reshape(lengths)[tuple(cuts)]
    return flat.reshape(rows)[to_slices(begin, sizes)]


def _group_dims(source: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the smallest groups of dims with equal element counts before and after a reshape, without dims of 1."""
    before, after = (deque(dim for dim, size in enumerate(sizes) if size > 1) for sizes in (source, shape))
    while before:
        ins, outs = [before.popleft()], [after.popleft()]
        size_before, size_after = source[ins[0]], shape[outs[0]]
        while size_before != size_after:
            if size_before < size_after:
                ins.append(before.popleft())
                size_before *= source[ins[-1]]
            else:
                outs.append(after.popleft())
                size_after *= shape[outs[-1]]
        yield ins, outs


def _read(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    return _get_source(tensor).read(offsets, sizes)


def _replace_dim(values: Sequence[int], dim: int, value: int) -> list[int]:
    return [*values[:dim], value, *values[dim + 1 :]]


_RULES: dict[str, Callable[[LazyCall, list[int], list[int]], Tensor | None]] = {
    **dict.fromkeys(("contiguous", "clone", "detach"), _read_same),
    **dict.fromkeys(("cat", "concat"), _read_cat),
    **dict.fromkeys(("chunk", "split", "tensor_split"), _read_split),
    **dict.fromkeys(("reshape", "view", "squeeze", "unsqueeze"), _read_reshape),
    **dict.fromkeys(("transpose", "t"), _read_transpose),
    "to": _read_cast,
    "__getitem__": _read_getitem,
    "stack": _read_stack,
    "unbind": _read_unbind,
}
