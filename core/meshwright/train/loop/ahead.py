"""Draw the microbatches of the next step, and begin to agree on them, while the device computes this one.

The random numbers of a step follow from its seed, so a step draws the same whether it was begun ahead or not. An error
in drawing is raised when the step's turn comes.

[Note: agreeing to stop] A rank that has noted a signal draws nothing for the next step. The others see in the message
that each step sends that something is wrong with it, and only then do ranks ask each other what. A signal that comes
when the next step has begun takes effect one step later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ...base.errors import BatchError
from ...base.types import Batch, Objective
from ...step.agreement import defects_told
from ...strategy.contract import StrategyManager
from .agreed import raise_on_all
from .batches import PassEnds, Passes, end_together, step_seed

if TYPE_CHECKING:
    from ...base.stopping import StopSignals


class StopsBefore(Exception):
    """All ranks stop before a step, since a rank has noted a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(frozen=True)
class _Drawn:
    """A step that has begun: its microbatches, or the error in drawing them, and the state after that.

    Attributes:
        generator: state of torch's generator.
        state: see `Passes.state`.
        signal: number of the signal for which nothing was drawn; 0: none.
    """

    step: int
    microbatches: Sequence[Batch]
    num_tokens: Tensor
    error: Exception | None
    generator: Tensor
    state: dict[str, Any] | None
    signal: int


class Ahead:
    """The microbatches of one loop, step by step.

    Args:
        batches: returns this rank's microbatches of a step; of the same kind on all ranks.
        seed: of the run; None: random numbers go on as they are.
        signals: end the loop; on all ranks or none.

    Attributes:
        state: of `Passes`, after the step that was taken last.
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
        self._drawn: _Drawn | None = None
        self.state: dict[str, Any] | None = None
        self._seconds = 0.0

    def begin(self, step: int) -> None:
        """Draw a step, counted from 0, and announce it to the other ranks without waiting for them. Collective."""
        self._drawn = self._begun(step)

    def _begun(self, step: int) -> _Drawn:
        before = torch.get_rng_state()
        if self._seed is not None:
            # The generators of accelerators stay as they are: the current step may need them.
            torch.default_generator.manual_seed(self._seed_of(step, self._seed))
        microbatches: Sequence[Batch] = ()
        error: Exception | None = None
        state = None
        noted = 0 if self._signals is None else self._signals.noted
        start = time.perf_counter()
        try:
            drawn = () if noted else self._batches(step)
            if isinstance(self._batches, Passes):
                state = self._batches.state()
            microbatches = drawn
        except Exception as caught:
            error = caught
        self._seconds += time.perf_counter() - start
        generator = torch.get_rng_state()
        torch.set_rng_state(before)
        # No microbatches tell the others that something is wrong.
        num_tokens = self._manager.announce(microbatches, objective=self._objective)
        return _Drawn(step, microbatches, num_tokens, error, generator, state, noted)

    def take_seconds(self) -> float:
        """Return what drawing has taken since the last call, without waiting for other ranks."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def take(self, step: int) -> tuple[Sequence[Batch], Tensor]:
        """Return the microbatches of a step and their `num_tokens`, and seed all generators. Collective.

        Raises:
            StopsBefore: a rank has noted a signal; on all ranks. Nothing has changed since the step before.
            Exception: in drawing; the other ranks raise MeshwrightError.
        """
        drawn, self._drawn = self._drawn, None
        if drawn is None or drawn.step != step:
            drawn = self._begun(step)
        while self._ends(drawn):
            drawn = self._begun(step)
        self.state = drawn.state
        if self._seed is not None:
            torch.manual_seed(self._seed_of(step, self._seed))
        torch.set_rng_state(drawn.generator)
        if drawn.error is not None:
            # Where a pass has ended here, another rank has failed in drawing, and raises the cause.
            error = None if isinstance(drawn.error, PassEnds) else drawn.error
            what = f"the microbatches of step {step + 1} cannot be drawn"
            raise_on_all(self._manager.mesh.world, error, BatchError, what)
        return drawn.microbatches, drawn.num_tokens

    def _ends(self, drawn: _Drawn) -> bool:
        """Whether a pass has ended, so that the step is to be drawn from the next one. Collective."""
        if self._signals is None and not isinstance(self._batches, Passes):
            return False
        if not defects_told(drawn.num_tokens):
            return False
        if self._signals is not None:
            (number,) = self._manager.mesh.world.reduce_ints([drawn.signal], ReduceOp.MAX)
            if number:
                raise StopsBefore(number)
        if not isinstance(self._batches, Passes):
            return False
        return end_together(drawn.error, self._manager.mesh, drawn.step)

    def _seed_of(self, step: int, seed: int) -> int:
        return step_seed(seed, step, self._manager.mesh.data_rank)
