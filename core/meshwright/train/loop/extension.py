"""What takes part in a training loop beside its steps. No torch in this module."""

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
"""Of a step's gradients: after the backward pass, and after clipping."""


class LoopExtension:
    """Base class of extensions of a loop. `fit` calls the hooks of all extensions in their order.

    A hook may be collective if every rank has the extension. By default it does nothing.
    """

    def on_start(self, state: Mapping[str, Any]) -> None:
        """Called once before the first step, with what the loop remembers in checkpoints."""

    def step_context(self, index: int) -> AbstractContextManager[object]:
        """Return the context in which a step runs, counted from 0 in this call of `fit`."""
        return nullcontext()

    def on_gradients(self, stage: GradientStage) -> None:
        """Look at the gradients of a step."""

    def process_result(self, result: StepResult) -> StepResult:
        """Look at a step before it is evaluated and reported, and return its result, perhaps with more in it."""
        return result

    def evaluate(self, compute_losses: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Return further losses to report with an evaluation."""
        return {}

    def before_save(self, step: int, state: Mapping[str, Any]) -> None:
        """Called before the state after a step is saved or copied."""

    def finish_step(self, step: int, prepare_extra: Callable[[], dict[str, Any]]) -> None:
        """Called last in a step, after a checkpoint that was due. `prepare_extra` prepares the state to be copied, and returns
        what belongs into a checkpoint beside the state of the manager; collective."""

    def on_rollback(self, step: int) -> None:
        """Called when an earlier state has been loaded."""


class StepContext(LoopExtension):
    """Run each step within a context that may measure something: further entries of `StepResult.times`."""

    def __init__(
        self,
        create_context: Callable[[int], AbstractContextManager[object]] | None,
        read_times: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        self._create_context, self._read_times = create_context, read_times

    def step_context(self, index: int) -> AbstractContextManager[object]:
        return nullcontext() if self._create_context is None else self._create_context(index)

    def process_result(self, result: StepResult) -> StepResult:
        more = {} if self._read_times is None else self._read_times()
        return replace(result, times={**result.times, **more}) if more else result


@dataclass
class FlopsReporter(LoopExtension):
    """Report the model's FLOPs of each step, and the peak of a device."""

    flops_per_token: float | None
    peak_flops: float | None

    def process_result(self, result: StepResult) -> StepResult:
        flops = None if self.flops_per_token is None else self.flops_per_token * result.num_tokens
        return replace(result, flops=flops, peak_flops=self.peak_flops)


class StateReplication(Protocol):
    """Copies of training state that outlive the processes of a run; see the hook `open_state_replication`."""

    def list_replicas(self, world: World, run: str, access: StorageOptions) -> Sequence[tuple[int, StorageReader]]:
        """Return the step and the place of each copy of a run, the newest first. Collective."""

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
        """Copy the state of the training steps within the context. Collective.

        Args:
            run_id: id of the run.
            start_step: number of steps done before.
            every: steps between copies.
            bandwidth: bytes a second that each rank sends; None: as many as there can be.
            signing_key: with which copies are signed.
            report: called with the facts of each copy, by name.
        """
