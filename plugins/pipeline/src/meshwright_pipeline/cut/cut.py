"""How a model is cut: facts that runs of it have shown (`trial_runs`), by which its stages are made (`stage_model`).

Facts alone: nothing here changes a model, or says how many stages there are (`split`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from .boundary import Boundary, Crossing, Dim


@dataclass(frozen=True)
class Cut:
    """How a model is cut.

    Attributes:
        blocks: names, in the order in which they run.
        outside: for each module outside of the blocks that has parameters of its own, after how many blocks it runs;
            nothing for those that do not run.
        outputs: dims and dtype of what those return that return one tensor.
        kept: those without a parameter that trains, such as tables of positions; every stage holds them.
        loose: names of parameters of modules that contain the blocks; the first stage holds them.
        widths: for each block, the length of the tuple that it returns; None where it returns a tensor.
        crossings: what crosses the boundary before each block at which the model is cut, by the block's index.
        in_place: see `Boundary`.
    """

    blocks: tuple[str, ...]
    outside: Mapping[str, frozenset[int]]
    outputs: Mapping[str, tuple[tuple[Dim, ...], torch.dtype]]
    kept: frozenset[str]
    loose: tuple[str, ...]
    widths: Mapping[str, int | None]
    crossings: Mapping[int, tuple[Crossing, ...]] = field(default_factory=dict)
    in_place: bool = False

    def runs_in(self, module: str, stage: range) -> bool:
        """Whether a stage runs a module outside of the blocks on real values, and so must hold it."""
        if module in self.kept:
            return True
        positions = self.outside[module] or {0}
        return any(stage.start < each <= stage.stop or each == stage.start == 0 for each in positions)

    def boundary(self, stage: range) -> Boundary:
        """For a stage with these blocks."""
        entering, leaving = self.crossings.get(stage.start, ()), self.crossings.get(stage.stop, ())
        return Boundary(entering, leaving, in_place=self.in_place)
