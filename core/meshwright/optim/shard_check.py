"""Check that an optimizer has the same effect on sharded tensors as on full parameters.

[Note: trial] An optimizer of the same class and settings steps small test parameters, in float64: once full, and once
sharded as the strategy shards parameters. On flat parts of parameters, an optimizer is accepted if it is elementwise.
On DTensors, it must give the same result as on the full tensor. On full parameters, it only has to step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from .._compat.torch import is_sharded
from ..base.errors import MeshwrightError, StrategyError
from ..base.types import OptimizerFactory
from ..files.terminal import warn
from ..mesh.world import World
from ..tensors.ops import real_compute
from ..tensors.state import ShardLayout, gather_full_tensor
from .groups import format_exception_line, get_members, needs_closure

_EXACT_TOLERANCE, _ROUNDING_TOLERANCE = 1e-6, 0.05
"""Tolerated differences, relative to the largest change of an element: no difference, or the rounding of an optimizer
that computes in bfloat16 (Muon). An optimizer that mistakes a shard for the full tensor differs by more."""
_ALTERNATIVES = "Use AdamW, Adam, SGD, Adagrad or another optimizer that treats every element alike"


@dataclass(frozen=True)
class _ParamKind:
    num_dims: int
    is_partial: bool
    device: torch.device
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()

    @property
    def needs_all_ranks(self) -> bool:
        """Whether a step may communicate over the mesh, all of whose ranks have parameters of this kind."""
        return self.mesh is not None and not self.is_partial


def call_optimizer_factory(factory: OptimizerFactory, named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
    try:
        return factory(named)
    except MeshwrightError:
        raise
    except Exception as error:
        dims = ", ".join(map(str, sorted({parameter.dim() for _, parameter in named})))
        raise StrategyError(
            f"the optimizer cannot be made: {format_exception_line(error)}. Under this strategy it has {len(named)} "
            f"tensors here, of {dims} dimensions; where it has pieces of parameters, these have 1. {_ALTERNATIVES}, or "
            "another strategy."
        ) from error


def check_optimizer(optimizer: Optimizer, parts: ShardLayout, world: World) -> None:
    """Raise StrategyError on all ranks for an optimizer that steps its parameters incorrectly or fails. Collective.

    A class whose constructor needs more than parameters and settings is not tested; if parameters are sharded, this
    warns.
    """
    kinds = [(type(member), *each) for member in get_members(optimizer) for each in _collect_kinds(member, parts)]

    def check_alone() -> None:
        for cls in filter(needs_closure, map(type, get_members(optimizer))):
            raise StrategyError(
                f"{cls.__name__} needs a closure that runs the model again, and a step here is one pass. "
                f"{_ALTERNATIVES}."
            )
        for cls, kind, settings in kinds:
            if not kind.needs_all_ranks:
                _check_kind(cls, kind, settings)

    with real_compute():
        # Ranks may have different kinds of parameters.
        world.run_on_all_ranks(check_alone)
        for cls, kind, settings in world.select(kinds, []):
            if kind.needs_all_ranks:
                _check_kind(cls, kind, settings)


def _collect_kinds(optimizer: Optimizer, parts: ShardLayout) -> list[tuple[_ParamKind, dict[str, Any]]]:
    kinds: dict[tuple[_ParamKind, str], tuple[_ParamKind, dict[str, Any]]] = {}
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for parameter in group["params"]:
            shape, is_partial = parts.get_full_shape(parameter, parameter), False
            if type(parts) is not ShardLayout:
                numel = sum(chunk.tensor.numel() for chunk in parts.get_local_chunks(parameter.detach(), parameter))
                is_split = parameter.shape != shape or numel < shape.numel()
                is_partial = is_split or any(True for _ in parts.get_shard_groups(parameter))
            device = parameter.device if parameter.device.type != "meta" else torch.device("cpu")
            sharding = (parameter.device_mesh, tuple(parameter.placements)) if isinstance(parameter, DTensor) else ()
            kind = _ParamKind(len(shape), is_partial, device, *sharding)
            kinds.setdefault((kind, repr(settings)), (kind, settings))
    return list(kinds.values())


def _check_kind(cls: type[Optimizer], kind: _ParamKind, settings: dict[str, Any]) -> None:
    values = _create_stand_in(kind)
    try:
        full_result = _run_two_steps(cls, settings, values, lambda value: [value])
    except Exception as error:
        if f"{cls.__module__}.".startswith("torch.optim."):
            raise StrategyError(
                f"{cls.__name__} cannot step with these settings: {format_exception_line(error)}. Change them, or use "
                "another optimizer."
            ) from error
        if kind.is_partial or kind.mesh is not None:
            warn(
                f"{cls.__name__} could not be tried ({format_exception_line(error)}), so it is not known whether it "
                "steps the parts of parameters that it has under this strategy as it would step whole ones. Compare "
                "with strategy single."
            )
        return
    is_elementwise = _is_elementwise(cls, settings, values, full_result)
    if kind.is_partial and not is_elementwise:
        raise StrategyError(
            f"{cls.__name__} looks at whole parameters, and under this strategy each rank steps pieces of them. "
            f"{_ALTERNATIVES}, or a strategy or options under which the optimizer has whole parameters (ddp without "
            f"use_distributed_optimizer)."
        )
    if kind.mesh is None:
        return
    try:
        stepped = _run_two_steps(cls, settings, values, lambda value: [_to_dtensor(value, kind)])
        if is_elementwise:
            agrees = _is_close([each.to_local() for each in stepped], full_result, values, _EXACT_TOLERANCE)
        else:
            full = [gather_full_tensor(_to_dtensor(value, kind)) for value in values]
            expected = _run_two_steps(cls, settings, full, lambda value: [value])
            agrees = _is_close([gather_full_tensor(each) for each in stepped], expected, full, _ROUNDING_TOLERANCE)
    except Exception as error:
        raise StrategyError(
            f"{cls.__name__} cannot step sharded parameters (DTensors), which it has under this strategy: "
            f"{format_exception_line(error)}. Use AdamW, Adam, SGD, Adagrad or another one, or a strategy under which "
            "the optimizer has whole parameters (ddp)."
        ) from error
    if not agrees:
        raise StrategyError(
            f"{cls.__name__} steps sharded parameters (DTensors), which it has under this strategy, otherwise than "
            f"whole ones. {_ALTERNATIVES}, or a strategy under which the optimizer has whole parameters (ddp)."
        )


def _create_stand_in(kind: _ParamKind) -> list[Tensor]:
    """Return this rank's shard of a test parameter and of its gradients in two steps; float64, equal on replicas."""
    shape = tuple(4 + 2 * dim for dim in range(kind.num_dims))
    generator = torch.Generator().manual_seed(0)
    values = torch.randn((3, *shape), generator=generator, dtype=torch.float64).view(3, -1)
    # Scale the shards differently, so that no two are equal or have equal norms.
    coordinate = () if kind.mesh is None else kind.mesh.get_coordinate() or ()
    shard_scale = 1.0 + sum(index for index, each in zip(coordinate, kind.placements, strict=True) if is_sharded(each))
    scale = torch.linspace(1, 9, values.shape[1], dtype=torch.float64) * shard_scale
    return [each.view(shape) for each in (values * scale).to(kind.device)]


def _to_dtensor(local: Tensor, kind: _ParamKind) -> DTensor:
    """Return the DTensor whose shard on each rank has the size of `local`. No communication."""
    if kind.mesh is None:
        raise TypeError("the parameter is no DTensor")
    shape = list(local.shape)
    for placement, size in zip(kind.placements, kind.mesh.shape, strict=True):
        if is_sharded(placement):
            shape[placement.dim] *= size
    full = torch.empty(shape, device="meta")
    return DTensor.from_local(
        local.clone(), kind.mesh, kind.placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def _run_two_steps(
    cls: type[Optimizer], settings: dict[str, Any], values: Sequence[Tensor], split: Callable[[Tensor], list[Tensor]]
) -> list[Tensor]:
    """Return the parts of a test parameter after two steps."""
    start, *gradients = values
    trained = [nn.Parameter(part.clone()) for part in split(start)]
    make: Callable[..., Optimizer] = cls
    optimizer = make([{**settings, "params": trained}])
    # torch reads `differentiable` from the defaults, not from the group.
    optimizer.defaults.update({key: settings[key] for key in optimizer.defaults if key in settings})
    for gradient in gradients:
        for parameter, part in zip(trained, split(gradient), strict=True):
            parameter.grad = part.clone()
        optimizer.step()
    return [parameter.detach() for parameter in trained]


def _is_elementwise(
    cls: type[Optimizer], settings: dict[str, Any], values: Sequence[Tensor], full: Sequence[Tensor]
) -> bool:
    def cut(value: Tensor) -> list[Tensor]:
        # Split within a row, if there are rows. The last part is empty, as that of a rank may be.
        third = value.numel() // 3
        return list(value.flatten().split([third, value.numel() - third, 0]))

    try:
        parts = _run_two_steps(cls, settings, values, cut)
    except Exception:
        # An optimizer that steps full parameters but fails on their parts, with any exception, needs full parameters.
        return False
    return _is_close([torch.cat(parts).view(full[0].shape)], full, values, _EXACT_TOLERANCE)


def _is_close(found: Sequence[Tensor], expected: Sequence[Tensor], values: Sequence[Tensor], tolerance: float) -> bool:
    change = (expected[0] - values[0]).abs().max()
    # False for NaN.
    return bool((found[0] - expected[0]).abs().max() <= tolerance * change)
