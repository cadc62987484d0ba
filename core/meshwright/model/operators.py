"""Measure what a block computes, what autograd saves of it, and the cost of each operator.

A dispatch mode records the operators of one call with gradients, as torch's selective checkpointing will see them. It
runs on real tensors, because the token counts of experts and the sizes of messages depend on values.

[Note: cost] The cost of an operator, in floating-point operations, is the number that it computes or, if that takes
longer, the equivalent of the bytes that it moves. An accelerator performs some hundred bfloat16 operations while a byte
comes from its memory, and thousands while a byte comes from another rank. Source: Williams et al. 2009, "Roofline".
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
"""Key of all results received from other ranks. They are saved together or not at all, equally on all ranks."""
_FLOPS_PER_BYTE, _FLOPS_PER_BYTE_SENT = 200, 5000


@dataclass(frozen=True)
class Operator:
    """An operator whose results a block may save: their bytes, at least 1, and the cost of recomputing them."""

    key: Hashable
    nbytes: int
    recompute_cost: float


@dataclass(frozen=True)
class BlockProfile:
    """What one call of a block saves and computes. `recompute_cost` is the cost of recomputing everything."""

    input_bytes: int
    """Bytes of the inputs, which are always saved."""
    saved_bytes: int
    """Bytes saved besides the inputs if nothing is recomputed."""
    recompute_cost: float
    operators: tuple[Operator, ...]
    """Operators whose results may be saved. All others are recomputed unless the block saves everything."""


@dataclass
class _RecordedCall:
    func: Any
    key: Hashable
    nbytes: int
    cost: float
    is_communication: bool
    can_save: bool


class OperatorRecorder(TorchDispatchMode):
    """Record one call of a block with gradients enabled.

    A strategy may gather and free parameters within a block. Their memory is not an activation. Operators that run
    without gradients and compute nothing cannot be saved: they are identified by their call count, and the
    recomputation may find parameters already gathered.
    """

    supports_higher_order_operators = True

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self._block = block
        self._gather_ops: set[Any] = set()
        self._calls: list[_RecordedCall] = []
        self._counts: Counter[Any] = Counter()
        # For each live storage, the operator that created it; None if it existed before.
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
        inputs = list(iter_allocated_tensors((args, kwargs)))
        for tensor in inputs:
            self._record_storage(get_storage(tensor), None)
        result = func(*args, **kwargs)
        operations = count_flops(func, args, kwargs, result)
        if not torch.is_grad_enabled() and not operations:
            self._gather_ops.add(func)
        results = list(iter_allocated_tensors(result))
        new_bytes = sum(self._record_storage(get_storage(tensor), len(self._calls)) for tensor in results)
        moved_bytes = sum(tensor.nbytes for tensor in (*inputs, *results)) if new_bytes else 0
        is_communication = is_collective(func)
        cost = max(operations, (_FLOPS_PER_BYTE_SENT if is_communication else _FLOPS_PER_BYTE) * moved_bytes)
        can_save = new_bytes > 0 and not draws_random_numbers(func, args, kwargs)
        self._calls.append(_RecordedCall(func, (func, self._counts[func]), new_bytes, cost, is_communication, can_save))
        self._counts[func] += 1
        # A tensor that is modified in place cannot be saved, because the recomputation would modify it again.
        for argument in get_mutated_arguments(func):
            value = (
                kwargs.get(argument)
                if isinstance(argument, str)
                else (args[argument] if argument < len(args) else None)
            )
            for tensor in iter_allocated_tensors(value):
                maker = self._makers[get_storage(tensor)]
                if maker is not None:
                    self._calls[maker].can_save = False
        return result

    def build_profile(self, input_bytes: int, hidden: Tensor | None) -> BlockProfile:
        """Return the profile of the recorded call.

        `input_bytes` counts the inputs that only this block uses, including `hidden`.
        """
        # Recomputation stops after the last operator that backward needs.
        needed = self._calls[: self._num_needed]
        communication = [each for each in needed if each.is_communication]
        operators = [
            Operator(each.key, each.nbytes, each.cost)
            for each in needed
            if each.can_save and not each.is_communication and each.func not in self._gather_ops
        ]
        if communication:
            size, cost = sum(each.nbytes for each in communication), sum(each.cost for each in communication)
            operators.append(Operator(COMMUNICATION_KEY, max(1, size), cost))
        saved_bytes = sum(size for storage, size in self._saved.items() if self._makers[storage] is not None)
        if hidden is not None and get_storage(hidden) not in self._saved:
            saved_bytes = max(0, saved_bytes - get_storage(hidden).nbytes())
        return BlockProfile(input_bytes, saved_bytes, sum(each.cost for each in needed), tuple(operators))

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = get_storage(tensor)
        self._record_storage(storage, None)
        if not is_parameter_storage(self._block, storage):
            self._saved[storage] = storage.nbytes()
        self._num_needed = len(self._calls)
        # A graph that holds its own result would never be freed.
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
    """Return the hidden states that a block processes: the first floating-point tensor of its inputs."""
    return next((each for each in iter_allocated_tensors(inputs) if each.is_floating_point()), None)


def is_parameter_storage(module: nn.Module, storage: torch.UntypedStorage) -> bool:
    """Return whether one of the module's parameters currently uses a storage."""
    return any(storage is get_storage(each) for each in module.parameters() if not each.is_meta)


def get_storage(tensor: Tensor) -> torch.UntypedStorage:
    # Without gradients, the local tensor is returned itself, not as a view that autograd tracks.
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()
