"""Simulate one rank of a world of any size in this process: parameters have no memory, and nothing is sent.

[Note: what is real] Token counts, masks, positions and plans are small and follow from known numbers. They are
computed, so that code can read them: an operator whose inputs are all real returns real tensors of up to
`MAX_REAL_BYTES` bytes, and so does one that creates integers without inputs. All others return fake tensors, which have
a shape and a dtype but no values.

[Note: what code reads] Code reads values of fake tensors to detect errors. A plan assumes a model without errors, so a
number that is read is 0, and tensors of the same shape are equal.

[Note: routing] Router choices are known: all candidates are chosen equally often. With an imbalance of f, the first
candidates (as many as a token chooses, on the first ranks) are chosen f times as often as on average. Values that
follow from the choices, such as the rows of each expert, are computed.

[Note: what is received] Every rank holds the same as this one, so the shards of all ranks are copies of this rank's. A
sum remains this rank's own contribution: apart from the sums of `FakeWorld`, only flags of errors and use are summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.plugin import (
    MeshError,
    MeshwrightError,
    UncompiledMode,
    World,
    bind_arguments,
    clear_mesh_caches,
    get_operation_name,
    is_on_meta,
    is_propagating_shapes,
    is_real_compute,
    is_topk,
    is_wrapper_subclass,
    list_tensors,
    resolve_process_group,
)

from ._compat import DATA_DEPENDENT_ERRORS, FakeTensorDispatcher, init_fake_process_group, pass_through_collective

MAX_REAL_BYTES = 1 << 25  # Operator results of up to this many bytes are computed
COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
T = TypeVar("T")
_FSDP_COPY_IN = "fsdp.all_gather_copy_in.default"
_INPUT_ARGUMENTS = ("input_tensors", "input_tensor", "input", "inputs", "tensors", "tensor")
_OUTPUT_ARGUMENTS = ("output_tensors", "output_tensor", "output", "outputs")


class FakeWorld(World):
    """A world in which every rank holds the same as this one, and nothing is sent; see `fake_world`."""

    is_real = False

    def _reduce_now(self, sums: Sequence[int], maxima: Sequence[int]) -> tuple[list[int], list[int]]:
        return [value * self.size for value in sums], list(maxima)

    def raise_first_error(self, error: MeshwrightError | None) -> NoReturn:
        raise error or MeshError("another rank reported an error.")

    def run_on_first_rank(self, work: Callable[[], T]) -> T:
        return work()


@contextmanager
def fake_world(rank: int, size: int, *, imbalance: float = 1.0) -> Iterator[FakeWorld]:
    """Simulate a rank of a world that does not exist; for `imbalance` (at least 1), see [Note: routing]."""
    if dist.is_initialized():
        raise MeshError("a plan needs a process without a process group. Plan before init_process_group.")
    if not 0 <= rank < size:
        raise MeshError(
            f"there is no rank {rank} in a world of {size} ranks. Use a rank from 0 to the world size minus 1."
        )
    init_fake_process_group(rank, size)
    try:
        with _FakeComputeMode(imbalance):
            yield FakeWorld(torch.device("cpu"), owns_group=True)
    finally:
        dist.destroy_process_group()
        clear_mesh_caches()


class _FakeComputeMode(UncompiledMode):
    """Dispatch mode that computes real tensors, and only shapes of all others; see [Note: what is real]."""

    def __init__(self, imbalance: float) -> None:
        super().__init__()
        self._dispatcher, self._imbalance = FakeTensorDispatcher(), imbalance
        self._empty_cache: dict[tuple[Any, ...], Tensor] = {}
        self._small_results: set[tuple[Any, ...] | None] = set()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.new_empty.default and 0 in args[1] and self._dispatcher.is_fake(args[0]):
            return self._reuse_empty(func, types, args, kwargs)
        if any(map(is_wrapper_subclass, types)):
            return NotImplemented
        if func is torch.ops.prim.device.default:
            return self._dispatcher.get_device(args[0])
        if is_propagating_shapes() or is_real_compute():
            return func(*args, **kwargs)
        given = list(list_tensors((args, kwargs)))
        if any(map(self._dispatcher.is_fake, given)):
            return self._dispatch_fake(func, types, args, kwargs, given)
        if func.namespace in COLLECTIVE_NAMESPACES:
            return _run_collective(func, args, kwargs)
        devices = [each.type for each in (*args, *kwargs.values()) if isinstance(each, torch.device)]
        device_types = devices or [each.device.type for each in given]
        stays_on_meta = bool(device_types) and all(each == "meta" for each in device_types)
        if torch.Tag.inplace_view in func.tags or func.namespace == "profiler" or stays_on_meta:
            return func(*args, **kwargs)
        if any(map(is_on_meta, given)) or any(each != "cpu" for each in devices):
            return self._dispatcher.dispatch(func, types, args, kwargs)
        return self._dispatch_real(func, types, args, kwargs, given)

    def _dispatch_real(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        """Compute an operator on real tensors if its result is small."""
        if func.is_view:
            view = func(*args, **kwargs)  # a view allocates nothing, so its size can be checked afterwards
            return self._dispatcher.dispatch(func, types, args, kwargs) if _count_bytes(view) > MAX_REAL_BYTES else view
        key = _make_shape_key(func, args, kwargs)
        if key is None or key not in self._small_results:
            try:
                fake = self._dispatcher.dispatch(func, types, args, kwargs)
            except DATA_DEPENDENT_ERRORS:
                fake = None
            if _count_bytes(fake) > MAX_REAL_BYTES or (
                not tensors and any(each.is_floating_point() for each in list_tensors(fake))
            ):
                return fake
            self._small_results.add(key)
        return func(*args, **kwargs)

    def _dispatch_fake(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        if (same := pass_through_collective(func, tensors)) is not None:
            return same
        if get_operation_name(func) == "aten._local_scalar_dense.default":
            dtype = tensors[0].dtype
            return False if dtype is torch.bool else 0.0 if dtype.is_floating_point else 0j if dtype.is_complex else 0
        if func is torch.ops.aten.equal.default:
            return tensors[0].shape == tensors[1].shape
        if get_operation_name(func) == "aten._unsafe_view.default":
            # `view` gives the same result, and torch caches its shape computation.
            func = torch.ops.aten.view.default
        if get_operation_name(func) == _FSDP_COPY_IN and not self._dispatcher.is_fake(args[1]):
            # FSDP gathers several dtypes as bytes. Its buffer is real if it is small; return it.
            _, buffer, _, size, rank = args
            return buffer.narrow(0, size * rank, size), buffer
        result = self._dispatcher.dispatch(func, types, args, kwargs)
        if is_topk(func):
            return result[0], make_routing_choices(result[1].shape, tensors[0].shape[-1], self._imbalance)
        return result

    def _reuse_empty(self, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return a cached empty tensor: FSDP creates one per rank without rows of a parameter, and keeps none."""
        key = (tuple(args[1]), args[0].dtype, *sorted((name, str(value)) for name, value in kwargs.items()))
        if key not in self._empty_cache:
            self._empty_cache[key] = self._dispatcher.dispatch(func, types, args, kwargs)
        return self._empty_cache[key]


def make_routing_choices(shape: Sequence[int], candidates: int, imbalance: float) -> Tensor:
    """Return the candidates that each token chooses, in the last dim of `shape`; see [Note: routing]."""
    choices = torch.arange(math.prod(shape)).view(-1, shape[-1]) % candidates
    if imbalance > 1.0 and shape[-1] < candidates:
        fraction = min(1.0, (imbalance - 1) / (candidates / shape[-1] - 1))
        choices[: round(fraction * len(choices))] = torch.arange(shape[-1])
    return choices.view(*shape)


def _count_bytes(values: Any) -> int:
    return sum(each.numel() * each.element_size() for each in list_tensors(values))


def _make_shape_key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return a key that determines the size of an operator's results; None if tensors are nested in containers."""
    key: list[Any] = [func]
    for value in (*args, *kwargs.items()):
        if isinstance(value, Tensor):
            key.append((value.shape, value.dtype, value.stride()))
        elif isinstance(value, tuple | list | Mapping) and any(True for _ in list_tensors(value)):
            return None
        else:
            key.append(repr(value))
    return tuple(key)


@torch.no_grad()
def _run_collective(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator of torch.distributed on real tensors, and write what it would receive."""
    arguments = bind_arguments(operation, args, kwargs)
    result = operation(*args, **kwargs)
    group = arguments.get("process_group", arguments.get("group_name"))
    given = _get_tensors(arguments, _INPUT_ARGUMENTS)
    if group is None or not given:
        return result
    mine = torch.cat([each.reshape(-1) for each in given])
    members = resolve_process_group(group)
    if "all_to_all" in str(operation) or "alltoall" in str(operation):
        part = mine.numel() // members.size()  # what each rank sends to this one
        mine = mine[members.rank() * part : (members.rank() + 1) * part]
    for other in _get_tensors(arguments, _OUTPUT_ARGUMENTS) or list(list_tensors(result)):
        if 0 < mine.numel() <= other.numel():
            other.copy_(mine.repeat(other.numel() // mine.numel()).view_as(other))
        elif other.numel():
            start = members.rank() * other.numel()  # this rank's shard of a reduce-scatter
            other.copy_(mine[start : start + other.numel()].view_as(other))
    return result


def _get_tensors(arguments: dict[str, Any], names: tuple[str, ...]) -> list[Tensor]:
    return next((list(list_tensors(arguments[name])) for name in names if name in arguments), [])
