"""Operators that compute nothing of parameters and activations, and all of what decides how a step runs.

[Note: what is real] Counts of tokens, masks, positions and plans are small, and made of numbers that are known: they
are computed, so that code may look into them. What is made of parameters and activations has a shape and a dtype, and
no values. The two are told apart by what a tensor is made of: an operator on real tensors alone gives real ones, and so
does one that makes whole numbers out of nothing, up to `SMALL` bytes; all others do not.

[Note: what code reads] Code looks at what was not computed to find what is wrong: are gradients finite, do stages of a
pipeline give what the whole model gives, does a token act on another? A plan is of a model with which nothing is wrong.
So a number that is read is 0, and tensors of one shape are equal.

[Note: routing] Where routers choose among candidates, the choices are known: all candidates are chosen equally often,
or, with an imbalance of f, the first ones f times as often as on average: as many as a token chooses, which are on the
first ranks. So what follows from them (how many rows an expert gets, and from where) is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from .._compat.planning import DEPENDS_ON_VALUES, Fakes, handed_on, is_asking_for_shapes
from .._compat.torch import UncompiledMode, is_choice
from ..tensors.ops import has_values, is_on_meta, tensors_in
from ..testing._compat import unwraps_itself
from ..testing.observe import name_of
from .messages import NAMESPACES, received

SMALL = 1 << 25
"""Bytes up to which an operator's results are computed."""

_COPIES_IN = "fsdp.all_gather_copy_in.default"


class Planning(UncompiledMode):
    """A dispatch mode; see the module.

    Args:
        imbalance: of routing, at least 1; see [Note: routing].
    """

    def __init__(self, imbalance: float = 1.0) -> None:
        super().__init__()
        self._fakes, self._imbalance = Fakes(), imbalance
        self._empties: dict[tuple[Any, ...], torch.Tensor] = {}
        self._computed: set[tuple[Any, ...] | None] = set()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.new_empty.default and 0 in args[1] and self._fakes.knows(args[0]):
            return self._empty(func, types, args, kwargs)
        if any(map(unwraps_itself, types)):
            return NotImplemented
        if func is torch.ops.prim.device.default:
            return self._fakes.device(args[0])
        if is_asking_for_shapes() or has_values():
            return func(*args, **kwargs)
        given = list(tensors_in((args, kwargs)))
        if any(map(self._fakes.knows, given)):
            return self._of_fakes(func, types, args, kwargs, given)
        if func.namespace in NAMESPACES:
            return received(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags or func.namespace == "profiler" or _stays_on_meta(given, args, kwargs):
            return func(*args, **kwargs)
        if any(is_on_meta(each) for each in given) or not _is_on_cpu(args, kwargs):
            return self._fakes.computed(func, types, args, kwargs)
        return self._of_numbers(func, types, args, kwargs, given)

    def _of_numbers(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]
    ) -> Any:
        """What an operator gives where all that it is given is real: numbers, where they are few."""
        if func.is_view:
            # Has no memory of its own, so it can be looked at.
            seen = func(*args, **kwargs)
            return self._fakes.computed(func, types, args, kwargs) if _size(seen) > SMALL else seen
        key = _key(func, args, kwargs)
        if key is None or key not in self._computed:
            try:
                found = self._fakes.computed(func, types, args, kwargs)
            except DEPENDS_ON_VALUES:
                found = None
            if _size(found) > SMALL or (not given and any(each.is_floating_point() for each in tensors_in(found))):
                return found
            self._computed.add(key)
        return func(*args, **kwargs)

    def _of_fakes(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]
    ) -> Any:
        """What an operator gives where some of what it is given has no memory."""
        if (same := handed_on(func, given)) is not None:
            return same
        if name_of(func) == "aten._local_scalar_dense.default":
            return _zero(given[0].dtype)
        if func is torch.ops.aten.equal.default:
            return given[0].shape == given[1].shape
        if name_of(func) == "aten._unsafe_view.default":
            # The same for its tensors, and torch keeps what it has found out.
            func = torch.ops.aten.view.default
        if name_of(func) == _COPIES_IN and not self._fakes.knows(args[1]):
            # FSDP gathers several dtypes as bytes, whose buffer is real where it is small, and given back.
            _, buffer, _, size, rank = args
            return buffer.narrow(0, size * rank, size), buffer
        found = self._fakes.computed(func, types, args, kwargs)
        if is_choice(func):
            return found[0], choices(found[1].shape, given[0].shape[-1], self._imbalance)
        return found

    def _empty(self, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Parts of nothing, of which FSDP makes one for each rank that has no rows of a parameter, and keeps none."""
        key = (tuple(args[1]), args[0].dtype, *sorted((name, str(value)) for name, value in kwargs.items()))
        if key not in self._empties:
            self._empties[key] = self._fakes.computed(func, types, args, kwargs)
        return self._empties[key]


def choices(shape: Sequence[int], candidates: int, imbalance: float) -> torch.Tensor:
    """What each token chooses, the last dim of `shape`; see [Note: routing]."""
    made = torch.arange(math.prod(shape)).view(-1, shape[-1]) % candidates
    if imbalance > 1.0 and shape[-1] < candidates:
        drawn = min(1.0, (imbalance - 1) / (candidates / shape[-1] - 1))
        made[: round(drawn * len(made))] = torch.arange(shape[-1])
    return made.view(*shape)


def _size(made: Any) -> int:
    return sum(each.numel() * each.element_size() for each in tensors_in(made))


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """What tells how large the results of an operator are; None: it is not told."""
    told: list[Any] = [func]
    for value in (*args, *kwargs.items()):
        if isinstance(value, torch.Tensor):
            told.append((value.shape, value.dtype, value.stride()))
        elif isinstance(value, tuple | list | Mapping) and any(True for _ in tensors_in(value)):
            return None
        else:
            told.append(repr(value))
    return tuple(told)


def _zero(dtype: torch.dtype) -> bool | int | float | complex:
    if dtype is torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else 0j if dtype.is_complex else 0


def _is_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    devices = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.device)]
    return all(device.type == "cpu" for device in devices)


def _stays_on_meta(given: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    devices = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.device)]
    found = [each.type for each in devices] or [each.device.type for each in given]
    return bool(found) and all(each == "meta" for each in found)
