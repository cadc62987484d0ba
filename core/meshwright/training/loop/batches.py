"""Microbatches of a loop: fetched one step ahead, from a DataLoader or any other iterable.

[Note: epochs] Each step takes `gradient_accumulation_steps` microbatches from the iterable. Iterating over it once is
an epoch; it is iterated again as often as the steps need. No step spans two epochs: the last step of an epoch may have
fewer microbatches. An epoch must end on all ranks after the same step. Before each epoch, `set_epoch` is called on the
iterable and on its `sampler`, `batch_sampler` and `dataset`, if they have that method.

[Note: resuming within an epoch] If the iterable has `state_dict` and `load_state_dict`, like torchdata's
StatefulDataLoader, checkpoints contain its state, one for each data rank. Otherwise the batches already trained on are
skipped: from the start of the current epoch, or from the start of the first epoch if the iterable has no length or has
a generator of its own. An order that is sampled from torch's default generator is reproduced if the loop has a seed.

[Note: stop signals] The next step's batch is fetched while the device computes the current step. A rank that has
received a signal fetches nothing. The flag in the step's handshake tells the other ranks that something is wrong, and
only then do the ranks exchange the reason. A later signal takes effect one step later.
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
    """The epoch has ended on this rank; the next fetch starts another one."""


class StopRequested(Exception):
    """All ranks stop before a step, since a rank has received a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signum = number


def derive_step_seed(seed: int, step: int, data_rank: int) -> int:
    """Return the seed of a step's random numbers: different for each data rank, equal on ranks with the same batch."""
    state = np.random.SeedSequence(seed, spawn_key=(step, data_rank)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


class EpochBatches:
    """Fetch the microbatches of each step from an iterable; see [Note: epochs]. Call it with consecutive steps.

    Args:
        state: a `state_dict()` from before the first step that is fetched. None: see [Note: resuming within an epoch].
        seed_for_step: returns the seed for a step. None: generators are not seeded.
    """

    def __init__(
        self,
        source: Iterable[Batch],
        *,
        gradient_accumulation_steps: int = 1,
        state: Mapping[str, Any] | None = None,
        seed_for_step: Callable[[int], int] | None = None,
    ) -> None:
        self._source = source
        self._gradient_accumulation_steps = gradient_accumulation_steps
        self._seed_for_step = seed_for_step
        self._state = state
        self._epoch, self._num_drawn = 0, 0
        self._iterator: Iterator[Batch] | None = None
        self._is_positioned = False

    def __call__(self, step: int) -> list[Batch]:
        """Return the microbatches of a step.

        Raises:
            EpochEnded: the epoch has no more microbatches.
            BatchError: the iterable is empty, or a microbatch is not a mapping of tensors.
        """
        if not self._is_positioned:
            self._is_positioned = True
            self._seek(step)
        microbatches = self._draw()
        for each in microbatches:
            _check_batch(each)
        return microbatches

    def state_dict(self) -> dict[str, Any] | None:
        """Return the position and the iterable's state; None if the iterable has no `state_dict`."""
        get_state = getattr(self._source, "state_dict", None)
        if get_state is None or not hasattr(self._source, "load_state_dict"):
            return None
        # The iterable may return a reference to its state, and fetches the next step before this one is saved.
        return {"pass": self._epoch, "given": self._num_drawn, "source": deepcopy(get_state())}

    def _draw(self) -> list[Batch]:
        if self._iterator is None:
            for each in self._list_epoch_aware_parts():
                if callable(set_epoch := getattr(each, "set_epoch", None)):
                    set_epoch(self._epoch)
            self._iterator = iter(self._source)
        microbatches = list(islice(self._iterator, self._gradient_accumulation_steps))
        if len(microbatches) == self._gradient_accumulation_steps:
            self._num_drawn += len(microbatches)
            return microbatches
        if not microbatches and not self._num_drawn:
            suffix = f" when they are gone through again (pass {self._epoch + 1})" if self._epoch else ""
            raise BatchError(
                f"the batches give nothing{suffix}. Give an iterable that gives some each time, or less steps."
            )
        self._iterator, self._num_drawn = None, 0
        self._epoch += 1
        if not microbatches:
            raise EpochEnded("a pass over the batches has ended.")
        # If other ranks have more microbatches in this step, it is rejected later.
        return microbatches

    def _list_epoch_aware_parts(self) -> list[Any]:
        """Return the iterable and the objects that determine a DataLoader's order."""
        parts = [getattr(self._source, name, None) for name in ("sampler", "batch_sampler", "dataset")]
        candidates = (self._source, *parts, getattr(parts[1], "sampler", None))
        return list({id(part): part for part in candidates if part is not None}.values())

    def _seek(self, step: int) -> None:
        """Restore the state, or skip the microbatches before `step`."""
        if self._state is not None:
            self._epoch, self._num_drawn = int(self._state["pass"]), int(self._state["given"])
            self._source.load_state_dict(self._state["source"])  # type: ignore[attr-defined]
            return
        steps_per_epoch, done = count_steps_per_epoch(self._source, self._gradient_accumulation_steps), 0
        if steps_per_epoch and all(getattr(part, "generator", None) is None for part in self._list_epoch_aware_parts()):
            self._epoch, done = step // steps_per_epoch, step // steps_per_epoch * steps_per_epoch
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
    invalid = [f"{name} ({type(value).__name__})" for name, value in batch.items() if not isinstance(value, Tensor)]
    if invalid:
        raise BatchError(f"a microbatch holds what is no tensor: {', '.join(invalid)}. Leave it out in collate_fn.")


def check_epoch_end(error: Exception | None, mesh: Mesh, step: int) -> bool:
    """Return whether the epoch has ended on all ranks and no fetch has failed. Called if any rank reports an error in a
    step. Collective.

    Args:
        error: what this rank's fetch raised.

    Raises:
        BatchError: the epoch has ended on some ranks only.
    """
    world, ended = mesh.world, isinstance(error, EpochEnded)
    count, failed = world.reduce_ints([ended, error is not None and not ended])
    if failed or count in (0, world.size):
        return not failed and count > 0
    ended_by_rank: list[Any] = [None] * world.size
    dist.all_gather_object(ended_by_rank, (mesh.data_rank, ended), group=world.group)
    ranks = sorted({data_rank for data_rank, has_ended in ended_by_rank if has_ended})
    raise BatchError(
        f"after step {step} the batches have ended on data ranks {', '.join(map(str, ranks))} of {mesh.data_size}, "
        f"and not on the others. Give each data rank equally many, as DistributedSampler does, and ranks that share "
        f"data the same; or let them continue forever, as itertools.cycle does."
    )


def gather_loader_states(own_state: Mapping[str, Any] | None, mesh: Mesh) -> dict[str, Any] | None:
    """Return the iterables' states of all data ranks; None if no iterable has a state. Collective."""
    gathered: list[Any] = [None] * mesh.world.size
    mesh.world.reduce_ints([0])
    dist.all_gather_object(gathered, (mesh.data_rank, own_state), group=mesh.world.group)
    states = dict(reversed(gathered))
    if all(state is None for state in states.values()):
        return None
    return {"of_data_ranks": [states[rank] for rank in range(mesh.data_size)]}


def select_loader_state(state: Mapping[str, Any] | None, mesh: Mesh) -> Mapping[str, Any] | None:
    """Return this data rank's state from the result of `gather_loader_states`.

    Raises:
        CheckpointError: the number of data ranks has changed.
    """
    if state is None:
        return None
    states: Sequence[Mapping[str, Any]] = state["of_data_ranks"]
    if len(states) != mesh.data_size:
        raise CheckpointError(
            f"the checkpoint has the states of the batches of {len(states)} data ranks, and there are "
            f"{mesh.data_size}. Continue with {len(states)}; or leave state out of the loop, to count batches instead."
        )
    return states[mesh.data_rank]


class _PrefetchedStep(NamedTuple):
    """A fetched step. `rng_state` and `state` are from after the fetch; `signal` is why nothing was fetched, or 0."""

    step: int
    microbatches: Sequence[Batch]
    num_tokens: Tensor
    error: Exception | None
    rng_state: Tensor
    state: dict[str, Any] | None
    signal: int


class BatchPrefetcher:
    """Fetch the microbatches of a loop, one step ahead of the device.

    An error during a fetch is raised by `get_step` of that step.

    Attributes:
        loader_state: state of `EpochBatches` after the last step returned by `get_step`.
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
        """Fetch a step, counted from 0, and start its handshake without waiting for other ranks. Collective."""
        self._prefetched = self._draw(step)

    def _draw(self, step: int) -> _PrefetchedStep:
        saved_rng_state = torch.get_rng_state()
        if self._seed is not None:
            # Accelerators' generators are not seeded here: the current step may still use them.
            torch.default_generator.manual_seed(self._derive_seed(step, self._seed))
        microbatches: Sequence[Batch] = ()
        error: Exception | None = None
        state = None
        signum = 0 if self._signals is None else self._signals.received_signal
        start = time.perf_counter()
        try:
            fetched = () if signum else self._batches(step)
            if isinstance(self._batches, EpochBatches):
                state = self._batches.state_dict()
            microbatches = fetched
        except Exception as caught:
            error = caught
        self._draw_seconds += time.perf_counter() - start
        rng_state = torch.get_rng_state()
        torch.set_rng_state(saved_rng_state)
        # An empty batch reports an error to the other ranks.
        num_tokens = self._manager.begin_step_sync(microbatches, objective=self._objective)
        return _PrefetchedStep(step, microbatches, num_tokens, error, rng_state, state, signum)

    def pop_draw_seconds(self) -> float:
        """Return the seconds spent on fetching since the last call, without waiting for other ranks."""
        seconds, self._draw_seconds = self._draw_seconds, 0.0
        return seconds

    def get_step(self, step: int) -> tuple[Sequence[Batch], Tensor]:
        """Return the microbatches of a step and their `num_tokens`, and seed all generators. Collective.

        Raises:
            StopRequested: a rank has received a signal; nothing has changed since the previous step.
            BatchError: a rank could not fetch its microbatches (on all ranks).
        """
        fetched, self._prefetched = self._prefetched, None
        if fetched is None or fetched.step != step:
            fetched = self._draw(step)
        while self._has_epoch_ended(fetched):
            fetched = self._draw(step)
        self.loader_state = fetched.state
        if self._seed is not None:
            torch.manual_seed(self._derive_seed(step, self._seed))
        torch.set_rng_state(fetched.rng_state)
        if fetched.error is not None:
            # If the epoch has ended here, another rank's fetch has failed, and that rank raises the cause.
            error = None if isinstance(fetched.error, EpochEnded) else fetched.error
            failure = f"the microbatches of step {step + 1} cannot be drawn"
            raise_on_all_ranks(self._manager.mesh.world, error, BatchError, failure)
        return fetched.microbatches, fetched.num_tokens

    def _has_epoch_ended(self, drawn: _PrefetchedStep) -> bool:
        """Return whether the epoch has ended, so that the step must be fetched from the next one. Collective."""
        has_epochs = isinstance(self._batches, EpochBatches)
        if (self._signals is None and not has_epochs) or not has_reported_errors(drawn.num_tokens):
            return False
        if self._signals is not None:
            (signum,) = self._manager.mesh.world.reduce_ints([drawn.signal], ReduceOp.MAX)
            if signum:
                raise StopRequested(signum)
        return has_epochs and check_epoch_end(drawn.error, self._manager.mesh, drawn.step)

    def _derive_seed(self, step: int, seed: int) -> int:
        return derive_step_seed(seed, step, self._manager.mesh.data_rank)


def build_prefetcher(manager: StrategyManager, loop: Loop) -> BatchPrefetcher:
    """Build the prefetcher of a loop."""
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
