"""Make a model's LM head compute the loss or token statistics instead of logits.

[Note: deferred logits] The head returns `DeferredLogits`. Elementwise operations of the model on them (scaling, a soft
cap, a cast) are recorded, and applied to the logits of each chunk of rows later; all other operations are rejected. The
loss or statistics are computed at the end of the model's forward, where the head's parameters are gathered, and replace
the logits.

[Note: autograd bypass] Strategies cast the outputs of the model's forward, and track these tensors in backward. So the
forward returns an anchor: a scalar that connects to the result in the autograd graph. The result and its gradient
bypass the anchor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._compat.torch import get_own_parameters
from ..base.errors import ModelError
from ..model.forward_order import ForwardMethod, WrapOrder, wrap_forward
from ..tensors.ops import temporary_attribute, temporary_parameters
from .chunked_loss import HiddenRows, Projection
from .row_statistics import UNSHARDED_VOCABULARY, Vocabulary

_CAST_OPS = frozenset({"to", "float", "double", "half", "bfloat16", "contiguous"})
_ELEMENTWISE_OPS = _CAST_OPS | {"mul", "rmul", "div", "truediv", "true_divide", "add", "radd", "sub", "neg", "tanh"}
_METADATA_OPS = frozenset(
    {"__get__", "__len__", "size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "is_contiguous"}
)
_SCALAR_TYPES = (bool, int, float, type(None), torch.dtype, torch.memory_format)


class ChunkedLogitsError(ModelError):
    """The logits of a model cannot be computed in chunks of rows."""


@dataclass(frozen=True)
class LogitsSource:
    """Inputs of deferred logits: the hidden states (..., H), the head, and the operations after it.

    `has_only_casts`: all of these operations are casts that lose no precision.
    """

    hidden: Tensor
    head: Callable[[Tensor], Tensor]
    transforms: tuple[Callable[[Tensor], Tensor], ...] = ()
    has_only_casts: bool = True
    vocabulary: Vocabulary = UNSHARDED_VOCABULARY

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return functools.reduce(lambda logits, step: step(logits), self.transforms, self.head(hidden))


class DeferredLogits(Tensor):
    """Placeholder for logits; see [Note: deferred logits]. It reports the device of the hidden states."""

    source: LogitsSource

    @staticmethod
    def from_source(source: LogitsSource, num_entries: int, dtype: torch.dtype) -> DeferredLogits:
        shape = (*source.hidden.shape[:-1], num_entries)
        logits = torch.empty(shape, dtype=dtype, device="meta").as_subclass(DeferredLogits)
        logits.source = source
        return logits

    def with_vocabulary(self, vocabulary: Vocabulary) -> DeferredLogits:
        """Return these logits as this rank's shard of a sharded vocabulary."""
        return DeferredLogits.from_source(replace(self.source, vocabulary=vocabulary), self.shape[-1], self.dtype)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        name = func.__name__
        if func == Tensor.device.__get__:
            return args[0].source.hidden.device
        if name in _METADATA_OPS:
            result = super().__torch_function__(func, types, tuple(args), options)
            if not isinstance(result, Tensor):
                return result
        if name == "view_as" and all(each is args[0] for each in args):
            # Strategies call this to distinguish a module's outputs from its inputs.
            return args[0]
        positions = [index for index, each in enumerate(args) if isinstance(each, DeferredLogits)]
        rest = [each for index, each in enumerate(args) if index not in positions] + list(options.values())
        operation = name.removeprefix("__").removesuffix("__")
        if operation not in _ELEMENTWISE_OPS or len(positions) != 1 or not all(map(_is_scalar, rest)):
            raise ChunkedLogitsError(f"what {name} makes of its logits is not known row by row")
        return _apply_deferred(func, list(args), positions[0], options, is_lossless=operation in _CAST_OPS)

    def __repr__(self, **_: Any) -> str:
        return f"DeferredLogits({tuple(self.shape)}, {self.dtype})"


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.requires_grad
    return isinstance(value, _SCALAR_TYPES)


def _apply_deferred(
    func: Any, args: list[Any], index: int, options: dict[str, Any], *, is_lossless: bool
) -> DeferredLogits:
    before: DeferredLogits = args[index]

    def step(logits: Tensor) -> Tensor:
        result: Tensor = func(*args[:index], logits, *args[index + 1 :], **options)
        return result

    # Run on one entry to find the dtype.
    dtype = step(torch.zeros((1, 1), dtype=before.dtype, device=before.source.hidden.device)).dtype
    is_lossless = is_lossless and torch.promote_types(dtype, before.dtype) == dtype
    args[index] = None
    steps, only_casts = (*before.source.transforms, step), before.source.has_only_casts and is_lossless
    source = replace(before.source, transforms=steps, has_only_casts=only_casts)
    return DeferredLogits.from_source(source, before.shape[-1], dtype)


ConsumeLogits = Callable[[DeferredLogits], Tensor]


class DeferredHead:
    """The head of one unsharded model.

    `vocab_size`: entries of the full vocabulary; `pending_gradients`: see `chunked_loss.compute_token_loss`.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self._name, self._head = name, model.get_submodule(name)
        self.vocab_size: int | None = getattr(self._head, "out_features", None)
        self._is_linear = type(self._head) is nn.Linear and "forward" not in vars(self._head)
        self._logits_meta: tuple[int, torch.dtype] | None = None
        self._consume: ConsumeLogits | None = None
        self.pending_gradients: WeakSet[Any] = WeakSet()
        wrap_forward(self._head, WrapOrder.LOSS, self._wrap_head)
        wrap_forward(model, WrapOrder.LOSS, self._wrap_model)

    @property
    def local_vocab_size(self) -> int | None:
        """Entries of the vocabulary on this rank, once the head has run."""
        return None if self._logits_meta is None else self._logits_meta[0]

    def run_with_deferred_logits(self, run: Callable[[], Any], consume: ConsumeLogits) -> tuple[Tensor, Any]:
        """Run the sharded model and consume its deferred logits in its forward; return the result and the outputs."""
        bypass = _Bypass()
        with temporary_attribute(self, "_consume", lambda logits: _EnterBypass.apply(consume(logits), bypass)):
            outputs = run()
        result: Tensor = _LeaveBypass.apply(outputs.logits, bypass)
        return result, outputs

    def build_rows(self, logits: DeferredLogits) -> HiddenRows:
        """Return the rows of deferred logits; call it within the model's forward.

        Raises ChunkedLogitsError if the head's parameters are no longer gathered.
        """
        source = logits.source
        device = source.hidden.device.type
        is_cast, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        slots = [
            (module, name) for module in self._head.modules() for name, _ in module.named_parameters(recurse=False)
        ]
        tensors = tuple(get_own_parameters(module)[name] for module, name in slots)
        for (_, name), tensor in zip(slots, tensors, strict=True):
            if isinstance(tensor, DTensor) or tensor.untyped_storage().nbytes() < tensor.nbytes:
                raise ChunkedLogitsError(f"{self._name}.{name} is gathered for the forward of {self._name} alone")
        if (
            self._is_linear
            and source.has_only_casts
            and [name for _, name in slots] in (["weight"], ["weight", "bias"])
        ):
            # Like autocast, do not cast float64.
            is_cast = is_cast and source.hidden.dtype is not torch.float64
            inputs = [each.to(dtype) if is_cast else each for each in (source.hidden, *tensors)]
            return HiddenRows.from_linear(inputs[0], inputs[1], *inputs[2:], vocabulary=source.vocabulary)

        def project(rows_CH: Tensor, given: Sequence[Tensor]) -> Tensor:
            parameters = [(module, name, tensor) for (module, name), tensor in zip(slots, given, strict=True)]
            with torch.autocast(device, dtype=dtype, enabled=is_cast), temporary_parameters(parameters):
                return source.compute_logits(rows_CH[None])[0]

        hidden_NH = source.hidden.reshape(-1, source.hidden.shape[-1])
        return HiddenRows(hidden_NH, tensors, Projection(project, False, source.vocabulary))

    # -- forwards

    def _wrap_head(self, forward: ForwardMethod) -> ForwardMethod:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._consume is None:
                output = forward(*args, **kwargs)
                if isinstance(output, Tensor):
                    self._logits_meta = output.shape[-1], output.dtype
                return output
            if self._logits_meta is None or len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
                raise ChunkedLogitsError(f"{self._name} takes more than hidden states")
            return DeferredLogits.from_source(LogitsSource(args[0], forward), *self._logits_meta)

        return run

    def _wrap_model(self, forward: ForwardMethod) -> ForwardMethod:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            outputs = forward(*args, **kwargs)
            if self._consume is not None:
                if not isinstance(outputs.logits, DeferredLogits):
                    raise ChunkedLogitsError(f"the logits are not what {self._name} gives")
                outputs.logits = self._consume(outputs.logits)
            return outputs

        return run


# -- the autograd bypass


class _Bypass:
    """A result and its gradient; see [Note: autograd bypass]."""

    value: Tensor
    gradient: Tensor


class _EnterBypass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, crossing: _Bypass) -> Tensor:
        ctx.crossing, crossing.value = crossing, value.detach()
        return value.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.crossing.gradient, None


class _LeaveBypass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, crossing: _Bypass) -> Tensor:
        ctx.crossing, ctx.dtype = crossing, anchor.dtype
        return crossing.value.view_as(crossing.value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.crossing.gradient = gradient
        return gradient.new_zeros((), dtype=ctx.dtype), None
