"""What one checkpoint holds: of a rank's state the part that is its to write, and what is told about the whole."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ..base.errors import CheckpointError
from ..base.version import __version__
from ..model.adapter_base import base_of, left_out
from ..strategy.contract import StrategyManager
from ..tensors.ownership import Rectangle
from ..tensors.pieces import Sharded
from .agreement import Agreement
from .index import INDEX
from .manifest import FORMAT, OF_ADAPTERS, Manifest
from .optimizer import settings_name, settings_of
from .schedule import note_rates
from .values import RANDOM, flat, plain, random_state


@dataclass
class Content:
    """One rank's.

    Attributes:
        tensors: its part of the state, which still is the state itself: training changes it.
        texts: of its further files, by name.
        manifest: of the whole, without files.
    """

    tensors: list[Tensor]
    texts: dict[str, bytes]
    manifest: Manifest

    def detach(self) -> None:
        """Copy what this rank writes, so that training can go on."""
        self.tensors = [each.to("cpu", copy=True, memory_format=torch.contiguous_format) for each in self.tensors]


def content_of(
    manager: StrategyManager,
    group: dist.ProcessGroup,
    *,
    step: int,
    scheduler: LRScheduler | None,
    extra: Mapping[str, Any] | None,
    with_optimizer: bool = True,
    agreement: Agreement | None = None,
) -> Content:
    """What this rank writes of its state as it is now: who writes what is agreed on. Collective.

    Args:
        agreement: of the checkpoints before it, of the same run.

    Raises:
        CheckpointError: a value is none of JSON; on all ranks.
    """
    world = manager.mesh.world
    if scheduler is not None:
        note_rates(scheduler)
    state = manager.sharded_state()
    if not with_optimizer:
        state = replace(state, optimizer=None)
    parts = manager.model_parts
    known, skipped = base_of(parts), left_out(parts)
    state.model = {name: each for name, each in state.model.items() if name not in skipped}
    tensors = {**flat(state), f"{RANDOM}{dist.get_rank()}": random_state()}
    share = (agreement or Agreement()).share(tensors, state.optimizer, group)
    values = {"scheduler": None if scheduler is None else scheduler.state_dict(), "extra": dict(extra or {})}
    settings, told = world.together(lambda: (settings_of(state.optimizer, share), plain(values)))
    named = {settings_name(world.rank): settings, INDEX: share.index_json}
    return Content(
        [cut(tensors[each.name], each) for each in share.rectangles],
        {name: text for name, text in named.items() if text is not None},
        Manifest(
            step=step,
            strategy=manager.strategy,
            mesh=asdict(manager.mesh.degrees),
            world_size=world.size,
            versions={
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "meshwright": __version__,
            },
            has_optimizer=state.optimizer is not None,
            format=FORMAT if known is None else OF_ADAPTERS,
            base=None if known is None else known.base.told(),
            **told,
        ),
    )


def cut(sharded: Sharded, rectangle: Rectangle) -> Tensor:
    """A rectangle, as a view of the piece that holds it."""
    found = sharded.cut(rectangle.offsets, rectangle.sizes)
    if found is None:
        raise CheckpointError(f"this rank has not the part of {rectangle.name} that it is to write.")
    return found
