"""What ranks send each other before a step, and what the answer to all tells each of them.

When it is sent is said in `agreement`.

[Note: equal shares] Whether ranks that share a batch have the same tokens is seen in one sum, however many ranks there
are. Each multiplies a checksum of its tokens with a number of its own, and the numbers of those that share a batch add
up to 0 (modulo 2**64, as sums of int64 are). So do the products where all have the same checksum; where not, it would
be an accident.

[Note: equal flags] Whether ranks freeze the same parameters is seen in one sum, too. For each parameter that it
freezes, a rank adds minus a number that stands for the name; the first rank that holds the parameter adds that number
once for each other rank instead. The sum is 0 where all that hold a parameter freeze it, or none.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from ..base.errors import BatchError, MeshwrightError, StrategyError
from ..mesh.mesh import Mesh
from ..strategy.contract import IGNORED_LABEL, Batch
from .batch import Terms, checksum, defect_of

ANNOUNCED = -1
COUNTED = -2
NO_LOSS = -3
"""In the place of a number of tokens: the message counts them itself, of a step, or of no step; or none are needed."""


@dataclass(frozen=True)
class Message:
    """What one rank sends; see `agreement`.

    Attributes:
        defect: what it has found wrong.
        tokens: that it counts.
        count: of microbatches.
        given: the number of tokens that it was given, or one of the above.
        share: see [Note: equal shares].
        most: see `Terms.count`.
        signature: see `Terms.signature`.
        longest: tokens of its longest row, padding included.
        frozen: see [Note: equal flags].
    """

    mesh: Mesh
    defect: MeshwrightError | None
    given: int
    tokens: int = 0
    count: int = 0
    share: int = 0
    most: int = 0
    signature: int = 0
    longest: int = 0
    frozen: int = 0

    @classmethod
    def of_step(
        cls, mesh: Mesh, microbatches: Sequence[Batch], defect: MeshwrightError | None, terms: Terms, *, given: int
    ) -> Message:
        if defect is not None:
            return cls(mesh, defect, given)
        try:
            tokens = terms.tokens(microbatches) if given == ANNOUNCED and _counts(mesh) else 0
        except BatchError as error:
            return cls(mesh, error, given)
        most, share = terms.count(microbatches), share_of(mesh, checksum(microbatches))
        signature = terms.signature(microbatches)
        longest = max(batch["input_ids"].shape[1] for batch in microbatches)
        return cls(mesh, None, given, tokens, len(microbatches), share, most, signature, longest, terms.frozen)

    @classmethod
    def of_count(cls, mesh: Mesh, microbatches: Sequence[Batch], terms: Terms) -> Message:
        if (defect := defect_of(microbatches)) is not None:
            return cls(mesh, BatchError(defect), COUNTED)
        try:
            return cls(mesh, None, COUNTED, terms.tokens(microbatches) if _counts(mesh) else 0)
        except BatchError as error:
            return cls(mesh, error, COUNTED)

    def sent(self) -> Answer:
        sums, highs = self.mesh.world.exchange(*self._numbers())
        return Answer(self, *sums, *highs)

    def begun(self) -> Callable[[], Answer]:
        """`sent` in the background; gives what waits for the answer."""
        wait = self.mesh.world.begin_exchange(*self._numbers())

        def answer() -> Answer:
            sums, highs = wait()
            return Answer(self, *sums, *highs)

        return answer

    def _numbers(self) -> tuple[list[int], list[int]]:
        sums = [int(self.defect is not None), self.tokens, self.share, self.frozen]
        equal = [self.count, -self.count, self.given, -self.given, self.signature, -self.signature]
        return sums, [*equal, self.most, self.longest]


@dataclass(frozen=True)
class Answer:
    """The same on all ranks, but for the message that this one has sent: sums, and highest values, of all."""

    message: Message
    defects: int
    tokens: int
    shares: int
    frozen: int
    high_count: int
    minus_low_count: int
    high_given: int
    minus_low_given: int
    high_signature: int
    minus_low_signature: int
    most: int
    longest: int

    def check(self) -> None:
        """Refuse what is malformed, and a step that the ranks would not run alike.

        Raises:
            BatchError, StrategyError: on all ranks alike.
        """
        if self.defects:
            self.message.mesh.world.raise_any(self.message.defect)
        low, high = -self.minus_low_given, self.high_given
        if low < 0 and low != high:
            raise BatchError(
                "ranks do not call alike: some announce a step, count tokens or ask for token_stats, while others do "
                "something else. Call announce, count_tokens, forward_backward, eval_loss and token_stats on all "
                "ranks, in the same order."
            )
        if self.high_signature != -self.minus_low_signature:
            raise BatchError(
                "ranks disagree on the objective, or on the columns of its batches: their names, dtypes and numbers of "
                "dims. Give all ranks the same objective, and microbatches with the same columns."
            )
        if self.frozen:
            raise StrategyError(
                "ranks disagree on which parameters are frozen. Set requires_grad alike on all ranks, and where stages "
                "of a pipeline share a parameter (tied embedding and head), on each stage."
            )
        if self.high_count != -self.minus_low_count:
            raise BatchError(
                f"ranks disagree on the number of microbatches: between {-self.minus_low_count} and {self.high_count}. "
                f"Give every rank the same number; pad with microbatches whose labels are all {IGNORED_LABEL}."
            )
        if low != high:
            raise BatchError(
                f"ranks disagree on num_tokens: between {low} and {high}. It is the count over the global batch, equal "
                f"on all ranks: use meshwright.count_tokens."
            )


def check_shares(microbatches: Sequence[Batch], mesh: Mesh) -> None:
    """Say which ranks that share a batch have other tokens; those on an accelerator are not looked at. Collective.

    Raises:
        BatchError: on all ranks alike.
    """
    found: list[tuple[int, int | None]] = [(0, None)] * mesh.world.size
    dist.all_gather_object(found, (mesh.data_rank, checksum(microbatches)), group=mesh.world.group)
    for data_rank in range(mesh.data_size):
        if len({each for rank, each in found if rank == data_rank and each is not None}) > 1:
            raise BatchError(
                f"ranks that share a batch ({mesh.degrees}) have different input_ids for data rank {data_rank} of "
                f"{mesh.data_size}. Choose the batch by mesh.data_rank, not by the rank."
            )


def _counts(mesh: Mesh) -> bool:
    """Whether this rank counts the tokens of its batch, for all who see it."""
    return mesh.leads_data or mesh.world.is_planned


def share_of(mesh: Mesh, value: int | None) -> int:
    """This rank's part of the sum of [Note: equal shares]; as an int64."""
    degrees = mesh.degrees
    sharers = degrees.pp * degrees.cp * degrees.tp
    mine = (mesh.axis_rank("pp") * degrees.cp + mesh.axis_rank("cp")) * degrees.tp + mesh.axis_rank("tp")
    if value is None or sharers == 1 or mesh.world.is_planned:
        return 0
    factor = (_scattered(mine) - _scattered((mine + 1) % sharers)) * (2 * _scattered(mesh.data_rank) + 1)
    return (value * factor + 2**63) % 2**64 - 2**63


def frozen_share(mesh: Mesh, frozen: Iterable[tuple[str, int, int]]) -> int:
    """This rank's part of the sum of [Note: equal flags]; as an int64.

    Args:
        frozen: the name of each parameter that this rank freezes, which of its copies on stages of a pipeline this is,
            and how many there are.
    """
    degrees, total = mesh.degrees, 0
    ranks = mesh.data_size * degrees.cp * degrees.tp
    mine = (mesh.data_rank * degrees.cp + mesh.axis_rank("cp")) * degrees.tp + mesh.axis_rank("tp")
    for name, copy, copies in () if mesh.world.is_planned else frozen:
        number = _scattered(zlib.crc32(name.encode()))
        total += number * (copies * ranks - 1) if copy == mine == 0 else -number
    return (total + 2**63) % 2**64 - 2**63


def _scattered(index: int) -> int:
    """A number of 64 bits for each index, in no order (the finalizer of splitmix64)."""
    value = (index + 1) * 0x9E3779B97F4A7C15 % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ value >> shift) * factor % 2**64
    return value ^ value >> 31
