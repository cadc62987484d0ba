"""Whole parameters and gradients of a step, in files, under any strategy.

[Note: a gradient as state] What an optimizer steps is divided over ranks as its state is, and a strategy tells of state
by name, in pieces. So a gradient that is put beside that state for a moment is told as pieces of a whole, under the
names of the unwrapped model, whatever the strategy has made of parameters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..base.types import OptimizerFactory
from ..optim.build import ConfiguredOptimizer
from ..optim.groups import Trained
from ..optim.optimizers import members_of
from ..strategy.contract import StrategyManager
from ..tensors.pieces import Sharded
from ..tensors.whole_parameters import whole_parameters

BUCKET_BYTES = 1 << 25
NAMES = "names.json"
_KEY = "meshwright_gradient"


class NotedOptimizers(ConfiguredOptimizer):
    """The factory of a run file's optimizer, which knows what it has made.

    Attributes:
        made: one for each part of the model on this rank.
    """

    made: list[Optimizer]

    def for_model(self, trained: Mapping[str, Trained]) -> OptimizerFactory:
        make, self.made = super().for_model(trained), getattr(self, "made", [])

        def factory(named: object) -> Optimizer:
            self.made.append(make(named))  # type: ignore[arg-type]
            return self.made[-1]

        return factory


def save_gradients(manager: StrategyManager, optimizers: NotedOptimizers, directory: Path) -> None:
    """The gradients that the optimizers are about to step with, zeros where a parameter has none. Collective."""
    members = [member for each in optimizers.made for member in members_of(each)]
    stepped = [(each, p) for each in members for group in each.param_groups for p in group["params"]]
    for optimizer, parameter in stepped:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.state[parameter][_KEY] = gradient.detach()
    try:
        state = manager.sharded_state().optimizer
        pieces = {} if state is None else {name: each[_KEY] for name, each in state.tensors.items() if _KEY in each}
    finally:
        for optimizer, parameter in stepped:
            del optimizer.state[parameter][_KEY]
            if not optimizer.state[parameter]:
                del optimizer.state[parameter]
    held: Mapping[str, Sharded | None] = pieces
    _save(whole_parameters(lambda: held, manager.mesh, bucket_bytes=BUCKET_BYTES, dtype=None), manager, directory)


def save_parameters(manager: StrategyManager, directory: Path) -> None:
    """All parameters, as the model computes with them. Collective."""
    _save(manager.iter_parameters(bucket_bytes=BUCKET_BYTES), manager, directory)


def _save(tensors: Iterator[tuple[str, Tensor]], manager: StrategyManager, directory: Path) -> None:
    """A file for each, on the first rank; one after the other, so that none but that is held whole."""
    names: list[str] = []
    for name, tensor in tensors:
        if manager.mesh.rank == 0:
            directory.mkdir(exist_ok=True)
            torch.save(tensor.cpu(), directory / f"{len(names)}.pt")
        names.append(name)
    if manager.mesh.rank == 0:
        directory.mkdir(exist_ok=True)
        (directory / NAMES).write_text(json.dumps(names), encoding="utf-8")


def saved(directory: Path) -> Iterator[tuple[str, Path]]:
    """Names in the order of the model, and where each tensor is."""
    for number, name in enumerate(json.loads((directory / NAMES).read_text(encoding="utf-8"))):
        yield name, directory / f"{number}.pt"


def load(path: Path) -> Tensor:
    tensor: Tensor = torch.load(path, weights_only=True, mmap=True)
    return tensor
