"""Microbatches of a loop: from a DataLoader or any other iterable, drawn one step ahead.

[Note: passes] An iterable gives microbatches one after the other; a step takes `accumulate` of them. It is iterated as
often as steps ask for, and no step reaches over the end of a pass: the last one may have fewer microbatches. A pass
must end on all ranks after the same step. Before each pass `set_epoch` is called, of the iterable, its `sampler`,
`batch_sampler` or `dataset`, as far as they have it.

[Note: going on in a pass] If the iterable has `state_dict` and `load_state_dict`, as torchdata's StatefulDataLoader,
its state goes into checkpoints, one of each data rank. Any other is iterated again without training: from the beginning
of the pass, or of the first pass where it has no length, or a generator of its own. An order drawn from torch's
generator when a pass begins comes again if the loop has a seed.

[Note: agreeing to stop] The next step is drawn while the device computes this one. A rank that has noted a signal draws
nothing for it. The others see in the message that each step sends that something is wrong with it, and only then do
ranks ask each other what. A signal that comes when the next step has begun takes effect one step later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from ...base.errors import BatchError, CheckpointError
from ...base.types import Batch, Objective
from ...mesh.mesh import Mesh
from ...step.handshake import has_reported_errors
from ...strategy.contract import StrategyManager
from .options import Loop, count_steps_per_epoch, raise_on_all_ranks

if TYPE_CHECKING:
    from ...base.stopping import StopSignals


class EpochEnded(BatchError):
    """A pass has ended on this rank; the next draw begins another."""


class StopRequested(Exception):
    """All ranks stop before a step, since a rank has noted a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signum = number


def derive_step_seed(seed: int, step: int, data_rank: int) -> int:
    """Return the seed of a step's random numbers: different for each data rank, equal for ranks that share a batch."""
    state = np.random.SeedSequence(seed, spawn_key=(step, data_rank)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


class EpochBatches:
    """The microbatches of each step, from an iterable; see [Note: passes]. Called with consecutive steps.

    `state` is as of `state()`, before the first step that is asked for; None: see [Note: going on in a pass]. `seed_for_step`
    returns the seed for a step; None: generators are left alone.
    """

    def __init__(
        self,
        source: Iterable[Batch],
        *,
        gradient_accumulation_steps: int = 1,
        state: Mapping[str, Any] | None = None,
        seed_for_step: Callable[[int], int] | None = None,
    ) -> None:
        self._source, self._gradient_accumulation_steps, self._seed_for_step = (
            source,
            gradient_accumulation_steps,
            seed_for_step,
        )
        self._state = state
        self._epoch, self._num_drawn = 0, 0
        self._iterator: Iterator[Batch] | None = None
        self._is_positioned = False

    def __call__(self, step: int) -> list[Batch]:
        """Return the microbatches of a step; EpochEnded: the pass has no more."""
        if not self._is_positioned:
            self._is_positioned = True
            self._seek(step)
        found = self._draw()
        for each in found:
            _check_batch(each)
        return found

    def state_dict(self) -> dict[str, Any] | None:
        """Return where the iterable is, if it can tell."""
        find = getattr(self._source, "state_dict", None)
        if find is None or not hasattr(self._source, "load_state_dict"):
            return None
        # It may return its own memory, and the next step is drawn before this one is saved.
        return {"pass": self._epoch, "given": self._num_drawn, "source": deepcopy(find())}

    def _draw(self) -> list[Batch]:
        if self._iterator is None:
            for each in self._list_epoch_aware_parts():
                if callable(set_epoch := getattr(each, "set_epoch", None)):
                    set_epoch(self._epoch)
            self._iterator = iter(self._source)
        found = list(islice(self._iterator, self._gradient_accumulation_steps))
        if len(found) == self._gradient_accumulation_steps:
            self._num_drawn += len(found)
            return found
        if not found and not self._num_drawn:
            again = f" when they are gone through again (pass {self._epoch + 1})" if self._epoch else ""
            raise BatchError(
                f"the batches give nothing{again}. Give an iterable that gives some each time, or less steps."
            )
        self._iterator, self._num_drawn = None, 0
        self._epoch += 1
        if not found:
            raise EpochEnded("a pass over the batches has ended.")
        # All ranks have as few of this step, or it is refused.
        return found

    def _list_epoch_aware_parts(self) -> list[Any]:
        """Return the iterable, and what a DataLoader takes its order from."""
        parts = [getattr(self._source, name, None) for name in ("sampler", "batch_sampler", "dataset")]
        found = (self._source, *parts, getattr(parts[1], "sampler", None))
        return list({id(part): part for part in found if part is not None}.values())

    def _seek(self, step: int) -> None:
        """Go to where the first step begins."""
        if self._state is not None:
            self._epoch, self._num_drawn = int(self._state["pass"]), int(self._state["given"])
            self._source.load_state_dict(self._state["source"])  # type: ignore[attr-defined]
            return
        each, done = count_steps_per_epoch(self._source, self._gradient_accumulation_steps), 0
        if each and all(getattr(part, "generator", None) is None for part in self._list_epoch_aware_parts()):
            self._epoch, done = step // each, step // each * each
        while done < step:
            if self._iterator is None:
                self._reseed(done)
            with suppress(EpochEnded):
                self._draw()
                done += 1
        self._reseed(step)

    def _reseed(self, step: int) -> None:
        if self._seed_for_step is not None:
            torch.default_generator.manual_seed(self._seed_for_step(step))


def _check_batch(batch: Any) -> None:
    if not isinstance(batch, Mapping):
        raise BatchError(
            f"batches give a {type(batch).__name__}, where a microbatch is a mapping of tensors with input_ids and "
            f"labels. Give the DataLoader a collate_fn that makes such."
        )
    wrong = [f"{name} ({type(value).__name__})" for name, value in batch.items() if not isinstance(value, Tensor)]
    if wrong:
        raise BatchError(f"a microbatch holds what is no tensor: {', '.join(wrong)}. Leave it out in collate_fn.")


def check_epoch_end(error: Exception | None, mesh: Mesh, step: int) -> bool:
    """Whether a pass has ended on all ranks, and drawing has failed on none. Collective; asked when some rank has found
    something wrong with a step. `error` is what this rank has met in drawing."""
    world, ended = mesh.world, isinstance(error, EpochEnded)
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


def gather_loader_states(own_state: Mapping[str, Any] | None, mesh: Mesh) -> dict[str, Any] | None:
    """Return the states of the iterables of all data ranks; None where they have none. Collective."""
    found: list[Any] = [None] * mesh.world.size
    mesh.world.reduce_ints([0])
    dist.all_gather_object(found, (mesh.data_rank, own_state), group=mesh.world.group)
    states = dict(reversed(found))
    if all(state is None for state in states.values()):
        return None
    return {"of_data_ranks": [states[rank] for rank in range(mesh.data_size)]}


def select_loader_state(state: Mapping[str, Any] | None, mesh: Mesh) -> Mapping[str, Any] | None:
    """Return this data rank's state of those of `gather_loader_states`."""
    if state is None:
        return None
    states: Sequence[Mapping[str, Any]] = state["of_data_ranks"]
    if len(states) != mesh.data_size:
        raise CheckpointError(
            f"the checkpoint has the states of the batches of {len(states)} data ranks, and there are "
            f"{mesh.data_size}. Go on with {len(states)}; or leave state out of the loop, to count batches instead."
        )
    return states[mesh.data_rank]


class _PrefetchedStep(NamedTuple):
    """A step that has begun; `generator` and `state` are as of after drawing, `signal` is why nothing was drawn."""

    step: int
    microbatches: Sequence[Batch]
    num_tokens: Tensor
    error: Exception | None
    rng_state: Tensor
    state: dict[str, Any] | None
    signal: int


class BatchPrefetcher:
    """The microbatches of one loop, step by step; the next step is drawn while the device computes this one.

    An error in drawing is raised when the step's turn comes. `state` is that of `EpochBatches`, after the step taken last.
    """

    def __init__(
        self,
        manager: StrategyManager,
        batches: Callable[[int], Sequence[Batch]],
        *,
        seed: int | None,
        objective: Objective | None = None,
        signals: StopSignals | None = None,
    ) -> None:
        self._manager, self._batches, self._seed = manager, batches, seed
        self._objective, self._signals = objective, signals
        self._prefetched: _PrefetchedStep | None = None
        self.loader_state: dict[str, Any] | None = None
        self._draw_seconds = 0.0

    def prefetch(self, step: int) -> None:
        """Draw a step, counted from 0, and announce it to the other ranks without waiting for them. Collective."""
        self._prefetched = self._draw(step)

    def _draw(self, step: int) -> _PrefetchedStep:
        before = torch.get_rng_state()
        if self._seed is not None:
            # The generators of accelerators stay as they are: the current step may need them.
            torch.default_generator.manual_seed(self._derive_seed(step, self._seed))
        microbatches: Sequence[Batch] = ()
        error: Exception | None = None
        state = None
        noted = 0 if self._signals is None else self._signals.received_signal
        start = time.perf_counter()
        try:
            drawn = () if noted else self._batches(step)
            if isinstance(self._batches, EpochBatches):
                state = self._batches.state_dict()
            microbatches = drawn
        except Exception as caught:
            error = caught
        self._draw_seconds += time.perf_counter() - start
        generator = torch.get_rng_state()
        torch.set_rng_state(before)
        # No microbatches tell the others that something is wrong.
        num_tokens = self._manager.begin_step_sync(microbatches, objective=self._objective)
        return _PrefetchedStep(step, microbatches, num_tokens, error, generator, state, noted)

    def pop_draw_seconds(self) -> float:
        """Return what drawing has taken since the last call, without waiting for other ranks."""
        seconds, self._draw_seconds = self._draw_seconds, 0.0
        return seconds

    def get_step(self, step: int) -> tuple[Sequence[Batch], Tensor]:
        """Return the microbatches of a step and their `num_tokens`, and seed all generators. Collective; StopRequested: a
        rank has noted a signal, and nothing has changed since the step before."""
        drawn, self._prefetched = self._prefetched, None
        if drawn is None or drawn.step != step:
            drawn = self._draw(step)
        while self._has_epoch_ended(drawn):
            drawn = self._draw(step)
        self.loader_state = drawn.state
        if self._seed is not None:
            torch.manual_seed(self._derive_seed(step, self._seed))
        torch.set_rng_state(drawn.rng_state)
        if drawn.error is not None:
            # Where a pass has ended here, another rank has failed in drawing, and raises the cause.
            error = None if isinstance(drawn.error, EpochEnded) else drawn.error
            what = f"the microbatches of step {step + 1} cannot be drawn"
            raise_on_all_ranks(self._manager.mesh.world, error, BatchError, what)
        return drawn.microbatches, drawn.num_tokens

    def _has_epoch_ended(self, drawn: _PrefetchedStep) -> bool:
        """Whether a pass has ended, so that the step is to be drawn from the next one. Collective."""
        in_passes = isinstance(self._batches, EpochBatches)
        if (self._signals is None and not in_passes) or not has_reported_errors(drawn.num_tokens):
            return False
        if self._signals is not None:
            (number,) = self._manager.mesh.world.reduce_ints([drawn.signal], ReduceOp.MAX)
            if number:
                raise StopRequested(number)
        return in_passes and check_epoch_end(drawn.error, self._manager.mesh, drawn.step)

    def _derive_seed(self, step: int, seed: int) -> int:
        return derive_step_seed(seed, step, self._manager.mesh.data_rank)


def build_prefetcher(manager: StrategyManager, loop: Loop) -> BatchPrefetcher:
    """Return what draws the microbatches of a loop."""
    source, mesh, run_seed = loop.batches, manager.mesh, loop.seed
    if not callable(source):
        if not isinstance(source, Iterable):
            raise BatchError(f"batches must be a function of the step, or an iterable, not {type(source).__name__}.")
        state = select_loader_state((loop.resume_state or {}).get("batches"), mesh)
        seed = None if run_seed is None else lambda step: derive_step_seed(run_seed, step, mesh.data_rank)
        source = EpochBatches(
            source, gradient_accumulation_steps=loop.gradient_accumulation_steps, state=state, seed_for_step=seed
        )
    return BatchPrefetcher(manager, source, seed=run_seed, objective=loop.objective, signals=loop.signals)
