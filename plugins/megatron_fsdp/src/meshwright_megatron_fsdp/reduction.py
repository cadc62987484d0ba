"""Gradients: when they are reduced, and what becomes of those that are missing or not finite.

[Note: one order] All ranks must gather and reduce in one order, also where the data decides which parameters a rank
uses. So a unit is reduced as a whole when its backward has ended, that is, when the gradients of its inputs are there;
what it has not used counts as zero. The rest is reduced, by name, when backward ends: what is in no unit, and units
whose end nothing shows (no input requires a gradient).

The collectives, and the buffers that they act on, are the package's.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.tensor import DTensor

from meshwright.base.errors import StrategyError
from meshwright.mesh.mesh import Mesh

from ._compat.wrapped import (
    awaited,
    begin_backward,
    in_backward,
    take_gradient_hooks,
    tensors_in,
    wait_for_gathers,
)
from .config import MegatronFSDPConfig
from .shards import like


class Reduction:
    """The reduction of one model's gradients; see the module.

    Args:
        fsdp: from `_compat.wrapping.wrap`, in the sharded state.
        units: what it was wrapped with.
        config: whether gradients are reduced during backward or in `finish`, averaged, and looked at.
        mesh: that it was wrapped with.

    Attributes:
        is_pending: whether gradients have come that `finish` has not dealt with.
    """

    def __init__(self, fsdp: Any, units: Iterable[nn.Module], config: MegatronFSDPConfig, mesh: Mesh) -> None:
        self._fsdp = fsdp
        self._config = config
        self._world = mesh.world
        # Makes up for an average, so that gradients are sums.
        self._factor = mesh.data_size * mesh.degrees.cp if config.average_in_collective else 1
        self._sharded: dict[str, nn.Parameter] = dict(fsdp.param_and_grad_buffer.optimizer_named_parameters)
        raw = {self._sharded[name]: parameter for name, parameter in fsdp.raw_param.items()}
        self._reduce = take_gradient_hooks(fsdp)
        self._names = {p: name for name, p in fsdp.raw_param.items() if p in self._reduce}
        self._units = {
            unit: [raw[p] for p in dict.fromkeys(unit.parameters()) if raw[p] in self._reduce] for unit in units
        }
        self._uses: Counter[nn.Module] = Counter()
        self._endless: set[nn.Module] = set()
        self._used: set[nn.Parameter] = set()
        self._late: set[nn.Parameter] = set()
        self._wrong: set[nn.Parameter] = set()
        self.is_pending = False
        fsdp.register_forward_pre_hook(self._before_forward)
        fsdp.register_forward_hook(self._after_forward)
        for unit in self._units:
            unit.register_forward_pre_hook(self._before_unit, with_kwargs=True)
        # Weak, since Python's garbage collector does not see through these hooks: the model would stay for ever.
        arrived = weakref.WeakMethod(self._arrived)
        for parameter in self._reduce:
            parameter.register_post_accumulate_grad_hook(functools.partial(_call, arrived))

    def set_last(self, is_last: bool) -> None:
        """Say whether the next backward is the last one of its step, during which gradients are reduced."""
        self._fsdp.is_last_microbatch = is_last and self._config.overlap_grad_reduce

    # -- hooks

    def _before_forward(self, *_: Any) -> None:
        self._uses.clear()
        self._endless.clear()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._begin)

    def _before_unit(self, unit: nn.Module, args: Any, kwargs: Any) -> None:
        # Not while backward computes activations again.
        if not torch.is_grad_enabled() or in_backward(self._fsdp):
            return
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if not inputs:
            self._endless.add(unit)
            return
        self._uses[unit] += 1
        register_multi_grad_hook(inputs, lambda _: self._end(unit), mode="all")

    def _begin(self, _: Tensor) -> None:
        self.is_pending = True
        begin_backward(self._fsdp)

    def _arrived(self, parameter: Tensor) -> None:
        if self._config.report_nan_in_param_grad and not bool(parameter.grad.isfinite().all()):
            self._wrong.add(parameter)
        if parameter not in awaited(self._fsdp):
            self._late.add(parameter)
        self._used.add(parameter)

    def _end(self, unit: nn.Module) -> None:
        """A block may be used several times, and its parameters have their gradients after the last of them."""
        self._uses[unit] -= 1
        if self._uses[unit] > 0 or unit in self._endless:
            return
        waiting = awaited(self._fsdp)
        for parameter in self._units[unit]:
            if parameter in waiting:
                self._reduce[parameter](parameter)

    # -- the end of a step

    def finish(self) -> None:
        """Wait for the reduction, and put the gradients on the sharded parameters. Collective.

        They are DTensors like the sharded parameters, in their dtype. All ranks then have gradients of the same
        parameters, empty ones included: those that any rank has used.

        Raises:
            StrategyError: a gradient is not finite, or came too late to be reduced; on all ranks. All are dropped.
        """
        fsdp = self._fsdp
        if not self._config.overlap_grad_reduce:
            fsdp.grad_reduce_pipeline.reduce_gradients(
                list(self._names), outer_fsdp_group_grad_reduce=fsdp.dist_index.use_hybrid_fsdp
            )
        wait_for_gathers(fsdp)
        fsdp.finish_grad_sync()
        if self._factor != 1:
            fsdp.scale_gradients(self._factor)
        sums = [self._sharded[name].grad for name in self._names.values()]
        infinite = _infinite(sums) if self._config.check_for_nan_in_grad else [False] * len(sums)
        marks = [[p in each for p in self._names] for each in (self._used, self._late, self._wrong)]
        flat = [int(mark) for row in (*marks, infinite) for mark in row]
        agreed = self._world.reduce_ints(flat, dist.ReduceOp.MAX)
        count = len(self._names)
        used, late, wrong, infinite = ([bool(x) for x in agreed[k * count : (k + 1) * count]] for k in range(4))
        for name, is_used in zip(self._names.values(), used, strict=True):
            self._settle(self._sharded[name], is_used)
        self._used.clear()
        self._late.clear()
        self._wrong.clear()
        self.is_pending = False
        self._refuse(late, "came after the backward of its unit had ended", "Name other megatron_fsdp_unit_modules.")
        remedy = "Lower the learning rate, or look at the data; nothing was trained in this step."
        self._refuse(wrong, "holds a NaN or infinity on a rank, before it is reduced", remedy)
        self._refuse(infinite, "holds a NaN or infinity", remedy)

    def _settle(self, parameter: nn.Parameter, is_used: bool) -> None:
        if not is_used:
            # AdamW would decay it for a gradient of zeros.
            parameter.grad = None
        elif parameter.grad is None and isinstance(parameter, DTensor):
            # The package gives none where this rank's part is empty.
            parameter.grad = like(parameter, torch.zeros_like(parameter.detach().to_local()))

    def _refuse(self, marks: Sequence[bool], what: str, remedy: str) -> None:
        names = [name for name, mark in zip(self._names.values(), marks, strict=True) if mark]
        if names:
            self._fsdp.zero_grad_buffer()
            told = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise StrategyError(f"the gradient of {told} {what}. {remedy}")


def _call(method: weakref.WeakMethod[Any], parameter: Tensor) -> None:
    function = method()
    if function is not None:
        function(parameter)


def _infinite(gradients: Sequence[Tensor | None]) -> list[bool]:
    """Which of this rank's parts hold a NaN or infinity, with one wait for the device."""
    parts = [(i, g.to_local() if isinstance(g, DTensor) else g) for i, g in enumerate(gradients) if g is not None]
    found = [False] * len(gradients)
    if parts:
        for (index, _), finite in zip(parts, torch.stack([g.isfinite().all() for _, g in parts]).tolist(), strict=True):
            found[index] = not finite
    return found
