"""Extensions of a training loop. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from ...events.step import StepResult

if TYPE_CHECKING:
    from ...checkpoint.storage import SigningKey, StorageOptions, StorageReader
    from ...mesh.world import World
    from ...strategy.contract import StrategyManager

GradientStage: TypeAlias = Literal["whole", "clipped"]
"""Stage of a step's gradients: "whole" after the backward pass, "clipped" after clipping."""


class LoopExtension:
    """Base class of loop extensions. `fit` calls the hooks of all extensions in order.

    A hook may be collective if every rank has the extension. The default hooks do nothing.
    """

    def on_start(self, state: Mapping[str, Any]) -> None:
        """Called once before the first step, with the loop's state."""

    def step_context(self, index: int) -> AbstractContextManager[object]:
        """Return the context of a step. `index` is counted from 0 in this call of `fit`."""
        return nullcontext()

    def on_gradients(self, stage: GradientStage) -> None:
        """Called with each stage of a step's gradients."""

    def process_result(self, result: StepResult) -> StepResult:
        """Called after a step, before evaluation and reporting. Return its result, possibly extended."""
        return result

    def evaluate(self, compute_losses: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Return additional losses to report with an evaluation."""
        return {}

    def before_save(self, step: int, state: Mapping[str, Any]) -> None:
        """Called before the state after a step is saved or copied."""

    def finish_step(self, step: int, prepare_extra: Callable[[], dict[str, Any]]) -> None:
        """Called last in a step, after the checkpoint if one is due.

        Args:
            prepare_extra: prepares the state for a copy, and returns a checkpoint's `extra`. Collective.
        """

    def on_rollback(self, step: int) -> None:
        """Called after a rollback, with the step of the loaded state."""


class StepContext(LoopExtension):
    """Run each step in a context manager, and add measured times to `StepResult.times`."""

    def __init__(
        self,
        create_context: Callable[[int], AbstractContextManager[object]] | None,
        read_times: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        self._create_context, self._read_times = create_context, read_times

    def step_context(self, index: int) -> AbstractContextManager[object]:
        return nullcontext() if self._create_context is None else self._create_context(index)

    def process_result(self, result: StepResult) -> StepResult:
        extra = {} if self._read_times is None else self._read_times()
        return replace(result, times={**result.times, **extra}) if extra else result


@dataclass
class FlopsReporter(LoopExtension):
    """Report the model FLOPs of each step, and the peak FLOP/s of one device."""

    flops_per_token: float | None
    peak_flops: float | None

    def process_result(self, result: StepResult) -> StepResult:
        flops = None if self.flops_per_token is None else self.flops_per_token * result.num_tokens
        return replace(result, flops=flops, peak_flops=self.peak_flops)


class StateReplication(Protocol):
    """Replicas of the training state that outlive the processes of a run; see the hook `open_state_replication`."""

    def list_replicas(self, world: World, run: str, access: StorageOptions) -> Sequence[tuple[int, StorageReader]]:
        """Return the step and the storage of each replica of a run, newest first. Collective."""

    def replicate(
        self,
        manager: StrategyManager,
        scheduler: Any,
        *,
        run_id: str,
        start_step: int,
        every: int,
        bandwidth: float | None,
        signing_key: SigningKey | None,
        report: Callable[..., object],
    ) -> AbstractContextManager[LoopExtension]:
        """Replicate the training state of the steps within the context. Collective.

        Args:
            run_id: id of the run.
            start_step: number of steps already done.
            every: steps between copies.
            bandwidth: bytes per second that each rank may send; None: unlimited.
            signing_key: key that signs the copies.
            report: called with the facts of each copy as keyword arguments.
        """
