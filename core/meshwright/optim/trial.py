"""Check that an optimizer does to sharded tensors what it would do to whole parameters.

[Note: trial] An optimizer of the same class and settings steps small stand-ins, in float64: once whole, and once cut as
the strategy cuts parameters. Of pieces, one that treats every element alike is right; of DTensors, one that does what
it does to the whole tensor; of whole parameters, any that can step.
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
from ..tensors.ops import with_values
from ..tensors.state import Parts, whole_tensor
from .groups import members_of, needs_closure, reason

_EXACT, _ROUNDED = 1e-6, 0.05
"""What may differ, relative to the largest change of an element: nothing, or what an optimizer that computes in
bfloat16 (Muon) rounds away. One that takes a part for the whole is off by more."""
_INSTEAD = "Use AdamW, Adam, SGD, Adagrad or another optimizer that treats every element alike"


@dataclass(frozen=True)
class _Kind:
    dims: int
    is_piece: bool
    device: torch.device
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()

    @property
    def is_joint(self) -> bool:
        """Whether a step may need all ranks of the mesh, which then all have parameters of this kind."""
        return self.mesh is not None and not self.is_piece


def call_factory(factory: OptimizerFactory, named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
    try:
        return factory(named)
    except MeshwrightError:
        raise
    except Exception as error:
        dims = ", ".join(map(str, sorted({parameter.dim() for _, parameter in named})))
        raise StrategyError(
            f"the optimizer cannot be made: {reason(error)}. Under this strategy it has {len(named)} tensors here, of "
            f"{dims} dimensions; where it has pieces of parameters, these have 1. {_INSTEAD}, or another strategy."
        ) from error


def check_optimizer(optimizer: Optimizer, parts: Parts, world: World) -> None:
    """Refuse an optimizer that cannot step its parameters, or does it wrongly; StrategyError on all ranks. Collective.

    A class that takes more than parameters and settings is accepted untried, with a warning if it gets parts.
    """
    kinds = [(type(member), *each) for member in members_of(optimizer) for each in _kinds(member, parts)]

    def check_alone() -> None:
        for cls in filter(needs_closure, map(type, members_of(optimizer))):
            raise StrategyError(
                f"{cls.__name__} needs a closure that runs the model again, and a step here is one pass. {_INSTEAD}."
            )
        for cls, kind, settings in kinds:
            if not kind.is_joint:
                _try(cls, kind, settings)

    with with_values():
        # Ranks may have different pieces.
        world.together(check_alone)
        for cls, kind, settings in world.select(kinds, []):
            if kind.is_joint:
                _try(cls, kind, settings)


def _kinds(optimizer: Optimizer, parts: Parts) -> list[tuple[_Kind, dict[str, Any]]]:
    found: dict[tuple[_Kind, str], tuple[_Kind, dict[str, Any]]] = {}
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for parameter in group["params"]:
            shape, is_piece = parts.shape(parameter, parameter), False
            if type(parts) is not Parts:
                held = sum(piece.tensor.numel() for piece in parts.pieces(parameter.detach(), parameter))
                is_divided = parameter.shape != shape or held < shape.numel()
                is_piece = is_divided or any(True for _ in parts.groups(parameter))
            device = parameter.device if parameter.device.type != "meta" else torch.device("cpu")
            place = (parameter.device_mesh, tuple(parameter.placements)) if isinstance(parameter, DTensor) else ()
            kind = _Kind(len(shape), is_piece, device, *place)
            found.setdefault((kind, repr(settings)), (kind, settings))
    return list(found.values())


def _try(cls: type[Optimizer], kind: _Kind, settings: dict[str, Any]) -> None:
    values = _values(kind)
    try:
        whole = _stepped(cls, settings, values, lambda value: [value])
    except Exception as error:
        if f"{cls.__module__}.".startswith("torch.optim."):
            raise StrategyError(
                f"{cls.__name__} cannot step with these settings: {reason(error)}. Change them, or use another "
                f"optimizer."
            ) from error
        if kind.is_piece or kind.mesh is not None:
            warn(
                f"{cls.__name__} could not be tried ({reason(error)}), so it is not known whether it steps the parts "
                f"of parameters that it has under this strategy as it would step whole ones. Compare with strategy "
                f"single."
            )
        return
    is_elementwise = _is_elementwise(cls, settings, values, whole)
    if kind.is_piece and not is_elementwise:
        raise StrategyError(
            f"{cls.__name__} looks at whole parameters, and under this strategy each rank steps pieces of them. "
            f"{_INSTEAD}, or a strategy or options under which the optimizer has whole parameters (ddp without "
            f"use_distributed_optimizer)."
        )
    if kind.mesh is None:
        return
    try:
        stepped = _stepped(cls, settings, values, lambda value: [_as_dtensor(value, kind)])
        if is_elementwise:
            agrees = _agree([each.to_local() for each in stepped], whole, values, _EXACT)
        else:
            full = [whole_tensor(_as_dtensor(value, kind)) for value in values]
            expected = _stepped(cls, settings, full, lambda value: [value])
            agrees = _agree([whole_tensor(each) for each in stepped], expected, full, _ROUNDED)
    except Exception as error:
        raise StrategyError(
            f"{cls.__name__} cannot step sharded parameters (DTensors), which it has under this strategy: "
            f"{reason(error)}. Use AdamW, Adam, SGD, Adagrad or another one, or a strategy under which the optimizer "
            f"has whole parameters (ddp)."
        ) from error
    if not agrees:
        raise StrategyError(
            f"{cls.__name__} steps sharded parameters (DTensors), which it has under this strategy, otherwise than "
            f"whole ones. {_INSTEAD}, or a strategy under which the optimizer has whole parameters (ddp)."
        )


def _values(kind: _Kind) -> list[Tensor]:
    """Return this rank's part of a stand-in, and its gradients in two steps; float64, equal where placements are."""
    shape = tuple(4 + 2 * dim for dim in range(kind.dims))
    generator = torch.Generator().manual_seed(0)
    values = torch.randn((3, *shape), generator=generator, dtype=torch.float64).view(3, -1)
    # No two parts are alike, in their norms neither.
    place = () if kind.mesh is None else kind.mesh.get_coordinate() or ()
    unlike = 1.0 + sum(index for index, each in zip(place, kind.placements, strict=True) if is_sharded(each))
    scale = torch.linspace(1, 9, values.shape[1], dtype=torch.float64) * unlike
    return [each.view(shape) for each in (values * scale).to(kind.device)]


def _as_dtensor(local: Tensor, kind: _Kind) -> DTensor:
    """Make the DTensor of which each rank has a part as large as `local`. No communication."""
    if kind.mesh is None:
        raise TypeError("the parameter is no DTensor")
    shape = list(local.shape)
    for placement, size in zip(kind.placements, kind.mesh.shape, strict=True):
        if is_sharded(placement):
            shape[placement.dim] *= size
    whole = torch.empty(shape, device="meta")
    return DTensor.from_local(
        local.clone(), kind.mesh, kind.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _stepped(
    cls: type[Optimizer], settings: dict[str, Any], values: Sequence[Tensor], cut: Callable[[Tensor], list[Tensor]]
) -> list[Tensor]:
    """Return a stand-in, cut, after two steps."""
    start, *gradients = values
    trained = [nn.Parameter(part.clone()) for part in cut(start)]
    make: Callable[..., Optimizer] = cls
    optimizer = make([{**settings, "params": trained}])
    # Torch asks these, not the group, whether a step is differentiable.
    optimizer.defaults.update({key: settings[key] for key in optimizer.defaults if key in settings})
    for gradient in gradients:
        for parameter, part in zip(trained, cut(gradient), strict=True):
            parameter.grad = part.clone()
        optimizer.step()
    return [parameter.detach() for parameter in trained]


def _is_elementwise(
    cls: type[Optimizer], settings: dict[str, Any], values: Sequence[Tensor], whole: Sequence[Tensor]
) -> bool:
    def cut(value: Tensor) -> list[Tensor]:
        # Within a row, if there are rows; and the last one is empty, as a rank's may be.
        third = value.numel() // 3
        return list(value.flatten().split([third, value.numel() - third, 0]))

    try:
        parts = _stepped(cls, settings, values, cut)
    except Exception:
        # An optimizer that steps whole parameters and fails on their parts needs whole ones, whatever it raises.
        return False
    return _agree([torch.cat(parts).view(whole[0].shape)], whole, values, _EXACT)


def _agree(found: Sequence[Tensor], expected: Sequence[Tensor], values: Sequence[Tensor], tolerance: float) -> bool:
    change = (expected[0] - values[0]).abs().max()
    # A NaN agrees with nothing.
    return bool((found[0] - expected[0]).abs().max() <= tolerance * change)
