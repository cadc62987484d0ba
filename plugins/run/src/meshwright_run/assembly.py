"""Put together what a run trains with: initial weights, computed columns, the optimizer, and the loop.

[Note: the reference] The run's own manager computes log-probabilities under the initial weights before the first step:
a sum over the supervised tokens of each row. The output directory keeps them for a run that goes on.

Shapes: N rows of a set, B rows of a microbatch, S positions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console

from meshwright.plugin import (
    EMA,
    Batch,
    ConfigError,
    Degrees,
    Loop,
    OptimizerFactory,
    StrategyManager,
    build_scheduler,
    load_checkpoint,
    optimizer_factory,
    set_schedule,
    written_whole,
)

from .data.feed import Feed, Place, RunRows, eval_microbatches
from .data.rows import Rows
from .model_trial import REFERENCE, as_asked, check_kept_apart
from .preflight import Plan, masks_padding
from .report import show
from .resume import Source, early_stopping
from .run_directory import RunDirectory
from .run_file import as_plain


def begin_with_weights(manager: StrategyManager, plan: Plan, source: Source | None, console: Console) -> Plan:
    """Load `model.checkpoint` if the run begins with it, and compute what an objective needs of the initial weights.
    Collective."""
    config, directory = plan.config, RunDirectory.of(plan.config)

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
    plan: Plan,
    source: Source | None,
    *,
    seen: Callable[[], AbstractContextManager[None]] = nullcontext,
    factory: OptimizerFactory | None = None,
    place: Place | None = None,
    draw: Callable[[Feed, int], Sequence[Batch]] | None = None,
) -> Loop:
    """Build the manager's optimizer, load the state of the source, and return the loop that trains on from there.
    Collective. One thing, since the optimizer, its averages and the data all go on from the source."""
    config, mesh, rows = plan.config, manager.mesh, plan.rows
    with seen():
        optimizer = manager.build_optimizer(factory or optimizer_factory(config.optimizer))
        # Before a checkpoint with an average is loaded, and after one without.
        ema = EMA(manager, config.ema) if config.ema and (source is None or source.has_average) else None
    scheduler = build_scheduler(plan.schedule, optimizer, plan.steps)
    origin = (0, 0)
    if source is not None:
        # Settings and rates are those of the run file: the saved ones except for what was allowed to change.
        load_checkpoint(manager, source.place, keep_settings=True)
        set_schedule(scheduler, source.step)
        ema = ema or (EMA(manager, config.ema, step=source.step) if config.ema else None)
        origin = (source.step + source.left_out, source.position())
    if place is None:
        place = place_of(mesh.degrees, plan.micro_batch_size, mesh.data_rank)
    if not plan.rows_tried:
        _try_rows(manager, plan, place)
    feed = Feed(
        rows.training, place, batch_size=config.batch_size, seed=config.seed, weights=rows.weights, origin=origin
    )
    if source is not None and origin[1]:
        feed.load_state(source.manifest.extra.get("streams"))
    # Of each set so many rows, or all where it has less.
    most = config.eval.sequences
    counts = {name: None if most is None else min(most, len(each)) for name, each in rows.held_out.items()}
    draw_from = draw or Feed.microbatches
    extra = {"identity": plan.identity, "run": as_plain(config), "named": source and source.named}
    return Loop(
        steps=plan.steps,
        batches=lambda drawn: [as_asked(plan.objective, batch) for batch in draw_from(feed, drawn)],
        scheduler=scheduler,
        max_grad_norm=config.max_grad_norm,
        grad_norm_type=config.grad_norm_type,
        held_out={
            name: [as_asked(plan.objective, batch) for batch in eval_microbatches(each, place, count=counts[name])]
            for name, each in rows.held_out.items()
        },
        ema=ema,
        eval_every=config.eval.every,
        early_stopping=early_stopping(config.eval),
        extra=lambda drawn: {**extra, "position": feed.position(drawn), "streams": feed.state(drawn)},
        seed=config.seed,
        on_bad_step=config.bad_steps,
        verify_every=config.verify_every,
        objective=plan.objective,
        start=0 if source is None else source.step,
        state=None if source is None else source.watched,
    )


def place_of(degrees: Degrees, micro_batch_size: int, data_rank: int) -> Place:
    """Return a data rank's part of each global batch, in lengths that all axes can divide."""
    multiple = (2 * degrees.cp if degrees.cp > 1 else 1) * degrees.tp
    return Place(data_rank, degrees.dp, micro_batch_size, multiple=multiple, one_shape=degrees.pp > 1)


def _try_rows(manager: StrategyManager, plan: Plan, place: Place) -> None:
    """Refuse a model that does not isolate documents that share a row, on all ranks. Collective."""

    config = plan.config

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


_TRAINING = "training"
_KEY, _NUMBER = "key", "number of the row"
_AT_ONCE = 16
"""Microbatches of a rank that are read at once."""


class _Derived(Rows):
    """Rows with one more column, some of other rows."""

    def __init__(self, rows: Rows, name: str, values: np.ndarray, numbers: np.ndarray | None = None) -> None:
        self._rows, self._name, self._values = rows, name, values
        self._numbers = np.arange(len(rows)) if numbers is None else numbers
        self.seq_len, self.group = rows.seq_len, rows.group
        self.columns = {**rows.columns, name: (values.dtype, False)}

    def __len__(self) -> int:
        return len(self._numbers)

    def lengths(self, indices: np.ndarray) -> np.ndarray | None:
        return self._rows.lengths(self._numbers[indices])

    def _read(self, rows: np.ndarray, length: int) -> dict[str, np.ndarray]:
        numbers = self._numbers[rows]
        return {**self._rows._read(numbers, length), self._name: self._values[numbers]}


def with_reference(
    manager: StrategyManager, rows: RunRows, file: Path, place: Place, *, of: Any, begin: Callable[[], None]
) -> RunRows:
    """Add log-probabilities under the initial weights to the rows; see [Note: the reference]. Collective."""
    world = manager.mesh.world
    key = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()
    sets = {f"{_TRAINING}{index}": each for index, each in enumerate(rows.training) if isinstance(each, Rows)}
    sets |= {f"set {name}": each for name, each in rows.held_out.items()}
    found = world.from_first(lambda: _read(file, key, sets))
    if found is None:
        begin()
        found = {name: _sums(manager, each, place) for name, each in sets.items()}
        values = found
        world.from_first(lambda: _write(file, key, values))
    wrapped = {name: _Derived(each, REFERENCE, found[name]) for name, each in sets.items()}
    return replace(
        rows,
        training=tuple(wrapped[f"{_TRAINING}{index}"] for index in range(len(rows.training))),
        held_out={name: wrapped[f"set {name}"] for name in rows.held_out},
    )


def _sums(manager: StrategyManager, rows: Rows, place: Place) -> np.ndarray:
    """Return the sum of each row over its supervised tokens: (N,), float64, on all ranks. Collective."""
    world = manager.mesh.world
    found = torch.zeros(len(rows), dtype=torch.float64)
    every = np.arange(len(rows))
    block = _AT_ONCE * place.data_size * place.micro_batch_size
    for start in range(0, len(rows), block):
        part = _Derived(rows, _NUMBER, every, every[start : start + block])
        batches = [dict(each) for each in eval_microbatches(part, place, count=None)]
        numbers = [batch.pop(_NUMBER) for batch in batches]
        inputs = [{name: each for name, each in batch.items() if name not in rows.columns} for batch in batches]
        for number, each in zip(numbers, manager.token_stats(inputs, ["log_probs"]), strict=True):
            # Rows that are repeated, so that ranks have equally many, are masked and add nothing.
            found.index_add_(0, number, each["log_probs"].sum(1, dtype=torch.float64).cpu())
    if not manager.mesh.leads_data:
        found.zero_()
    world.reduce_ints([0])
    dist.all_reduce(found, group=world.group)
    return found.numpy()


def _read(file: Path, key: str, sets: Mapping[str, Rows]) -> dict[str, np.ndarray] | None:
    """Read what was computed before; None if it was not, for these rows and weights."""
    try:
        with np.load(file, allow_pickle=False) as stored:
            if str(stored[_KEY]) != key:
                return None
            found = {name: np.asarray(stored[name], np.float64) for name in sets}
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None
    return found if all(len(found[name]) == len(rows) for name, rows in sets.items()) else None


def _write(file: Path, key: str, values: Mapping[str, np.ndarray]) -> None:
    arrays: dict[str, Any] = {_KEY: np.array(key), **values}
    try:
        with written_whole(file) as opened:
            np.savez(opened, **arrays)
    except OSError as error:
        raise ConfigError(f"output_dir: {file} cannot be written: {error}.") from error
