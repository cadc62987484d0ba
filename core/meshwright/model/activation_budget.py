"""Save as many activations of blocks as a budget of bytes allows, and recompute the rest.

A dry run with the micro-batch of the first step measures what each block computes and saves (see `operators`). What to
save is then chosen for all blocks of a rank together, and applied by torch's selective checkpointing.

[Note: the choice] This is a multiple-choice knapsack. Each block follows the lower convex hull of (bytes saved, cost of
recomputation). Of all blocks, the step that saves most cost per byte is taken first; a step that does not fit ends its
block. Then single operators fill the remaining bytes. The result costs more than the optimum by less than one step.
Source: Sinha and Zoltners 1979, "The multiple-choice knapsack problem"; for the budget of bytes against operations,
Jain et al. 2020, arXiv:1910.02653.

[Note: what a budget counts] Bytes that blocks save for backward, of all micro-batches in flight, and what the block
whose backward runs has recomputed. Not counted: temporaries of a block, activation gradients, everything outside of
blocks (embedding, head, logits), parameters, their gradients, optimizer state.

[Note: equal communication] Ranks may save different results, but must recompute the same communication: a rank that
repeats a gather waits for its peers. Results of collectives are saved if all ranks that train the same part can save
them.
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
"""Called with a forward, contexts that save some of its results, and its arguments; the rest is recomputed."""


# -- the choice; see [Note: the choice]


@dataclass(frozen=True)
class BackwardStart:
    """The start of a backward of `stage`.

    `num_in_flight` counts, for each stage of this rank, the micro-batches between forward and backward.
    """

    num_in_flight: tuple[int, ...]
    stage: int


SINGLE_STAGE = (BackwardStart((1,), 0),)
"""Backward starts of a single stage whose forwards and backwards alternate."""


@dataclass
class SavedActivations:
    """What one call of a block saves besides its inputs: everything, or results of the operators with these keys.

    `nbytes` is the size of these results, `recompute_cost` the cost of the rest.
    """

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
    """What each block of a rank saves: `saved`, by stage and in call order. Initially only inputs."""

    def __init__(self, stages: Sequence[Sequence[BlockProfile]], moments: Sequence[BackwardStart]) -> None:
        self.stages, self.moments = stages, moments
        self.saved = [[_save_inputs_only(each) for each in stage] for stage in stages]
        self._released: set[Hashable] = set()

    @property
    def peak_bytes(self) -> int:
        """Maximum bytes at any time: of all micro-batches in flight, and of the block whose backward runs."""
        saved_bytes, extra_bytes = zip(*map(self._get_stage_bytes, range(len(self.stages))), strict=True)
        return max(
            sum(count * each for count, each in zip(moment.num_in_flight, saved_bytes, strict=True))
            + extra_bytes[moment.stage]
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
        """Let the calls whose `is_saved` is 0 recompute an operator; `fill_remaining` will not save it again."""
        for block, (profile, may_save) in enumerate(zip(self.stages[stage], is_saved, strict=True)):
            operator = next((each for each in profile.operators if each.key == key), None)
            if operator is None:
                continue
            self._released.add(key)
            current = self.saved[stage][block]
            if not may_save and current.saves_all:
                self.saved[stage][block] = _save_inputs_only(profile)
            elif not may_save and key in current.operator_keys:
                size, cost = current.nbytes - operator.nbytes, current.recompute_cost + operator.recompute_cost
                self.saved[stage][block] = SavedActivations(False, current.operator_keys - {key}, size, cost)

    def fill_remaining(self, limit: int) -> None:
        """Save single operators of blocks that are recomputed in part, best cost per byte first."""
        candidates = [
            (operator.recompute_cost / operator.nbytes, block, stage, operator)
            for stage, profiles in enumerate(self.stages)
            for block, profile in enumerate(profiles)
            if not self.saved[stage][block].saves_all
            for operator in profile.operators
            if operator.key not in self.saved[stage][block].operator_keys | self._released
        ]
        for _, block, stage, operator in sorted(candidates, key=_sort_key):
            extended = self.saved[stage][block].with_operator(operator)
            if extended.nbytes < self.stages[stage][block].saved_bytes:
                self._try_saving(stage, block, extended, limit)

    def _get_stage_bytes(self, stage: int) -> tuple[int, int]:
        """Return the bytes that a stage saves for one micro-batch, and the maximum that its backward adds.

        Before a block recomputes, the blocks behind it are freed.
        """
        later_bytes = extra_bytes = 0
        for profile, choice in zip(reversed(self.stages[stage]), reversed(self.saved[stage]), strict=True):
            extra_bytes = max(extra_bytes, profile.saved_bytes - choice.nbytes - later_bytes)
            later_bytes += profile.input_bytes + choice.nbytes
        return later_bytes, extra_bytes

    def _try_saving(self, stage: int, block: int, choice: SavedActivations, limit: int) -> bool:
        before, self.saved[stage][block] = self.saved[stage][block], choice
        if self.peak_bytes <= limit:
            return True
        self.saved[stage][block] = before
        return False

    def _sort_hull_steps(self) -> Iterator[tuple[int, int, SavedActivations]]:
        """Return the hull steps of all blocks, best cost per byte first; of equal ones, the last block's."""
        steps: list[tuple[float, int, int, SavedActivations]] = []
        for stage, profiles in enumerate(self.stages):
            max_in_flight = max(moment.num_in_flight[stage] for moment in self.moments)
            for block, profile in enumerate(profiles):
                for before, choice in itertools.pairwise([self.saved[stage][block], *_build_hull(profile)]):
                    value = (before.recompute_cost - choice.recompute_cost) / max(
                        1, (choice.nbytes - before.nbytes) * max_in_flight
                    )
                    steps.append((value, block, stage, choice))
        # Steps of one block are in order of decreasing value, and the sort is stable.
        return ((stage, block, choice) for _, block, stage, choice in sorted(steps, key=_sort_key))


def _sort_key(step: tuple[float, int, int, Any]) -> tuple[float, int, int]:
    return -step[0], -step[1], step[2]


def _save_inputs_only(profile: BlockProfile) -> SavedActivations:
    return SavedActivations(False, frozenset(), 0, profile.recompute_cost)


def _build_hull(profile: BlockProfile) -> list[SavedActivations]:
    """Return the choices for a block beyond its inputs, up to everything, in order of decreasing value per byte."""
    hull = [_save_inputs_only(profile)]
    for operator in sorted(profile.operators, key=lambda each: -each.recompute_cost / each.nbytes):
        point = hull[-1].with_operator(operator)
        if point.nbytes >= profile.saved_bytes:
            break
        hull.append(point)
    everything = SavedActivations(True, frozenset(), profile.saved_bytes, 0.0)
    # Operators are in order of decreasing value, so only the last point can be above the line to another.
    while len(hull) > 1 and _slope(hull[-1], everything) > _slope(hull[-2], hull[-1]):
        hull.pop()
    return [*hull[1:], everything]


def _slope(first: SavedActivations, second: SavedActivations) -> float:
    return (first.recompute_cost - second.recompute_cost) / max(1, second.nbytes - first.nbytes)


# -- blocks


class BudgetedBlocks:
    """The blocks of one model or pipeline stage under a budget [10^9 bytes].

    Attributes:
        profiles: profiles of the block calls in one forward, in order.
        saved: what each of these calls saves.
        needs_choice: whether nothing has been chosen yet.
    """

    def __init__(self, budget_gb: float) -> None:
        self.budget_gb = budget_gb
        self.profiles: list[BlockProfile] = []
        self.saved: list[SavedActivations] = []
        self.needs_choice = True
        self._is_measuring, self._max_elements = False, 0
        # Each block has its own hidden states; masks and similar inputs are shared.
        self._inputs: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._block_indices: list[int] = []
        self._upcoming: list[Iterator[SavedActivations]] = []

    def wrap_block(self, block: nn.Module, recompute: Recompute, original: ForwardMethod) -> ForwardMethod:
        """Return a forward of the block that saves what is chosen for each call."""
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
                # Warn once for each size.
                warn(
                    f"a microbatch is {elements / self._max_elements:.2f} times as large as those of the first step, "
                    f"for which budget_gb={self.budget_gb:g} was divided: blocks may hold as much more.",
                    stacklevel=2,
                )
                self._max_elements = elements
            if choice.saves_all:
                return original(*args, **kwargs)
            return recompute(original, functools.partial(_make_contexts, choice), args, kwargs)

        return forward

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure blocks in one forward without gradients, of a micro-batch as large as those of the run."""
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
        new_storages = set(map(get_storage, iter_allocated_tensors((args, kwargs)))) - set(self._inputs)
        self._inputs.update(new_storages)
        self._max_elements = max(self._max_elements, _count_elements(args, kwargs))
        hidden: Tensor | None = None

        def track_hidden(value: Any) -> Any:
            # As in training, the first floating-point tensor, the hidden states, requires a gradient.
            nonlocal hidden
            if hidden is not None or not (isinstance(value, Tensor) and value.is_floating_point()):
                return value
            hidden = value
            return value.detach().requires_grad_()

        with torch.enable_grad(), OperatorRecorder(block) as recorder:
            positional = [track_hidden(each) for each in args]
            result = original(*positional, **{name: track_hidden(each) for name, each in kwargs.items()})
        self.profiles.append(recorder.build_profile(sum(each.nbytes() for each in new_storages), hidden))
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
    """Return the parts with a budget for which nothing has been chosen; the same on all ranks."""
    return [each for each in parts if isinstance(each, BudgetedBlocks) and each.needs_choice]


def choose_saved_activations(
    stages: Sequence[BudgetedBlocks],
    dry_runs: Sequence[Callable[[], object]],
    worlds: Sequence[World],
    backward_starts: Sequence[BackwardStart],
    world: World,
) -> None:
    """Choose what all blocks of a rank save; see [Note: equal communication]. Collective over `world`, all ranks.

    Args:
        stages: blocks of each pipeline stage of this rank.
        dry_runs: for each stage, runs a forward without gradients of a micro-batch as large as those of the run.
        worlds: for each stage, the ranks that train it.
        backward_starts: the times at which most bytes may be saved.

    Raises:
        ConfigError: the budget is too small, even if everything is recomputed.
    """
    for stage, dry_run in zip(stages, dry_runs, strict=True):
        with stage.measure():
            dry_run()
    budget_gb = stages[0].budget_gb
    limit = int(budget_gb * 1e9)
    plan = ActivationPlan([each.profiles for each in stages], backward_starts)
    (min_bytes,) = world.reduce_ints([plan.peak_bytes], dist.ReduceOp.MAX)
    if min_bytes > limit:
        raise ConfigError(
            f"activation_checkpointing: budget_gb={budget_gb:g} cannot be met: where all is computed again, blocks "
            f"still hold their inputs, and one of them all its backward needs; a rank has {_format_gb(min_bytes)} GB "
            f"then. Set budget_gb to at least {_format_gb(min_bytes)}, or use smaller microbatches or shorter "
            "sequences."
        )
    plan.fill_budget(limit)
    for index, stage_world in enumerate(worlds):
        can_save = [int(each.saves_all or COMMUNICATION_KEY in each.operator_keys) for each in plan.saved[index]]
        plan.release_operator(index, COMMUNICATION_KEY, stage_world.reduce_ints(can_save, dist.ReduceOp.MIN))
    plan.fill_remaining(limit)
    for stage, stage_saved in zip(stages, plan.saved, strict=True):
        stage.set_saved(stage_saved)


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
