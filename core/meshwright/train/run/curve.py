"""The picture of a run's losses, drawn now and then while it trains, and when it ends or fails.

While the run trains another process draws, at low priority, more rarely the longer it takes. No torch in this module,
so that this process has none.

    python -m meshwright.train.run.curve METRICS PNG     # what it runs
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from ...base.safe_path import PYTHON
from ...events.step import StepResult
from ...files.writing import written_whole
from ...strategy.hooks import hookimpl
from .report import read_metrics, shown

FIRST_AFTER_S = 30.0
PART_OF_TIME = 0.001
"""Part of one core's time that drawing may take."""
_NICE = "import os, runpy; os.nice(10); runpy.run_module('meshwright.train.run.curve', run_name='__main__')"
_ENDS_WITHIN_S = 10.0


def draw_loss_curve(results: Sequence[StepResult], path: Path, *, of_tokens: bool = True) -> None:
    """Write a PNG of the losses of training and of each set over steps.

    Args:
        of_tokens: whether losses are in nats per token; else in the unit of an objective.
    """
    # The object interface draws without a display and without global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot([r.step for r in results], [r.loss for r in results], linewidth=1, label="training")
    for name in dict.fromkeys(name for r in results for name in r.evaluations):
        points = [(r.step, r.evaluations[name]) for r in results if name in r.evaluations]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=1.5, label=shown(name))
    axes.set(xlabel="step", ylabel="loss [nats per token]" if of_tokens else "loss")
    axes.grid(alpha=0.3)
    axes.legend()
    with written_whole(path) as file:
        figure.savefig(file, format="png")


def draw_metrics(metrics: Path, path: Path, *, of_tokens: bool = True) -> None:
    """Draw the steps of a file of metrics; nothing if it has none, or the disk takes no picture."""
    with suppress(OSError):
        results = read_metrics(metrics, until=sys.maxsize, steps=0)
        if results:
            draw_loss_curve(results, path, of_tokens=of_tokens)


class Curve:
    """Observer on the first rank that has the picture drawn; a context manager that leaves no process behind.

    Attributes:
        drawing: the process that draws, if one does.
    """

    def __init__(
        self, metrics: Path, path: Path, *, of_tokens: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics, self._path, self._of_tokens, self._clock = metrics, path, of_tokens, clock
        self.drawing: subprocess.Popen[bytes] | None = None
        self._begun, self._due = clock(), clock() + FIRST_AFTER_S

    def __enter__(self) -> Curve:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()
        if error is not None:
            draw_metrics(self._metrics, self._path, of_tokens=self._of_tokens)

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        now = self._clock()
        if self.drawing is not None and self.drawing.poll() is not None:
            self.drawing = None
            self._due = now + (now - self._begun) / PART_OF_TIME
        if self.drawing is None and now >= self._due:
            self._begun = now
            command = [*PYTHON, "-c", _NICE, str(self._metrics), str(self._path), str(int(self._of_tokens))]
            quiet = subprocess.DEVNULL
            self.drawing = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)

    def _end(self) -> None:
        drawing, self.drawing = self.drawing, None
        if drawing is None:
            return
        try:
            drawing.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            drawing.kill()
            drawing.wait()


if __name__ == "__main__":
    draw_metrics(Path(sys.argv[1]), Path(sys.argv[2]), of_tokens=sys.argv[3] == "1")
