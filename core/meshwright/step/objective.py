"""Objectives that replace the token loss: checks, a probe before training, and calls in a step.

[Note: objectives] An objective is called as `objective(tokens, columns)` for each microbatch. `tokens` is a `Tokens`,
or an `Outputs` if `objective.input_kind` is "outputs", for models without a vocabulary head. `columns` are the entries
of the batch that the model's forward does not take, of full sequences: (B,), (B, S) or (B, S, K). The objective returns
the differentiable sum over the microbatch's tokens or sequences, a scalar. It may also return a mapping of extra sums,
scalars, which the manager adds up as `last_sums`. Optional attributes:

- `input_kind`: "tokens" (default) or "outputs", see above;
- `columns`: entries of the batch that it requires;
- `group_size`: number of consecutive rows that belong together (2 for pairs);
- `check(batch)`: raises for an invalid microbatch;
- `count(batch)`: int, computed on the host; the sum is divided by its total instead of by the unmasked targets;
- `name`: its name in messages.

Entry s of a column (B, S) belongs to position s, which predicts token s + 1. Rows without labels, which pad the number
of microbatches on some ranks, should add 0.

[Note: a sum] The values of an objective are added up over microbatches and ranks. So the values of two groups of rows
must add up to the value of both together, which is not true of a mean. A probe checks each objective with generated
statistics of some rows.

[Note: a failure in a step] If an objective fails on one rank during a step, this rank continues with 0, so that no
other rank waits for it. At the end of the step all ranks raise the error, and no parameter changes.

Shapes: B sequences of a microbatch, S positions of each, K ids at each position.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.errors import BatchError, ConfigError, MeshwrightError, ModelError, NonFiniteError
from ..base.types import IGNORE_INDEX, Batch, Objective, TokenStatistic
from .tokens import Outputs, Sequences, StatisticsRecorder, Tokens, shift_labels

MODEL_KEYS = frozenset({"input_ids", "labels", "attention_mask", "position_ids"})
"""Entries of a batch that are never columns of an objective, whatever the model's forward takes."""
_UNSHARDED_PREFIX = "whole: "
_RETURN_RULE = "An objective returns a scalar tensor, or one and a mapping of names to scalar tensors, each a sum."


@dataclass(frozen=True, eq=False)
class BoundObjective:
    """An objective bound to a model.

    `model_keys`: entries of a batch that the model's forward takes; `usual_statistics`: see `Tokens`.
    """

    objective: Objective
    model_keys: frozenset[str] = MODEL_KEYS
    usual_statistics: set[TokenStatistic] = field(default_factory=set)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, BoundObjective)
            and self.is_bound_to(other.objective)
            and self.model_keys == other.model_keys
        )

    def is_bound_to(self, objective: Objective) -> bool:
        """Return whether `objective` is the same object, or an equal bound method."""
        return objective is self.objective or (isinstance(objective, MethodType) and objective == self.objective)

    @property
    def name(self) -> str:
        own = getattr(self.objective, "name", None) or getattr(self.objective, "__name__", None)
        return f"objective {own if isinstance(own, str) else type(self.objective).__name__!r}"

    def expect_statistics(self, names: Sequence[TokenStatistic]) -> None:
        self.usual_statistics.clear()
        self.usual_statistics.update(names)

    @property
    def input_kind(self) -> Literal["tokens", "outputs"]:
        """Type of its first argument: `Tokens` or `Outputs`."""
        return getattr(self.objective, "input_kind", "tokens")

    @property
    def group_size(self) -> int:
        return getattr(self.objective, "group_size", 1)

    def get_columns(self, batch: Batch) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in batch.items() if name not in self.model_keys}

    def get_model_inputs(self, batch: Batch) -> Batch:
        return {name: tensor for name, tensor in batch.items() if name in self.model_keys}

    def get_unsharded_columns(self, batch: Batch) -> dict[str, Tensor]:
        """Return the columns, labels and positions of an unsharded microbatch, under prefixed keys.

        `split_unsharded_columns` removes the prefix.
        """
        entries = self.get_columns(batch) | {key: batch[key] for key in ("labels", "position_ids") if key in batch}
        return {_UNSHARDED_PREFIX + name: tensor for name, tensor in entries.items()}

    def compute_signature(self, microbatches: Sequence[Batch]) -> int:
        columns = sorted(
            (name, str(each.dtype), each.dim()) for name, each in self.get_columns(microbatches[0]).items()
        )
        return 1 + zlib.crc32(repr((self.name, self.input_kind, columns)).encode())

    def count(self, microbatches: Sequence[Batch]) -> int | None:
        """Return the divisor of the sum, counted on the host; None: the number of unmasked targets."""
        own: Callable[[Batch], int] | None = getattr(self.objective, "count", None)
        if own is None:
            return None
        try:
            counts = [own(batch) for batch in microbatches]
        except Exception as error:
            raise BatchError(f"the count of {self.name} fails: {type(error).__name__}: {error}") from error
        for count in counts:
            if not isinstance(count, int) or count < 0:
                raise BatchError(f"the count of {self.name} must be an int, at least 0, not {count!r}.")
        return sum(counts)

    def check(self, microbatches: Sequence[Batch], *, rows_per_chunk: int | None = None) -> None:
        """Raise BatchError for an invalid objective, or a batch that it rejects; no collective."""
        if not callable(self.objective):
            raise BatchError(f"objective must be callable as objective(tokens, batch), not {self.objective!r}.")
        if self.input_kind not in ("tokens", "outputs"):
            raise BatchError(f"the {self.name} has input_kind={self.input_kind!r}; it must be 'tokens' or 'outputs'.")
        if not isinstance(self.group_size, int) or self.group_size < 1:
            raise BatchError(f"the {self.name} has rows={self.group_size!r}; it must be an int, at least 1.")
        for index, batch in enumerate(microbatches):
            about, count = f"microbatch {index} of {len(microbatches)}", batch["input_ids"].shape[0]
            for column in getattr(self.objective, "columns", ()):
                if column not in batch:
                    raise BatchError(
                        f"{about} lacks the column {column!r}, which the {self.name} needs; it has {', '.join(batch)}."
                    )
            for column, tensor in self.get_columns(batch).items():
                if tensor.shape[:1] != (count,):
                    raise BatchError(
                        f"{about}: {column} has the shape {tuple(tensor.shape)}; a column of the {self.name} has one "
                        f"entry for each of the {count} sequences along its first dim: (B,), (B, S) or (B, S, K)."
                    )
            own = getattr(self.objective, "check", None)
            try:
                _ = own(batch) if own is not None else None
            except Exception as error:
                raise BatchError(f"{about}: the {self.name} refuses it: {error}") from error
            for size in {count, rows_per_chunk or count}:
                if size % self.group_size:
                    raise BatchError(
                        f"{about}: {size} sequences at a time cannot be taken {self.group_size} by {self.group_size}, "
                        f"as the {self.name} takes them. Let microbatches, and those of a pipeline "
                        f"(pp_microbatch_size), have a multiple of {self.group_size} sequences."
                    )


def model_inputs(objective: BoundObjective | None, microbatches: Sequence[Batch]) -> Sequence[Batch]:
    """Return the microbatches without the objective's columns."""
    return microbatches if objective is None else [objective.get_model_inputs(batch) for batch in microbatches]


def split_unsharded_columns(batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split a sharded batch into the model's inputs and the entries of `BoundObjective.get_unsharded_columns`."""
    part = {name: tensor for name, tensor in batch.items() if not name.startswith(_UNSHARDED_PREFIX)}
    return part, {name.removeprefix(_UNSHARDED_PREFIX): batch[name] for name in batch.keys() - part.keys()}


class ObjectiveAccumulator:
    """Call an objective in one step or evaluation, and accumulate its extra sums, float64.

    `has_nonfinite`: a value was not finite; `error`: the first error on this rank, see [Note: a failure in a step].
    """

    def __init__(self, objective: BoundObjective, names: Sequence[str], device: torch.device) -> None:
        self.objective, self.names = objective, tuple(names)
        self.sums = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        self.has_nonfinite = torch.zeros((), dtype=torch.bool, device=device)
        self.error: MeshwrightError | None = None

    def __call__(self, inputs: Tokens | Outputs, columns: Mapping[str, Tensor]) -> Tensor:
        value = None
        if self.error is None:
            try:
                value, sums = call_objective(self.objective, inputs, columns)
                self._add(sums)
                self.has_nonfinite |= ~value.detach().isfinite()
            except MeshwrightError as error:
                self.error = error
        if self.error is not None or value is None:
            return inputs.zero_with_grad()
        # An objective may return a constant for rows without labels.
        return value if value.requires_grad or not torch.is_grad_enabled() else value + inputs.zero_with_grad()

    def _add(self, sums: Mapping[str, Tensor]) -> None:
        if tuple(sorted(sums)) != self.names:
            raise ConfigError(
                f"the {self.objective.name} returns sums named {sorted(sums)}, where it has returned {[*self.names]} "
                f"before. Return the same names each time."
            )
        for index, name in enumerate(self.names):
            self.sums[index] += sums[name].detach()

    def get_error(self, has_nonfinite: bool) -> MeshwrightError | None:
        if self.error is not None or not has_nonfinite:
            return self.error
        return NonFiniteError(
            f"the {self.objective.name} is not finite. No parameter was changed by this step. Look at the batch, and "
            "at what the objective divides by, exponentiates or takes the logarithm of."
        )


def call_objective(
    objective: BoundObjective, inputs: Sequences, columns: Mapping[str, Tensor]
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Call an objective and return its value and extra sums; ConfigError if it fails or returns something else."""
    try:
        result: Any = objective.objective(inputs, columns)
    except (MeshwrightError, torch.OutOfMemoryError, dist.DistError):
        raise
    except KeyError as error:
        raise ConfigError(
            f"the {objective.name} asks for {error}, which the batch has not; its columns: "
            f"{', '.join(columns) or 'none'}."
        ) from error
    except Exception as error:
        raise ConfigError(f"the {objective.name} fails: {type(error).__name__}: {error}") from error
    value, sums = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(value, Tensor) or value.dim() != 0 or not value.is_floating_point():
        raise ConfigError(f"the {objective.name} returns {_describe_value(value)}. {_RETURN_RULE}")
    if not isinstance(sums, Mapping):
        raise ConfigError(f"the {objective.name} returns {_describe_value(sums)} besides its value. {_RETURN_RULE}")
    for name, each in sums.items():
        if not isinstance(name, str) or not isinstance(each, Tensor) or each.dim() != 0:
            raise ConfigError(f"the {objective.name} returns {_describe_value(each)} as {name!r}. {_RETURN_RULE}")
    return value, sums


def _describe_value(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} {tuple(value.shape)}"
    return f"a value of type {type(value).__name__}"


def check_logits_shape(objective: BoundObjective, shape: Sequence[int], vocab_size: int | None) -> None:
    """Raise ModelError for an objective over tokens if the logits are not over a vocabulary."""
    if objective.input_kind == "tokens" and (len(shape) != 3 or shape[-1] < (vocab_size or 0)):
        raise ModelError(
            f"the {objective.name} is over tokens, but the model gives logits {tuple(shape)}, which are not those of "
            "its vocabulary. Set input_kind = 'outputs', for an objective over what the model's head returns."
        )


def probe_objective(
    objective: BoundObjective, batch: Batch, num_features: int | None, dtype: torch.dtype
) -> tuple[str, ...]:
    """Call an objective with generated statistics; return the names of its extra sums. See [Note: a sum]."""
    if isinstance(objective.objective, StatisticsRecorder):
        return ()
    probe = _ProbeBatch(objective, batch, num_features, dtype)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        (both, sums), (again, _) = probe.call(0, 2), probe.call(0, 2)
        parts = [probe.call(0, 1)[0], probe.call(1, 2)[0]]
    if not both.requires_grad and bool((probe.targets != IGNORE_INDEX).any()):
        raise ConfigError(f"the {objective.name} returns a value without a gradient: nothing would be trained.")
    values = [float(each.detach()) for each in (both, again, *parts)]
    total, repeated, first, second = values
    # An objective with random numbers differs in each call. Non-finite values may come from the generated statistics.
    is_known = total == repeated and all(abs(each) < float("inf") for each in values)
    if is_known and abs(total - first - second) > 1e-3 * (abs(first) + abs(second)):
        raise ConfigError(
            f"the {objective.name} gives {first:g} and {second:g} for two groups of sequences, and {total:g} for both "
            f"together, so it is no sum over sequences (a mean, perhaps). Return the sum: it is divided by num_tokens."
        )
    return tuple(sorted(sums))


class _ProbeBatch:
    """Two groups of rows of a microbatch; rows repeat if there are too few."""

    def __init__(self, given: BoundObjective, batch: Batch, features: int | None, dtype: torch.dtype) -> None:
        self._objective, self._num_features = given, features
        labels, rows = batch["labels"], given.group_size
        count, length = labels.shape
        index = torch.arange(2 * rows, device=labels.device) % min(count, 2 * rows)
        self.targets = shift_labels(labels)[index]
        positions = batch.get("position_ids")
        self._positions = None if positions is None else positions.expand(count, length)[index]
        self._columns = {name: tensor[index] for name, tensor in given.get_columns(batch).items()}
        generator = torch.Generator().manual_seed(0)
        noise = torch.rand(2 * rows, length, generator=generator, dtype=torch.float64)
        self._noise = noise.to(labels.device, dtype).requires_grad_()

    def call(self, start: int, stop: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        rows = slice(start * self._objective.group_size, stop * self._objective.group_size)
        noise_BS, positions = self._noise[rows], None if self._positions is None else self._positions[rows]

        def get_statistics(ids_BSK: Tensor, names: Sequence[TokenStatistic]) -> Mapping[str, Tensor]:
            values: dict[str, Tensor] = dict.fromkeys(names, 1.0 + noise_BS)
            losses_BSK = 0.5 + noise_BS[..., None] + 3.0 * (ids_BSK * 0.618).frac()
            values["log_probs"] = torch.where(ids_BSK != IGNORE_INDEX, -losses_BSK, 0.0)
            values["is_top1"] = (noise_BS > 0.5) & (ids_BSK != IGNORE_INDEX).any(-1)
            return {name: values[name] for name in names}

        inputs: Tokens | Outputs
        if self._objective.input_kind == "tokens":
            inputs = Tokens(
                self.targets[rows],
                get_statistics,
                positions_BS=positions,
                usual_statistics=self._objective.usual_statistics,
            )
        else:
            features = self._num_features or 1
            each_K = torch.linspace(-1.0, 1.0, abs(features), dtype=noise_BS.dtype, device=noise_BS.device)
            logits = (noise_BS[..., None] if features > 0 else noise_BS[:, :1]) * each_K
            inputs = Outputs(self.targets[rows], logits, positions_BS=positions)
        return call_objective(self._objective, inputs, {name: tensor[rows] for name, tensor in self._columns.items()})
