"""Measure what a block computes, what autograd holds of it, and what each operator costs.

A dispatch mode records the operators of one call with gradients, as torch's selective checkpointing will see them. It
runs on real tensors, since the number of an expert's tokens and the length of a message depend on values.

[Note: cost] An operator costs its floating-point operations, or the bytes that it moves where these take longer; both
in operations. An accelerator does some hundred of them (bfloat16) while a byte comes from its memory, and thousands
while one comes from another rank.
Source: Williams et al. 2009, "Roofline".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._compat.torch import TorchDispatchMode, count_flops, draws_random_numbers, get_mutated_arguments, is_collective
from ..tensors.ops import list_tensors

COMMUNICATION_KEY = "communication"
"""Key of all that a block gets from other ranks, which is held together or not at all, the same on all ranks."""
_FLOPS_PER_BYTE, _FLOPS_PER_BYTE_SENT = 200, 5000


@dataclass(frozen=True)
class Operator:
    """Something that a block computes and may hold: bytes (at least 1) of its results, cost of recomputing it."""

    key: Hashable
    nbytes: int
    recompute_cost: float


@dataclass(frozen=True)
class BlockProfile:
    """What one call of a block holds and computes; `cost` is that of recomputing all."""

    input_bytes: int
    """Bytes of what it is given, which are held in any case."""
    saved_bytes: int
    """Bytes that it holds besides if nothing is recomputed."""
    recompute_cost: float
    operators: tuple[Operator, ...]
    """What may be held; all else is recomputed unless the block is held whole."""


@dataclass
class _RecordedCall:
    func: Any
    key: Hashable
    nbytes: int
    cost: float
    is_communication: bool
    can_save: bool


class OperatorRecorder(TorchDispatchMode):
    """Records one call of a block with gradients on.

    Within a block, a strategy may gather parameters and free them. Their memory is no activation; and since
    recomputation may find them gathered, operators that run without gradients and compute nothing cannot be held: they
    are known by how often they were called.
    """

    supports_higher_order_operators = True

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self._block = block
        self._gather_ops: set[Any] = set()
        self._calls: list[_RecordedCall] = []
        self._counts: Counter[Any] = Counter()
        # Of each storage that lives: the operator that has made it, or None where it was there before.
        self._makers: WeakKeyDictionary[torch.UntypedStorage, int | None] = WeakKeyDictionary()
        self._saved: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()
        self._num_needed = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> OperatorRecorder:
        self._hooks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(iter_allocated_tensors((args, kwargs)))
        for tensor in given:
            self._record_storage(get_storage(tensor), None)
        result = func(*args, **kwargs)
        operations = count_flops(func, args, kwargs, result)
        if not torch.is_grad_enabled() and not operations:
            self._gather_ops.add(func)
        results = list(iter_allocated_tensors(result))
        made = sum(self._record_storage(get_storage(tensor), len(self._calls)) for tensor in results)
        moved = sum(tensor.nbytes for tensor in (*given, *results)) if made else 0
        sends = is_collective(func)
        cost = max(operations, (_FLOPS_PER_BYTE_SENT if sends else _FLOPS_PER_BYTE) * moved)
        can_be_held = made > 0 and not draws_random_numbers(func, args, kwargs)
        self._calls.append(_RecordedCall(func, (func, self._counts[func]), made, cost, sends, can_be_held))
        self._counts[func] += 1
        # What is written into cannot be held, for the recomputation would write into it again.
        for where in get_mutated_arguments(func):
            value = kwargs.get(where) if isinstance(where, str) else (args[where] if where < len(args) else None)
            for tensor in iter_allocated_tensors(value):
                maker = self._makers[get_storage(tensor)]
                if maker is not None:
                    self._calls[maker].can_save = False
        return result

    def build_profile(self, input_bytes: int, hidden: Tensor | None) -> BlockProfile:
        """Return what was recorded, for a block that alone was given so many bytes of `input_bytes`, `hidden` among
        them."""
        # Recomputation stops where nothing is left that backward needs.
        needed = self._calls[: self._num_needed]
        sent = [each for each in needed if each.is_communication]
        operators = [
            Operator(each.key, each.nbytes, each.cost)
            for each in needed
            if each.can_save and not each.is_communication and each.func not in self._gather_ops
        ]
        if sent:
            size, cost = sum(each.nbytes for each in sent), sum(each.cost for each in sent)
            operators.append(Operator(COMMUNICATION_KEY, max(1, size), cost))
        whole = sum(size for storage, size in self._saved.items() if self._makers[storage] is not None)
        if hidden is not None and get_storage(hidden) not in self._saved:
            whole = max(0, whole - get_storage(hidden).nbytes())
        return BlockProfile(input_bytes, whole, sum(each.cost for each in needed), tuple(operators))

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = get_storage(tensor)
        self._record_storage(storage, None)
        if not is_parameter_storage(self._block, storage):
            self._saved[storage] = storage.nbytes()
        self._num_needed = len(self._calls)
        # The graph of a result that holds the result itself would never be freed.
        return tensor.detach()

    def _record_storage(self, storage: torch.UntypedStorage, maker: int | None) -> int:
        """Return the bytes of a new storage; 0 if it is known."""
        if storage in self._makers:
            return 0
        self._makers[storage] = maker
        return storage.nbytes()


def iter_allocated_tensors(value: Any) -> Iterator[Tensor]:
    return (each for each in list_tensors(value) if each.layout is torch.strided and not each.is_meta)


def find_hidden_states(inputs: Any) -> Tensor | None:
    """Return the hidden states that a block works on: the first floating-point tensor in what it is given."""
    return next((each for each in iter_allocated_tensors(inputs) if each.is_floating_point()), None)


def is_parameter_storage(module: nn.Module, storage: torch.UntypedStorage) -> bool:
    """Return whether a storage is that of one of the module's parameters as they are now."""
    return any(storage is get_storage(each) for each in module.parameters() if not each.is_meta)


def get_storage(tensor: Tensor) -> torch.UntypedStorage:
    # Without gradients, the local part is the tensor itself, not a view that autograd follows.
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()
