"""One message a step: what ranks must know of each other's microbatches before they can train on them together.

[Note: one message] It has the sum of the ranks' tokens, whether any rank has found something wrong, and whether what
must be equal is: the number of microbatches, `num_tokens`, and, where ranks share a batch, its tokens. It is sent when
a step is announced, in the background; `forward_backward` takes the answer. Where tokens are counted instead, that is a
message, too, and `forward_backward` sends its own: what it is given may be something else than what was counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base.errors import BatchError
from ..mesh.mesh import Mesh
from ..strategy.contract import Batch, Objective
from .batch import Terms, apart, defect_under
from .message import ANNOUNCED, NO_LOSS, Answer, Message, check_shares
from .objective import Given


@dataclass(frozen=True)
class Agreed:
    """What all ranks know of a step.

    Attributes:
        microbatches: what this rank is to train on: those given, but for masks that say nothing.
        num_tokens: unmasked targets of the global batch; int64 scalar on the CPU.
        most: the largest of what `Terms.count` gives on a rank.
        longest: tokens of the longest row of any rank; see `rope_length`.
    """

    microbatches: list[Batch]
    num_tokens: Tensor
    most: int
    longest: int


class TokenCount(Tensor):
    """The count of tokens of a step that is announced, int64 scalar on the CPU; see [Note: one message].

    Any use of it as a tensor is one of the number, and waits until all ranks have announced theirs; nothing is sent.
    """

    announced: Announced

    @classmethod
    def of(cls, announced: Announced) -> TokenCount:
        count: TokenCount = torch.zeros((), dtype=torch.int64).as_subclass(cls)
        count.announced = announced
        return count

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*_as_numbers(args), **_as_numbers(dict(kwargs or {})))


def _as_numbers(value: Any) -> Any:
    if isinstance(value, TokenCount):
        return torch.tensor(value.announced.answer().tokens, dtype=torch.int64)
    if type(value) in (list, tuple):
        return type(value)(map(_as_numbers, value))
    if isinstance(value, dict):
        return {key: _as_numbers(each) for key, each in value.items()}
    return value


@dataclass(frozen=True)
class Announced:
    """A message that has begun.

    Attributes:
        microbatches, terms: that it speaks of.
        answer: waits for the answer, as often as it is called.
    """

    microbatches: Sequence[Batch]
    terms: Terms
    answer: Callable[[], Answer]


def count_tokens(microbatches: Sequence[Batch], mesh: Mesh, objective: Objective | None = None) -> Tensor:
    """Count the unmasked targets of the global batch, by a message of its own.

    Args:
        microbatches: this data-parallel rank's share of the step.
        mesh: all of its ranks call this.
        objective: which may count something else; see [Note: objectives] in `objective`.

    Returns:
        int64 scalar on the CPU, equal on all ranks.

    Raises:
        BatchError: a microbatch of any rank is malformed; on all ranks.
    """
    terms = Terms(objective=None if objective is None else Given(objective))
    answer = Message.of_count(mesh, microbatches, terms).sent()
    answer.check()
    return torch.tensor(answer.tokens, dtype=torch.int64)


def announce(microbatches: Sequence[Batch], mesh: Mesh, terms: Terms) -> Tensor:
    """Begin to agree on a step, while the one before computes; see `StrategyManager.announce`. Collective."""
    defect = defect_under(microbatches, terms, mesh.degrees.cp)
    answer = Message.of_step(mesh, microbatches, defect, terms, given=ANNOUNCED).begun()
    return TokenCount.of(Announced(microbatches, terms, answer))


def defects_told(num_tokens: Tensor) -> bool:
    """Whether any rank may have found something wrong with the step that a count of tokens announces."""
    return not isinstance(num_tokens, TokenCount) or num_tokens.announced.answer().defects > 0


def agree(microbatches: Sequence[Batch], num_tokens: Tensor | None, mesh: Mesh, terms: Terms) -> Agreed:
    """Make sure that all ranks can run this step, by one message, or by that which has announced it. Collective.

    Args:
        num_tokens: as `StrategyManager.forward_backward` takes it; None: there is no loss, and it is 1.
        terms: what the caller asks of microbatches.

    Raises:
        BatchError: on all ranks, as `StrategyManager.forward_backward` says; on this one alone, if the microbatches are
            others than those announced.
    """
    if isinstance(num_tokens, TokenCount) and num_tokens.announced.terms == terms:
        if microbatches is not num_tokens.announced.microbatches:
            raise BatchError("the microbatches are others than those that were announced with this num_tokens.")
        answer = num_tokens.announced.answer()
        total = answer.tokens
    else:
        total = NO_LOSS if num_tokens is None else int(num_tokens)
        defect = defect_under(microbatches, terms, mesh.degrees.cp)
        answer = Message.of_step(mesh, microbatches, defect, terms, given=total).sent()
    answer.check()
    total = 1 if num_tokens is None else total
    if total < 1:
        counted = (
            "an unmasked target" if terms.objective is None else f"anything for the {terms.objective.name} to count"
        )
        raise BatchError(f"num_tokens is 0: no rank has {counted} in this step. Leave the step out, or unmask labels.")
    if answer.shares:
        check_shares(microbatches, mesh)
    return Agreed(apart(microbatches), torch.tensor(total), answer.most, answer.longest)
