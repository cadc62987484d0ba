"""Hold what a budget of bytes allows of the activations of blocks, and recompute the rest.

Blocks are called once on trial, with the microbatch of the first step, which shows what each computes and holds (see
`operators`). What each then holds is chosen for all blocks of a rank together, and carried out by torch's selective
checkpointing.

[Note: the choice] This is a multiple-choice knapsack. Each block goes along the lower convex hull of (bytes held, cost
of recomputation), the step that saves most per byte first, whichever block it belongs to; a step that does not fit ends
its block. Then single operators fill what is left. The result costs more than the best one by less than one step.
Source: Sinha and Zoltners 1979, "The multiple-choice knapsack problem"; for the budget of bytes against operations,
Jain et al. 2020, arXiv:1910.02653.

[Note: what a budget counts] Bytes that blocks hold for backward, of all microbatches in flight, and what the block
whose backward runs has recomputed. Not counted: temporaries of a block, gradients of activations, what lies outside of
blocks (embedding, head, logits), parameters, their gradients, optimizer state.

[Note: equal communication] Ranks may hold different things, but must recompute the same communication: a rank that
gathers again waits for one that does not. Results of collectives are held where all ranks that train the same part can
hold them.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from .._compat.torch import is_collective
from ..base.errors import ConfigError, StrategyError
from ..files.terminal import warn
from ..mesh.world import World
from .forward_order import ForwardMethod
from .operators import (
    COMMUNICATION_KEY,
    BlockProfile,
    Operator,
    OperatorRecorder,
    find_hidden_states,
    get_storage,
    iter_allocated_tensors,
)

Recompute = Callable[..., Any]
"""Called with a forward, contexts in which it holds some results, and its arguments; all else is recomputed."""


# -- the choice; see [Note: the choice]


@dataclass(frozen=True)
class BackwardStart:
    """The start of a backward of `stage`; `num_in_flight` counts, for each stage of this rank, the microbatches whose
    forward is done and whose backward is not."""

    num_in_flight: tuple[int, ...]
    stage: int


SINGLE_STAGE = (BackwardStart((1,), 0),)
"""Moments of forwards and backwards in turn."""


@dataclass
class SavedActivations:
    """What one call of a block holds besides its inputs: everything, or results of the operators with these keys.
    `cost` is that of what is recomputed."""

    saves_all: bool
    operator_keys: frozenset[Hashable]
    nbytes: int
    recompute_cost: float

    def with_operator(self, operator: Operator) -> SavedActivations:
        return SavedActivations(
            False,
            self.operator_keys | {operator.key},
            self.nbytes + operator.nbytes,
            self.recompute_cost - operator.recompute_cost,
        )


class ActivationPlan:
    """The choices `made` for all blocks of a rank, by stage and in the order of calls; at first, inputs alone."""

    def __init__(self, stages: Sequence[Sequence[BlockProfile]], moments: Sequence[BackwardStart]) -> None:
        self.stages, self.moments = stages, moments
        self.saved = [[_save_inputs_only(each) for each in stage] for stage in stages]
        self._released: set[Hashable] = set()

    @property
    def peak_bytes(self) -> int:
        """Most bytes held at any moment: of all microbatches in flight, and of the block whose backward runs."""
        held, on_top = zip(*map(self._get_stage_bytes, range(len(self.stages))), strict=True)
        return max(
            sum(count * each for count, each in zip(moment.num_in_flight, held, strict=True)) + on_top[moment.stage]
            for moment in self.moments
        )

    @property
    def recompute_cost(self) -> float:
        return sum(choice.recompute_cost for stage in self.saved for choice in stage)

    def fill_budget(self, limit: int) -> None:
        ended: set[tuple[int, int]] = set()
        for stage, block, choice in self._sort_hull_steps():
            if (stage, block) not in ended and not self._try_saving(stage, block, choice, limit):
                ended.add((stage, block))
        self.fill_remaining(limit)

    def release_operator(self, stage: int, key: Hashable, is_saved: Sequence[int]) -> None:
        """Let calls of blocks for which `is_saved` has a 0 recompute an operator; `fill_remaining` will not hold it."""
        for block, (profile, is_held) in enumerate(zip(self.stages[stage], is_saved, strict=True)):
            released = next((each for each in profile.operators if each.key == key), None)
            if released is None:
                continue
            self._released.add(key)
            now = self.saved[stage][block]
            if not is_held and now.saves_all:
                self.saved[stage][block] = _save_inputs_only(profile)
            elif not is_held and key in now.operator_keys:
                size, cost = now.nbytes - released.nbytes, now.recompute_cost + released.recompute_cost
                self.saved[stage][block] = SavedActivations(False, now.operator_keys - {key}, size, cost)

    def fill_remaining(self, limit: int) -> None:
        """Hold single operators of blocks that are not whole, the one that saves most per byte first."""
        rest = [
            (operator.recompute_cost / operator.nbytes, block, stage, operator)
            for stage, profiles in enumerate(self.stages)
            for block, profile in enumerate(profiles)
            if not self.saved[stage][block].saves_all
            for operator in profile.operators
            if operator.key not in self.saved[stage][block].operator_keys | self._released
        ]
        for _, block, stage, operator in sorted(rest, key=_sort_key):
            more = self.saved[stage][block].with_operator(operator)
            if more.nbytes < self.stages[stage][block].saved_bytes:
                self._try_saving(stage, block, more, limit)

    def _get_stage_bytes(self, stage: int) -> tuple[int, int]:
        """Return the bytes that a stage holds of one microbatch, and what its backward adds at most: before a block
        recomputes what it has not held, the blocks behind it are freed."""
        behind = on_top = 0
        for profile, choice in zip(reversed(self.stages[stage]), reversed(self.saved[stage]), strict=True):
            on_top = max(on_top, profile.saved_bytes - choice.nbytes - behind)
            behind += profile.input_bytes + choice.nbytes
        return behind, on_top

    def _try_saving(self, stage: int, block: int, choice: SavedActivations, limit: int) -> bool:
        before, self.saved[stage][block] = self.saved[stage][block], choice
        if self.peak_bytes <= limit:
            return True
        self.saved[stage][block] = before
        return False

    def _sort_hull_steps(self) -> Iterator[tuple[int, int, SavedActivations]]:
        """Return the steps of all blocks, the one that saves most per byte first; of equal ones, the last block's."""
        steps: list[tuple[float, int, int, SavedActivations]] = []
        for stage, profiles in enumerate(self.stages):
            weight = max(moment.num_in_flight[stage] for moment in self.moments)
            for block, profile in enumerate(profiles):
                for before, choice in itertools.pairwise([self.saved[stage][block], *_build_hull(profile)]):
                    worth = (before.recompute_cost - choice.recompute_cost) / max(
                        1, (choice.nbytes - before.nbytes) * weight
                    )
                    steps.append((worth, block, stage, choice))
        # Steps of one block come with falling worth, and the sort is stable.
        return ((stage, block, choice) for _, block, stage, choice in sorted(steps, key=_sort_key))


def _sort_key(step: tuple[float, int, int, Any]) -> tuple[float, int, int]:
    return -step[0], -step[1], step[2]


def _save_inputs_only(profile: BlockProfile) -> SavedActivations:
    return SavedActivations(False, frozenset(), 0, profile.recompute_cost)


def _build_hull(profile: BlockProfile) -> list[SavedActivations]:
    """Return what a block may hold beyond its inputs, up to everything, with falling worth of each further byte."""
    hull = [_save_inputs_only(profile)]
    for operator in sorted(profile.operators, key=lambda each: -each.recompute_cost / each.nbytes):
        point = hull[-1].with_operator(operator)
        if point.nbytes >= profile.saved_bytes:
            break
        hull.append(point)
    whole = SavedActivations(True, frozenset(), profile.saved_bytes, 0.0)
    # Operators come by falling worth, so only the last point can lie above a line to another.
    while len(hull) > 1 and _slope(hull[-1], whole) > _slope(hull[-2], hull[-1]):
        hull.pop()
    return [*hull[1:], whole]


def _slope(first: SavedActivations, second: SavedActivations) -> float:
    return (first.recompute_cost - second.recompute_cost) / max(1, second.nbytes - first.nbytes)


# -- blocks


class BudgetedBlocks:
    """The blocks of one model, or of one stage of it, under a budget [10^9 bytes].

    `profiles` are those of the calls of blocks in one forward, in order, each with one of `choices`. While `is_open`,
    nothing is chosen yet.
    """

    def __init__(self, budget_gb: float) -> None:
        self.budget_gb = budget_gb
        self.profiles: list[BlockProfile] = []
        self.saved: list[SavedActivations] = []
        self.needs_choice = True
        self._is_measuring, self._max_elements = False, 0
        # Each block has hidden states of its own; masks and the like are one for all.
        self._inputs: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._block_indices: list[int] = []
        self._upcoming: list[Iterator[SavedActivations]] = []

    def wrap_block(self, block: nn.Module, recompute: Recompute, original: ForwardMethod) -> ForwardMethod:
        """Return a forward of the block that holds what is chosen for it, call by call."""
        index = len(self._upcoming)
        self._upcoming.append(iter(()))

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._is_measuring:
                return self._measure(index, block, original, args, kwargs)
            if not (block.training and torch.is_grad_enabled()):
                return original(*args, **kwargs)
            choice = next(self._upcoming[index], None)
            if choice is None:
                raise StrategyError(
                    f"activation_checkpointing: budget_gb={self.budget_gb:g} is divided over the blocks by the first "
                    f"forward_backward, which has not been called. In a loop by hand, set activation_checkpointing to "
                    f"full or selective."
                )
            if (elements := _count_elements(args, kwargs)) > self._max_elements:
                # Once for each size.
                warn(
                    f"a microbatch is {elements / self._max_elements:.2f} times as large as those of the first step, "
                    "for "
                    f"which budget_gb={self.budget_gb:g} was divided: blocks may hold as much more.",
                    stacklevel=2,
                )
                self._max_elements = elements
            if choice.saves_all:
                return original(*args, **kwargs)
            return recompute(original, functools.partial(_make_contexts, choice), args, kwargs)

        return forward

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure blocks in one forward without gradients, of a microbatch as large as those of the run."""
        self.profiles, self._block_indices = [], []
        self._inputs, self._is_measuring = weakref.WeakSet(), True
        try:
            yield
        finally:
            self._is_measuring = False

    def set_saved(self, choices: Sequence[SavedActivations]) -> None:
        self.saved, self.needs_choice = list(choices), False
        pairs = list(zip(choices, self._block_indices, strict=True))
        count = len(self._upcoming)
        self._upcoming = [itertools.cycle([each for each, at in pairs if at == index]) for index in range(count)]

    def _measure(
        self, index: int, block: nn.Module, original: ForwardMethod, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        new = set(map(get_storage, iter_allocated_tensors((args, kwargs)))) - set(self._inputs)
        self._inputs.update(new)
        self._max_elements = max(self._max_elements, _count_elements(args, kwargs))
        hidden: Tensor | None = None

        def given(value: Any) -> Any:
            # As in training, the first floating-point tensor carries a gradient, that of the block before.
            nonlocal hidden
            if hidden is not None or not (isinstance(value, Tensor) and value.is_floating_point()):
                return value
            hidden = value
            return value.detach().requires_grad_()

        with torch.enable_grad(), OperatorRecorder(block) as recorder:
            positional = [given(each) for each in args]
            result = original(*positional, **{name: given(each) for name, each in kwargs.items()})
        self.profiles.append(recorder.build_profile(sum(each.nbytes() for each in new), hidden))
        self._block_indices.append(index)
        return _detach(result)


def _make_contexts(choice: SavedActivations) -> Any:
    counts: Counter[Any] = Counter()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        key = COMMUNICATION_KEY if is_collective(op) else (op, counts[op])
        counts[op] += 1
        return CheckpointPolicy.MUST_SAVE if key in choice.operator_keys else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def find_undecided(parts: Sequence[object]) -> list[BudgetedBlocks]:
    """Return those parts that have a budget of which nothing is chosen yet; the same on all ranks."""
    return [each for each in parts if isinstance(each, BudgetedBlocks) and each.needs_choice]


def choose_saved_activations(
    stages: Sequence[BudgetedBlocks],
    dry_runs: Sequence[Callable[[], object]],
    worlds: Sequence[World],
    backward_starts: Sequence[BackwardStart],
    world: World,
) -> None:
    """Choose what all blocks of a rank hold; see [Note: equal communication]. Collective over `world`, all ranks.

    Each of the `stages` of this rank has a rehearsal, which runs a forward without gradients of a microbatch as large
    as those of the run, and the ranks that train it. Most may be held at `backward_starts`.
    """
    for stage, rehearse in zip(stages, dry_runs, strict=True):
        with stage.measure():
            rehearse()
    budget_gb = stages[0].budget_gb
    limit = int(budget_gb * 1e9)
    choices = ActivationPlan([each.profiles for each in stages], backward_starts)
    (smallest,) = world.reduce_ints([choices.peak_bytes], dist.ReduceOp.MAX)
    if smallest > limit:
        raise ConfigError(
            f"activation_checkpointing: budget_gb={budget_gb:g} cannot be met: where all is computed again, blocks "
            f"still hold their inputs, and one of them all its backward needs; a rank has {_format_gb(smallest)} GB "
            "then. "
            f"Set budget_gb to at least {_format_gb(smallest)}, or use smaller microbatches or shorter sequences."
        )
    choices.fill_budget(limit)
    for index, own in enumerate(worlds):
        holds = [int(each.saves_all or COMMUNICATION_KEY in each.operator_keys) for each in choices.saved[index]]
        choices.release_operator(index, COMMUNICATION_KEY, own.reduce_ints(holds, dist.ReduceOp.MIN))
    choices.fill_remaining(limit)
    for stage, made in zip(stages, choices.saved, strict=True):
        stage.set_saved(made)


def _format_gb(size: int) -> str:
    dropped = max(0, len(str(size)) - 3)
    digits = max(0, 3 - len(str(size)))
    return f"{-(-size // 10**dropped) * 10**dropped / 1e9:.{digits + 9}f}".rstrip("0").rstrip(".")


def _count_elements(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    hidden = find_hidden_states((args, kwargs))
    return hidden.numel() if hidden is not None else 0


def _detach(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if type(value) in (list, tuple):
        return type(value)(map(_detach, value))
    return {key: _detach(each) for key, each in value.items()} if type(value) is dict else value
