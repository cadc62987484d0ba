"""Put together what a run trains with: initial weights, computed columns, the optimizer, and the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from rich.console import Console

from ...base.types import Batch, OptimizerFactory
from ...checkpoint import load_checkpoint
from ...data import Feed, Place, eval_microbatches
from ...mesh.sizes import Degrees
from ...optim.build import build_scheduler, optimizer_factory, set_schedule
from ...strategy.contract import StrategyManager
from ..loop.ema import EMA
from ..loop.options import Loop
from .apart import check_kept_apart
from .columns import as_asked, with_reference
from .preflight import Plan, masks_padding
from .report import show
from .resume import Source, early_stopping
from .run_directory import RunDirectory
from .run_file import RunConfig, as_plain


def begin_with_weights(
    manager: StrategyManager, config: RunConfig, plan: Plan, source: Source | None, console: Console
) -> Plan:
    """Load `model.checkpoint` if the run begins with it, and compute what an objective needs of the initial weights.
    Collective.

    Args:
        manager: with the model's own weights.
        source: that the run resumes from.

    Returns:
        The plan with the computed columns.
    """
    directory = RunDirectory.of(config)

    def load_weights() -> None:
        if "checkpoint" in config.model:
            load_checkpoint(manager, directory.place_of(config.model["checkpoint"]))

    def begin() -> None:
        if source is not None:
            load_weights()
        if manager.mesh.rank == 0:
            show("computing the log-probabilities of the reference", console)

    if source is None:
        load_weights()
    if not plan.needs_reference:
        return plan
    of = {"model": plan.identity["model"], "data": plan.identity["data"], "begins with": config.model}
    if not {"path", "checkpoint"} & config.model.keys():
        of["seed"] = config.seed
    place = place_of(manager.mesh.degrees, plan.micro_batch_size, manager.mesh.data_rank)
    return replace(plan, rows=with_reference(manager, plan.rows, directory.reference, place, of=of, begin=begin))


def loop_of(
    manager: StrategyManager,
    config: RunConfig,
    plan: Plan,
    source: Source | None,
    *,
    seen: Callable[[], AbstractContextManager[None]] = nullcontext,
    factory: OptimizerFactory | None = None,
    place: Place | None = None,
    draw: Callable[[Feed, int], Sequence[Batch]] | None = None,
) -> Loop:
    """Build the manager's optimizer, load the state of the source, and return the loop that trains on from there.
    Collective.

    Args:
        manager: with its model.
        source: that the run resumes from.
        seen: the context in which the optimizer is made.
        factory: of the optimizer; None: that of the run file.
        place: of this rank in a global batch; None: as the mesh has it.
        draw: returns what this rank trains on in a step, counted from 0; None: its microbatches of the feed.
    """
    mesh = manager.mesh
    with seen():
        optimizer = manager.build_optimizer(factory or optimizer_factory(config.optimizer))
        # Before a checkpoint with an average is loaded, and after one without.
        ema = None if source is not None and not source.has_average else _average(config, manager)
    scheduler = build_scheduler(plan.schedule, optimizer, plan.steps)
    origin = (0, 0)
    if source is not None:
        # Settings and rates are those of the run file: the saved ones except for what was allowed to change.
        load_checkpoint(manager, source.place, keep_settings=True)
        set_schedule(scheduler, source.step)
        ema = ema or _average(config, manager, step=source.step)
        origin = (source.step + source.left_out, source.position())
    if place is None:
        place = place_of(mesh.degrees, plan.micro_batch_size, mesh.data_rank)
    if not plan.rows_tried:
        _try_rows(manager, config, plan, place)
    feed = _feed(config, plan, place, source, origin)
    draw_from = draw or (lambda feed, drawn: feed.microbatches(drawn))
    named = None if source is None else source.named
    extra = {"identity": plan.identity, "run": as_plain(config), "named": named}
    loop = Loop(
        steps=plan.steps,
        batches=lambda drawn: [as_asked(plan.objective, batch) for batch in draw_from(feed, drawn)],
        scheduler=scheduler,
        max_grad_norm=config.max_grad_norm,
        grad_norm_type=config.grad_norm_type,
        held_out=_sets(plan, place, config.eval.sequences),
        ema=ema,
        eval_every=config.eval.every,
        early_stopping=early_stopping(config),
        extra=lambda drawn: {**extra, "position": feed.position(drawn), "streams": feed.state(drawn)},
        seed=config.seed,
        on_bad_step=config.bad_steps,
        verify_every=config.verify_every,
        objective=plan.objective,
    )
    return loop if source is None else replace(loop, start=source.step, state=source.watched)


def place_of(degrees: Degrees, micro_batch_size: int, data_rank: int) -> Place:
    """Return a data rank's part of each global batch, in lengths that all axes can divide."""
    multiple = (2 * degrees.cp if degrees.cp > 1 else 1) * degrees.tp
    return Place(data_rank, degrees.dp, micro_batch_size, multiple=multiple, one_shape=degrees.pp > 1)


def _average(config: RunConfig, manager: StrategyManager, *, step: int = 0) -> EMA | None:
    return EMA(manager, config.ema, step=step) if config.ema is not None else None


def _feed(config: RunConfig, plan: Plan, place: Place, source: Source | None, origin: tuple[int, int]) -> Feed:
    """Return the rows to train on, from where the run resumes."""
    rows = plan.rows
    feed = Feed(
        rows.training, place, batch_size=config.batch_size, seed=config.seed, weights=rows.weights, origin=origin
    )
    if source is not None and origin[1]:
        feed.load_state(source.manifest.extra.get("streams"))
    return feed


def _sets(plan: Plan, place: Place, count: int | None) -> dict[str, Sequence[Batch]]:
    """Return the microbatches of each evaluation set: of `count` rows, or of all where it has less."""
    return {
        name: [
            as_asked(plan.objective, batch)
            for batch in eval_microbatches(rows, place, count=None if count is None else min(count, len(rows)))
        ]
        for name, rows in plan.rows.held_out.items()
    }


def _try_rows(manager: StrategyManager, config: RunConfig, plan: Plan, place: Place) -> None:
    """Refuse a model that does not isolate documents that share a row, on all ranks. Collective."""

    def statistics(batches: list[Batch]) -> list[torch.Tensor]:
        return [found["log_probs"] for found in manager.token_stats(batches, ["log_probs"])]

    check_kept_apart(
        plan.model_config,
        config.data.packing_kind(),
        statistics,
        dtype=plan.model.dtype(config.model),
        seq_len=config.data.seq_len,
        vocab_size=plan.data.vocab_size,
        multiple=place.multiple,
        rows=place.micro_batch_size,
        microbatches=config.batch_size // (place.data_size * place.micro_batch_size),
        masks=masks_padding(plan.model_config),
    )
