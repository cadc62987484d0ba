"""Let blocks hold what a budget of bytes allows, and compute the rest again.

Blocks are called once on trial, with the microbatch of the first step, which shows what each computes and holds (see
`operators`). What each then holds is chosen for all blocks of a rank together (`knapsack`), and carried out by torch's
selective checkpointing.

[Note: what a budget counts] Bytes that blocks hold for backward, of all microbatches in flight, with what the block
whose backward runs has computed again. Not counted: what lives within one operator or between two (a block's
temporaries, gradients of activations), what lies outside of blocks (embedding, head, logits), parameters, their
gradients, optimizer state.

[Note: equal communication] Ranks may hold different things, but not compute different communication again: who gathers
again waits for who does not. Results of collectives are held where all ranks that train the same part can hold them.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from .._compat.torch import is_communication
from ..base.errors import ConfigError, StrategyError
from ..files.terminal import warn
from ..mesh.world import World
from .forward_order import ForwardMethod
from .knapsack import Choice, Choices, Moment, Profile
from .operators import COMMUNICATION, Recorder, hidden_in, storage_in, tensors_with_memory

Recompute = Callable[..., Any]
"""Called with a forward, contexts in which it holds some results, and its arguments; all else is computed again."""


class BudgetedBlocks:
    """The blocks of one model, or of one stage of it, under a budget [10^9 bytes].

    `profiles` are those of the calls of blocks in one forward, in their order, each with one of `choices`. While
    `is_measuring`, blocks are on trial; while `is_open`, nothing is chosen yet.
    """

    def __init__(self, budget_gb: float) -> None:
        self.budget_gb = budget_gb
        self.profiles: list[Profile] = []
        self.choices: list[Choice] = []
        self.is_measuring, self.is_open = False, True
        self._inputs, self._largest = _Inputs(), 0
        self._calls: list[int] = []
        self._blocks: list[_Block] = []

    def put_around(self, block: nn.Module, recompute: Recompute, original: ForwardMethod) -> ForwardMethod:
        """Return a forward of the block that holds what is chosen for it."""
        made = _Block(self, block, recompute, original, len(self._blocks))
        self._blocks.append(made)
        return made

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure blocks in one forward without gradients, of a microbatch as large as those of the run."""
        self.profiles, self._calls = [], []
        self._inputs, self.is_measuring = _Inputs(), True
        try:
            yield
        finally:
            self.is_measuring = False

    def measure(self, index: int, original: ForwardMethod, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a block and record what it computes; only within `measuring`."""
        inputs = self._inputs.bytes_of((args, kwargs))
        self._largest = max(self._largest, _elements(args, kwargs))
        hidden: Tensor | None = None

        def given(value: Any) -> Any:
            # As in training, the first tensor of floating point carries a gradient, that of the block before.
            nonlocal hidden
            if hidden is not None or not (isinstance(value, Tensor) and value.is_floating_point()):
                return value
            hidden = value
            return value.detach().requires_grad_()

        with torch.enable_grad(), Recorder(self._blocks[index].block) as recorder:
            positional = [given(each) for each in args]
            result = original(*positional, **{name: given(each) for name, each in kwargs.items()})
        self.profiles.append(recorder.profile(inputs, hidden))
        self._calls.append(index)
        return _detached(result)

    def warn_of_larger(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Warn, once, of a microbatch that is larger than those that were measured."""
        elements = _elements(args, kwargs)
        if elements > self._largest:
            warn(
                f"a microbatch is {elements / self._largest:.2f} times as large as those of the first step, for which "
                f"budget_gb={self.budget_gb:g} was divided: blocks may hold as much more.",
                stacklevel=2,
            )
            self._largest = elements

    def take(self, choices: Sequence[Choice]) -> None:
        self.choices, self.is_open = list(choices), False
        for block in self._blocks:
            block.choices = [each for each, index in zip(choices, self._calls, strict=True) if index == block.index]
            block.next = 0


class _Block:
    """The forward of one block; called several times in one forward of the model, it has a choice for each call."""

    def __init__(
        self, blocks: BudgetedBlocks, block: nn.Module, recompute: Recompute, original: ForwardMethod, index: int
    ) -> None:
        self.block, self.index = block, index
        self.choices: list[Choice] = []
        self.next = 0
        self._all, self._recompute, self._original = blocks, recompute, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._all.is_measuring:
            return self._all.measure(self.index, self._original, args, kwargs)
        if not (self.block.training and torch.is_grad_enabled()):
            return self._original(*args, **kwargs)
        if not self.choices:
            raise StrategyError(
                f"activation_checkpointing: budget_gb={self._all.budget_gb:g} is divided over the blocks by the first "
                f"forward_backward, which has not been called. In a loop by hand, set activation_checkpointing to full "
                f"or selective."
            )
        self._all.warn_of_larger(args, kwargs)
        choice = self.choices[self.next]
        self.next = (self.next + 1) % len(self.choices)
        if choice.whole:
            return self._original(*args, **kwargs)
        return self._recompute(self._original, lambda: _contexts(choice), args, kwargs)


def _contexts(choice: Choice) -> Any:
    counts: Counter[Any] = Counter()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        key = COMMUNICATION if is_communication(op) else (op, counts[op])
        counts[op] += 1
        return CheckpointPolicy.MUST_SAVE if key in choice.keys else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def without_choice(parts: Sequence[object]) -> list[BudgetedBlocks]:
    """Return those parts that have a budget of which nothing is chosen yet; the same on all ranks."""
    return [each for each in parts if isinstance(each, BudgetedBlocks) and each.is_open]


def choose(
    stages: Sequence[BudgetedBlocks],
    rehearsals: Sequence[Callable[[], object]],
    worlds: Sequence[World],
    moments: Sequence[Moment],
    world: World,
) -> None:
    """Choose what all blocks of a rank hold; see [Note: equal communication]. Collective over `world`, all ranks.

    Args:
        stages: one, or those of a pipeline that this rank has.
        rehearsals: for each, runs a forward without gradients, of a microbatch as large as those of the run.
        worlds: for each, the ranks that train it.
        moments: when most may be held.
    """
    for stage, rehearse in zip(stages, rehearsals, strict=True):
        with stage.measuring():
            rehearse()
    budget_gb = stages[0].budget_gb
    limit = int(budget_gb * 1e9)
    choices = Choices([each.profiles for each in stages], moments)
    (smallest,) = world.reduce_ints([choices.peak], dist.ReduceOp.MAX)
    if smallest > limit:
        raise ConfigError(
            f"activation_checkpointing: budget_gb={budget_gb:g} cannot be met: where all is computed again, blocks "
            f"still hold their inputs, and one of them all its backward needs; a rank has {_gb(smallest)} GB then. "
            f"Set budget_gb to at least {_gb(smallest)}, or use smaller microbatches or shorter sequences."
        )
    choices.fill(limit)
    for index, own in enumerate(worlds):
        holds = [int(each.whole or COMMUNICATION in each.keys) for each in choices.made[index]]
        choices.release(index, COMMUNICATION, own.reduce_ints(holds, dist.ReduceOp.MIN))
    choices.top_up(limit)
    for stage, made in zip(stages, choices.made, strict=True):
        stage.take(made)


def _gb(size: int) -> str:
    """Bytes in GB, rounded up to three digits."""
    dropped = max(0, len(str(size)) - 3)
    digits = max(0, 3 - len(str(size)))
    return f"{-(-size // 10**dropped) * 10**dropped / 1e9:.{digits + 9}f}".rstrip("0").rstrip(".")


def _elements(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    hidden = hidden_in((args, kwargs))
    return hidden.numel() if hidden is not None else 0


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if type(value) in (list, tuple):
        return type(value)(map(_detached, value))
    return {key: _detached(each) for key, each in value.items()} if type(value) is dict else value


class _Inputs:
    """What blocks are given: each has hidden states of its own, but masks and the like are one for all."""

    def __init__(self) -> None:
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def bytes_of(self, value: Any) -> int:
        new = {id(each): each for each in map(storage_in, tensors_with_memory(value)) if id(each) not in self._alive}
        for key, storage in new.items():
            self._alive[key] = weakref.ref(storage, lambda _, key=key: self._alive.pop(key))  # type: ignore[misc]
        return sum(each.nbytes() for each in new.values())
