"""The head of a model, asked for the loss or statistics of its tokens instead of their logits.

[Note: within the forward] What is asked for is computed at the end of the model's own forward, where the head's
parameters are gathered and in place, whatever a strategy does to them before and after. The model returns the answer in
place of its logits.

[Note: the way out] Strategies cast what the model's forward returns, and look for its tensors in backward. So the
forward returns an anchor, a scalar that leads to the answer in the graph; the answer and its gradient bypass it in
their own dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._compat.torch import own_parameters
from ..model.forward_order import ForwardMethod, Layer, put_around
from .deferred_logits import DeferredLogits, RowsError, Source
from .rows import Projection, Rows

Consume = Callable[[DeferredLogits], Tensor]


class RowHead:
    """The head of one model; see the module.

    Args:
        model: unsharded. Its forward and the head's are wrapped; the wrappers do nothing outside of `ask`.
        name: of the head.

    Attributes:
        entries: of the whole vocabulary; None: unknown.
        waiting: argument of `token_loss`.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self._name, self._head = name, model.get_submodule(name)
        self.entries: int | None = getattr(self._head, "out_features", None)
        self._is_linear = type(self._head) is nn.Linear and "forward" not in vars(self._head)
        self._answer: tuple[int, torch.dtype] | None = None
        self._consume: Consume | None = None
        self.waiting: WeakSet[Any] = WeakSet()
        put_around(self._head, Layer.LOSS, self._around_head)
        put_around(model, Layer.LOSS, self._around_model)

    @property
    def features(self) -> int | None:
        """Entries of the vocabulary on this rank, once the head has run."""
        return None if self._answer is None else self._answer[0]

    def ask(self, run: Callable[[], Any], consume: Consume) -> tuple[Tensor, Any]:
        """Run the sharded model, whose head must have run before, and consume its deferred logits within its forward.

        Returns the result of `consume`, with its gradient, and that of `run`. RowsError if the logits are not computed
        row by row.
        """
        crossing = _Crossing()
        self._consume = lambda logits: _Leave.apply(consume(logits), crossing)
        try:
            outputs = run()
        finally:
            self._consume = None
        answer: Tensor = _Arrive.apply(outputs.logits, crossing)
        return answer, outputs

    def rows(self, logits: DeferredLogits) -> Rows:
        """Return the rows of deferred logits, within the forward; RowsError if the head's parameters are gone."""
        source = logits.source
        device = source.hidden.device.type
        is_cast, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        slots = [
            (module, name) for module in self._head.modules() for name, _ in module.named_parameters(recurse=False)
        ]
        tensors = tuple(own_parameters(module)[name] for module, name in slots)
        for (_, name), tensor in zip(slots, tensors, strict=True):
            if isinstance(tensor, DTensor) or tensor.untyped_storage().nbytes() < tensor.nbytes:
                raise RowsError(f"{self._name}.{name} is gathered for the forward of {self._name} alone")
        if self._is_linear and source.only_casts and [name for _, name in slots] in (["weight"], ["weight", "bias"]):
            # As autocast does, which leaves float64 alone.
            is_cast = is_cast and source.hidden.dtype is not torch.float64
            given = [each.to(dtype) if is_cast else each for each in (source.hidden, *tensors)]
            return Rows.linear(given[0], given[1], *given[2:], vocabulary=source.vocabulary)

        def project(rows_CH: Tensor, given: Sequence[Tensor]) -> Tensor:
            with torch.autocast(device, dtype=dtype, enabled=is_cast), _placed(slots, given):
                return source.logits(rows_CH[None])[0]

        hidden_NH = source.hidden.reshape(-1, source.hidden.shape[-1])
        return Rows(hidden_NH, tensors, Projection(project, False, source.vocabulary))

    # -- forwards

    def _around_head(self, forward: ForwardMethod) -> ForwardMethod:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._consume is None:
                answer = forward(*args, **kwargs)
                if isinstance(answer, Tensor):
                    self._answer = answer.shape[-1], answer.dtype
                return answer
            if self._answer is None or len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
                raise RowsError(f"{self._name} takes more than hidden states")
            return DeferredLogits.of(Source(args[0], forward), *self._answer)

        return run

    def _around_model(self, forward: ForwardMethod) -> ForwardMethod:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            outputs = forward(*args, **kwargs)
            if self._consume is not None:
                if not isinstance(outputs.logits, DeferredLogits):
                    raise RowsError(f"the logits are not what {self._name} gives")
                outputs.logits = self._consume(outputs.logits)
            return outputs

        return run


@contextmanager
def _placed(slots: Sequence[tuple[nn.Module, str]], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Put tensors in the places of parameters, as in the model's forward."""
    before = [own_parameters(module)[name] for module, name in slots]
    for (module, name), tensor in zip(slots, tensors, strict=True):
        own_parameters(module)[name] = tensor
    try:
        yield
    finally:
        for (module, name), tensor in zip(slots, before, strict=True):
            own_parameters(module)[name] = tensor


# -- the way out


class _Crossing:
    """What bypasses the anchor; see [Note: the way out]."""

    value: Tensor
    gradient: Tensor


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, crossing: _Crossing) -> Tensor:
        ctx.crossing, crossing.value = crossing, value.detach()
        return value.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.crossing.gradient, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, crossing: _Crossing) -> Tensor:
        ctx.crossing, ctx.dtype = crossing, anchor.dtype
        return crossing.value.view_as(crossing.value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.crossing.gradient = gradient
        return gradient.new_zeros((), dtype=ctx.dtype), None
