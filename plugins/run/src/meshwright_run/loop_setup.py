"""Build the training loop of a run: initial weights, reference log-probabilities, optimizer and loop.

[Note: reference log-probabilities] Before the first step, the run's own manager computes log-probabilities under the
initial weights: one sum per row, over its supervised tokens. The output directory keeps them for a run that resumes.

Shapes: N rows of a data set, B rows of a micro-batch, S positions.
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
    LoopExtension,
    OptimizerFactory,
    StepResult,
    StrategyManager,
    atomic_writer,
    build_scheduler,
    load_checkpoint,
    optimizer_factory,
    set_scheduler_step,
)

from .data.packing import RowDataset
from .data.train_sampler import DataShard, RunDatasets, TrainSampler, read_eval_microbatches
from .metrics_report import print_text
from .model_probe import REFERENCE_COLUMN, cast_columns, check_document_isolation
from .preflight import PreparedRun, needs_padding_mask
from .resume import ResumePoint, build_early_stopping
from .run_directory import RunDirectory
from .run_file import to_redacted_dict


def load_initial_weights(
    manager: StrategyManager, prepared: PreparedRun, resume_point: ResumePoint | None, console: Console
) -> PreparedRun:
    """Load `model.checkpoint` if the run starts from it, and add reference log-probabilities if the objective needs
    them. Collective."""
    config, directory = prepared.config, RunDirectory.from_config(prepared.config)

    def load_weights() -> None:
        if "checkpoint" in config.model:
            load_checkpoint(manager, directory.resolve_checkpoint(config.model["checkpoint"]))

    def begin() -> None:
        if resume_point is not None:
            load_weights()
        if manager.mesh.rank == 0:
            print_text("computing reference log-probabilities", console)

    if resume_point is None:
        load_weights()
    if not prepared.needs_reference_log_probs:
        return prepared
    identity = {"model": prepared.identity["model"], "data": prepared.identity["data"], "begins with": config.model}
    if not {"path", "checkpoint"} & config.model.keys():
        identity["seed"] = config.seed
    shard = build_data_shard(manager.mesh.degrees, prepared.micro_batch_size, manager.mesh.data_rank)
    return replace(
        prepared,
        datasets=add_reference_log_probs(
            manager, prepared.datasets, directory.reference_log_probs, shard, identity=identity, on_compute=begin
        ),
    )


def build_loop(
    manager: StrategyManager,
    prepared: PreparedRun,
    resume_point: ResumePoint | None,
    *,
    observe_setup: Callable[[], AbstractContextManager[None]] = nullcontext,
    factory: OptimizerFactory | None = None,
    shard: DataShard | None = None,
    draw_batches: Callable[[TrainSampler, int], Sequence[Batch]] | None = None,
) -> Loop:
    """Build the manager's optimizer, load the state of `resume_point`, and return the loop that continues from there.
    Collective. One thing, since the optimizer, the EMA and the data all resume from the same point."""
    config, mesh, rows = prepared.config, manager.mesh, prepared.datasets
    with observe_setup():
        optimizer = manager.build_optimizer(factory or optimizer_factory(config.optimizer))
        # Built before a checkpoint with averaged weights is loaded, or after one without them.
        ema = EMA(manager, config.ema) if config.ema and (resume_point is None or resume_point.has_ema) else None
    scheduler = build_scheduler(prepared.schedule, optimizer, prepared.num_steps)
    origin = (0, 0)
    if resume_point is not None:
        # Settings and learning rates come from the run file. Except for allowed changes, they equal the saved ones.
        load_checkpoint(manager, resume_point.checkpoint, keep_group_settings=True)
        set_scheduler_step(scheduler, resume_point.step)
        with observe_setup():
            ema = ema or (EMA(manager, config.ema, start_step=resume_point.step) if config.ema else None)
        origin = (resume_point.step + resume_point.num_skipped_batches, resume_point.compute_data_position())
    if shard is None:
        shard = build_data_shard(mesh.degrees, prepared.micro_batch_size, mesh.data_rank)
    if not prepared.is_isolation_probed:
        _probe_isolation(manager, prepared, shard)
    feed = TrainSampler(
        rows.train_sets, shard, batch_size=config.batch_size, seed=config.seed, weights=rows.weights, origin=origin
    )
    if resume_point is not None and origin[1]:
        feed.load_state_dict(resume_point.manifest.extra.get("streams"))
    # Number of rows to evaluate in each set: all if it has fewer than the limit.
    limit = config.eval.max_sequences
    counts = {name: None if limit is None else min(limit, len(each)) for name, each in rows.eval_sets.items()}
    draw_from = draw_batches or TrainSampler.read_microbatches
    extra = {
        "identity": prepared.identity,
        "run": to_redacted_dict(config),
        "named": resume_point and resume_point.resumed_from,
    }
    return Loop(
        steps=prepared.num_steps,
        batches=lambda drawn: [cast_columns(prepared.objective, batch) for batch in draw_from(feed, drawn)],
        scheduler=scheduler,
        max_grad_norm=config.max_grad_norm,
        grad_norm_type=config.grad_norm_type,
        eval_sets={
            name: [
                cast_columns(prepared.objective, batch)
                for batch in read_eval_microbatches(each, shard, num_rows=counts[name])
            ]
            for name, each in rows.eval_sets.items()
        },
        ema=ema,
        eval_every=config.eval.every,
        early_stopping=build_early_stopping(config.eval),
        checkpoint_extra=lambda drawn: {
            **extra,
            "position": feed.compute_data_position(drawn),
            "streams": feed.state_dict(drawn),
        },
        seed=config.seed,
        on_bad_step=config.bad_step_config,
        verify_every=config.verify_every,
        objective=prepared.objective,
        start_step=0 if resume_point is None else resume_point.step,
        extensions=[InputTokenCounter(feed, origin[0])],
        resume_state=None if resume_point is None else resume_point.loop_state,
    )


class InputTokenCounter(LoopExtension):
    """Report the input tokens of each step. Consecutive steps draw consecutive batches, also after a rollback."""

    def __init__(self, sampler: TrainSampler, first_draw: int) -> None:
        self._sampler, self._next_draw = sampler, first_draw

    def step_context(self, index: int) -> AbstractContextManager[object]:
        self._next_draw += 1
        return nullcontext()

    def process_result(self, result: StepResult) -> StepResult:
        return replace(result, num_input_tokens=self._sampler.token_counts.get(self._next_draw - 1))


def build_data_shard(degrees: Degrees, micro_batch_size: int, data_rank: int) -> DataShard:
    """Return a data rank's part of each global batch, with row lengths that all axes can divide."""
    multiple = (2 * degrees.cp if degrees.cp > 1 else 1) * degrees.tp
    return DataShard(data_rank, degrees.dp, micro_batch_size, length_multiple=multiple, uniform_length=degrees.pp > 1)


def _probe_isolation(manager: StrategyManager, prepared: PreparedRun, shard: DataShard) -> None:
    """Raise ModelError on all ranks for a model that does not isolate documents in a row. Collective."""

    config = prepared.config

    def statistics(batches: list[Batch]) -> list[torch.Tensor]:
        return [each["log_probs"] for each in manager.token_stats(batches, ["log_probs"])]

    check_document_isolation(
        prepared.model_config,
        config.data.resolve_packing(),
        statistics,
        dtype=prepared.model.get_dtype(config.model),
        seq_len=config.data.seq_len,
        vocab_size=prepared.data.vocab_size,
        length_multiple=shard.length_multiple,
        num_rows=shard.micro_batch_size,
        num_microbatches=config.batch_size // (shard.data_size * shard.micro_batch_size),
        mask_padding=needs_padding_mask(prepared.model_config),
    )


_TRAINING_PREFIX = "training"
_KEY, _ROW_INDEX_COLUMN = "key", "number of the row"
_MICROBATCHES_PER_BLOCK = 16
"""Micro-batches per rank that are read at once."""


class _DatasetWithColumn(RowDataset):
    """A data set, or some of its rows, with an additional column."""

    def __init__(self, dataset: RowDataset, name: str, values: np.ndarray, indices: np.ndarray | None = None) -> None:
        self._dataset, self._name, self._values = dataset, name, values
        self._indices = np.arange(len(dataset)) if indices is None else indices
        self.seq_len, self.group_size = dataset.seq_len, dataset.group_size
        self.column_specs = {**dataset.column_specs, name: (values.dtype, False)}

    def __len__(self) -> int:
        return len(self._indices)

    def lengths(self, indices: np.ndarray) -> np.ndarray | None:
        return self._dataset.lengths(self._indices[indices])

    def count_tokens(self, indices: np.ndarray) -> int:
        return self._dataset.count_tokens(self._indices[indices])

    def _read_arrays(self, rows: np.ndarray, length: int) -> dict[str, np.ndarray]:
        numbers = self._indices[rows]
        return {**self._dataset._read_arrays(numbers, length), self._name: self._values[numbers]}


def add_reference_log_probs(
    manager: StrategyManager,
    datasets: RunDatasets,
    file: Path,
    shard: DataShard,
    *,
    identity: Any,
    on_compute: Callable[[], None],
) -> RunDatasets:
    """Add a column of log-probabilities under the initial weights; see [Note: reference log-probabilities].
    Collective."""
    world = manager.mesh.world
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    sets = {
        f"{_TRAINING_PREFIX}{index}": each
        for index, each in enumerate(datasets.train_sets)
        if isinstance(each, RowDataset)
    }
    sets |= {f"set {name}": each for name, each in datasets.eval_sets.items()}
    sums = world.run_on_first_rank(lambda: _load_reference(file, key, sets))
    if sums is None:
        on_compute()
        sums = {name: _compute_log_prob_sums(manager, each, shard) for name, each in sets.items()}
        computed = sums
        world.run_on_first_rank(lambda: _save_reference(file, key, computed))
    wrapped = {name: _DatasetWithColumn(each, REFERENCE_COLUMN, sums[name]) for name, each in sets.items()}
    return replace(
        datasets,
        train_sets=tuple(wrapped[f"{_TRAINING_PREFIX}{index}"] for index in range(len(datasets.train_sets))),
        eval_sets={name: wrapped[f"set {name}"] for name in datasets.eval_sets},
    )


def _compute_log_prob_sums(manager: StrategyManager, dataset: RowDataset, shard: DataShard) -> np.ndarray:
    """Return the log-probability of each row, summed over its supervised tokens: (N,), float64, equal on all ranks.
    Collective."""
    world = manager.mesh.world
    sums = torch.zeros(len(dataset), dtype=torch.float64)
    every = np.arange(len(dataset))
    block = _MICROBATCHES_PER_BLOCK * shard.data_size * shard.micro_batch_size
    for start in range(0, len(dataset), block):
        part = _DatasetWithColumn(dataset, _ROW_INDEX_COLUMN, every, every[start : start + block])
        batches = [dict(each) for each in read_eval_microbatches(part, shard, num_rows=None)]
        numbers = [batch.pop(_ROW_INDEX_COLUMN) for batch in batches]
        inputs = [{name: each for name, each in batch.items() if name not in dataset.column_specs} for batch in batches]
        for number, each in zip(numbers, manager.token_stats(inputs, ["log_probs"]), strict=True):
            # Rows that are repeated to give all ranks the same number are masked, and add nothing.
            sums.index_add_(0, number, each["log_probs"].sum(1, dtype=torch.float64).cpu())
    if not manager.mesh.is_data_leader:
        sums.zero_()
    world.reduce_ints([0])
    dist.all_reduce(sums, group=world.group)
    return sums.numpy()


def _load_reference(file: Path, key: str, sets: Mapping[str, RowDataset]) -> dict[str, np.ndarray] | None:
    """Read saved log-probability sums; None if there are none for these rows and weights."""
    try:
        with np.load(file, allow_pickle=False) as stored:
            if str(stored[_KEY]) != key:
                return None
            sums = {name: np.asarray(stored[name], np.float64) for name in sets}
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None
    return sums if all(len(sums[name]) == len(rows) for name, rows in sets.items()) else None


def _save_reference(file: Path, key: str, values: Mapping[str, np.ndarray]) -> None:
    arrays: dict[str, Any] = {_KEY: np.array(key), **values}
    try:
        with atomic_writer(file) as opened:
            np.savez(opened, **arrays)
    except OSError as error:
        raise ConfigError(f"output_dir: {file} cannot be written: {error}.") from error
