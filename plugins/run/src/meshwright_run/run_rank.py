"""Main function of a rank: check the run, train, register observers, and write the results."""

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
    INTERRUPTED_EXIT_CODE,
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
from .loss_curve import LossCurvePlotter, plot_metrics
from .metrics_report import MetricsReporter, print_finished, print_stopped, print_text
from .observers import StartupReporter, StartupTimer, StragglerDetector, attach_trackers, resolve_trackers
from .output import export_model, write_results
from .preflight import PreparedRun, build_run_model, describe_run, download_model, preflight
from .profile.recorder import CommunicationSampler, FaultFileWriter, StepProfiler
from .resume import ResumePoint, RunReplicas, find_resume_point
from .run_action import RunAction, choose_run_action, describe_replaced, is_finished
from .run_directory import RunDirectory
from .run_file import RunConfig, to_redacted_dict
from .run_logs import EventLog, HangFileReporter, RankLog, build_timeline_logs, get_run_id, log_event
from .run_sections import KeepBestConfig
from .step_text import StepFormatter

if TYPE_CHECKING:
    from torch.distributed import Store

PREVIOUS_RUN_WAIT_S = 15.0
"""Maximum time that a run waits for ranks of an earlier run, whose launcher was killed, to end."""


class RunMonitor(Protocol):
    """Monitor of a run, which compares setup and steps with the run's plan.

    The launching process or rank 0 creates it before the process group exists; it is pickled for ranks. Its hooks are
    called on rank 0, whose `flops_per_token` and `peak_flops` are used.
    """

    @property
    def refusal_error(self) -> MeshwrightError | None:
        """The error that prevents the run from starting; None if it may start."""

    @property
    def flops_per_token(self) -> float | None: ...

    @property
    def peak_flops(self) -> float | None: ...

    def startup_lines(self) -> Sequence[str]:
        """Return the lines to print before training starts."""

    def observe_setup(self) -> AbstractContextManager[None]:
        """Return the context in which rank 0 parallelizes the model or builds the optimizer."""

    def step_contexts(self, manager: StrategyManager) -> Callable[[int], AbstractContextManager[None]]:
        """Return a function that returns the context of a step on rank 0; steps count from 0 in this attempt."""


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
            action = world.run_on_first_rank(lambda: choose_run_action(config, plan.num_steps))
            if action is RunAction.FINISHED:
                # Another run, whose lock this one waited for, has finished it.
                return
            stop = config.checkpoint.stop_config
            # A process that has started the ranks on this node reports signals itself, before it forwards them.
            should_report = world.rank == 0 and multiprocessing.parent_process() is None
            report = partial(print_text, console=create_console(stderr=True)) if should_report else None
            signals = StopSignals(stop.signals, exit_code=stop.exit_code, grace_s=stop.grace_s, report=report)
            held.enter_context(signals)
            try:
                results = _RankRun(directory, plan, action, world, signals, monitor, startup).train()
            except Stopped as stopped:
                if world.rank == 0:
                    print_stopped(stopped, num_steps=plan.num_steps)
                raise
        # The other ranks are done. The rest needs no collective.
        if world.rank == 0:
            write_results(plan, results, create_console())


@dataclass
class _RankRun:
    """One rank's part of a run that has passed its checks."""

    directory: RunDirectory
    prepared: PreparedRun
    action: RunAction
    world: World
    signals: StopSignals
    monitor: RunMonitor | None
    startup: StartupTimer
    console: Console = field(default_factory=create_console)

    def train(self) -> list[StepResult]:
        """Train and export the model, and return the results of all steps. Collective."""
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
        # The manager no longer needs them. They hold open files, and the values that were read last.
        del model, weights, opened
        self.prepared = plan = load_initial_weights(manager, plan, source, self.console)
        run = self._build_run_info(source, parameters)
        loop = replace(build_loop(manager, plan, source, observe_setup=self._observe_setup), signals=self.signals)
        if source is not None and world.rank == 0:
            changed = f", with changed {', '.join(source.changed_settings)}" if source.changed_settings else ""
            print_text(f"resuming from {source.checkpoint}, after step {source.step}{changed}", self.console)
        with (
            copies.replicate(manager, loop, run.id) as copied,
            self._with_checkpointer(manager, copied) as saving,
            self._with_observers(manager, saving, run, earlier) as watched,
        ):
            self.startup.end_phase("optimizer")
            results = earlier + fit(manager, watched)
        # There are no results if no step was left.
        done = results[-1].step if results else plan.num_steps if source is None else source.step
        export_model(manager, plan, step=done)
        return results

    def _observe_setup(self) -> AbstractContextManager[None]:
        return nullcontext() if self.monitor is None or self.world.rank else self.monitor.observe_setup()

    def _prepare_directory(self, resume_point: ResumePoint | None) -> list[StepResult]:
        """Prepare the output directory, on rank 0, and return the results of earlier steps."""
        directory = self.directory
        earlier = [] if resume_point is None else resume_point.load_previous_results(self.prepared.num_steps)
        if self.action is RunAction.RESUME:
            keeps = resume_point.keep_until_step if resume_point is not None else -1
            archive = archive_after(directory.checkpoint_storage, after_step=keeps, files_to_copy=[directory.metrics])
            if archive is not None:
                print_text(
                    f"later checkpoints, which this run does not resume from, were moved to {archive}; you can remove "
                    f"them",
                    self.console,
                )
        overwrite = self.action is RunAction.OVERWRITE
        if overwrite:
            replaced = describe_replaced(self.prepared.config)
            print_text(f"overwrite=true: removing {replaced} from {directory.configured_path}", self.console)
        directory.prepare(to_yaml(to_redacted_dict(self.prepared.config)), overwrite=overwrite)
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
        """Context that yields the loop with checkpoints, if enabled. On exit, all checkpoints are written."""
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
        """Context that registers all observers, and yields the loop with its extensions. Collective."""
        world, directory, monitor = self.world, self.directory, self.monitor
        metrics, observing = self.prepared.config.metrics, get_registry().observing
        world.progress.hang_reporter = HangFileReporter(directory, world.rank, partial(FaultFileWriter, directory.path))
        with ExitStack() as held:
            held.enter_context(observing(FaultFileWriter(directory.path, world.rank)))
            extensions = [*loop.extensions, *self._build_profilers(run, loop.start_step, held)]
            if metrics.per_rank:
                held.enter_context(observing(RankLog(directory.get_rank_log_path(world.rank))))
            held.enter_context(observing(*build_timeline_logs(manager, directory.path, metrics.timeline_every)))
            # Only on rank 0, but errors are raised on all ranks.
            world.run_on_first_rank(
                lambda: held.enter_context(attach_trackers(resolve_trackers(self.prepared.config.trackers), run))
            )
            if world.rank == 0:
                held.enter_context(observing(*self._build_reporters(held, previous_results)))
                if monitor is not None:
                    held.enter_context(observing(monitor))
                    extensions.append(StepContext(monitor.step_contexts(manager)))
            if metrics.stragglers is not None:
                world.progress.step_times = deque(maxlen=metrics.stragglers.window_steps)
                extensions.append(StragglerDetector(metrics.stragglers, world.progress))
            flops = world.run_on_first_rank(
                lambda: (None, None) if monitor is None else (monitor.flops_per_token, monitor.peak_flops)
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
            formatter=StepFormatter(
                config.batch_size, self.prepared.datasets.num_rows_per_epoch, has_token_loss=config.objective is None
            ),
        )
        curve = LossCurvePlotter(directory.metrics, directory.loss_curve, is_per_token=config.objective is None)
        journal = EventLog(directory.events)
        startup = StartupReporter(self.startup, log=journal.log, print_text=partial(print_text, console=self.console))
        return [stack.enter_context(reporter), stack.enter_context(curve), journal, startup]

    def _build_profilers(self, run: RunInfo, start_step: int, stack: ExitStack) -> list[LoopExtension]:
        profilers: list[LoopExtension] = []
        rank, device = self.world.rank, self.world.device
        profile, every = self.prepared.config.profile, self.prepared.config.metrics.communication_every
        if profile is not None and profile.includes_rank(rank):
            metadata = {"run": run.name, "strategy": run.strategy, "mesh": run.mesh, "world_size": run.world_size}
            recorder = StepProfiler(
                profile, self.directory.path, rank=rank, device=device, metadata=metadata, start_step=start_step
            )
            profilers.append(StepContext(stack.enter_context(recorder).step_context))
        if every is not None and rank == 0:
            sampler = CommunicationSampler(every, device)
            profilers.append(StepContext(sampler.step_context, sampler.read_times))
        return profilers


def record_failure(config: RunConfig, exit_code: int) -> None:
    """Record what rank 0 may not have written: the exit code, and the loss curve."""
    directory = RunDirectory.from_config(config)
    # An input error, such as a directory that another run has locked, leaves the directory as it was.
    if exit_code in (0, ConfigError.exit_code, INTERRUPTED_EXIT_CODE, config.checkpoint.stop_config.exit_code):
        return
    if not directory.metrics.exists() or directory.summary.exists():
        return
    log_event(directory.events, "exit", code=exit_code)
    plot_metrics(directory.metrics, directory.loss_curve, is_per_token=config.objective is None)
