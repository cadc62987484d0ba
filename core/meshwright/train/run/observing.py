"""The observers and extensions of a run file's run on each rank, and what is left behind by a failed run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias

from rich.console import Console

from ...base.errors import ConfigError, MeshwrightError
from ...events.run import RunInfo
from ...events.step import StepResult
from ...mesh.mesh import Mesh
from ...profile.faults import FaultFiles
from ...profile.recording import Recorder, Sampler
from ...strategy.contract import StrategyManager
from ...strategy.registry import get_registry
from ..loop.extension import Around, Flops, LoopExtension
from ..loop.options import Loop
from .curve import Curve, draw_metrics
from .journal import HangFiles, Journal, id_of, note
from .rank_log import RankLog, timeline_logs
from .report import Reporter, show
from .run_directory import RunDirectory
from .run_file import RunConfig, as_plain
from .startup import Startup, StartupReport
from .stragglers import Stragglers
from .trackers import chosen, tracking

if TYPE_CHECKING:
    from .preflight import Plan
    from .resume import Source


class Companion(Protocol):
    """What monitors a run: it knows beforehand what the run takes, and looks at a step while it happens.

    It is made before the process group, by the launching process or by the first rank, and is pickled for the ranks
    that the former starts. It is a plugin object, too: its hooks are called on the first rank.
    """

    @property
    def refusal(self) -> MeshwrightError | None:
        """Why the run must not start."""

    @property
    def flops_per_token(self) -> float | None:
        """See `Flops.per_token`; the first rank's counts."""

    @property
    def peak_flops(self) -> float | None:
        """See `Flops.peak`; the first rank's counts."""

    def lines(self) -> Sequence[str]:
        """Return what is printed before the run begins."""

    def seeing(self) -> AbstractContextManager[None]:
        """Return the context in which the first rank makes its part of the model and the optimizer."""

    def around(self, manager: StrategyManager) -> Callable[[int], AbstractContextManager[None]]:
        """Return the context of each step on the first rank, counted from 0 in this attempt."""


Accompany: TypeAlias = "Callable[[RunConfig, int], Companion | None]"
"""Makes the companion of a run on a number of ranks. None where the run is not valid: the run itself finds out why."""


def run_info(
    manager: StrategyManager, config: RunConfig, plan: Plan, source: Source | None, parameters: int
) -> RunInfo:
    """Return how observers see the run. Collective."""
    mesh, directory = manager.mesh, RunDirectory.of(config)
    return RunInfo(
        id=mesh.world.from_first(lambda: id_of(directory.events)),
        name=directory.path.name,
        strategy=str(plan.stack),
        mesh=str(plan.degrees),
        world_size=mesh.world.size,
        rank=mesh.rank,
        start=0 if source is None else source.step,
        steps=plan.steps,
        parameters=parameters,
        device=mesh.device.type,
        directory=directory.path,
        config=as_plain(config),
    )


@contextmanager
def observed(
    manager: StrategyManager,
    config: RunConfig,
    loop: Loop,
    run: RunInfo,
    *,
    companion: Companion | None,
    console: Console,
    earlier: Sequence[StepResult],
    startup: Startup,
) -> Iterator[Loop]:
    """Return the loop with its extensions, and register all observers. Collective.

    Args:
        companion: of the first rank.
        earlier: steps of the run before it was interrupted.

    Raises:
        ConfigError: a tracker cannot be started; on all ranks.
    """
    mesh, directory, observing = manager.mesh, RunDirectory.of(config), get_registry().observing
    metrics = config.metrics
    mesh.world.progress.witness = HangFiles(directory, mesh.rank)
    with ExitStack() as held:
        held.enter_context(observing(FaultFiles(directory.path, mesh.rank)))
        extensions = [*loop.extensions, *_profiling(config, directory, run, mesh, loop.start, held)]
        if metrics.ranks:
            held.enter_context(observing(RankLog(directory.rank_file(mesh.rank))))
        held.enter_context(observing(*timeline_logs(manager, directory.path, metrics.timeline_every)))
        # On the first rank alone, but errors are raised on all.
        mesh.world.from_first(lambda: held.enter_context(tracking(chosen(config.trackers), run)))
        if mesh.rank == 0:
            reporter = Reporter(
                directory.metrics,
                log_every=config.log_every,
                console=console,
                earlier=earlier,
                on_error=config.checkpoint.on_error,
            )
            held.enter_context(reporter)
            curve = Curve(directory.metrics, directory.curve, of_tokens=config.objective is None)
            held.enter_context(curve)
            journal = Journal(directory.events)
            timings = StartupReport(startup, note=journal.note, show=partial(show, console=console))
            held.enter_context(observing(reporter, curve, journal, timings))
            if companion is not None:
                held.enter_context(observing(companion))
                extensions.append(Around(companion.around(manager)))
        if metrics.stragglers is not None:
            mesh.world.progress.steps = deque(maxlen=metrics.stragglers.over)
            extensions.append(Stragglers(metrics.stragglers, mesh.world.progress))
        flops = mesh.world.from_first(
            lambda: (None, None) if companion is None else (companion.flops_per_token, companion.peak_flops)
        )
        extensions.append(Flops(*flops))
        yield replace(loop, run=run, norms_every=metrics.norms_every, extensions=extensions)


def _profiling(
    config: RunConfig, directory: RunDirectory, run: RunInfo, mesh: Mesh, start: int, held: ExitStack
) -> list[LoopExtension]:
    """Return what profiles steps of this rank, and samples exposed communication."""
    found: list[LoopExtension] = []
    asked, every = config.profile, config.metrics.communication_every
    if asked is not None and asked.takes(mesh.rank):
        about = {"run": run.name, "strategy": run.strategy, "mesh": run.mesh, "world_size": run.world_size}
        recorder = Recorder(asked, directory.path, rank=mesh.rank, device=mesh.device, about=about, start=start)
        found.append(Around(held.enter_context(recorder).around))
    if every is not None and mesh.rank == 0:
        sampler = Sampler(every, mesh.device)
        found.append(Around(sampler.around, sampler.measured))
    return found


def note_failure(config: RunConfig, code: int) -> None:
    """Write down what the first rank may not have come to: the exit code, and the picture of the losses."""
    directory = RunDirectory.of(config)
    # What is wrong with the input, including another run that holds the directory, has left it as it was.
    if code in (0, ConfigError.exit_code, config.checkpoint.stops_on.exit_code):
        return
    if not directory.metrics.exists() or directory.summary.exists():
        return
    note(directory.events, "exit", code=code)
    draw_metrics(directory.metrics, directory.curve, of_tokens=config.objective is None)
