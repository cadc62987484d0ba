"""One run, from its file to its directory: plan it, start its ranks, train, and leave behind what the user wants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch.optim.lr_scheduler import LRScheduler

from ..checkpoint import Checkpointer, load_checkpoint
from ..checkpoint.directory import set_aside
from ..data import ORDER_VERSION, DataOrder, eval_microbatches, load_tokenizer, step_microbatches
from ..launch.rank import guarded, signs_of_life, started_by_launcher
from ..mesh.mesh import Mesh
from ..mesh.world import World, open_world
from ..model.pretrained import PretrainedWeights
from ..strategy.contract import StepResult, StrategyManager
from ..strategy.registry import get_registry
from .fate import Fate, check_output, is_finished
from .files import CHECKPOINTS, METRICS, SUMMARY
from .from_pretrained import check_same_weights, tell
from .loop import Loop, fit
from .optim import optimizer_factory
from .output import export, finish, locked, prepare_output
from .plan import Plan, headline, plan_run, processes
from .report import Reporter, read_metrics
from .resume import Source, find_source
from .run_file import RunConfig, as_plain
from .run_model import fetch_model, make_model
from .schedules import build_scheduler, set_schedule

if TYPE_CHECKING:
    from torch.distributed import Store

LINGERING_S = 15.0
"""How long a run waits for the ranks of one before it, whose launcher was killed, to end."""


def start(config: RunConfig, *, show_traceback: bool = False) -> int:
    """Run `config`: join the ranks that torchrun started, or start them here.

    Returns:
        The exit code; what went wrong has been written to stderr.

    Raises:
        MeshwrightError: the run is not valid; nothing was started.
    """
    if started_by_launcher():
        return guarded(run_rank, (config,), show_traceback=show_traceback)
    if is_finished(config):
        _say_finished(config)
        return 0
    count = processes(config)
    with Console(stderr=True).status("preparing the run"):
        plan_run(config, count)
    if count == 1:
        return guarded(run_rank, (config,), show_traceback=show_traceback)
    from ..launch.local import launch

    return launch(run_rank, (config,), nproc=count, show_traceback=show_traceback)


def run_rank(store: Store | None, config: RunConfig) -> None:
    """What each rank does."""
    if config.threads_per_rank != "auto":
        torch.set_num_threads(config.threads_per_rank)
    world_store = torch.distributed.PrefixStore("meshwright/world", store) if store is not None else None
    with ExitStack() as held:
        timeout_s = config.timeout_s
        with signs_of_life(timeout_s), open_world(config.device, store=world_store, timeout_s=timeout_s) as world:
            if world.from_first(lambda: is_finished(config)):
                if world.rank == 0:
                    _say_finished(config)
                return
            commit = fetch_model(config.model, world)
            plan = world.together(lambda: plan_run(config, world.size, commit=commit))
            if world.rank == 0:
                lock = locked(Path(config.output_dir), patience_s=min(LINGERING_S, timeout_s / 2))
            world.from_first(lambda: held.enter_context(lock))
            fate = world.from_first(lambda: check_output(config))
            if fate is Fate.DONE:
                # By the run that was waited for.
                return
            results = _train(config, plan, fate, world)
        # The other ranks are done: what is left needs no collective.
        if world.rank == 0:
            finish(config, plan, results, Console())


def _say_finished(config: RunConfig) -> None:
    Console().print(
        f"this run has finished: {Path(config.output_dir) / SUMMARY} is there, with the same run file. Nothing was "
        f"done. Raise steps to go on, or set resume=never and overwrite=true to train anew.",
        highlight=False,
        soft_wrap=True,
    )


def _train(config: RunConfig, plan: Plan, fate: Fate, world: World) -> list[StepResult]:
    """Train the model, and write it. Collective."""
    console = Console()
    source = find_source(config, fate, plan.identity, world)
    mesh = Mesh(plan.degrees, world)
    manager = plan.stack.build(mesh)
    model, weights = world.together(lambda: make_model(config.model, plan.model, plan.model_config, seed=config.seed))
    earlier: list[StepResult] = []
    world.from_first(lambda: earlier.extend(_prepare(config, fate, source, console)))
    if world.rank == 0:
        console.print(headline(config, plan, model, mesh), highlight=False, soft_wrap=True)
    if isinstance(opened := getattr(weights, "base", weights), PretrainedWeights):
        check_same_weights(opened, world)
        tell(opened, world, stacklevel=2)
    manager.parallelize(model, weights)
    # What a rank needs of them, the manager has; they keep files open, and values that were read last.
    del model, weights, opened
    if source is None and "checkpoint" in config.model:
        load_checkpoint(manager, Path(config.model["checkpoint"]).expanduser())
    results = _fit(manager, config, plan, source, earlier, console)
    export(manager, config, plan)
    return results


def _prepare(config: RunConfig, fate: Fate, source: Source | None, console: Console) -> list[StepResult]:
    """Make the output directory ready, on the first rank; the steps that were done before."""
    directory = Path(config.output_dir)
    earlier: list[StepResult] = []
    if source is not None and source.metrics is not None:
        earlier = read_metrics(source.metrics, until=source.step, steps=config.steps)
    if fate is Fate.GO_ON:
        keeps = source.keeps if source is not None else -1
        aside = set_aside(directory / CHECKPOINTS, after=keeps, copies=[directory / METRICS])
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
    earlier: list[StepResult],
    console: Console,
) -> list[StepResult]:
    mesh, data = manager.mesh, plan.data
    optimizer = manager.build_optimizer(optimizer_factory(config.optimizer))
    scheduler = build_scheduler(config.schedule, optimizer, config.steps)
    start, origin, version = 0, (0, 0), ORDER_VERSION
    if source is not None:
        # Settings and rates are those of the run file, which are the saved ones but for what was allowed to change.
        load_checkpoint(manager, source.directory, keep_settings=True)
        set_schedule(scheduler, source.step)
        start, origin, version = source.step, (source.step, source.position()), source.order
        if mesh.rank == 0:
            changed = f", with other {', '.join(source.changed)}" if source.changed else ""
            told = f"going on from {source.directory}, after step {start}{changed}"
            console.print(told, highlight=False, soft_wrap=True)
    order = DataOrder(len(data.train), config.batch_size, config.seed, version=version, origin=origin)
    place = {
        "data_rank": mesh.data_rank,
        "data_size": mesh.data_size,
        "micro_batch_size": plan.micro_batch_size,
    }
    loop = Loop(
        steps=config.steps,
        batches=lambda step: step_microbatches(data.train, order, step, **place),
        max_grad_norm=config.max_grad_norm,
        grad_norm_type=config.grad_norm_type,
        held_out=eval_microbatches(data.held_out, count=config.eval.sequences, **place),
        eval_every=config.eval.every,
        start=start,
        seed=config.seed,
        objective=plan.objective,
    )
    metrics = Path(config.output_dir) / METRICS
    named = None if source is None else source.named
    extra = {"identity": {**plan.identity, "order": version}, "run": as_plain(config), "named": named}
    with _saving(
        manager, scheduler, config, plan, loop, lambda step: {**extra, "position": order.position(step)}
    ) as loop:
        if mesh.rank != 0:
            return fit(manager, scheduler, loop)
        reporter = Reporter(metrics, log_every=config.log_every, console=console, earlier=earlier)
        with reporter, get_registry().observing(reporter):
            return earlier + fit(manager, scheduler, loop)


@contextmanager
def _saving(
    manager: StrategyManager,
    scheduler: LRScheduler,
    config: RunConfig,
    plan: Plan,
    loop: Loop,
    extra: Callable[[int], dict[str, Any]],
) -> Iterator[Loop]:
    """The loop, saving checkpoints if the run asks for them; on disk when the context is left.

    Args:
        extra: what a checkpoint is to tell besides, after so many steps.
    """
    settings = config.checkpoint
    if settings.every is None:
        yield loop
        return
    with Checkpointer(
        manager,
        Path(config.output_dir) / CHECKPOINTS,
        keep_last=settings.keep_last,
        keep_every=settings.keep_every,
        asynchronous=settings.asynchronous,
        on_error=settings.on_error,
        tokenizer=load_tokenizer(plan.data.tokenizer_dir),
    ) as checkpointer:

        def save(step: int) -> None:
            checkpointer.save(step, scheduler=scheduler, extra=extra(step))

        yield replace(loop, save=save, save_every=settings.every)
