"""Give a model on the meta device the weights that it would have had, without ever holding them all.

A model of transformers draws its weights while it is built: constructors draw, and submodels initialise themselves
before the rest is there. So what a seed gives follows from the whole sequence of draws. Here the model is built a
second time, on the CPU, and each operator on a large tensor is written down with the state of the random generator
before it. So the memory of any tensor can be given back when there is too much of it, and its value computed again
from its own operators alone, when it is needed: by the model's own code, or for the shard that a rank keeps.

A rank holds its shards, one whole parameter, and a budget for what was used last. The time is that of building the
model twice.
Source: the deferred initialisation of torchdistx (Meta, 2022).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.torch import TorchDispatchMode, storage_of, written_arguments
from ..base.errors import ModelError

LARGE_BYTES = 1 << 14
"""Memory below this is never given back."""
BUDGET_BYTES = 1 << 28
"""Large memory beyond this is given back, the least recently used first."""


@dataclass(frozen=True)
class _Ref:
    """A view of a large storage."""

    key: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class _Step:
    operator: Any
    args: Any
    kwargs: Any
    reads: frozenset[int]
    writes: frozenset[int]
    outputs: tuple[_Ref | None, ...]
    """What it makes, where that is large memory of its own."""
    generator: Tensor | None
    """State of the random generator before."""


class _Outline(TorchDispatchMode):
    """Write down how large tensors get their values, and give back their memory until it is needed again."""

    def __init__(self, budget_bytes: int) -> None:
        super().__init__()
        self._budget_bytes = budget_bytes
        self._steps: list[_Step] = []
        # Kept, since a freed storage's key may come again; and how many elements it has, of which dtype.
        self._storages: dict[int, Any] = {}
        self._lengths: dict[int, tuple[int, torch.dtype]] = {}
        # In the order of their last use.
        self._resident: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        used = {key for key, _ in map(storage_of, _tensors((args, kwargs)))} & self._storages.keys()
        for key in used:
            self._bring_back(key)
        refs, named = self._referred(args), self._referred(kwargs)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        state = torch.get_rng_state() if is_random else None
        result = func(*args, **kwargs)
        outputs = tuple(self._track(each) if isinstance(each, Tensor) else None for each in _sequence(result))
        writes = {storage_of(_argument(args, kwargs, place))[0] for place in written_arguments(func)} & used
        writes |= {ref.key for ref in outputs if ref is not None}
        if writes:
            self._steps.append(_Step(func, refs, named, frozenset(used), frozenset(writes), outputs, state))
        self._give_back(keep=used | writes)
        return result

    def value(self, tensor: Tensor) -> Tensor:
        """A tensor of the model, its memory brought back."""
        key, _ = storage_of(tensor)
        if key in self._storages:
            self._bring_back(key)
            self._give_back(keep={key})
        return tensor

    def _track(self, tensor: Tensor) -> _Ref | None:
        """Take up new large memory; None for a view of what is known, or a small tensor."""
        key, storage = storage_of(tensor)
        # Memory of others (arrays of numpy) cannot be given back.
        if key in self._storages or storage.nbytes() < LARGE_BYTES or not storage.resizable():
            return None
        self._storages[key] = storage
        self._lengths[key] = (storage.nbytes() // tensor.element_size(), tensor.dtype)
        self._resident[key] = storage.nbytes()
        return self._refer(tensor)

    def _give_back(self, keep: set[int]) -> None:
        for key in list(self._resident):
            if sum(self._resident.values()) <= self._budget_bytes:
                return
            if key not in keep:
                self._storages[key].resize_(0)
                del self._resident[key]

    def _bring_back(self, key: int) -> None:
        size = self._resident.pop(key, None)
        if size is None:
            length, dtype = self._lengths[key]
            size = length * dtype.itemsize
            flat = self._computed(key)
            storage = self._storages[key]
            storage.resize_(size)
            storage.copy_(flat.untyped_storage())
        self._resident[key] = size

    def _computed(self, wanted: int) -> Tensor:
        """Compute the contents of a storage from the operators that it depends on."""
        needed = {wanted}
        chosen = []
        for step in reversed(self._steps):
            if step.writes & needed:
                chosen.append(step)
                needed |= step.reads
        memory = {
            key: torch.empty(length, dtype=dtype) for key, (length, dtype) in self._lengths.items() if key in needed
        }

        def real(value: Any) -> Any:
            return value.of(memory[value.key]) if isinstance(value, _Ref) else value

        state = torch.get_rng_state()
        for step in reversed(chosen):
            if step.generator is not None:
                torch.set_rng_state(step.generator)
            result = step.operator(*_map(real, step.args), **_map(real, step.kwargs))
            for ref, each in zip(step.outputs, _sequence(result), strict=True):
                if ref is not None and ref.key in memory:
                    real(ref).copy_(each)
        torch.set_rng_state(state)
        return memory[wanted]

    def _referred(self, value: Any) -> Any:
        """Large tensors as references; others as copies, since they may change afterwards."""

        def refer(each: Any) -> Any:
            if not isinstance(each, Tensor):
                return each
            return self._refer(each) if storage_of(each)[0] in self._storages else each.detach().clone()

        return _map(refer, value)

    def _refer(self, tensor: Tensor) -> _Ref:
        key, _ = storage_of(tensor)
        dtype = self._lengths[key][1]
        if dtype != tensor.dtype:
            raise ModelError(
                f"the model looks at a {dtype} tensor as {tensor.dtype} while it is built, which cannot be repeated "
                f"for a part of it. Build the model without `torch.device('meta')`."
            )
        return _Ref(key, tensor.size(), tensor.stride(), tensor.storage_offset())


class DeferredModel:
    """The values of a model on the meta device, as its class, its configuration and the random generator give them.

    A `meshwright.model.weights.Weights` of all its parameters and buffers.

    The generator of the CPU goes on as if the model had been built with memory.

    Args:
        model: as built under `torch.device("meta")`, before anything changes it.
        budget_bytes: memory for whole parameters that were used last; None: BUDGET_BYTES.

    Raises:
        ModelError: a part of the model is not on the meta device, or its class cannot be built again.
    """

    def __init__(self, model: nn.Module, *, budget_bytes: int | None = None) -> None:
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
        self._outline = _Outline(BUDGET_BYTES if budget_bytes is None else budget_bytes)
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(next(p.dtype for p in model.parameters() if p.is_floating_point()))
        try:
            with self._outline:
                built = type(model)(copy.deepcopy(config))
        except Exception as error:
            # Each class is built in its own way, and may read values that are not there.
            reason = f"{type(error).__name__}: {error}".split("\n")[0]
            raise ModelError(
                f"{type(model).__name__} cannot be built from the meta device ({reason}). "
                f"Build it without `torch.device('meta')`."
            ) from error
        finally:
            torch.set_default_dtype(dtype)
        self._values = dict(_named(built))
        expected = {name: (p.shape, p.dtype) for name, p in self._values.items()}
        found = {name: (p.shape, p.dtype) for name, p in _named(model)}
        if expected != found:
            name = next(iter(sorted(expected.items() ^ found.items(), key=lambda item: item[0])))[0]
            raise ModelError(
                f"the model on the meta device is not what its configuration gives: {name} differs. Change the "
                f"configuration instead, or build the model without `torch.device('meta')`."
            )

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """See `meshwright.model.weights.Weights`."""
        whole = self._outline.value(self._values[name]).detach()
        return whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _argument(args: Any, kwargs: Any, place: int | str) -> Tensor:
    value: Tensor = args[place] if isinstance(place, int) else kwargs[place]
    return value


def _map(change: Any, value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_map(change, each) for each in value)
    if isinstance(value, dict):
        return {key: _map(change, each) for key, each in value.items()}
    return change(value)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _tensors(value: Any) -> Iterator[Tensor]:
    return (each for each in _leaves(value) if isinstance(each, Tensor))


def _sequence(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)
