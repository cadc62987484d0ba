"""What the modules of a model give in one step, as far as it is whole on a rank, in a file of each rank.

[Note: whole outputs] Ranks of data have rows of their own, which lie one behind the other. Along `tp` an output is
whole on each rank, or a part of the positions, or a part of the features, which is left out: what a layer gives that is
divided so is seen in what comes behind it. Along `cp` positions are dealt out in another order, and nothing is noted.

Shapes: N rows of a step, S positions, and what the module makes of each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..base.types import Batch
from ..strategy.contract import StrategyManager
from .peers import PLAIN

MOST_BYTES = 1 << 30
"""Of outputs on one rank; larger ones are not kept."""


class Outputs:
    """Notes what each module gives in training, on this rank; a context manager around one step.

    Args:
        manager: with its model.
    """

    def __init__(self, manager: StrategyManager) -> None:
        self._mesh, self._parts = manager.mesh, tuple(manager.model_parts)
        # A stage of a pipeline has stand-ins where others have modules.
        in_stages = self._mesh.degrees.pp > 1
        self._names = {
            id(module): name
            for part in self._parts
            for name, module in part.named_modules()
            if name and not (in_stages and next(module.parameters(), None) is None)
        }
        self._found: dict[str, list[Tensor]] = defaultdict(list)
        self._calls = dict.fromkeys(range(len(self._parts)), 0)
        self._bytes = 0
        self._handles: list[Any] = []
        self.reason = "positions are dealt out over the ranks of cp" if self._mesh.degrees.cp > 1 else ""

    def __enter__(self) -> Outputs:
        for number, part in enumerate(self._parts if not self.reason else ()):
            self._handles.append(part.register_forward_pre_hook(self._counting(number)))
            for module in part.modules():
                if id(module) in self._names:
                    self._handles.append(module.register_forward_hook(self._noting(number)))
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _counting(self, number: int) -> Any:
        def count(module: nn.Module, *_: Any) -> None:
            self._calls[number] += module.training

        return count

    def _noting(self, number: int) -> Any:
        def note(module: nn.Module, _: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple | list) and output else output
            found = self._found[self._names[id(module)]]
            # What is recomputed has been noted.
            if not module.training or len(found) >= self._calls[number] or type(first) not in PLAIN:
                return
            if isinstance(first, DTensor):
                first = first.to_local()
            self._bytes += first.nbytes
            if self._bytes > MOST_BYTES:
                self.reason = f"outputs take more than {MOST_BYTES >> 20} MiB on a rank"
                self._found.clear()
                return
            found.append(first.detach().to("cpu", copy=True))

        return note

    def save(self, directory: Path, drawn: Sequence[Batch]) -> None:
        """Leave them in a file of this rank, with the rows that they are of.

        Args:
            drawn: this rank's microbatches of the step.
        """
        mesh = self._mesh
        rows = [row for batch in drawn for row in _rows(batch)]
        outputs = {} if self.reason else {name: _joined(each, len(rows)) for name, each in self._found.items()}
        told = {
            "data_rank": mesh.data_rank,
            "tp": mesh.axis_rank("tp"),
            "pp": mesh.axis_rank("pp"),
            "reason": self.reason,
            "rows": rows,
            "outputs": {name: each for name, each in outputs.items() if each is not None},
        }
        torch.save(told, directory / f"outputs-{mesh.rank}.pt")


def _rows(batch: Batch) -> list[Tensor]:
    return [torch.stack([ids, labels]) for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)]


def _joined(parts: Sequence[Tensor], count: int) -> list[Tensor] | None:
    """Row by row; rows of one step may have several lengths. What a pipeline has filled up with is at the end."""
    if not parts or any(each.dim() < 2 or not each.is_floating_point() for each in parts):
        return None
    rows = [row for part in parts for row in part]
    return rows[:count] if len(rows) >= count else None
