"""See every operation of a piece of code, by a dispatch mode of torch; see `_compat`."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from .._compat.planning import is_asking_for_shapes
from .._compat.torch import TorchDispatchMode
from ._compat import unwraps_itself


@functools.cache
def name_of(operation: Any) -> str:
    """Such as "aten.mm.default"."""
    return str(operation)


class Observer(TorchDispatchMode):
    """A context manager that sees each operation on plain tensors, those of autograd's backward included.

    DTensors and their like count by what they run on the tensors inside.
    """

    @abstractmethod
    def observe(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Called after each operation."""

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.dispatched(func, types, args, kwargs)

    def dispatched(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
    ) -> Any:
        """What an operation gives, once it has been observed."""
        if any(map(unwraps_itself, types)):
            # The mode is asked again for each operation on what is inside.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        # Not attributes of tensors without memory, and not what is only asked for shapes.
        if func.namespace != "prim" and not is_asking_for_shapes():
            self.observe(func, args, kwargs or {}, result)
        return result


class Counting(Observer):
    """Counts the operations that are computed; those whose results are held do not come here again.

    Attributes:
        counts: by name, such as "aten.mm.default".
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def observe(self, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.counts[str(operation)] += 1
