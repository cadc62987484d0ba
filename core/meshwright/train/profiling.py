"""What looks at the steps of a run: profiles, samples of exposed communication, and what faults leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from ..events.run import RunInfo
from ..mesh.mesh import Mesh
from ..profile.faults import FaultFiles
from ..profile.recording import Recorder
from ..profile.sampling import Sampler, around_both
from ..strategy.registry import get_registry
from .loop_options import Loop
from .run_file import RunConfig


@contextmanager
def looked_at(config: RunConfig, loop: Loop, run: RunInfo, mesh: Mesh) -> Iterator[Loop]:
    """The loop with what this rank's steps happen within, if anything; what faults leave behind is always written."""
    directory, asked, every = Path(config.output_dir), config.profile, config.metrics.communication_every
    with ExitStack() as held:
        held.enter_context(get_registry().observing(FaultFiles(directory, mesh.rank)))
        if every is not None and mesh.rank == 0:
            sampler = Sampler(every, mesh.device)
            loop = replace(loop, around=sampler.around, measured=sampler.measured)
        if asked is not None and asked.takes(mesh.rank):
            about = {"run": run.name, "strategy": run.strategy, "mesh": run.mesh, "world_size": run.world_size}
            recorder = held.enter_context(
                Recorder(asked, directory, rank=mesh.rank, device=mesh.device, about=about, start=loop.start)
            )
            loop = replace(loop, around=around_both(recorder.around, loop.around))
        yield loop
