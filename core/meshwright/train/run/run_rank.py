"""One run on its ranks, from its file to its directory: check it, train, and write what the user wants."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from ...base.stopping import Stopped, StopSignals
from ...checkpoint import Checkpointer
from ...checkpoint.directory import move_aside
from ...events.step import StepResult
from ...files.parsing import as_yaml
from ...files.terminal import new_console
from ...launch.open_world import open_world
from ...launch.rank import signs_of_life
from ...mesh.mesh import Mesh
from ...mesh.world import World
from ...model.pretrained import PretrainedWeights
from ...strategy.contract import StrategyManager
from ..from_pretrained import check_same_weights, tell
from ..loop.fit import fit
from ..loop.options import Loop
from .assembly import begin_with_weights, loop_of
from .checkpoint_section import KeepBestConfig
from .fate import Fate, check_output, is_finished
from .from_memory import MemoryCopies
from .observing import Companion, observed, run_info
from .output import export, finish
from .preflight import Plan, headline, plan_run
from .report import say_finished, say_stopped, show
from .resume import Source, find_source
from .run_directory import RunDirectory
from .run_file import RunConfig, as_plain
from .run_model import fetch_model, make_model
from .startup import Startup

if TYPE_CHECKING:
    from torch.distributed import Store

LINGERING_S = 15.0
"""How long a run waits for the ranks of one before it, whose launcher was killed, to end."""


def run_rank(
    store: Store | None, config: RunConfig, companion: Companion | None = None, startup: Startup | None = None
) -> None:
    """Run a rank."""
    startup = startup or Startup()
    startup.end("start of the ranks")
    if config.threads_per_rank != "auto":
        torch.set_num_threads(config.threads_per_rank)
    directory = RunDirectory.of(config)
    with ExitStack() as held:
        timeout_s, watching = config.timeout_s, signs_of_life(config.timeout_s, config.watchdog_s)
        with watching as progress, open_world(config.device, store=store, timeout_s=timeout_s) as world:
            world.progress = progress
            if world.from_first(lambda: is_finished(config)):
                if world.rank == 0:
                    say_finished(directory)
                return
            commit = fetch_model(config.model, world)
            startup.end("process group")
            plan = world.together(lambda: plan_run(config, world.size, commit=commit))
            startup.end("checks on the ranks")
            world.raise_together(companion.refusal if companion is not None else None)
            lock = directory.locked(patience_s=min(LINGERING_S, timeout_s / 2))
            world.from_first(lambda: held.enter_context(lock))
            directory.check_same_key(world)
            fate = world.from_first(lambda: check_output(config, plan.steps))
            if fate is Fate.DONE:
                # By the run that was waited for.
                return
            signals = held.enter_context(_signals(config, world))
            try:
                results = _Run(config, directory, plan, fate, world, signals, companion, startup).train()
            except Stopped as stopped:
                if world.rank == 0:
                    say_stopped(stopped, steps=plan.steps)
                raise
        # The other ranks are done: what is left needs no collective.
        if world.rank == 0:
            finish(config, plan, results, new_console())


def _signals(config: RunConfig, world: World) -> StopSignals:
    """Return the signals that end this run after a step."""
    asked = config.checkpoint.stops_on
    # The process that has started the ranks here reports what it passes on, and the SIGTERM that ends their peers.
    reports = world.rank == 0 and multiprocessing.parent_process() is None
    tell = partial(show, console=new_console(stderr=True)) if reports else None
    return StopSignals(asked.signals, exit_code=asked.exit_code, grace_s=asked.grace_s, tell=tell)


@dataclass
class _Run:
    """A run that may begin, on one rank."""

    config: RunConfig
    directory: RunDirectory
    plan: Plan
    fate: Fate
    world: World
    signals: StopSignals
    companion: Companion | None
    startup: Startup
    console: Console = field(default_factory=new_console)

    def train(self) -> list[StepResult]:
        """Train the model, and write it. Collective."""
        config, plan, world = self.config, self.plan, self.world
        copies = MemoryCopies(self.directory, world)
        source = find_source(config, self.fate, plan.identity, world, steps=plan.steps, copies=copies)
        manager = plan.stack.build(Mesh(plan.degrees, world))
        model, weights = world.together(
            lambda: make_model(config.model, plan.model, plan.model_config, seed=config.seed)
        )
        parameters = sum(each.numel() for each in model.parameters())
        earlier: list[StepResult] = []
        world.from_first(lambda: earlier.extend(self._prepare(source)))
        if world.rank == 0:
            lines = self.companion.lines() if self.companion is not None else ()
            for line in (*headline(config, plan, model, manager.mesh), *lines):
                show(line, self.console)
        if isinstance(opened := getattr(weights, "base", weights), PretrainedWeights):
            check_same_weights(opened, world, plan.model.base)
            tell(opened, world, stacklevel=2)
        self.startup.end("model")
        with self._seen():
            manager.parallelize(model, weights)
        self.startup.end("sharding and weights")
        # The manager has what it needs of them; they keep files open, and values that were read last.
        del model, weights, opened
        self.plan = plan = begin_with_weights(manager, config, plan, source, self.console)
        results = self._fit(manager, source, copies, earlier, parameters)
        # There may have been nothing left to be done.
        done = results[-1].step if results else plan.steps if source is None else source.step
        export(manager, config, plan, step=done)
        return results

    def _seen(self) -> AbstractContextManager[None]:
        return nullcontext() if self.companion is None or self.world.rank else self.companion.seeing()

    def _prepare(self, source: Source | None) -> list[StepResult]:
        """Prepare the output directory, on the first rank, and return the steps that were done before."""
        directory = self.directory
        earlier = [] if source is None else source.earlier(self.plan.steps)
        if self.fate is Fate.GO_ON:
            keeps = source.keeps if source is not None else -1
            aside = move_aside(directory.checkpoints, after=keeps, copies=[directory.metrics])
            if aside is not None:
                show(
                    f"later checkpoints, which this run does not go on from, are now in {aside}; remove them when you "
                    f"like",
                    self.console,
                )
        directory.prepare(as_yaml(as_plain(self.config)), replaces=self.fate is Fate.REPLACE)
        return earlier

    def _fit(
        self,
        manager: StrategyManager,
        source: Source | None,
        copies: MemoryCopies,
        earlier: list[StepResult],
        parameters: int,
    ) -> list[StepResult]:
        config = self.config
        run = run_info(manager, config, self.plan, source, parameters)
        loop = replace(loop_of(manager, config, self.plan, source, seen=self._seen), signals=self.signals)
        if source is not None and self.world.rank == 0:
            changed = f", with other {', '.join(source.changed)}" if source.changed else ""
            show(f"going on from {source.place}, after step {source.step}{changed}", self.console)
        with (
            copies.copying(manager, loop, run.id) as copied,
            self._saving(manager, copied) as saving,
            observed(
                manager,
                config,
                saving,
                run,
                companion=self.companion,
                console=self.console,
                earlier=earlier,
                startup=self.startup,
            ) as watched,
        ):
            self.startup.end("optimizer")
            return earlier + fit(manager, watched)

    @contextmanager
    def _saving(self, manager: StrategyManager, loop: Loop) -> Iterator[Loop]:
        """Return the loop, saving checkpoints if the run asks for them; on disk when the context is left."""
        settings = self.config.checkpoint
        if not settings.saves:
            yield loop
            return
        best = settings.keep_best or KeepBestConfig()
        with Checkpointer(
            manager,
            self.directory.checkpoints,
            keep_last=settings.keep_last,
            keep_every=settings.keep_every,
            keep_best=best.n if settings.keep_best is not None else None,
            best_of=best.set,
            asynchronous=settings.asynchronous,
            on_error=settings.on_error,
            tokenizer=self.plan.tokenizer(self.config.data),
        ) as checkpointer:
            every, after_s = settings.every_steps, settings.after_s
            yield replace(loop, checkpointer=checkpointer, save_every=every, save_after_s=after_s)
