"""Start the package's gradient reductions, and report missing or non-finite gradients.

[Note: collective order] All ranks must gather and reduce in the same order, even if the data determine which parameters
a rank uses. So a unit is reduced at once when its backward has ended, that is, when the gradients of its inputs are
available; unused parameters count as zero. Parameters outside of units, and in units without an input that requires a
gradient, are reduced when backward ends.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.tensor import DTensor

from meshwright.plugin import GradientReport, Mesh, MeshwrightError, NonFiniteError, StrategyError

from ._compat.wrapped_model import (
    begin_backward,
    find_pending_parameters,
    flatten_tensors,
    is_in_backward,
    remove_gradient_hooks,
    wait_for_prefetched_gathers,
)
from .config import MegatronFSDPConfig
from .shard_layout import build_dtensor_like


class GradientReducer:
    """Reduce the gradients of one model."""

    def __init__(self, fsdp: Any, units: Iterable[nn.Module], config: MegatronFSDPConfig, mesh: Mesh) -> None:
        self._fsdp = fsdp
        self._config = config
        # Undoes an average, so that gradients are sums.
        self._sum_factor = mesh.data_size * mesh.degrees.cp if config.average_in_collective else 1
        self._sharded_by_name: dict[str, nn.Parameter] = dict(fsdp.param_and_grad_buffer.optimizer_named_parameters)
        raw = {self._sharded_by_name[name]: parameter for name, parameter in fsdp.raw_param.items()}
        self._reduce_hooks = remove_gradient_hooks(fsdp)
        self._name_by_parameter = {p: name for name, p in fsdp.raw_param.items() if p in self._reduce_hooks}
        self._parameters_by_unit = {
            unit: [raw[p] for p in dict.fromkeys(unit.parameters()) if raw[p] in self._reduce_hooks] for unit in units
        }
        self._pending_uses: Counter[nn.Module] = Counter()
        self._units_without_input_grad: set[nn.Module] = set()
        self._used_parameters: set[nn.Parameter] = set()
        self._late_parameters: set[nn.Parameter] = set()
        self._nonfinite_flags: dict[Tensor, Tensor] = {}
        self.is_pending = False
        fsdp.register_forward_pre_hook(self._forward_pre_hook)
        fsdp.register_forward_hook(self._forward_hook)
        for unit in self._parameters_by_unit:
            unit.register_forward_pre_hook(self._unit_forward_pre_hook, with_kwargs=True)
        # Weak, since Python's garbage collector does not traverse these hooks, and the model would never be freed.
        on_gradient = weakref.WeakMethod(self._on_gradient)
        for parameter in self._reduce_hooks:
            parameter.register_post_accumulate_grad_hook(functools.partial(_call_weak_method, on_gradient))

    def set_is_last_microbatch(self, is_last: bool) -> None:
        """Set whether the next backward is the last of its step, during which gradients are reduced."""
        self._fsdp.is_last_microbatch = is_last and self._config.overlap_grad_reduce

    def _forward_pre_hook(self, *_: Any) -> None:
        self._pending_uses.clear()
        self._units_without_input_grad.clear()

    def _forward_hook(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in flatten_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._begin_backward)

    def _unit_forward_pre_hook(self, unit: nn.Module, args: Any, kwargs: Any) -> None:
        # Not during recomputation in backward.
        if not torch.is_grad_enabled() or is_in_backward(self._fsdp):
            return
        inputs = [tensor for tensor in flatten_tensors((args, kwargs)) if tensor.requires_grad]
        if not inputs:
            self._units_without_input_grad.add(unit)
            return
        self._pending_uses[unit] += 1
        register_multi_grad_hook(inputs, lambda _: self._end_unit_backward(unit), mode="all")

    def _begin_backward(self, _: Tensor) -> None:
        self.is_pending = True
        begin_backward(self._fsdp)

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._config.report_nan_in_param_grad and parameter.grad is not None:
            flag = _has_nonfinite(parameter.grad)
            self._nonfinite_flags[parameter] = (
                flag | self._nonfinite_flags[parameter] if parameter in self._nonfinite_flags else flag
            )
        if parameter not in find_pending_parameters(self._fsdp):
            self._late_parameters.add(parameter)
        self._used_parameters.add(parameter)

    def _end_unit_backward(self, unit: nn.Module) -> None:
        # A block may be used several times; its gradients are complete after the backward of the last use.
        self._pending_uses[unit] -= 1
        if self._pending_uses[unit] > 0 or unit in self._units_without_input_grad:
            return
        pending = find_pending_parameters(self._fsdp)
        for parameter in self._parameters_by_unit[unit]:
            if parameter in pending:
                self._reduce_hooks[parameter](parameter)

    def finish(self) -> GradientReport:
        """Wait for the reduction, and set the gradients of the sharded parameters. Collective.

        Afterwards all ranks have gradients of all parameters, as DTensors like the sharded parameters, possibly empty.
        """
        fsdp = self._fsdp
        if not self._config.overlap_grad_reduce:
            fsdp.grad_reduce_pipeline.reduce_gradients(
                list(self._name_by_parameter), outer_fsdp_group_grad_reduce=fsdp.dist_index.use_hybrid_fsdp
            )
        wait_for_prefetched_gathers(fsdp)
        fsdp.finish_grad_sync()
        if self._sum_factor != 1:
            fsdp.scale_gradients(self._sum_factor)
        trained = {name: self._sharded_by_name[name] for name in self._name_by_parameter.values()}
        used = [parameter in self._used_parameters for parameter in self._name_by_parameter]
        late = [name for parameter, name in self._name_by_parameter.items() if parameter in self._late_parameters]
        flags = {
            (self._name_by_parameter[parameter], _NONFINITE_BEFORE_REDUCTION): flag
            for parameter, flag in self._nonfinite_flags.items()
        }
        if self._config.check_for_nan_in_grad:
            flags |= {(name, _NONFINITE): _has_nonfinite(p.grad) for name, p in trained.items() if p.grad is not None}
        for parameter in trained.values():
            _fill_missing_gradient(parameter)
        self._used_parameters.clear()
        self._late_parameters.clear()
        self._nonfinite_flags.clear()
        self.is_pending = False
        # Two kernels: one to stack the flags, one to check them.
        values = torch.stack([*flags.values()]) if flags else None
        return GradientReport(
            trained=[[parameter] for parameter in trained.values()],
            is_used=used,
            has_error=values.any() if values is not None and not late else bool(late),
            error_values=values,
            build_error=functools.partial(_find_error, late, list(flags)),
            on_error=self._fsdp.zero_grad_buffer,
        )


_NONFINITE_BEFORE_REDUCTION = "holds a NaN or infinity on a rank, before it is reduced"
_NONFINITE = "holds a NaN or infinity"


def _find_error(
    late: Sequence[str], flags: Sequence[tuple[str, str]], values: Sequence[float]
) -> MeshwrightError | None:
    names_by_error = {
        error: [name for (name, each), value in zip(flags, values, strict=True) if value and each == error]
        for error in (_NONFINITE_BEFORE_REDUCTION, _NONFINITE)
    }
    if late:
        reason = f"the gradient of {_format_names(late)} came after the backward of its unit had ended"
        return StrategyError(f"{reason}. Name other megatron_fsdp_unit_modules.")
    for error, names in names_by_error.items():
        if names:
            remedy = "Lower the learning rate, or look at the data; nothing was trained in this step."
            return NonFiniteError(f"the gradient of {_format_names(names)} {error}. {remedy}")
    return None


def _format_names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _fill_missing_gradient(parameter: nn.Parameter) -> None:
    """Set a zero gradient if a parameter has none: it is unused, or this rank's shard is empty."""
    if parameter.grad is None and isinstance(parameter, DTensor):
        parameter.grad = build_dtensor_like(parameter, torch.zeros_like(parameter.detach().to_local()))


def _has_nonfinite(gradient: Tensor) -> Tensor:
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return ~local.isfinite().all()


def _call_weak_method(method: weakref.WeakMethod[Any], parameter: Tensor) -> None:
    function = method()
    if function is not None:
        function(parameter)
