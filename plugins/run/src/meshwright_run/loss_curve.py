"""Plot the losses of a run to a PNG file. Imports no torch.

During training, another process draws the plot at low priority, less often the longer it takes.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.plugin import SAFE_PYTHON, StepResult, atomic_writer, hookimpl

from .metrics_report import read_metrics
from .step_text import format_eval_set

_TEXT, _QUIET, _LINE = "#1c2330", "#586173", "#d5dae1"
_COLOURS = ("#2b62c0", "#c2410c", "#1a7f4b", "#7b4ea3", "#b8324a", "#1f7a74")
"""Of the training loss and of each evaluation set, as in `meshwright watch`."""

FIRST_PLOT_AFTER_S = 30.0
PLOT_TIME_FRACTION = 0.001
"""Fraction of one core's time that drawing may take."""
_PLOT_CODE = "import os, runpy; os.nice(10); runpy.run_module('meshwright_run.loss_curve', run_name='__main__')"
_PLOT_EXIT_TIMEOUT_S = 10.0


def plot_loss_curve(results: Sequence[StepResult], path: Path, *, is_per_token: bool = True) -> None:
    """Write a PNG of the training loss and the loss on each evaluation set over steps."""
    # The object interface draws without a display and without global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot([r.step for r in results], [r.loss for r in results], linewidth=1.2, color=_COLOURS[0], label="training")
    for index, name in enumerate(dict.fromkeys(name for r in results for name in r.evaluations)):
        points = [(r.step, r.evaluations[name]) for r in results if name in r.evaluations]
        colour = _COLOURS[1 + index % (len(_COLOURS) - 1)]
        style: dict[str, Any] = {"color": colour, "marker": "o", "markersize": 4.5, "linewidth": 1.8}
        axes.plot(*zip(*points, strict=True), label=format_eval_set(name), **style)
    _style_axes(axes, "Loss [nats per token]" if is_per_token else "Loss")
    with atomic_writer(path) as file:
        figure.savefig(file, format="png")


def _style_axes(axes: Any, title: str) -> None:
    """Style axes as in the figures of the documentation: horizontal grid lines, round ticks, no box."""
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontsize=11, weight="bold", color=_TEXT, pad=10)
    axes.set_xlabel("step", fontsize=9, color=_QUIET)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(length=0, colors=_QUIET, labelsize=9)
    axes.grid(axis="y", color=_LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_LINE)
    above: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 3}
    legend = axes.legend(fontsize=9, frameon=False, labelcolor=_TEXT, **above)
    for label in legend.get_texts():
        label.set_parse_math(False)  # A name of an evaluation set may have dollar signs


def plot_metrics(metrics: Path, path: Path, *, is_per_token: bool = True) -> None:
    """Plot a metrics file. Writes nothing if the file has no steps; ignores write errors."""
    with suppress(OSError):
        results = read_metrics(metrics, last_step=sys.maxsize, num_steps=0)
        if results:
            plot_loss_curve(results, path, is_per_token=is_per_token)


class LossCurvePlotter:
    """Observer on rank 0 that starts a process to draw the plot. A context manager that ends this process on exit."""

    def __init__(
        self, metrics: Path, path: Path, *, is_per_token: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics, self._path, self._is_per_token, self._clock = metrics, path, is_per_token, clock
        self.process: subprocess.Popen[bytes] | None = None
        self._started_at, self._next_plot_at = clock(), clock() + FIRST_PLOT_AFTER_S

    def __enter__(self) -> LossCurvePlotter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        drawing, self.process = self.process, None
        if drawing is not None:
            try:
                drawing.wait(_PLOT_EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                drawing.kill()
                drawing.wait()
        if error is not None:
            plot_metrics(self._metrics, self._path, is_per_token=self._is_per_token)

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        now = self._clock()
        if self.process is not None and self.process.poll() is not None:
            self.process = None
            self._next_plot_at = now + (now - self._started_at) / PLOT_TIME_FRACTION
        if self.process is None and now >= self._next_plot_at:
            self._started_at = now
            command = [
                *SAFE_PYTHON,
                "-c",
                _PLOT_CODE,
                str(self._metrics),
                str(self._path),
                str(int(self._is_per_token)),
            ]
            quiet = subprocess.DEVNULL
            self.process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)


if __name__ == "__main__":
    plot_metrics(Path(sys.argv[1]), Path(sys.argv[2]), is_per_token=sys.argv[3] == "1")
