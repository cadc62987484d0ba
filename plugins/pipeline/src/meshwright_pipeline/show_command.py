"""`meshwright pipeline show`: what each rank will do when, before anything is started. No process group, no weights.

Times are those of `schedule.order.timeline`, in forwards of an average stage; nothing is measured.
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
"""Colour and name of each kind of action."""
BUBBLE_COLOR = "#d9dde3"


@dataclass(frozen=True)
class StageSummary:
    """What one stage holds."""

    blocks: tuple[str, ...]
    parameters: int
    """Elements of its blocks and of the embedding or head; a tied weight counts on each stage that holds it."""
    cost: float
    """Time of a forward, as a multiple of the average over stages."""


@dataclass(frozen=True)
class PipelineSummary:
    """A run's pipeline; times are in forwards of an average stage."""

    schedule: Schedule
    stages: tuple[StageSummary, ...]
    microbatch_size: int
    """Sequences."""

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
        """The share of the whole time in which a rank waits, from 0 to 1."""
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
        """How much of all ranks' time is waiting, as text."""
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
    # A model of several modalities has several stacks, and only a run shows which of them text goes through.
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
    """What rich prints before the timeline: tables of the split and of the ranks, and the bubbles as text."""
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
    """The timeline, a line for each rank: letters of the actions, lower case for all but a rank's first stage; and
    what they mean."""
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


# ---- as a picture


def draw_timeline(summary: PipelineSummary, path: Path) -> None:
    """Write a PNG (or what else the name's ending says) of ranks over time."""
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
            # Numbers that would run into each other are left out.
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
        patches.append(Patch(color="#000000", alpha=0.3, label="paler: not the rank's first stage"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--out {str(path)!r} cannot be written: {error}.") from None


# ---- the command


def add_commands(app: typer.Typer) -> None:
    group = typer.Typer(help="Look at pipelines.", no_args_is_help=True)
    app.add_typer(group, name="pipeline")

    @group.callback()
    def pipeline() -> None:
        """Look at pipelines."""

    @group.command()
    def show(
        run_file: Annotated[Path, typer.Argument(help="A run file (YAML).")],
        assignments: Annotated[
            list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value, such as pp_size=4.")
        ] = None,
        out: Annotated[Path | None, typer.Option(help="Draw the schedule to this file, such as schedule.png.")] = None,
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
            console.print(f"drawn: {out}", highlight=False)
