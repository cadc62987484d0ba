"""Save parameters, gradients and module outputs of a step, and compare those of two replays.

[Note: a gradient as state] A strategy describes optimizer state by parameter name, as chunks of full tensors. A
gradient that is stored in that state temporarily is described in the same way, under the names of the unwrapped model.

[Note: full outputs] Data ranks have different rows. Along `tp`, an output is full on every rank, or split by positions,
or split by features; those split by features are left out. Along `cp`, positions are in another order, and no outputs
are saved.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshwright.plugin import (
    Batch,
    ChunkedTensor,
    ConfiguredOptimizer,
    OptimizerFactory,
    ParamTraits,
    StrategyManager,
    get_members,
    iter_full_parameters,
)

from .rank_comparison import TENSOR_TYPES, get_first_output

BUCKET_BYTES = 1 << 25
NAMES_FILE = "names.json"
MAX_OUTPUT_BYTES = 1 << 30  # Maximum size of the outputs on one rank; if they are larger, none are saved
_KEY = "meshwright_gradient"


class RecordingOptimizerFactory(ConfiguredOptimizer):
    """Factory of a run file's optimizer that records the optimizers it creates, one per model part of this rank."""

    optimizers: list[Optimizer]

    def bind_to_model(self, trained: Mapping[str, ParamTraits]) -> OptimizerFactory:
        make, self.optimizers = super().bind_to_model(trained), getattr(self, "optimizers", [])

        def factory(named: object) -> Optimizer:
            self.optimizers.append(make(named))  # type: ignore[arg-type]
            return self.optimizers[-1]

        return factory


def save_gradients(manager: StrategyManager, optimizers: RecordingOptimizerFactory, directory: Path) -> None:
    """Save the gradients of the next optimizer step; a missing gradient counts as zeros. Collective."""
    members = [member for each in optimizers.optimizers for member in get_members(each)]
    stepped = [(each, p) for each in members for group in each.param_groups for p in group["params"]]
    for optimizer, parameter in stepped:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.state[parameter][_KEY] = gradient.detach()
    try:
        state = manager.sharded_state().optimizer
        pieces = {} if state is None else {name: each[_KEY] for name, each in state.tensors.items() if _KEY in each}
    finally:
        for optimizer, parameter in stepped:
            del optimizer.state[parameter][_KEY]
            if not optimizer.state[parameter]:
                del optimizer.state[parameter]
    held: Mapping[str, ChunkedTensor | None] = pieces
    _save(iter_full_parameters(lambda: held, manager.mesh, bucket_bytes=BUCKET_BYTES, dtype=None), manager, directory)


def save_parameters(manager: StrategyManager, directory: Path) -> None:
    """Save all full parameters, with the values that the model computes with. Collective."""
    _save(manager.iter_parameters(bucket_bytes=BUCKET_BYTES), manager, directory)


def _save(tensors: Iterator[tuple[str, Tensor]], manager: StrategyManager, directory: Path) -> None:
    """Save one file per tensor on rank 0. Only one full tensor is in memory at a time."""
    is_first, names = manager.mesh.rank == 0, list[str]()
    if is_first:
        directory.mkdir(exist_ok=True)
    for name, tensor in tensors:
        if is_first:
            torch.save(tensor.cpu(), directory / f"{len(names)}.pt")
        names.append(name)
    if is_first:
        (directory / NAMES_FILE).write_text(json.dumps(names), encoding="utf-8")


# -- outputs of modules


class OutputRecorder:
    """Record the outputs of this rank's modules in one training step. A context manager."""

    def __init__(self, manager: StrategyManager) -> None:
        self._mesh, self._parts = manager.mesh, tuple(manager.model_parts)
        # A pipeline stage has placeholders without parameters for modules of other stages.
        in_stages = self._mesh.degrees.pp > 1
        self._names = {
            id(module): name
            for part in self._parts
            for name, module in part.named_modules()
            if name and not (in_stages and next(module.parameters(), None) is None)
        }
        self._outputs: dict[str, list[Tensor]] = defaultdict(list)
        self._calls = dict.fromkeys(range(len(self._parts)), 0)
        self._bytes = 0
        self._handles: list[Any] = []
        self.reason = "positions are divided over the ranks of cp" if self._mesh.degrees.cp > 1 else ""

    def __enter__(self) -> OutputRecorder:
        for number, part in enumerate(self._parts if not self.reason else ()):
            self._handles.append(part.register_forward_pre_hook(self._make_call_counter(number)))
            for module in part.modules():
                if id(module) in self._names:
                    self._handles.append(module.register_forward_hook(self._make_output_hook(number)))
        return self

    def __exit__(self, *exc_info: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _make_call_counter(self, number: int) -> Any:
        def count(module: nn.Module, *_: Any) -> None:
            self._calls[number] += module.training

        return count

    def _make_output_hook(self, number: int) -> Any:
        def record(module: nn.Module, _: Any, output: Any) -> None:
            first = get_first_output(output)
            recorded = self._outputs[self._names[id(module)]]
            # Recomputed outputs are recorded already.
            if not module.training or len(recorded) >= self._calls[number] or type(first) not in TENSOR_TYPES:
                return
            if isinstance(first, DTensor):
                first = first.to_local()
            self._bytes += first.nbytes
            if self._bytes > MAX_OUTPUT_BYTES:
                self.reason = f"outputs exceed {MAX_OUTPUT_BYTES >> 20} MiB on a rank"
                self._outputs.clear()
                return
            recorded.append(first.detach().to("cpu", copy=True))

        return record

    def save(self, directory: Path, drawn: Sequence[Batch]) -> None:
        """Save the outputs and the rows of this rank's micro-batches to a file of this rank."""
        mesh = self._mesh
        rows = [torch.stack(pair) for batch in drawn for pair in zip(batch["input_ids"], batch["labels"], strict=True)]
        outputs = {} if self.reason else {name: _join_rows(each, len(rows)) for name, each in self._outputs.items()}
        saved = {
            "data_rank": mesh.data_rank,
            "tp": mesh.axis_rank("tp"),
            "pp": mesh.axis_rank("pp"),
            "reason": self.reason,
            "rows": rows,
            "outputs": {name: each for name, each in outputs.items() if each is not None},
        }
        torch.save(saved, directory / f"outputs-{mesh.rank}.pt")


def _join_rows(parts: Sequence[Tensor], count: int) -> list[Tensor] | None:
    """Return the rows of an output, which may differ in length, without a pipeline's padding rows at the end."""
    if not parts or any(each.dim() < 2 or not each.is_floating_point() for each in parts):
        return None
    rows = [row for part in parts for row in part]
    return rows[:count] if len(rows) >= count else None


@dataclass(frozen=True)
class RecordedOutputs:
    """Counts of a step's rows by their bytes, outputs by module and row, and the reason if there are no outputs."""

    rows: Mapping[bytes, int]
    outputs: Mapping[str, dict[bytes, Tensor]]
    reason: str


def load_outputs(directory: Path) -> RecordedOutputs:
    files = sorted(directory.glob("outputs-*.pt"), key=lambda path: int(path.stem.partition("-")[2]))
    ranks = [torch.load(path, weights_only=True) for path in files]
    reason = next((each["reason"] for each in ranks if each["reason"]), "")
    rows: Counter[bytes] = Counter()
    outputs: dict[str, dict[bytes, Tensor]] = {}
    for data_rank in sorted({each["data_rank"] for each in ranks}):
        mine = [each for each in ranks if each["data_rank"] == data_rank]
        keys = [_make_row_key(row) for row in mine[0]["rows"]]
        rows.update(keys)
        lengths = [row.shape[1] for row in mine[0]["rows"]]
        for stage in sorted({each["pp"] for each in mine}):
            along_tp = sorted((each for each in mine if each["pp"] == stage), key=lambda each: each["tp"])
            for name in along_tp[0]["outputs"]:
                full = _unshard([each["outputs"].get(name) for each in along_tp], lengths)
                if full is not None:
                    outputs.setdefault(name, {}).update(zip(keys, full, strict=True))
    return RecordedOutputs(rows, outputs, reason)


def _make_row_key(row: Tensor) -> bytes:
    """Return the bytes of token ids and labels without padding: a repeated last column, as long as other rows need."""
    length = row.shape[1]
    while length > 1 and torch.equal(row[:, length - 1], row[:, length - 2]):
        length -= 1
    return row[:, :length].contiguous().numpy().tobytes()


def _unshard(parts: Sequence[list[Tensor] | None], lengths: Sequence[int]) -> list[Tensor] | None:
    """Join the rows of an output from the ranks of `tp`; return None if it is not full or split by positions."""
    found = []
    for row, length in enumerate(lengths):
        pieces = [part[row] for part in parts if part is not None and len(part) > row]
        if len(pieces) != len(parts):
            return None
        if all(piece.shape[0] == length for piece in pieces):
            # An output that is split by features differs between ranks.
            if any(not torch.equal(piece, pieces[0]) for piece in pieces[1:]):
                return None
            found.append(pieces[0])
        elif sum(piece.shape[0] for piece in pieces) == length:
            found.append(torch.cat(pieces))
        else:
            return None
    return found


# -- comparison


@dataclass(frozen=True)
class TensorDiff:
    """Largest difference of two tensors, also relative to their largest element, or why they cannot be compared."""

    name: str
    absolute: float
    relative: float
    reason: str = ""


@dataclass(frozen=True)
class TensorDiffs:
    """Comparison of tensors in model order: number beyond the tolerance, first of them, and largest difference."""

    num_tensors: int
    first: TensorDiff | None
    largest: TensorDiff | None
    num_beyond_tolerance: int


def compare_tensors(name: str, one: Tensor, other: Tensor) -> TensorDiff:
    """Return the difference of two tensors, computed in float64; elements that are NaN in both are equal."""
    if one.shape != other.shape:
        return TensorDiff(name, torch.inf, torch.inf, f"shape {tuple(one.shape)} against {tuple(other.shape)}")
    if not one.numel():
        return TensorDiff(name, 0.0, 0.0)
    a, b = one.double(), other.double()
    between = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).nan_to_num(nan=torch.inf)
    most, scale = float(between.max()), float(torch.maximum(a.abs(), b.abs()).nan_to_num(nan=0.0).max())
    return TensorDiff(name, most, most / scale if most and math.isfinite(most) else most)


def compare_saved_tensors(one: Path, other: Path, tolerance: float) -> TensorDiffs:
    """Compare the tensors that two replays have saved, by name, with a relative tolerance."""
    mine, theirs = (
        {name: path / f"{number}.pt" for number, name in enumerate(json.loads((path / NAMES_FILE).read_text("utf-8")))}
        for path in (one, other)
    )
    found = []
    for name, path in mine.items():
        if name in theirs:
            pair = (torch.load(each, weights_only=True, mmap=True) for each in (path, theirs.pop(name)))
            found.append(compare_tensors(name, *pair))
        else:
            found.append(TensorDiff(name, torch.inf, torch.inf, "the second run has no tensor of this name"))
    found += [TensorDiff(name, torch.inf, torch.inf, "the first run has no tensor of this name") for name in theirs]
    return _summarize(found, tolerance)


def compare_outputs(one: RecordedOutputs, other: RecordedOutputs, tolerance: float) -> TensorDiffs:
    """Compare the module outputs that both replays have in full, in the order of the first replay."""
    found: list[TensorDiff] = []
    for name, rows in one.outputs.items():
        theirs = other.outputs.get(name)
        if theirs is None or rows.keys() != theirs.keys():
            continue
        pairs = [(rows[key], theirs[key]) for key in rows]
        if any(a.shape[1:] != b.shape[1:] for a, b in pairs):
            continue
        widths = [min(len(a), len(b)) for a, b in pairs]
        left = torch.cat([a[:width].flatten() for (a, _), width in zip(pairs, widths, strict=True)])
        right = torch.cat([b[:width].flatten() for (_, b), width in zip(pairs, widths, strict=True)])
        found.append(compare_tensors(name, left, right))
    return _summarize(found, tolerance)


def _summarize(diffs: list[TensorDiff], tolerance: float) -> TensorDiffs:
    beyond = [each for each in diffs if not each.relative <= tolerance]
    largest = max(diffs, key=lambda each: each.relative, default=None)
    return TensorDiffs(len(diffs), beyond[0] if beyond else None, largest, len(beyond))
