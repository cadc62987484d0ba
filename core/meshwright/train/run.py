"""One run on its ranks, from its file to its directory: plan it, train, and leave behind what the user wants."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from ..base.stopping import Stopped, StopSignals
from ..checkpoint import Checkpointer
from ..checkpoint.directory import move_aside
from ..events.run import RunInfo
from ..events.step import StepResult
from ..files.terminal import new_console
from ..launch.open_world import open_world
from ..launch.rank import signs_of_life
from ..memory.keepers import Keepers
from ..mesh.mesh import Mesh
from ..mesh.world import World
from ..model.pretrained import PretrainedWeights
from ..strategy.contract import StrategyManager
from .assembly import begin_with_weights, loop_of
from .checkpoint_section import KeepBestConfig
from .companion import Companion
from .fate import Fate, check_output, is_finished
from .files import METRICS
from .from_memory import copying, keepers_of
from .from_pretrained import check_same_weights, tell
from .loop import Loop, fit
from .observing import observed, run_info
from .output import export, finish, locked, prepare_output, run_tokenizer
from .plan import Plan, headline, plan_run
from .report import say_finished, say_stopped
from .resume import Source, find_source
from .run_file import RunConfig
from .run_model import fetch_model, make_model
from .saved import check_same_key, saved_by
from .startup import Startup

if TYPE_CHECKING:
    from torch.distributed import Store

LINGERING_S = 15.0
"""How long a run waits for the ranks of one before it, whose launcher was killed, to end."""


def run_rank(
    store: Store | None, config: RunConfig, companion: Companion | None = None, startup: Startup | None = None
) -> None:
    """What each rank does."""
    startup = startup or Startup()
    startup.end("start of the ranks")
    if config.threads_per_rank != "auto":
        torch.set_num_threads(config.threads_per_rank)
    with ExitStack() as held:
        timeout_s, watching = config.timeout_s, signs_of_life(config.timeout_s, config.watchdog_s)
        with watching as progress, open_world(config.device, store=store, timeout_s=timeout_s) as world:
            world.progress = progress
            if world.from_first(lambda: is_finished(config)):
                if world.rank == 0:
                    say_finished(config)
                return
            commit = fetch_model(config.model, world)
            startup.end("process group")
            plan = world.together(lambda: plan_run(config, world.size, commit=commit))
            startup.end("checks on the ranks")
            world.raise_together(companion.refusal if companion is not None else None)
            if world.rank == 0:
                lock = locked(Path(config.output_dir), patience_s=min(LINGERING_S, timeout_s / 2))
            world.from_first(lambda: held.enter_context(lock))
            check_same_key(config, world)
            fate = world.from_first(lambda: check_output(config, plan.steps))
            if fate is Fate.DONE:
                # By the run that was waited for.
                return
            signals = held.enter_context(_signals(config, world))
            try:
                results = _train(config, plan, fate, world, signals, companion, startup)
            except Stopped as stopped:
                if world.rank == 0:
                    say_stopped(stopped, steps=plan.steps)
                raise
        # The other ranks are done: what is left needs no collective.
        if world.rank == 0:
            finish(config, plan, results, new_console())


def _signals(config: RunConfig, world: World) -> StopSignals:
    """What ends this run after a step."""
    asked = config.checkpoint.stops_on

    def tell(text: str) -> None:
        new_console(stderr=True).print(text, highlight=False, soft_wrap=True)

    return StopSignals(
        asked.signals,
        exit_code=asked.exit_code,
        grace_s=asked.grace_s,
        # Who has started the ranks here tells what it passes on, and knows it from the SIGTERM that ends their peers.
        tell=tell if world.rank == 0 and multiprocessing.parent_process() is None else None,
    )


def _train(
    config: RunConfig,
    plan: Plan,
    fate: Fate,
    world: World,
    signals: StopSignals,
    companion: Companion | None,
    startup: Startup,
) -> list[StepResult]:
    """Train the model, and write it. Collective."""
    console = new_console()
    keepers = keepers_of(config, world)
    source = find_source(config, fate, plan.identity, world, steps=plan.steps, keepers=keepers)
    mesh = Mesh(plan.degrees, world)
    manager = plan.stack.build(mesh)
    model, weights = world.together(lambda: make_model(config.model, plan.model, plan.model_config, seed=config.seed))
    parameters = sum(each.numel() for each in model.parameters())
    earlier: list[StepResult] = []
    world.from_first(lambda: earlier.extend(_prepare(config, plan, fate, source, console)))
    if world.rank == 0:
        for line in (*headline(config, plan, model, mesh), *(companion.lines() if companion is not None else ())):
            console.print(line, highlight=False, soft_wrap=True)
    if isinstance(opened := getattr(weights, "base", weights), PretrainedWeights):
        check_same_weights(opened, world, plan.model.base)
        tell(opened, world, stacklevel=2)
    startup.end("model")
    with _seen(companion, mesh):
        manager.parallelize(model, weights)
    startup.end("sharding and weights")
    # What a rank needs of them, the manager has; they keep files open, and values that were read last.
    del model, weights, opened
    plan = begin_with_weights(manager, config, plan, source, console)
    run = run_info(manager, config, plan, source, parameters)
    results = _fit(manager, config, plan, source, keepers, earlier, console, signals, companion, run, startup)
    # There may have been nothing left to be done.
    done = results[-1].step if results else plan.steps if source is None else source.step
    export(manager, config, plan, step=done)
    return results


def _seen(companion: Companion | None, mesh: Mesh) -> AbstractContextManager[None]:
    return nullcontext() if companion is None or mesh.rank else companion.seeing()


def _prepare(config: RunConfig, plan: Plan, fate: Fate, source: Source | None, console: Console) -> list[StepResult]:
    """Make the output directory ready, on the first rank; the steps that were done before."""
    directory = Path(config.output_dir)
    earlier = [] if source is None else source.earlier(plan.steps)
    if fate is Fate.GO_ON:
        keeps = source.keeps if source is not None else -1
        aside = move_aside(saved_by(config), after=keeps, copies=[directory / METRICS])
        if aside is not None:
            console.print(
                f"later checkpoints, which this run does not go on from, are now in {aside}; remove them when you like",
                highlight=False,
                soft_wrap=True,
            )
    prepare_output(config, replaces=fate is Fate.REPLACE)
    return earlier


def _fit(
    manager: StrategyManager,
    config: RunConfig,
    plan: Plan,
    source: Source | None,
    keepers: Keepers | None,
    earlier: list[StepResult],
    console: Console,
    signals: StopSignals,
    companion: Companion | None,
    run: RunInfo,
    startup: Startup,
) -> list[StepResult]:
    loop = loop_of(manager, config, plan, source, seen=lambda: _seen(companion, manager.mesh))
    if source is not None and manager.mesh.rank == 0:
        changed = f", with other {', '.join(source.changed)}" if source.changed else ""
        told = f"going on from {source.place}, after step {source.step}{changed}"
        console.print(told, highlight=False, soft_wrap=True)
    loop = replace(loop, signals=signals)
    with (
        copying(manager, config, keepers, loop, run.id) as copied,
        _saving(manager, config, plan, copied) as saving,
        observed(
            manager, config, saving, run, companion=companion, console=console, earlier=earlier, startup=startup
        ) as watched,
    ):
        startup.end("optimizer")
        return earlier + fit(manager, watched)


@contextmanager
def _saving(manager: StrategyManager, config: RunConfig, plan: Plan, loop: Loop) -> Iterator[Loop]:
    """The loop, saving checkpoints if the run asks for them; on disk when the context is left."""
    settings = config.checkpoint
    if not settings.saves:
        yield loop
        return
    best = settings.keep_best or KeepBestConfig()
    with Checkpointer(
        manager,
        saved_by(config),
        keep_last=settings.keep_last,
        keep_every=settings.keep_every,
        keep_best=best.n if settings.keep_best is not None else None,
        best_of=best.set,
        asynchronous=settings.asynchronous,
        on_error=settings.on_error,
        tokenizer=run_tokenizer(config, plan),
    ) as checkpointer:
        yield replace(loop, checkpointer=checkpointer, save_every=settings.every_steps, save_after_s=settings.after_s)
