"""`meshwright pipeline show`: the timeline of each rank, without starting processes or loading weights.

Times are computed by `schedule.actions.compute_timeline`, in forwards of an average stage; nothing is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.plugin import ConfigError, create_console

from .config import PipelineConfig, compute_num_microbatches, compute_num_stages, resolve_schedule
from .partition.split import compute_end_costs, count_parameters, split_model
from .schedule.actions import (
    UNIT_COSTS,
    ActionKind,
    Schedule,
    Timeline,
    bubble_fraction,
    compute_timeline,
    count_peak_live_microbatches,
)

if TYPE_CHECKING:
    from rich.text import Text

    from meshwright import RunConfig

ACTION_STYLES = {
    ActionKind.FORWARD: ("#4c78c8", "forward"),
    ActionKind.BACKWARD: ("#2f9e6e", "backward"),
    ActionKind.BACKWARD_INPUT: ("#35b0b8", "backward, input"),
    ActionKind.BACKWARD_WEIGHT: ("#e09f3e", "backward, weight"),
}
"""Color and label of each kind of action."""
BUBBLE_COLOR = "#d9dde3"


@dataclass(frozen=True)
class StageSummary:
    """Blocks, size and cost of one stage."""

    blocks: tuple[str, ...]
    parameters: int
    """Parameters of its blocks and of the embedding or head. A tied weight counts on each stage that holds it."""
    cost: float
    """Time of a forward, relative to the mean over stages."""


@dataclass(frozen=True)
class PipelineSummary:
    """Schedule and stages of a run; times are in forwards of an average stage."""

    schedule: Schedule
    stages: tuple[StageSummary, ...]
    microbatch_size: int
    """Sequences per microbatch."""

    @cached_property
    def times(self) -> Timeline:
        return compute_timeline(self.schedule, stage_costs=self.costs)

    @property
    def costs(self) -> list[float]:
        return [stage.cost for stage in self.stages]

    @cached_property
    def end_time(self) -> float:
        return max(rank[-1][2] for rank in self.times)

    @property
    def kinds(self) -> list[ActionKind]:
        used = {action.kind for order in self.schedule.actions_by_rank for action in order}
        return [kind for kind in ACTION_STYLES if kind in used]

    def compute_rank_bubble(self, rank: int) -> float:
        """Return the fraction of the total time in which a rank waits, from 0 to 1."""
        return 1 - sum(end - start for _, start, end in self.times[rank]) / self.end_time

    @property
    def headline(self) -> str:
        schedule = self.schedule
        return (
            f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, {schedule.num_microbatches} "
            f"microbatches of {self.microbatch_size} sequence{'s' if self.microbatch_size > 1 else ''}"
        )

    @property
    def bubble_text(self) -> str:
        """Bubble fractions with this split and with equal stages, as text."""
        equal = bubble_fraction(self.schedule)
        divided = bubble_fraction(self.schedule, stage_costs=self.costs)
        return f"bubble: {divided:.1%} of all ranks' time with this split, {equal:.1%} if stages were equal"


def summarize_pipeline(config: RunConfig) -> PipelineSummary:
    import torch
    from transformers import AutoModelForCausalLM

    from meshwright.plugin import import_plugin, model_layout, resolve

    preflight = import_plugin("run", "preflight")

    stack, degrees = resolve(
        config.strategy,
        config,
        preflight.count_local_ranks(config),
        config=config.strategy_config,
        wrapper_config=config.wrapper_config,
    )
    options = next((layer.config for layer in stack.wrappers if isinstance(layer.config, PipelineConfig)), None)
    if options is None:
        raise ConfigError(f"{stack} has no pipeline, so there is nothing to show. Set pp_size to 2 or more.")
    _, hf_config = preflight.prepare_data_and_model_config(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=False)
    layout = model_layout(model)
    # A multimodal model has several stacks of blocks, and only a forward shows which of them text passes through.
    blocks = max(layout.stacks, key=len, default=())
    count = compute_num_stages(options, num_layers=len(blocks), pp_size=degrees.pp)
    split = split_model(model, layout, options, count, blocks=blocks)
    microbatches = compute_num_microbatches(options, num_sequences=config.batch_size // degrees.dp)
    return PipelineSummary(
        resolve_schedule(options, num_ranks=degrees.pp, num_stages=count, num_microbatches=microbatches),
        tuple(_summarize_stages(model, layout, [[blocks[index] for index in part] for part in split])),
        options.pp_microbatch_size,
    )


def _summarize_stages(model: Any, layout: Any, blocks: Sequence[Sequence[str]]) -> list[StageSummary]:
    at_ends = compute_end_costs(model, layout)
    parameters = [sum(count_parameters(model, block) for block in part) for part in blocks]
    costs = [float(count) for count in parameters]
    for stage, module, cost in ((0, layout.embedding, at_ends["first"]), (-1, layout.head, at_ends["last"])):
        parameters[stage] += count_parameters(model, module)
        costs[stage] += cost
    mean = sum(costs) / len(costs)
    return [
        StageSummary(tuple(part), count, cost / mean)
        for part, count, cost in zip(blocks, parameters, costs, strict=True)
    ]


# ---- in the terminal


def render_tables(summary: PipelineSummary) -> list[Any]:
    """Return what rich prints before the timeline: tables of the stages and ranks, and the bubble as text."""
    from rich.table import Table

    split = Table("stage", "rank", "blocks", "parameters", "cost", title=summary.headline, title_justify="left")
    for index, stage in enumerate(summary.stages):
        first, *rest = stage.blocks
        last = f" to {rest[-1].rpartition('.')[2]}" if rest else ""
        held, owner = f"{first}{last} ({len(stage.blocks)})", summary.schedule.placement[index]
        split.add_row(str(index), str(owner), held, f"{stage.parameters:,}", f"{stage.cost:.2f}")
    ranks = Table("rank", "stages", "bubble", "peak of live microbatches")
    for rank, peak in enumerate(count_peak_live_microbatches(summary.schedule)):
        stages = ", ".join(map(str, summary.schedule.stages_on_rank(rank)))
        ranks.add_row(str(rank), stages, f"{summary.compute_rank_bubble(rank):.1%}", str(peak))
    return [split, ranks, summary.bubble_text]


def render_timeline(summary: PipelineSummary, width: int) -> list[Text]:
    """Return a line of action letters for each rank, and a legend.

    Letters are lower case for all stages of a rank except its first."""
    from rich.text import Text

    schedule = summary.schedule
    bubble = f"#808080 on {BUBBLE_COLOR}"
    styles = {kind: f"bold #ffffff on {colour}" for kind, (colour, _) in ACTION_STYLES.items()}
    shortest = min(min(summary.costs) * cost for cost in UNIT_COSTS.values())
    margin = len(f"rank {schedule.num_ranks - 1} ")
    columns = max(1, min(width - margin, round(summary.end_time / shortest)))
    lines = []
    for rank, times in enumerate(summary.times):
        first = schedule.stages_on_rank(rank)[0]
        line = Text(f"rank {rank} ".rjust(margin))
        for column in range(columns):
            now = (column + 0.5) * summary.end_time / columns
            action = next((each for each, start, end in times if start <= now < end), None)
            if action is None:
                line.append("·", style=bubble)
            else:
                letter = str(action.kind)
                line.append(letter if action.stage == first else letter.lower(), style=styles[action.kind])
        lines.append(line)
    legend = Text(" " * margin)
    for kind in summary.kinds:
        legend.append(str(kind), style=styles[kind]).append(f" {ACTION_STYLES[kind][1]}  ")
    legend.append("·", style=bubble).append(" bubble")
    if schedule.num_stages > schedule.num_ranks:
        legend.append("  lower case: not the rank's first stage")
    return [*lines, legend]


# ---- as an image


def draw_timeline(summary: PipelineSummary, path: Path) -> None:
    """Write an image of the ranks over time, in the format of the file's suffix."""
    # The object interface draws without a display and without global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = summary.schedule.num_ranks
    figure = Figure(figsize=(14, 1.8 + 0.55 * ranks), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.barh(range(ranks), [summary.end_time] * ranks, height=0.9, color=BUBBLE_COLOR)
    for rank, times in enumerate(summary.times):
        first = summary.schedule.stages_on_rank(rank)[0]
        for action, start, end in times:
            alpha = 1.0 if action.stage == first else 0.65
            axes.barh(
                rank,
                end - start,
                left=start,
                height=0.9,
                color=ACTION_STYLES[action.kind][0],
                alpha=alpha,
                edgecolor="#ffffff",
            )
            # Omit numbers that would overlap.
            if (end - start) / summary.end_time > 0.008:
                axes.text((start + end) / 2, rank, str(action.microbatch), ha="center", va="center", fontsize=7)
    axes.set_yticks(
        range(ranks),
        [f"rank {rank}\npeak {peak}" for rank, peak in enumerate(count_peak_live_microbatches(summary.schedule))],
    )
    axes.invert_yaxis()
    axes.set(xlabel="time [forwards of an average stage]", xlim=(0, summary.end_time))
    axes.set_title(f"{summary.headline}\n{summary.bubble_text}", loc="left", fontsize=9)
    patches = [Patch(color=ACTION_STYLES[kind][0], label=ACTION_STYLES[kind][1]) for kind in summary.kinds]
    patches.append(Patch(color=BUBBLE_COLOR, label="bubble"))
    if summary.schedule.num_stages > ranks:
        patches.append(Patch(color="#000000", alpha=0.3, label="lighter: not the rank's first stage"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--out {str(path)!r} cannot be written: {error}.") from None


# ---- the command


def add_commands(app: typer.Typer) -> None:
    group = typer.Typer(help="Show pipeline schedules.", no_args_is_help=True)
    app.add_typer(group, name="pipeline")

    @group.callback()
    def pipeline() -> None:
        """Show pipeline schedules."""

    @group.command()
    def show(
        run_file: Annotated[Path, typer.Argument(help="Run file (YAML).")],
        assignments: Annotated[
            list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value, such as pp_size=4.")
        ] = None,
        out: Annotated[
            Path | None, typer.Option(help="Write an image of the schedule to this file, such as schedule.png.")
        ] = None,
    ) -> None:
        """Show the pipeline schedule of a run: stages, actions of each rank, bubbles and live microbatches.

        \b
        Examples:
          meshwright pipeline show run.yaml --set pp_size=4
          meshwright pipeline show run.yaml --set pp_size=4 --out schedule.png
        """

        console = create_console()
        from meshwright import load_run

        view = summarize_pipeline(load_run(run_file, assignments or []))
        for each in render_tables(view):
            console.print(each, highlight=False)
        for line in render_timeline(view, console.width):
            console.print(line, no_wrap=True, crop=True)
        if out is not None:
            draw_timeline(view, out)
            console.print(f"written: {out}", highlight=False)
