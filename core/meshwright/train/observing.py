"""Who observes a run of a run file, on each of its ranks, and what is left behind of one that has failed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from ..base.errors import ConfigError
from ..events.run import RunInfo
from ..events.step import StepResult
from ..profile.sampling import around_both
from ..strategy.contract import StrategyManager
from ..strategy.registry import get_registry
from .companion import Companion
from .curve import Curve, draw_metrics
from .files import CURVE, METRICS, SUMMARY
from .hangs import HangFiles
from .journal import Journal, id_of, note
from .loop_options import Loop
from .plan import Plan
from .profiling import looked_at
from .rank_log import RankLog
from .report import Reporter
from .resume import Source
from .run_file import RunConfig, as_plain
from .startup import Startup, StartupReport
from .stragglers import Stragglers
from .timeline_log import timeline_logs
from .trackers import chosen, tracking


def run_info(
    manager: StrategyManager, config: RunConfig, plan: Plan, source: Source | None, parameters: int
) -> RunInfo:
    """What observers are told of the run. Collective."""
    mesh, directory = manager.mesh, Path(config.output_dir)
    return RunInfo(
        id=mesh.world.from_first(lambda: id_of(directory)),
        name=directory.name,
        strategy=str(plan.stack),
        mesh=str(plan.degrees),
        world_size=mesh.world.size,
        rank=mesh.rank,
        start=0 if source is None else source.step,
        steps=plan.steps,
        parameters=parameters,
        device=mesh.device.type,
        directory=directory,
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
    """The loop, with all that observes it registered. Collective.

    Args:
        companion: of the first rank.
        console: where the first rank reports.
        earlier: steps of the run before it was interrupted.
        startup: what it took to come here.

    Raises:
        ConfigError: a tracker cannot be started; on all ranks.
    """
    mesh, directory, observing = manager.mesh, Path(config.output_dir), get_registry().observing
    mesh.world.progress.witness = HangFiles(directory, mesh.rank)
    per_token, peak = mesh.world.from_first(lambda: _flops(companion))
    loop = replace(loop, run=run, norms_every=config.metrics.norms_every, flops_per_token=per_token, peak_flops=peak)
    if (named := config.metrics.stragglers) is not None:
        mesh.world.progress.steps = deque(maxlen=named.over)
        loop = replace(loop, stragglers=Stragglers(named, mesh.world.progress))
    with ExitStack() as held:
        loop = held.enter_context(looked_at(config, loop, run, mesh))
        if config.metrics.ranks:
            held.enter_context(observing(RankLog(directory, mesh.rank)))
        held.enter_context(observing(*timeline_logs(manager, directory, config.metrics.timeline_every)))
        # On the first rank alone, but what is wrong with one is told on all.
        mesh.world.from_first(lambda: held.enter_context(tracking(chosen(config.trackers), run)))
        if mesh.rank == 0:
            metrics = directory / METRICS
            reporter = held.enter_context(
                Reporter(
                    metrics,
                    log_every=config.log_every,
                    console=console,
                    earlier=earlier,
                    on_error=config.checkpoint.on_error,
                )
            )
            curve = held.enter_context(Curve(metrics, directory / CURVE, of_tokens=config.objective is None))
            journal = Journal(directory)
            timings = StartupReport(
                startup, note=journal.note, show=partial(console.print, highlight=False, soft_wrap=True)
            )
            held.enter_context(observing(reporter, curve, journal, timings))
            if companion is not None:
                held.enter_context(observing(companion))
                loop = replace(loop, around=around_both(loop.around, companion.around(manager)))
        yield loop


def _flops(companion: Companion | None) -> tuple[float | None, float | None]:
    """What the first rank knows of FLOPs: `flops_per_token` and `peak_flops` of the loop."""
    return (None, None) if companion is None else (companion.flops_per_token, companion.peak_flops)


def note_failure(config: RunConfig, code: int) -> None:
    """Leave behind what the first rank may not have come to: which code has ended it, and the picture of its losses."""
    directory = Path(config.output_dir)
    # What is wrong with the input, another run that holds the directory included, has left it as it was.
    if code in (0, ConfigError.exit_code, config.checkpoint.stops_on.exit_code):
        return
    if not (directory / METRICS).exists() or (directory / SUMMARY).exists():
        return
    note(directory, "exit", code=code)
    draw_metrics(directory / METRICS, directory / CURVE, of_tokens=config.objective is None)
