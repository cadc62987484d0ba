"""Record which parameters a step uses, on any rank.

FSDP reduces the gradients of a unit as one buffer. Where ranks use different parameters (experts chosen by the data), a
missing gradient must count as zero, or gradients of different parameters are added up. A parameter that no rank uses
must end up without gradient, or weight decay and momentum would move it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from meshwright.plugin import Findings


class Usage:
    """Records which gathered parameters of a sharded model get a gradient.

    Args:
        modules: those of units, each under its first name.
    """

    def __init__(self, model: nn.Module, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self._named = dict(model.named_parameters())
        # Gathered ones are plain tensors, or DTensors on the one axis that is not gathered: `tp`, or `ep`.
        self._axes = {name: p.device_mesh.ndim for name, p in self._named.items() if isinstance(p, DTensor)}
        self._used: set[str] = set()
        self._watched: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        for name, unit in modules:
            # After FSDP's own hook, which puts the gathered parameters in place.
            unit.register_forward_pre_hook(partial(self._watch, f"{name}." if name else ""))

    def _watch(self, prefix: str, unit: nn.Module, args: Any) -> None:
        # FSDP keeps the objects of gathered parameters. Within `unshard` others may be in their places, so names do not
        # identify them.
        for name, parameter in unit.named_parameters():
            fqn = prefix + name
            if self._is_sharded(fqn, parameter) or parameter in self._watched or not parameter.requires_grad:
                continue
            self._watched[parameter] = None
            parameter.register_post_accumulate_grad_hook(partial(self._note, fqn))

    def _note(self, fqn: str, parameter: nn.Parameter) -> None:
        # torch calls this also where an operation has given no gradient.
        if parameter.grad is not None:
            self._used.add(fqn)

    def _is_sharded(self, fqn: str, parameter: nn.Parameter) -> bool:
        if not isinstance(parameter, DTensor):
            return False
        axes = parameter.device_mesh.ndim
        # Another name of a parameter is watched by its first.
        return axes == self._axes.get(fqn, axes)

    def findings(self) -> Findings:
        """Return which parameters got a gradient on this rank, after the backwards of a step."""
        trained = {name: parameter for name, parameter in self._named.items() if parameter.requires_grad}
        used = [name in self._used for name in trained]
        self._used.clear()
        return Findings([[parameter] for parameter in trained.values()], used)
