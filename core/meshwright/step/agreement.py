"""Checks of a step's microbatches, and agreement of ranks on it by one message before they train.

[Note: one message] The message carries the sum of the ranks' tokens, whether any rank has found an error, and whether
what must be equal is: the number of microbatches, `num_tokens`, and the tokens of ranks that share a batch. It is sent
in the background when a step is announced, and `forward_backward` takes the answer. If tokens are counted instead,
`forward_backward` sends a message of its own, since it may be given something else than what was counted.

[Note: equal shares] One sum shows whether ranks that share a batch have the same tokens. Each multiplies a checksum of
its tokens by a number of its own, and the numbers of those that share a batch add up to 0 (modulo 2**64, as sums of
int64 do). So do the products if all checksums are equal, and hardly ever otherwise.

[Note: equal flags] One sum shows whether ranks freeze the same parameters. For each parameter that it freezes, a rank
adds minus a number that stands for the name; the first rank that holds the parameter adds that number once for each
other rank instead. The sum is 0 if all that hold a parameter freeze it, or none.

[Note: packed documents] If several documents share a row, `position_ids` restart at each. transformers keeps them apart
only without an attention mask; with one, each document sees those before it
(github.com/huggingface/transformers/issues/46634). So a mask of ones is left out, and any other is refused.
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
from ..base.types import IGNORED_LABEL, Batch, Objective
from ..mesh.mesh import Mesh
from ..mesh.world import World
from .objective import Given, without_columns
from .tokens import targets


@dataclass(frozen=True)
class Terms:
    """What a manager requires of the microbatches of a step.

    Attributes:
        check: further check without a collective; raises BatchError or StrategyError.
        count: a count of which ranks learn the maximum; see `Agreed.most`.
        rows: rows of the pieces into which microbatches are cut; None: they are not.
    """

    vocab_size: int | None = None
    sequence_multiple: int = 1
    check: Callable[[Sequence[Batch]], None] = lambda microbatches: None
    count: Callable[[Sequence[Batch]], int] = len
    objective: Given | None = None
    rows: int | None = None
    frozen: int = field(default=0, compare=False)

    def tokens(self, microbatches: Sequence[Batch]) -> int:
        own = None if self.objective is None else self.objective.count(microbatches)
        unmasked = (int((targets(batch["labels"]) != IGNORED_LABEL).sum()) for batch in microbatches)
        return sum(unmasked) if own is None else own


def checksum(microbatches: Sequence[Batch]) -> int | None:
    """Return a 32-bit checksum of all `input_ids`; None if they are on an accelerator, for which it would wait."""
    if any(batch["input_ids"].device.type != "cpu" for batch in microbatches):
        return None
    found = 0
    for batch in microbatches:
        found = zlib.crc32(batch["input_ids"].contiguous().numpy(), found)
    return found


def apart(microbatches: Sequence[Batch]) -> list[Batch]:
    """Return the microbatches without redundant masks; see [Note: packed documents]."""
    return [
        {name: tensor for name, tensor in batch.items() if name != "attention_mask"} if _restarts(batch) else batch
        for batch in microbatches
    ]


def defect_under(microbatches: Sequence[Batch], terms: Terms, cp_size: int) -> MeshwrightError | None:
    defect = defect_of(microbatches, terms.vocab_size)
    defect = defect or _length_defect(microbatches, terms.sequence_multiple, cp_size)
    if defect is not None:
        return BatchError(defect)
    try:
        if terms.objective is not None:
            terms.objective.check(microbatches, rows=terms.rows)
        terms.check(without_columns(terms.objective, microbatches))
    except (BatchError, StrategyError) as error:
        return error
    return None


def defect_of(microbatches: Sequence[Batch], vocab_size: int | None = None) -> str | None:
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
        if _restarts(batch) and not batch["attention_mask"].all():
            return (
                f"{about}: position_ids restart, so several documents share a row, beside an attention_mask with "
                f"zeros, under which transformers would let them see each other. Leave the mask out: end each row with "
                f"padding whose position_ids restart too, and whose labels are {IGNORED_LABEL}."
            )
        if vocab_size is not None:
            for key, tensor in (("input_ids", ids), ("labels", labels[labels != IGNORED_LABEL])):
                # Ids on an accelerator are not looked at: that would wait for queued work.
                low, high = map(int, tensor.aminmax() if tensor.device.type == "cpu" and tensor.numel() else (0, 0))
                if low < 0 or high >= vocab_size:
                    return (
                        f"{about}: {key} range from {low} to {high}, but the model's vocabulary has {vocab_size} "
                        f"entries (0 to {vocab_size - 1}). Is this the model's own tokenizer?"
                    )
    return None


def _restarts(batch: Batch) -> bool:
    """Return whether positions restart among a row's tokens that a mask of tokens (not of queries and keys) leaves."""
    positions, mask, shape = batch.get("position_ids"), batch.get("attention_mask"), batch["input_ids"].shape
    if positions is None or mask is None or mask.shape != shape or positions.shape not in (shape, (1, shape[1])):
        return False
    rows = zip(positions.expand(shape), mask.bool(), strict=True)
    return any(bool((row[kept].diff() <= 0).any()) for row, kept in rows)


def _length_defect(microbatches: Sequence[Batch], multiple: int, cp_size: int) -> str | None:
    beside = " and sequence_parallel" if multiple > 2 * cp_size else ""
    ranks, remedy = f"{multiple} ranks (sequence_parallel)", "set sequence_parallel=false"
    if cp_size > 1:
        ranks, remedy = f"the ranks of cp_size={cp_size}{beside}", "choose another cp_size"
    for index, length in enumerate(batch["input_ids"].shape[1] for batch in microbatches):
        if length % multiple:
            return (
                f"microbatch {index} of {len(microbatches)}: sequences of {length} tokens cannot be divided among "
                f"{ranks}. Pad them to a multiple of {multiple} with masked labels, or {remedy}."
            )
    return None


_ANNOUNCED, _COUNTED, _NO_LOSS = -1, -2, -3
"""In place of a number of tokens: the message counts them itself, for a step or for none; or there is no loss."""


@dataclass(frozen=True)
class Agreed:
    """What all ranks know of a step: `most` is the largest `Terms.count`, `longest` the tokens of the longest row."""

    microbatches: list[Batch]
    num_tokens: Tensor
    most: int
    longest: int


class TokenCount(Tensor):
    """Token count of an announced step, int64 scalar on the CPU; any use waits until all ranks have announced."""

    microbatches: Sequence[Batch]
    terms: Terms
    answer: Callable[[], _Answer]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*_as_numbers(args), **_as_numbers(dict(kwargs or {})))


def _as_numbers(value: Any) -> Any:
    if isinstance(value, TokenCount):
        return torch.tensor(value.answer().tokens, dtype=torch.int64)
    if type(value) in (list, tuple):
        return type(value)(map(_as_numbers, value))
    if isinstance(value, dict):
        return {key: _as_numbers(each) for key, each in value.items()}
    return value


def count_tokens(microbatches: Sequence[Batch], mesh: Mesh, objective: Objective | None = None) -> Tensor:
    """Count the unmasked targets of the global batch, or what `objective` counts, by a message of its own. Collective.

    Returns an int64 scalar on the CPU, equal on all ranks; BatchError on all if a microbatch of any is malformed.
    """
    terms, found = Terms(objective=None if objective is None else Given(objective)), defect_of(microbatches)
    answer = _message(microbatches, mesh, terms, BatchError(found) if found else None, given=_COUNTED).sent()
    answer.check()
    return torch.tensor(answer.tokens, dtype=torch.int64)


def announce(microbatches: Sequence[Batch], mesh: Mesh, terms: Terms) -> Tensor:
    """Begin to agree on a step while the one before computes; see `StrategyManager.announce`. Collective."""
    defect = defect_under(microbatches, terms, mesh.degrees.cp)
    message = _message(microbatches, mesh, terms, defect, given=_ANNOUNCED)
    wait = mesh.world.begin_exchange(message.sums, message.highs)
    count: TokenCount = torch.zeros((), dtype=torch.int64).as_subclass(TokenCount)
    count.microbatches, count.terms, count.answer = microbatches, terms, lambda: _Answer(message, wait())
    return count


def defects_told(num_tokens: Tensor) -> bool:
    """Return whether any rank may have found an error in the step that a token count announces."""
    return not isinstance(num_tokens, TokenCount) or num_tokens.answer().defects > 0


def agree(microbatches: Sequence[Batch], num_tokens: Tensor | None, mesh: Mesh, terms: Terms) -> Agreed:
    """Check that all ranks can run this step; `num_tokens` is None where there is no loss. Collective."""
    if isinstance(num_tokens, TokenCount) and num_tokens.terms == terms:
        if microbatches is not num_tokens.microbatches:
            raise BatchError("the microbatches are others than those that were announced with this num_tokens.")
        answer = num_tokens.answer()
        total = answer.tokens
    else:
        total = _NO_LOSS if num_tokens is None else int(num_tokens)
        defect = defect_under(microbatches, terms, mesh.degrees.cp)
        answer = _message(microbatches, mesh, terms, defect, given=total).sent()
    answer.check()
    total = 1 if num_tokens is None else total
    if total < 1:
        own = terms.objective
        counted = "an unmasked target" if own is None else f"anything for the {own.name} to count"
        raise BatchError(f"num_tokens is 0: no rank has {counted} in this step. Leave the step out, or unmask labels.")
    if answer.shares:
        _check_shares(microbatches, mesh)
    return Agreed(apart(microbatches), torch.tensor(total), answer.most, answer.longest)


# -- the message


@dataclass(frozen=True)
class _Message:
    world: World
    defect: MeshwrightError | None
    sums: list[int]
    highs: list[int]

    def sent(self) -> _Answer:
        return _Answer(self, self.world.exchange(self.sums, self.highs))


def _message(
    microbatches: Sequence[Batch], mesh: Mesh, terms: Terms, defect: MeshwrightError | None, *, given: int
) -> _Message:
    """Make the message of a step; `given` is the number of tokens, or one of the constants that stand for it."""
    tokens = count = share = most = signature = longest = frozen = 0
    if defect is None:
        try:
            counts = given in (_ANNOUNCED, _COUNTED) and mesh.world.select(mesh.leads_data, True)
            tokens = terms.tokens(microbatches) if counts else 0
        except BatchError as error:
            defect = error
    if defect is None and given != _COUNTED:
        count, most = len(microbatches), terms.count(microbatches)
        signature = 0 if terms.objective is None else terms.objective.signature(microbatches)
        share, frozen = share_of(mesh, checksum(microbatches)), terms.frozen
        longest = max(batch["input_ids"].shape[1] for batch in microbatches)
    equal = [count, -count, given, -given, signature, -signature]
    return _Message(mesh.world, defect, [int(defect is not None), tokens, share, frozen], [*equal, most, longest])


class _Answer:
    def __init__(self, message: _Message, numbers: tuple[Sequence[int], Sequence[int]]) -> None:
        self._message = message
        (self.defects, self.tokens, self.shares, self._frozen), (*pairs, self.most, self.longest) = numbers
        # The lowest and the highest of all ranks.
        self._counts, self._given, self._signatures = ((-pairs[at + 1], pairs[at]) for at in (0, 2, 4))

    def check(self) -> None:
        if self.defects:
            self._message.world.raise_any(self._message.defect)
        low, high = self._given
        if low < 0 and low != high:
            raise BatchError(
                "ranks do not call alike: some announce a step, count tokens or ask for token_stats, while others do "
                "something else. Call announce, count_tokens, forward_backward, eval_loss and token_stats on all "
                "ranks, in the same order."
            )
        if self._signatures[0] != self._signatures[1]:
            raise BatchError(
                "ranks disagree on the objective, or on the columns of its batches: their names, dtypes and numbers of "
                "dims. Give all ranks the same objective, and microbatches with the same columns."
            )
        if self._frozen:
            raise StrategyError(
                "ranks disagree on which parameters are frozen. Set requires_grad alike on all ranks, and where stages "
                "of a pipeline share a parameter (tied embedding and head), on each stage."
            )
        if self._counts[0] != self._counts[1]:
            raise BatchError(
                f"ranks disagree on the number of microbatches: between {self._counts[0]} and {self._counts[1]}. "
                f"Give every rank the same number; pad with microbatches whose labels are all {IGNORED_LABEL}."
            )
        if low != high:
            raise BatchError(
                f"ranks disagree on num_tokens: between {low} and {high}. It is the count over the global batch, equal "
                f"on all ranks: use meshwright.count_tokens."
            )


def _check_shares(microbatches: Sequence[Batch], mesh: Mesh) -> None:
    found: list[tuple[int, int | None]] = [(0, None)] * mesh.world.size
    dist.all_gather_object(found, (mesh.data_rank, checksum(microbatches)), group=mesh.world.group)
    for data_rank in range(mesh.data_size):
        if len({each for rank, each in found if rank == data_rank and each is not None}) > 1:
            raise BatchError(
                f"ranks that share a batch ({mesh.degrees}) have different input_ids for data rank {data_rank} of "
                f"{mesh.data_size}. Choose the batch by mesh.data_rank, not by the rank."
            )


def share_of(mesh: Mesh, value: int | None) -> int:
    """Return this rank's part of the sum of [Note: equal shares], as an int64."""
    degrees = mesh.degrees
    sharers = degrees.pp * degrees.cp * degrees.tp
    mine = (mesh.axis_rank("pp") * degrees.cp + mesh.axis_rank("cp")) * degrees.tp + mesh.axis_rank("tp")
    if value is None or sharers == 1:
        return 0
    factor = (_scattered(mine) - _scattered((mine + 1) % sharers)) * (2 * _scattered(mesh.data_rank) + 1)
    return mesh.world.select(_as_int64(value * factor), 0)


def frozen_share(mesh: Mesh, frozen: Iterable[tuple[str, int, int]]) -> int:
    """Return this rank's part of the sum of [Note: equal flags]; `frozen`: name, number of its copy, and of copies."""
    degrees, total = mesh.degrees, 0
    ranks = mesh.data_size * degrees.cp * degrees.tp
    mine = (mesh.data_rank * degrees.cp + mesh.axis_rank("cp")) * degrees.tp + mesh.axis_rank("tp")
    for name, copy, copies in frozen:
        number = _scattered(zlib.crc32(name.encode()))
        total += number * (copies * ranks - 1) if copy == mine == 0 else -number
    return mesh.world.select(_as_int64(total), 0)


def _as_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _scattered(index: int) -> int:
    """Hash an index to 64 bits (the finalizer of splitmix64)."""
    value = (index + 1) * 0x9E3779B97F4A7C15 % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ value >> shift) * factor % 2**64
    return value ^ value >> 31
