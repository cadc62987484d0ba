"""Microbatches from a DataLoader or any other iterable.

[Note: passes] An iterable gives microbatches one after the other; a step takes `accumulate` of them. It is iterated as
often as steps ask for, and no step reaches over the end of a pass: the last one may have fewer microbatches. A pass
must end on all ranks after the same step. Before each pass `set_epoch` is called, of the iterable, its `sampler`,
`batch_sampler` or `dataset`, as far as they have it.

[Note: going on in a pass] If the iterable has `state_dict` and `load_state_dict`, as torchdata's StatefulDataLoader,
its state goes into checkpoints, one of each data rank. Any other is iterated again without training: from the beginning
of the pass, or of the first pass where it has no length, or a generator of its own. An order drawn from torch's
generator when a pass begins comes again if the loop has a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...base.errors import BatchError, CheckpointError
from ...base.types import Batch
from ...mesh.mesh import Mesh


class PassEnds(BatchError):
    """A pass has ended on this rank; the next draw begins another."""


def step_seed(seed: int, step: int, data_rank: int) -> int:
    """Return the seed of a step's random numbers: different for each data rank, equal for ranks that share a batch."""
    state = np.random.SeedSequence(seed, spawn_key=(step, data_rank)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def steps_in_a_pass(batches: Any, accumulate: int) -> int | None:
    """Return the optimizer steps of one pass; None for a function, or where the length is unknown."""
    try:
        return -(-len(batches) // accumulate)
    except (TypeError, NotImplementedError):
        return None


class Passes:
    """The microbatches of each step, from an iterable; see [Note: passes]. Called with consecutive steps.

    Args:
        accumulate: microbatches of a step.
        state: as of `state()`, before the first step that is asked for; None: see [Note: going on in a pass].
        seed: returns the seed for a step; None: generators are left alone.
    """

    def __init__(
        self,
        source: Iterable[Batch],
        *,
        accumulate: int = 1,
        state: Mapping[str, Any] | None = None,
        seed: Callable[[int], int] | None = None,
    ) -> None:
        self._source, self._accumulate, self._seed = source, accumulate, seed
        self._state = state
        self._number, self._given = 0, 0
        self._iterator: Iterator[Batch] | None = None
        self._is_placed = False

    def __call__(self, step: int) -> list[Batch]:
        """Return the microbatches of a step.

        Raises:
            PassEnds: the pass has no more.
            BatchError: a pass has none at all, or something else than microbatches.
        """
        if not self._is_placed:
            self._is_placed = True
            self._place(step)
        found = self._drawn()
        for each in found:
            _check_batch(each)
        return found

    def state(self) -> dict[str, Any] | None:
        """Return where the iterable is, if it can tell."""
        find = getattr(self._source, "state_dict", None)
        if find is None or not hasattr(self._source, "load_state_dict"):
            return None
        # It may return its own memory, and the next step is drawn before this one is saved.
        return {"pass": self._number, "given": self._given, "source": deepcopy(find())}

    def _drawn(self) -> list[Batch]:
        if self._iterator is None:
            for each in self._parts():
                if callable(set_epoch := getattr(each, "set_epoch", None)):
                    set_epoch(self._number)
            self._iterator = iter(self._source)
        found = list(islice(self._iterator, self._accumulate))
        if len(found) == self._accumulate:
            self._given += len(found)
            return found
        if not found and not self._given:
            again = f" when they are gone through again (pass {self._number + 1})" if self._number else ""
            raise BatchError(
                f"the batches give nothing{again}. Give an iterable that gives some each time, or less steps."
            )
        self._iterator, self._given = None, 0
        self._number += 1
        if not found:
            raise PassEnds("a pass over the batches has ended.")
        # All ranks have as few of this step, or it is refused.
        return found

    def _parts(self) -> list[Any]:
        """Return the iterable, and what a DataLoader takes its order from."""
        parts = [getattr(self._source, name, None) for name in ("sampler", "batch_sampler", "dataset")]
        found = (self._source, *parts, getattr(parts[1], "sampler", None))
        return list({id(part): part for part in found if part is not None}.values())

    def _place(self, step: int) -> None:
        """Go to where the first step begins."""
        if self._state is not None:
            self._number, self._given = int(self._state["pass"]), int(self._state["given"])
            self._source.load_state_dict(self._state["source"])  # type: ignore[attr-defined]
            return
        each, done = steps_in_a_pass(self._source, self._accumulate), 0
        if each and all(getattr(part, "generator", None) is None for part in self._parts()):
            self._number, done = step // each, step // each * each
        while done < step:
            if self._iterator is None:
                self._reseed(done)
            try:
                self._drawn()
                done += 1
            except PassEnds:
                continue
        self._reseed(step)

    def _reseed(self, step: int) -> None:
        if self._seed is not None:
            torch.default_generator.manual_seed(self._seed(step))


def _check_batch(batch: Any) -> None:
    if not isinstance(batch, Mapping):
        raise BatchError(
            f"batches give a {type(batch).__name__}, where a microbatch is a mapping of tensors with input_ids and "
            f"labels. Give the DataLoader a collate_fn that makes such."
        )
    wrong = [f"{name} ({type(value).__name__})" for name, value in batch.items() if not isinstance(value, Tensor)]
    if wrong:
        raise BatchError(f"a microbatch holds what is no tensor: {', '.join(wrong)}. Leave it out in collate_fn.")


def end_together(error: Exception | None, mesh: Mesh, step: int) -> bool:
    """Whether a pass has ended on all ranks, and drawing has failed on none; asked when some rank has found something
    wrong with a step. Collective.

    Args:
        error: that this rank has met in drawing.

    Raises:
        BatchError: the pass has ended on some ranks only; on all ranks.
    """
    world, ended = mesh.world, isinstance(error, PassEnds)
    count, failed = world.reduce_ints([ended, error is not None and not ended])
    if failed or count in (0, world.size):
        return not failed and count > 0
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, (mesh.data_rank, ended), group=world.group)
    ranks = sorted({data_rank for data_rank, has_ended in found if has_ended})
    raise BatchError(
        f"after step {step} the batches have ended on data ranks {', '.join(map(str, ranks))} of {mesh.data_size}, "
        f"and not on the others. Give each data rank equally many, as DistributedSampler does, and ranks that share "
        f"data the same; or let them go on for ever, as itertools.cycle does."
    )


def states_of_ranks(own: Mapping[str, Any] | None, mesh: Mesh) -> dict[str, Any] | None:
    """Return the states of the iterables of all data ranks; None where they have none. Collective."""
    found: list[Any] = [None] * mesh.world.size
    mesh.world.reduce_ints([0])
    dist.all_gather_object(found, (mesh.data_rank, own), group=mesh.world.group)
    states = dict(reversed(found))
    if all(state is None for state in states.values()):
        return None
    return {"of_data_ranks": [states[rank] for rank in range(mesh.data_size)]}


def state_of_rank(state: Mapping[str, Any] | None, mesh: Mesh) -> Mapping[str, Any] | None:
    """Return this data rank's state of those of `states_of_ranks`.

    Raises:
        CheckpointError: the number of data ranks is another.
    """
    if state is None:
        return None
    states: Sequence[Mapping[str, Any]] = state["of_data_ranks"]
    if len(states) != mesh.data_size:
        raise CheckpointError(
            f"the checkpoint has the states of the batches of {len(states)} data ranks, and there are "
            f"{mesh.data_size}. Go on with {len(states)}; or leave state out of the loop, to count batches instead."
        )
    return states[mesh.data_rank]
