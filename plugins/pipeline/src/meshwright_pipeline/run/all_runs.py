"""All microbatches of a step, in as many runs of the schedule as they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from meshwright.base.types import Batch
from meshwright.mesh.mesh import Mesh

from .action_times import TimelineRecorder
from .actions import Run, Stage
from .orders import Orders


def run_all(
    stages: Mapping[int, Stage],
    orders: Orders,
    mesh: Mesh,
    batches: Sequence[Batch],
    *,
    train: bool,
    recorder: TimelineRecorder,
) -> list[Tensor]:
    """The losses of the microbatches, on the last stage's rank.

    Args:
        stages: of this rank, by their index.
        batches: the microbatches, on this rank's device.
        train: whether there is a backward; the times of such a step are recorded where they are asked for.
    """
    length = orders.run_length(len(batches))
    losses: list[Tensor] = []
    times = recorder.begin(orders, length=length, runs=len(batches) // length) if train else None
    for start in range(0, len(batches), length):
        if times is not None:
            times.begin_run(start)
        moved = mesh.world.progress.move
        run = Run(stages, orders.placement, mesh.group("pp"), mesh.device, train=train, moved=moved, times=times)
        is_last = start + length >= len(batches)
        run(orders.actions(length, train=train), batches[start : start + length], is_last=is_last)
        losses += [run.losses[index] for index in sorted(run.losses)]
    return losses
