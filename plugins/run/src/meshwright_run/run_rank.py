"""One run on its ranks, from its file to its directory: check it, train, observe it, and write what the user wants."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from rich.console import Console

from meshwright.plugin import (
    Checkpointer,
    ConfigError,
    FlopsReporter,
    Loop,
    LoopExtension,
    Mesh,
    MeshwrightError,
    PretrainedWeights,
    RunInfo,
    StepContext,
    StepResult,
    Stopped,
    StopSignals,
    StrategyManager,
    World,
    archive_after,
    check_same_weights,
    create_console,
    fit,
    get_registry,
    open_world,
    to_yaml,
    warn_about_weights,
)

from .launch.rank_process import heartbeat
from .loop_setup import build_loop, load_initial_weights
from .metrics_report import LossCurvePlotter, MetricsReporter, plot_metrics, print_finished, print_stopped, print_text
from .observers import StartupReporter, StartupTimer, StragglerDetector, attach_trackers, resolve_trackers
from .output import export_model, write_results
from .preflight import PreparedRun, build_run_model, describe_run, download_model, preflight
from .profile.recorder import CommunicationSampler, FaultFileWriter, StepProfiler
from .resume import ResumePoint, RunReplicas, find_resume_point
from .run_action import RunAction, choose_run_action, is_finished
from .run_directory import RunDirectory
from .run_file import RunConfig, to_redacted_dict
from .run_logs import EventLog, HangFileReporter, RankLog, build_timeline_logs, get_run_id, log_event
from .run_sections import KeepBestConfig

if TYPE_CHECKING:
    from torch.distributed import Store

PREVIOUS_RUN_WAIT_S = 15.0
"""How long a run waits for the ranks of one before it, whose launcher was killed, to end."""


class RunMonitor(Protocol):
    """What monitors a run: it knows beforehand what the run takes, and looks at a step while it happens.

    The launching process or the first rank makes it before the process group; it is pickled for ranks. Its hooks are
    called on the first rank, whose `flops_per_token` and `peak_flops` count.
    """

    @property
    def refusal_error(self) -> MeshwrightError | None:
        """Why the run must not start."""

    @property
    def flops_per_token(self) -> float | None: ...

    @property
    def peak_flops(self) -> float | None: ...

    def startup_lines(self) -> Sequence[str]:
        """Return what is printed before the run begins."""

    def observe_setup(self) -> AbstractContextManager[None]:
        """Return the context in which the first rank makes its part of the model and the optimizer."""

    def step_contexts(self, manager: StrategyManager) -> Callable[[int], AbstractContextManager[None]]:
        """Return the context of each step on the first rank, counted from 0 in this attempt."""


def run_rank(
    store: Store | None, config: RunConfig, monitor: RunMonitor | None = None, startup: StartupTimer | None = None
) -> None:
    startup = startup or StartupTimer()
    startup.end_phase("start of the ranks")
    if config.threads_per_rank != "auto":
        torch.set_num_threads(config.threads_per_rank)
    directory, timeout_s = RunDirectory.from_config(config), config.timeout_s
    with ExitStack() as held:
        with (
            heartbeat(timeout_s, config.watchdog_s) as progress,
            open_world(config.device, store=store, timeout_s=timeout_s) as world,
        ):
            world.progress = progress
            if world.run_on_first_rank(lambda: is_finished(config)):
                if world.rank == 0:
                    print_finished(directory)
                return
            commit = download_model(config.model, world)
            startup.end_phase("process group")
            plan = world.run_on_all_ranks(lambda: preflight(config, world.size, commit=commit))
            startup.end_phase("checks on the ranks")
            world.raise_on_all_ranks(monitor.refusal_error if monitor is not None else None)
            lock = directory.lock(timeout_s=min(PREVIOUS_RUN_WAIT_S, timeout_s / 2))
            world.run_on_first_rank(lambda: held.enter_context(lock))
            directory.check_same_key(world)
            fate = world.run_on_first_rank(lambda: choose_run_action(config, plan.num_steps))
            if fate is RunAction.FINISHED:
                # By the run that was waited for.
                return
            asked = config.checkpoint.stop_config
            # The process that has started the ranks here reports what it passes on, and the SIGTERM of their peers.
            reports = world.rank == 0 and multiprocessing.parent_process() is None
            said = partial(print_text, console=create_console(stderr=True)) if reports else None
            signals = StopSignals(asked.signals, exit_code=asked.exit_code, grace_s=asked.grace_s, report=said)
            held.enter_context(signals)
            try:
                results = _RankRun(directory, plan, fate, world, signals, monitor, startup).train()
            except Stopped as stopped:
                if world.rank == 0:
                    print_stopped(stopped, num_steps=plan.num_steps)
                raise
        # The other ranks are done: what is left needs no collective.
        if world.rank == 0:
            write_results(plan, results, create_console())


@dataclass
class _RankRun:
    """A run that may begin, on one rank."""

    directory: RunDirectory
    prepared: PreparedRun
    action: RunAction
    world: World
    signals: StopSignals
    monitor: RunMonitor | None
    startup: StartupTimer
    console: Console = field(default_factory=create_console)

    def train(self) -> list[StepResult]:
        """Train the model, and write it. Collective."""
        plan, world = self.prepared, self.world
        config = plan.config
        copies = RunReplicas(self.directory, world)
        source = find_resume_point(config, self.action, plan.identity, world, num_steps=plan.num_steps, replicas=copies)
        manager = plan.strategy_stack.build(Mesh(plan.degrees, world))
        model, weights = world.run_on_all_ranks(
            lambda: build_run_model(config.model, plan.model, plan.model_config, seed=config.seed)
        )
        parameters = sum(each.numel() for each in model.parameters())
        earlier: list[StepResult] = []
        world.run_on_first_rank(lambda: earlier.extend(self._prepare_directory(source)))
        if world.rank == 0:
            lines = self.monitor.startup_lines() if self.monitor is not None else ()
            for line in (*describe_run(plan, model, manager.mesh), *lines):
                print_text(line, self.console)
        if isinstance(opened := getattr(weights, "base", weights), PretrainedWeights):
            check_same_weights(opened, world, plan.model.base)
            warn_about_weights(opened, world, stacklevel=2)
        self.startup.end_phase("model")
        with self._observe_setup():
            manager.parallelize(model, weights)
        self.startup.end_phase("sharding and weights")
        # The manager has what it needs of them; they keep files open, and values that were read last.
        del model, weights, opened
        self.prepared = plan = load_initial_weights(manager, plan, source, self.console)
        run = self._build_run_info(source, parameters)
        loop = replace(build_loop(manager, plan, source, observe_setup=self._observe_setup), signals=self.signals)
        if source is not None and world.rank == 0:
            changed = f", with other {', '.join(source.changed_settings)}" if source.changed_settings else ""
            print_text(f"resuming from {source.checkpoint}, after step {source.step}{changed}", self.console)
        with (
            copies.replicate(manager, loop, run.id) as copied,
            self._with_checkpointer(manager, copied) as saving,
            self._with_observers(manager, saving, run, earlier) as watched,
        ):
            self.startup.end_phase("optimizer")
            results = earlier + fit(manager, watched)
        # There may have been nothing left to be done.
        done = results[-1].step if results else plan.num_steps if source is None else source.step
        export_model(manager, plan, step=done)
        return results

    def _observe_setup(self) -> AbstractContextManager[None]:
        return nullcontext() if self.monitor is None or self.world.rank else self.monitor.observe_setup()

    def _prepare_directory(self, resume_point: ResumePoint | None) -> list[StepResult]:
        """Prepare the output directory, on the first rank, and return the steps that were done before."""
        directory = self.directory
        earlier = [] if resume_point is None else resume_point.load_previous_results(self.prepared.num_steps)
        if self.action is RunAction.RESUME:
            keeps = resume_point.keep_until_step if resume_point is not None else -1
            aside = archive_after(directory.checkpoint_storage, after_step=keeps, files_to_copy=[directory.metrics])
            if aside is not None:
                print_text(
                    f"later checkpoints, which this run does not resume from, are now in {aside}; remove them when you "
                    f"like",
                    self.console,
                )
        directory.prepare(to_yaml(to_redacted_dict(self.prepared.config)), overwrite=self.action is RunAction.OVERWRITE)
        return earlier

    def _build_run_info(self, resume_point: ResumePoint | None, num_parameters: int) -> RunInfo:
        directory, plan, world = self.directory, self.prepared, self.world
        return RunInfo(
            id=world.run_on_first_rank(lambda: get_run_id(directory.events)),
            name=directory.path.name,
            strategy=str(plan.strategy_stack),
            mesh=str(plan.degrees),
            world_size=world.size,
            rank=world.rank,
            start_step=0 if resume_point is None else resume_point.step,
            num_steps=plan.num_steps,
            num_parameters=num_parameters,
            device=world.device.type,
            directory=directory.path,
            config=to_redacted_dict(self.prepared.config),
        )

    @contextmanager
    def _with_checkpointer(self, manager: StrategyManager, loop: Loop) -> Iterator[Loop]:
        """Return the loop, saving checkpoints if the run asks for them; on disk when the context is left."""
        settings = self.prepared.config.checkpoint
        if not settings.is_enabled:
            yield loop
            return
        best = settings.keep_best or KeepBestConfig()
        with Checkpointer(
            manager,
            self.directory.checkpoint_storage,
            keep_last=settings.keep_last,
            keep_every=settings.keep_every,
            keep_best=best.count if settings.keep_best is not None else None,
            best_eval_set=best.eval_set,
            asynchronous=settings.asynchronous,
            on_error=settings.on_error,
            tokenizer=self.prepared.load_tokenizer(),
        ) as checkpointer:
            every, after_s = settings.every_steps, settings.every_seconds
            yield replace(loop, checkpointer=checkpointer, save_every=every, save_every_s=after_s)

    @contextmanager
    def _with_observers(
        self, manager: StrategyManager, loop: Loop, run: RunInfo, previous_results: Sequence[StepResult]
    ) -> Iterator[Loop]:
        """Return the loop with its extensions, and register all observers. Collective."""
        world, directory, companion = self.world, self.directory, self.monitor
        metrics, observing = self.prepared.config.metrics, get_registry().observing
        world.progress.hang_reporter = HangFileReporter(directory, world.rank, partial(FaultFileWriter, directory.path))
        with ExitStack() as held:
            held.enter_context(observing(FaultFileWriter(directory.path, world.rank)))
            extensions = [*loop.extensions, *self._build_profilers(run, loop.start_step, held)]
            if metrics.per_rank:
                held.enter_context(observing(RankLog(directory.get_rank_log_path(world.rank))))
            held.enter_context(observing(*build_timeline_logs(manager, directory.path, metrics.timeline_every)))
            # On the first rank alone, but errors are raised on all.
            world.run_on_first_rank(
                lambda: held.enter_context(attach_trackers(resolve_trackers(self.prepared.config.trackers), run))
            )
            if world.rank == 0:
                held.enter_context(observing(*self._build_reporters(held, previous_results)))
                if companion is not None:
                    held.enter_context(observing(companion))
                    extensions.append(StepContext(companion.step_contexts(manager)))
            if metrics.stragglers is not None:
                world.progress.step_times = deque(maxlen=metrics.stragglers.window_steps)
                extensions.append(StragglerDetector(metrics.stragglers, world.progress))
            flops = world.run_on_first_rank(
                lambda: (None, None) if companion is None else (companion.flops_per_token, companion.peak_flops)
            )
            extensions.append(FlopsReporter(*flops))
            yield replace(loop, run_info=run, grad_norms_every=metrics.norms_every, extensions=extensions)

    def _build_reporters(self, stack: ExitStack, previous_results: Sequence[StepResult]) -> list[object]:
        config, directory = self.prepared.config, self.directory
        every, on_error = config.log_every, config.checkpoint.on_error
        reporter = MetricsReporter(
            directory.metrics,
            log_every=every,
            console=self.console,
            previous_results=previous_results,
            on_error=on_error,
        )
        curve = LossCurvePlotter(directory.metrics, directory.loss_curve, is_per_token=config.objective is None)
        journal = EventLog(directory.events)
        startup = StartupReporter(self.startup, log=journal.log, print_text=partial(print_text, console=self.console))
        return [stack.enter_context(reporter), stack.enter_context(curve), journal, startup]

    def _build_profilers(self, run: RunInfo, start_step: int, stack: ExitStack) -> list[LoopExtension]:
        found: list[LoopExtension] = []
        rank, device = self.world.rank, self.world.device
        asked, every = self.prepared.config.profile, self.prepared.config.metrics.communication_every
        if asked is not None and asked.includes_rank(rank):
            about = {"run": run.name, "strategy": run.strategy, "mesh": run.mesh, "world_size": run.world_size}
            recorder = StepProfiler(
                asked, self.directory.path, rank=rank, device=device, metadata=about, start_step=start_step
            )
            found.append(StepContext(stack.enter_context(recorder).step_context))
        if every is not None and rank == 0:
            sampler = CommunicationSampler(every, device)
            found.append(StepContext(sampler.step_context, sampler.read_times))
        return found


def record_failure(config: RunConfig, exit_code: int) -> None:
    """Write down what the first rank may not have come to: the exit code, and the picture of the losses."""
    directory = RunDirectory.from_config(config)
    # What is wrong with the input, including another run that holds the directory, has left it as it was.
    if exit_code in (0, ConfigError.exit_code, config.checkpoint.stop_config.exit_code):
        return
    if not directory.metrics.exists() or directory.summary.exists():
        return
    log_event(directory.events, "exit", code=exit_code)
    plot_metrics(directory.metrics, directory.loss_curve, is_per_token=config.objective is None)
