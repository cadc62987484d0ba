"""Check a step's microbatches and validate the step across ranks, with one message before training.

[Note: one message] The message carries the ranks' total token count and whether any rank has found an error. It also
shows whether values that must be equal are: the number of microbatches, `num_tokens`, and the tokens of ranks that
share a batch. `begin_step_sync` sends it in the background, and `forward_backward` takes the result. After
`count_tokens`, `forward_backward` sends a separate message, since its microbatches may differ from the counted ones.

[Note: equal shares] One sum shows whether ranks that share a batch have the same tokens. Each rank multiplies a
checksum of its tokens by a factor of its own. The factors of ranks that share a batch add up to 0 (modulo 2**64, as
int64 sums do). So the products add up to 0 if all checksums are equal, and almost never otherwise.

[Note: equal flags] One sum shows whether ranks freeze the same parameters. For each parameter that it freezes, a rank
subtracts a hash of the name. The first rank that has the parameter instead adds that hash once for each other rank. The
sum is 0 if all ranks that have a parameter freeze it, or none does.

[Note: packed documents] If several documents share a row, `position_ids` restart at each. transformers isolates them
only without an attention mask; with one, each document attends to the previous ones
(github.com/huggingface/transformers/issues/46634). So a mask of ones is dropped, and any other mask is rejected.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.errors import BatchError, MeshwrightError, StrategyError
from ..base.types import IGNORE_INDEX, Batch, Objective
from ..mesh.mesh import Mesh
from ..mesh.world import World
from .objective import BoundObjective, model_inputs
from .tokens import shift_labels


@dataclass(frozen=True)
class BatchRequirements:
    """A manager's requirements on the microbatches of a step.

    Attributes:
        check: additional check without a collective; raises BatchError or StrategyError.
        get_count: a count whose maximum over ranks becomes `SyncedStep.max_count`.
        rows_per_chunk: rows of the pipeline microbatches into which microbatches are split; None: they are not split.
    """

    vocab_size: int | None = None
    sequence_multiple: int = 1
    check: Callable[[Sequence[Batch]], None] = lambda microbatches: None
    get_count: Callable[[Sequence[Batch]], int] = len
    objective: BoundObjective | None = None
    rows_per_chunk: int | None = None
    frozen_share: int = field(default=0, compare=False)

    def count_tokens(self, microbatches: Sequence[Batch]) -> int:
        own = None if self.objective is None else self.objective.count(microbatches)
        unmasked = (int((shift_labels(batch["labels"]) != IGNORE_INDEX).sum()) for batch in microbatches)
        return sum(unmasked) if own is None else own


def compute_checksum(microbatches: Sequence[Batch]) -> int | None:
    """Return a 32-bit checksum of all `input_ids`; None on an accelerator, to avoid a device sync."""
    if any(batch["input_ids"].device.type != "cpu" for batch in microbatches):
        return None
    checksum = 0
    for batch in microbatches:
        checksum = zlib.crc32(batch["input_ids"].contiguous().numpy(), checksum)
    return checksum


def drop_redundant_mask(microbatches: Sequence[Batch]) -> list[Batch]:
    """Return the microbatches without redundant masks; see [Note: packed documents]."""
    return [
        {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
        if _has_packed_documents(batch)
        else batch
        for batch in microbatches
    ]


def find_batch_error(
    microbatches: Sequence[Batch], requirements: BatchRequirements, cp_size: int
) -> MeshwrightError | None:
    defect = find_format_error(microbatches, requirements.vocab_size)
    defect = defect or _find_length_error(microbatches, requirements.sequence_multiple, cp_size)
    if defect is not None:
        return BatchError(defect)
    try:
        if requirements.objective is not None:
            requirements.objective.check(microbatches, rows_per_chunk=requirements.rows_per_chunk)
        requirements.check(model_inputs(requirements.objective, microbatches))
    except (BatchError, StrategyError) as error:
        return error
    return None


def find_format_error(microbatches: Sequence[Batch], vocab_size: int | None = None) -> str | None:
    if not isinstance(microbatches, Sequence) or not microbatches:
        return f"microbatches must be a non-empty sequence of mappings, not {type(microbatches).__name__} (or empty)."
    for index, batch in enumerate(microbatches):
        about = f"microbatch {index} of {len(microbatches)}"
        for key in ("input_ids", "labels"):
            value = batch.get(key)
            if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.dim() != 2:
                got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                return f"{about}: {key} must be an int64 tensor of shape (B, S), not {got}."
        ids, labels = batch["input_ids"], batch["labels"]
        if ids.shape != labels.shape or ids.shape[1] < 2 or ids.shape[0] < 1:
            return (
                f"{about}: input_ids {tuple(ids.shape)} and labels {tuple(labels.shape)} must have one shape (B, S), "
                f"B >= 1, S >= 2."
            )
        if _has_packed_documents(batch) and not batch["attention_mask"].all():
            return (
                f"{about}: position_ids restart, so several documents share a row, and attention_mask has zeros, "
                f"under which transformers would let them see each other. Leave the mask out: end each row with "
                f"padding whose position_ids restart too, and whose labels are {IGNORE_INDEX}."
            )
        if vocab_size is not None:
            for key, tensor in (("input_ids", ids), ("labels", labels[labels != IGNORE_INDEX])):
                # Skip ids on an accelerator, to avoid a device sync.
                low, high = map(int, tensor.aminmax() if tensor.device.type == "cpu" and tensor.numel() else (0, 0))
                if low < 0 or high >= vocab_size:
                    return (
                        f"{about}: {key} range from {low} to {high}, but the model's vocabulary has {vocab_size} "
                        f"entries (0 to {vocab_size - 1}). Is this the model's own tokenizer?"
                    )
    return None


def _has_packed_documents(batch: Batch) -> bool:
    """Return whether positions restart among the unmasked tokens of a row. False unless the mask is (B, S)."""
    positions, mask, shape = batch.get("position_ids"), batch.get("attention_mask"), batch["input_ids"].shape
    if positions is None or mask is None or mask.shape != shape or positions.shape not in (shape, (1, shape[1])):
        return False
    rows = zip(positions.expand(shape), mask.bool(), strict=True)
    return any(bool((row[kept].diff() <= 0).any()) for row, kept in rows)


def _find_length_error(microbatches: Sequence[Batch], length_multiple: int, cp_size: int) -> str | None:
    suffix = " and sequence_parallel" if length_multiple > 2 * cp_size else ""
    ranks, remedy = f"{length_multiple} ranks (sequence_parallel)", "set sequence_parallel=false"
    if cp_size > 1:
        ranks, remedy = f"the ranks of cp_size={cp_size}{suffix}", "choose another cp_size"
    for index, length in enumerate(batch["input_ids"].shape[1] for batch in microbatches):
        if length % length_multiple:
            return (
                f"microbatch {index} of {len(microbatches)}: sequences of {length} tokens cannot be divided among "
                f"{ranks}. Pad them to a multiple of {length_multiple} with masked labels, or {remedy}."
            )
    return None


_STARTED_SYNC, _COUNT_ONLY, _NO_LOSS = -1, -2, -3
"""Values of `num_tokens` in a message that counts tokens for a step, that only counts them, or that has no loss."""


@dataclass(frozen=True)
class SyncedStep:
    """A step that all ranks have agreed on.

    `max_count`: maximum of `BatchRequirements.get_count` over ranks; `max_length`: tokens of the longest row.
    """

    microbatches: list[Batch]
    num_tokens: Tensor
    max_count: int
    max_length: int


class TokenCount(Tensor):
    """Result of `begin_step_sync`: token count, int64 scalar on the CPU. Any use waits until all ranks have called."""

    microbatches: Sequence[Batch]
    requirements: BatchRequirements
    get_result: Callable[[], _HandshakeResult]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*_to_plain_tensors(args), **_to_plain_tensors(dict(kwargs or {})))


def _to_plain_tensors(value: Any) -> Any:
    if isinstance(value, TokenCount):
        return torch.tensor(value.get_result().num_tokens, dtype=torch.int64)
    if type(value) in (list, tuple):
        return type(value)(map(_to_plain_tensors, value))
    if isinstance(value, dict):
        return {key: _to_plain_tensors(each) for key, each in value.items()}
    return value


def count_tokens(microbatches: Sequence[Batch], mesh: Mesh, objective: Objective | None = None) -> Tensor:
    """Count the unmasked targets of the global batch, or what `objective` counts. Collective.

    Returns an int64 scalar on the CPU, equal on all ranks. Raises BatchError on all ranks if any microbatch is
    malformed.
    """
    requirements = BatchRequirements(objective=None if objective is None else BoundObjective(objective))
    error = find_format_error(microbatches)
    result = _build_handshake(
        microbatches, mesh, requirements, BatchError(error) if error else None, num_tokens=_COUNT_ONLY
    ).send()
    result.check()
    return torch.tensor(result.num_tokens, dtype=torch.int64)


def begin_step_sync(microbatches: Sequence[Batch], mesh: Mesh, requirements: BatchRequirements) -> Tensor:
    """Start the handshake of the next step in the background; see `StrategyManager.begin_step_sync`. Collective."""
    defect = find_batch_error(microbatches, requirements, mesh.degrees.cp)
    message = _build_handshake(microbatches, mesh, requirements, defect, num_tokens=_STARTED_SYNC)
    wait = mesh.world.begin_reduce_sum_and_max(message.sums, message.maxima)
    count: TokenCount = torch.zeros((), dtype=torch.int64).as_subclass(TokenCount)
    count.microbatches = microbatches
    count.requirements = requirements
    count.get_result = lambda: _HandshakeResult(message, wait())
    return count


def has_reported_errors(num_tokens: Tensor) -> bool:
    """Return whether any rank may have found an error in the step to which a token count belongs."""
    return not isinstance(num_tokens, TokenCount) or num_tokens.get_result().num_errors > 0


def finish_step_sync(
    microbatches: Sequence[Batch], num_tokens: Tensor | None, mesh: Mesh, requirements: BatchRequirements
) -> SyncedStep:
    """Check that all ranks can run this step; `num_tokens` is None for a step without a loss. Collective."""
    if isinstance(num_tokens, TokenCount) and num_tokens.requirements == requirements:
        if microbatches is not num_tokens.microbatches:
            raise BatchError("the microbatches are others than those that were announced with this num_tokens.")
        result = num_tokens.get_result()
        total = result.num_tokens
    else:
        total = _NO_LOSS if num_tokens is None else int(num_tokens)
        defect = find_batch_error(microbatches, requirements, mesh.degrees.cp)
        result = _build_handshake(microbatches, mesh, requirements, defect, num_tokens=total).send()
    result.check()
    total = 1 if num_tokens is None else total
    if total < 1:
        own = requirements.objective
        counted = "an unmasked target" if own is None else f"anything for the {own.name} to count"
        raise BatchError(f"num_tokens is 0: no rank has {counted} in this step. Leave the step out, or unmask labels.")
    if result.checksum_sum:
        _check_shared_batches(microbatches, mesh)
    return SyncedStep(drop_redundant_mask(microbatches), torch.tensor(total), result.max_count, result.max_length)


# -- the message


@dataclass(frozen=True)
class _StepHandshake:
    world: World
    error: MeshwrightError | None
    sums: list[int]
    maxima: list[int]

    def send(self) -> _HandshakeResult:
        return _HandshakeResult(self, self.world.reduce_sum_and_max(self.sums, self.maxima))


def _build_handshake(
    microbatches: Sequence[Batch],
    mesh: Mesh,
    requirements: BatchRequirements,
    batch_error: MeshwrightError | None,
    *,
    num_tokens: int,
) -> _StepHandshake:
    """Build the message of a step; `num_tokens` is the number of tokens, or one of the negative constants."""
    tokens = count = share = most = signature = longest = frozen = 0
    if batch_error is None:
        try:
            counts = num_tokens in (_STARTED_SYNC, _COUNT_ONLY) and mesh.world.select(mesh.is_data_leader, True)
            tokens = requirements.count_tokens(microbatches) if counts else 0
        except BatchError as error:
            batch_error = error
    if batch_error is None and num_tokens != _COUNT_ONLY:
        count, most = len(microbatches), requirements.get_count(microbatches)
        signature = 0 if requirements.objective is None else requirements.objective.compute_signature(microbatches)
        share, frozen = compute_checksum_share(mesh, compute_checksum(microbatches)), requirements.frozen_share
        longest = max(batch["input_ids"].shape[1] for batch in microbatches)
    equal = [count, -count, num_tokens, -num_tokens, signature, -signature]
    return _StepHandshake(
        mesh.world, batch_error, [int(batch_error is not None), tokens, share, frozen], [*equal, most, longest]
    )


class _HandshakeResult:
    def __init__(self, handshake: _StepHandshake, numbers: tuple[Sequence[int], Sequence[int]]) -> None:
        self._handshake = handshake
        (
            (self.num_errors, self.num_tokens, self.checksum_sum, self._frozen_sum),
            (*pairs, self.max_count, self.max_length),
        ) = numbers
        # The minimum and maximum over ranks.
        self._num_microbatches_range, self._num_tokens_range, self._signature_range = (
            (-pairs[at + 1], pairs[at]) for at in (0, 2, 4)
        )

    def check(self) -> None:
        if self.num_errors:
            self._handshake.world.raise_first_error(self._handshake.error)
        low, high = self._num_tokens_range
        if low < 0 and low != high:
            raise BatchError(
                "ranks do not call alike: some announce a step, count tokens or ask for token_stats, while others do "
                "something else. Call begin_step_sync, count_tokens, forward_backward, eval_loss and token_stats on "
                "all "
                "ranks, in the same order."
            )
        if self._signature_range[0] != self._signature_range[1]:
            raise BatchError(
                "ranks disagree on the objective, or on the columns of its batches: their names, dtypes and numbers of "
                "dims. Give all ranks the same objective, and microbatches with the same columns."
            )
        if self._frozen_sum:
            raise StrategyError(
                "ranks disagree on which parameters are frozen. Set requires_grad alike on all ranks, and where stages "
                "of a pipeline share a parameter (tied embedding and head), on each stage."
            )
        if self._num_microbatches_range[0] != self._num_microbatches_range[1]:
            raise BatchError(
                f"ranks disagree on the number of microbatches: between {self._num_microbatches_range[0]} and "
                f"{self._num_microbatches_range[1]}. "
                f"Give every rank the same number; pad with microbatches whose labels are all {IGNORE_INDEX}."
            )
        if low != high:
            raise BatchError(
                f"ranks disagree on num_tokens: between {low} and {high}. It is the count over the global batch, equal "
                f"on all ranks: use meshwright.count_tokens."
            )


def _check_shared_batches(microbatches: Sequence[Batch], mesh: Mesh) -> None:
    checksums: list[tuple[int, int | None]] = [(0, None)] * mesh.world.size
    dist.all_gather_object(checksums, (mesh.data_rank, compute_checksum(microbatches)), group=mesh.world.group)
    for data_rank in range(mesh.data_size):
        if len({each for rank, each in checksums if rank == data_rank and each is not None}) > 1:
            raise BatchError(
                f"ranks that share a batch ({mesh.degrees}) have different input_ids for data rank {data_rank} of "
                f"{mesh.data_size}. Choose the batch by mesh.data_rank, not by the rank."
            )


def compute_checksum_share(mesh: Mesh, value: int | None) -> int:
    """Return this rank's term of the sum in [Note: equal shares], as an int64."""
    degrees = mesh.degrees
    sharers = degrees.pp * degrees.cp * degrees.tp
    mine = (mesh.axis_rank("pp") * degrees.cp + mesh.axis_rank("cp")) * degrees.tp + mesh.axis_rank("tp")
    if value is None or sharers == 1:
        return 0
    factor = (_hash_index(mine) - _hash_index((mine + 1) % sharers)) * (2 * _hash_index(mesh.data_rank) + 1)
    return mesh.world.select(_wrap_to_int64(value * factor), 0)


def compute_frozen_share(mesh: Mesh, frozen: Iterable[tuple[str, int, int]]) -> int:
    """Return this rank's term of the sum in [Note: equal flags].

    `frozen`: for each frozen parameter its name, the index of this copy, and the number of copies.
    """
    degrees, total = mesh.degrees, 0
    ranks = mesh.data_size * degrees.cp * degrees.tp
    mine = (mesh.data_rank * degrees.cp + mesh.axis_rank("cp")) * degrees.tp + mesh.axis_rank("tp")
    for name, copy, copies in frozen:
        number = _hash_index(zlib.crc32(name.encode()))
        total += number * (copies * ranks - 1) if copy == mine == 0 else -number
    return mesh.world.select(_wrap_to_int64(total), 0)


def _wrap_to_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _hash_index(index: int) -> int:
    """Hash an index to 64 bits (the finalizer of splitmix64)."""
    value = (index + 1) * 0x9E3779B97F4A7C15 % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ value >> shift) * factor % 2**64
    return value ^ value >> 31
