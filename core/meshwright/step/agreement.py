"""One message a step: what ranks must know of each other's microbatches before they can train on them together.

[Note: one message] It has the sum of the ranks' tokens, whether any rank has found something wrong, and whether what
must be equal is: the number of microbatches, `num_tokens`, and, where ranks share a batch, its tokens. So a count of
tokens needs no message of its own: within a loop it waits until `forward_backward` is given it, and travels with the
checks. A count that is read before is sent by itself. Ranks need not read alike: who reads sends the same message as
who trains, and says in it that no checks have come with it; then those who train send another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base.errors import BatchError
from ..mesh.mesh import Mesh
from ..strategy.contract import Batch
from .batch import Terms, apart, count_here, defect_of, defect_under
from .message import Answer, Message, check_shares


@dataclass(frozen=True)
class Agreed:
    """What all ranks know of a step.

    Attributes:
        microbatches: what this rank is to train on: those given, but for masks that say nothing.
        num_tokens: unmasked targets of the global batch; int64 scalar on the CPU.
        most: the largest of what `Terms.count` gives on a rank.
    """

    microbatches: list[Batch]
    num_tokens: Tensor
    most: int


class TokenCount(Tensor):
    """A count of tokens, int64 scalar on the CPU, that is sent when it is needed; see [Note: one message].

    Any use of it as a tensor is one of the number, and collective over the world the first time.
    """

    waiting: WaitingCount

    @classmethod
    def of(cls, waiting: WaitingCount) -> TokenCount:
        count: TokenCount = torch.zeros((), dtype=torch.int64).as_subclass(cls)
        count.waiting = waiting
        return count

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*_as_numbers(args), **_as_numbers(dict(kwargs or {})))


def _as_numbers(value: Any) -> Any:
    if isinstance(value, TokenCount):
        return value.waiting.total()
    if type(value) in (list, tuple):
        return type(value)(map(_as_numbers, value))
    if isinstance(value, dict):
        return {key: _as_numbers(each) for key, each in value.items()}
    return value


class WaitingCount:
    """What a rank knows of a count: its own tokens, and what is wrong with its microbatches; in the end, the sum."""

    def __init__(self, microbatches: Sequence[Batch], mesh: Mesh) -> None:
        self._mesh = mesh
        self._total: Tensor | None = None
        self._answer: Callable[[], Answer] | None = None
        self.microbatches: Sequence[Batch] | None = None
        self.defect = defect_of(microbatches)
        self.tokens = count_here(microbatches) if self.defect is None and mesh.leads_data else 0

    @property
    def is_sent(self) -> bool:
        """Whether the sum is known."""
        return self._total is not None

    def total(self) -> Tensor:
        """The sum over ranks, int64 scalar. Collective where it has not been sent.

        Raises:
            BatchError: a microbatch of any rank is malformed; or those who train have found something else wrong.
        """
        if self._total is None and self._answer is not None:
            self.take(self._answer())
        if self._total is None:
            self.take(self.send(Message(self._mesh, miscounted=self.defect, tokens=self.tokens, is_read=True)))
        return self._total

    def wait(self) -> None:
        """Let the count travel with another message, or before it."""
        self._mesh.world.before_message = self._send_alone

    def _send_alone(self) -> None:
        self.total()

    def send(self, message: Message) -> Answer:
        """Send a message that the count travels with."""
        world = self._mesh.world
        if world.before_message == self._send_alone:
            world.before_message = None
        return message.sent()

    def step_message(self, microbatches: Sequence[Batch], defect: str | None, terms: Terms) -> Message:
        """What this rank sends with the count, before it trains on microbatches."""
        return Message.of_step(self._mesh, microbatches, defect, terms, miscounted=self.defect, tokens=self.tokens)

    def begin(self, message: Message, microbatches: Sequence[Batch]) -> None:
        """Begin to send a message with the checks of the step that the count is of."""
        self.microbatches, self._answer = microbatches, message.begun()

    def begun(self, microbatches: Sequence[Batch]) -> Answer | None:
        """The answer to the message that has begun, once; None: there is none.

        Args:
            microbatches: that are to be trained on.

        Raises:
            BatchError: they are others than those that the message is of; on this rank alone.
        """
        if self._answer is None:
            return None
        if microbatches is not self.microbatches:
            raise BatchError("forward_backward is given other microbatches than those announced for its num_tokens.")
        answer, self._answer = self._answer(), None
        return answer

    def take(self, answer: Answer) -> None:
        """The sum, from the message that the count has travelled with.

        Raises:
            BatchError: the message says that something is wrong.
        """
        answer.check_counts()
        self._total = torch.tensor(answer.tokens, dtype=torch.int64)


def count_tokens(microbatches: Sequence[Batch], mesh: Mesh) -> Tensor:
    """Count the unmasked targets of the global batch.

    Where a manager has trained on this mesh before, the count travels with the checks of `forward_backward`, and costs
    no message of its own. Read it behind that, or on all ranks: else who reads waits for the others to train.

    Args:
        microbatches: this data-parallel rank's share of the step.
        mesh: all of its ranks call this.

    Returns:
        int64 scalar on the CPU, equal on all ranks.

    Raises:
        BatchError: a microbatch of any rank is malformed; on all ranks, here or where the count is first used.
    """
    waiting = WaitingCount(microbatches, mesh)
    if not mesh.world.in_steps:
        return waiting.total()
    # Counts are sent in the order in which they were made.
    mesh.world.send_waiting()
    waiting.wait()
    return TokenCount.of(waiting)


def announce(microbatches: Sequence[Batch], mesh: Mesh, terms: Terms) -> Tensor:
    """Begin to agree on a step, while the one before computes; see `StrategyManager.announce`. Collective."""
    mesh.world.in_steps = True
    waiting = WaitingCount(microbatches, mesh)
    defect = defect_under(microbatches, terms, mesh.degrees.cp)
    waiting.begin(waiting.step_message(microbatches, defect, terms), microbatches)
    return TokenCount.of(waiting)


def agree(microbatches: Sequence[Batch], num_tokens: Tensor, mesh: Mesh, terms: Terms) -> Agreed:
    """Make sure that all ranks can run this step together; one message where they can. Collective.

    Args:
        num_tokens: as `StrategyManager.forward_backward` takes it.
        terms: what the caller asks of microbatches.

    Raises:
        BatchError: on all ranks, as `StrategyManager.forward_backward` says.
    """
    mesh.world.in_steps = True
    waiting = num_tokens.waiting if isinstance(num_tokens, TokenCount) else None
    begun = waiting.begun(microbatches) if waiting is not None else None
    if waiting is not None and begun is not None:
        waiting.take(begun)
        return _agreed(microbatches, waiting.total(), begun, mesh)
    defect = defect_under(microbatches, terms, mesh.degrees.cp)
    if waiting is not None and not waiting.is_sent:
        answer = waiting.send(waiting.step_message(microbatches, defect, terms))
        waiting.take(answer)
        if not answer.readers:
            return _agreed(microbatches, waiting.total(), answer, mesh)
        # Some rank has read the number and is yet to come here.
    tokens = int(num_tokens)
    answer = Message.of_step(mesh, microbatches, defect, terms, given=tokens).sent()
    return _agreed(microbatches, torch.tensor(tokens), answer, mesh)


def _agreed(microbatches: Sequence[Batch], num_tokens: Tensor, answer: Answer, mesh: Mesh) -> Agreed:
    answer.check()
    if int(num_tokens) < 1:
        raise BatchError(
            "num_tokens is 0: no rank has an unmasked target in this step. Leave the step out, or unmask labels."
        )
    if answer.shares:
        check_shares(microbatches, mesh)
    return Agreed(apart(microbatches), num_tokens, answer.most)
