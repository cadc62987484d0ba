"""Columns of a run's rows that an objective needs besides the tokens, and where they come from.

[Note: the reference] Log-probabilities under the initial weights are computed before the first step, by the run's own
manager: one number for each row, summed over its supervised tokens. They are kept in the output directory, so that a
resumed run compares with the same.

Shapes: N rows of a set, B rows of a microbatch, S positions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
import torch.distributed as dist

from ...base.errors import BatchError, ConfigError
from ...base.types import Batch, Objective
from ...data import Place, Rows, RunRows, eval_microbatches
from ...files.writing import written_whole
from ...objectives.base import Column
from ...step.objective import Given
from ...strategy.contract import StrategyManager

REFERENCE = "reference_log_probs"
_TRAINING = "training"
_KEY, _NUMBER = "key", "number of the row"
_AT_ONCE = 16
"""Microbatches of a rank that are read at once."""


def columns_to_compute(objective: Objective | None, rows: RunRows) -> bool:
    """Whether the reference's log-probabilities are to be computed.

    Raises:
        ConfigError: the rows lack what the objective needs, or are grouped where it takes each by itself.
    """
    group, first = rows.training[0].group, rows.evaluated
    given = None if objective is None else Given(objective)
    if group > 1 and (given is None or given.rows != group):
        told = "cross entropy" if given is None else given.name
        raise ConfigError(
            f"the rows of these data belong together, {group} by {group} (chosen and rejected), and the {told} takes "
            f"each by itself, so that rejected answers would be learnt. Set objective to orpo, simpo or dpo, or give "
            f"data of another format."
        )
    if given is None:
        return False
    if given.rows != group:
        raise ConfigError(
            f"the {given.name} takes rows {given.rows} by {given.rows}, and those of these data do not belong "
            f"together. Give data of format preference; or microbatches in which they do in a script: see "
            f"docs/objectives.md."
        )
    missing = [name for name in getattr(objective, "columns", ()) if name not in first.columns]
    takes_sums = any(each.name == REFERENCE and "B" in each.shapes for each in _asked(objective))
    computes = missing == [REFERENCE] and takes_sums
    if missing and not computes:
        raise ConfigError(
            f"the {given.name} needs {', '.join(missing)} beside the tokens, and the data have "
            f"{', '.join(first.columns) or 'no columns'}. Name fields of a source that hold it in its `columns`; or "
            f"give it microbatches that have it in a script: see docs/objectives.md."
        )
    sample = dict(first.take(range(group)))
    if computes:
        if not all(isinstance(each, Rows) for each in rows.training):
            raise ConfigError(
                f"the {given.name} compares with log-probabilities of the weights that the run begins with, which are "
                f"computed for all rows before, and a source is read while training. Set its streaming to false, or "
                f"name a field that holds {REFERENCE} in its `columns`."
            )
        sample[REFERENCE] = torch.zeros(group, dtype=torch.float64)
    try:
        given.check([as_asked(objective, sample)])
    except BatchError as error:
        raise ConfigError(f"the data do not fit the objective: {error}") from None
    return computes


def _asked(objective: Objective | None) -> Sequence[Column]:
    takes: Sequence[Column] = getattr(objective, "takes", ())
    return takes


def as_asked(objective: Objective | None, batch: Batch) -> Batch:
    """Convert integer columns of a microbatch to the floats or booleans that an objective asks for."""
    dtypes = {"float": torch.float64, "bool": torch.bool}
    changed = {
        each.name: batch[each.name].to(dtypes[each.kind])
        for each in _asked(objective)
        if each.name in batch and each.kind in dtypes and batch[each.name].dtype == torch.int64
    }
    return {**batch, **changed} if changed else batch


class _Derived(Rows):
    """Rows with one more column, some of other rows.

    Args:
        name, values: of the column: one number for each of the other rows.
        numbers: which of them; None: all.
    """

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
    """Add log-probabilities under the initial weights to the rows; see [Note: the reference]. Collective.

    Args:
        manager: has the initial weights once `begin` has been called.
        file: where they are kept.
        of: what they follow from, values of JSON: if that changes, they are computed again.
        begin: loads the initial weights; collective.
    """
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
    """Write what a resumed run needs."""
    arrays: dict[str, Any] = {_KEY: np.array(key), **values}
    try:
        with written_whole(file) as opened:
            np.savez(opened, **arrays)
    except OSError as error:
        raise ConfigError(f"output_dir: {file} cannot be written: {error}.") from error
