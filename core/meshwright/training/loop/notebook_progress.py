"""The progress bar that `fit` shows in a notebook. Elsewhere, nothing is shown."""

from __future__ import annotations

import sys
import warnings
from contextlib import AbstractContextManager, nullcontext

from ...events.run import BadStep, RunInfo, RunSummary
from ...events.step import StepResult
from ...mesh.mesh import Mesh
from ...strategy.hooks import hookimpl
from ...strategy.registry import get_registry


def show_notebook_progress(rank: int) -> AbstractContextManager[object]:
    """Return a context in which rank 0 shows the progress of a run, if it runs in a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    # IPython in a terminal has no kernel.
    if rank or getattr(shell, "kernel", None) is None:
        return nullcontext()
    return get_registry().observing(_NotebookProgress())


class _NotebookProgress:
    """Observer that shows the step, the losses and the remaining time."""

    @hookimpl
    def on_run_start(self, run: RunInfo, mesh: Mesh) -> None:
        with warnings.catch_warnings():
            # Without ipywidgets, tqdm warns and shows its bar as text.
            warnings.simplefilter("ignore")
            from tqdm.auto import tqdm
        self._bar = tqdm(total=run.num_steps, initial=run.start_step, unit="step")
        self._losses: dict[str, str] = {}

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        self._losses |= {name: f"{value:.4f}" for name, value in {"loss": result.loss, **result.evaluations}.items()}
        self._bar.set_postfix(self._losses, refresh=False)
        self._bar.update(result.step - self._bar.n)

    @hookimpl
    def on_bad_step(self, bad_step: BadStep) -> None:
        if bad_step.rollback_step is not None:
            self._bar.n = bad_step.rollback_step
            self._bar.refresh()

    @hookimpl
    def on_run_end(self, summary: RunSummary) -> None:
        self._bar.close()
