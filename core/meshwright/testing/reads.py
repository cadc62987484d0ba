"""Note every read of a tensor's value, which on an accelerator waits until all queued work is done.

On a CPU a read costs nothing, but it is the same call: so what a step would wait for is counted without an accelerator.
Reads of what is never on one (batches in host memory, messages of the control plane, step counters of optimizers) look
alike; who counts tells them apart by where they are.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..tensors.ops import tensors_in
from .observe import Observer

_READING = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "_unique2", "unique_dim", "on_host"}
)
"""Operators that give the host a value, or make a tensor whose size depends on values."""
_COPYING = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.cpu)
"""What copies to the host, and is no operator where the tensor is there already; not seen in hooks of backward."""
_PLACES = ("meshwright", "transformers", "torch/optim", "megatron_fsdp")
_PASSING = ("/testing/reads.py", "/testing/observe.py", "/testing/zoo/", "/tests/", "/model/recompute.py")
"""Modes and wrappers that operators come through."""


def count_reads(work: Callable[[], object]) -> Counter[str]:
    """Run `work` and count the reads of values, those of backward included.

    Returns:
        Reads by place: the innermost file of ours, of transformers or of torch's optimizers that they come from, such
        as "manager/ending.py", or "transformers/masking_utils.py"; "" for others.
    """
    operators = _Operators()
    calls = _Calls(operators)
    with calls, operators:
        work()
    return operators.found + calls.found


class _Operators(Observer):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.on_host: list[Tensor] = []
        """Copies that have been counted."""

    def observe(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        name = operation.overloadpacket.__name__
        chooses = name in ("index", "index_put", "index_put_") and any(
            each.dtype in (torch.bool, torch.uint8) for each in tensors_in(args[1])
        )
        counts = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name == "on_host":
            self.on_host.append(result)
        if name in _READING or chooses or counts:
            self.found[_place()] += 1


class _Calls(TorchFunctionMode):
    def __init__(self, operators: _Operators) -> None:
        super().__init__()
        self._operators = operators
        self.found: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _COPYING and not any(args[0] is each for each in self._operators.on_host):
            self.found[_place()] += 1
        return func(*args, **(kwargs or {}))


def _place() -> str:
    for frame in reversed(traceback.extract_stack()):
        file = frame.filename.replace("\\", "/")
        if any(f"/{each}" in file for each in _PLACES) and not any(each in file for each in _PASSING):
            package, _, rest = file.rpartition("/")
            return f"{package.rpartition('/')[2]}/{rest}"
    return ""
