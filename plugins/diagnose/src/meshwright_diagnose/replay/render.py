"""Render a replay, and what two runs differ in, as text; without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table

from meshwright.plugin import escape_markup, parse_markup

if TYPE_CHECKING:
    from rich.text import Text

    from .diff import Divergence, RunDiff, StepComparison
    from .replay import ReplayedValue, ReplayResult
    from .tensors import TensorDiffs

_EXPECTED_PRECISION = {
    "float64": "float64 agrees to 1e-9, and a bug shows at 1e-3",
    "float32": "float32 agrees to about 1e-6 after one step, and to less after each further one",
    "bfloat16": "bfloat16 agrees to about 1e-2 after one step, and to less after each further one",
}


def render_replay(replayed: ReplayResult) -> Group:
    """Render the numbers of a step next to those that were written, and what follows from them."""
    done, checkpoint = replayed.start
    started = f"from {checkpoint}" if checkpoint else "from the beginning of the run"
    steps = replayed.step - done
    headline = parse_markup(
        f"[bold]replay[/bold] of {escape_markup(replayed.run)}, step {replayed.step}: "
        f"{escape_markup(replayed.strategy)} on "
        f"{replayed.mesh}, {escape_markup(started)} ({steps} step{'s' if steps > 1 else ''})"
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "metrics.jsonl", "replayed", ""):
        table.add_column(name, no_wrap=True)
    for each in replayed.values:
        table.add_row(
            each.name.replace("_", " "),
            _format_number(each.recorded),
            _format_number(each.replayed),
            _format_difference(each),
        )
    parts: list[RenderableType] = [
        headline,
        table,
        *map(parse_markup, (*_describe_verdict(replayed), *_describe_ranks(replayed))),
    ]
    return Group(*parts)


def _format_difference(value: ReplayedValue) -> str | Text:
    if value.is_same:
        return "the same, bit for bit"
    if value.recorded is None or value.replayed is None:
        return parse_markup("[bold]only one[/bold]")
    return f"{abs(value.recorded - value.replayed):.3g} apart, relatively {value.relative_difference:.2g}"


def _format_number(value: float | None) -> str:
    return "-" if value is None else repr(value)


def _describe_verdict(replayed: ReplayResult) -> Iterator[str]:
    within = f"to {replayed.tolerance:g}"
    if replayed.is_same:
        yield f"The step is the same, {within if replayed.tolerance else 'bit for bit'}."
    else:
        yield f"[bold]The step is not the same[/bold]{f', {within}' if replayed.tolerance else ''}."
    if replayed.tolerance:
        yield f"Sums are in another order here: {_EXPECTED_PRECISION[replayed.precision]}."
    elif not replayed.is_same:
        yield (
            "What may have changed: the code or a library, the machine, the data, or a kernel that sums in no fixed "
            "order; or a rank has computed wrongly: see --compare-rank."
        )
    if replayed.note:
        yield escape_markup(replayed.note)


def _describe_ranks(replayed: ReplayResult) -> Iterator[str]:
    found = replayed.rank_comparison
    if found is None:
        return
    if replayed.has_consistent_ranks:
        yield (
            f"The work of data rank {replayed.compared_rank}, and of all others, gives the same result bits on another "
            f"rank: {found['num_compared']} outputs and gradients on each. No rank is suspect."
        )
        return
    for share, reported in found["mismatches"].items():
        one, other = reported["ranks"]
        where = escape_markup(reported["tensor"])
        yield f"the work of data rank {share} differs between ranks {one} and {other}, first in the {where}"
    if found["inconsistent_ranks"]:
        yield f"ranks that do not agree with themselves: {', '.join(map(str, found['inconsistent_ranks']))}"
    suspects = ", ".join(map(str, found["suspects"]))
    if found["reason"]:
        yield f"No rank is named: {escape_markup(found['reason'])}."
    elif len(found["suspects"]) == 1:
        yield f"[bold]Suspect: the hardware of rank {suspects}[/bold]. Take it out, and test it."
    else:
        yield (
            f"[bold]Suspect: the hardware of one of the ranks {suspects}[/bold], which disagree. Of two data ranks "
            f"none can tell which; three can."
        )


def _format_relative(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "without bound"


def render_diff(diff: RunDiff) -> Group:
    """Render where two runs differ, and what is known of why."""
    lines = [f"[bold]diff[/bold] of {escape_markup(diff.runs[0])} and {escape_markup(diff.runs[1])}"]
    for what, settings in (("by which numbers follow", diff.settings), ("of the layout", diff.layout)):
        for name, one, other in settings:
            reported = f"{escape_markup(name)} is {escape_markup(one)} against {escape_markup(other)}"
            lines.append(f"run files differ in what is {what}: {reported}")
    return Group(*map(parse_markup, (*lines, *_describe_metrics(diff), *_describe_step(diff))))


def _describe_metrics(diff: RunDiff) -> Iterator[str]:
    first, last = diff.metrics.steps
    parted = diff.first_divergence
    if parted is None:
        largest = max(diff.metrics.largest_differences.get(name, 0.0) for name in ("loss", "grad_norm"))
        apart = f"to {_format_relative(largest)}, relatively" if largest else "bit for bit"
        yield f"[bold]They agree[/bold] in steps {first} to {last}: losses and norms {apart}."
        return
    name, is_rate = _format_name(parted), parted.name.startswith("learning_rate")
    meaning = ": the schedule or its resume differs" if is_rate else ""
    if parted.name == "num_tokens":
        meaning = ": the data, or how they are laid out, differ"
    yield f"[bold]{name} part{'' if name.endswith('s') else 's'} at step {parted.step}[/bold]: " + (
        f"{_format_number(parted.one)} against {_format_number(parted.other)}{meaning}"
    )
    if not meaning:
        yield _describe_divergence(parted)
    for directory, step in zip(diff.runs, diff.resumed_after, strict=True):
        if step is not None:
            yield (
                f"{escape_markup(directory)} continued after step {step} (events.jsonl), and has done step "
                f"{parted.step} since"
            )
    for other in diff.metrics.divergences[1:]:
        yield (
            f"then {_format_name(other).lower()} at step {other.step}: {_format_number(other.one)} against "
            f"{_format_number(other.other)}"
        )


def _describe_divergence(divergence: Divergence) -> str:
    if divergence.is_jump:
        return (
            f"It is a jump: {_format_relative(divergence.relative_difference)} apart, relatively, and "
            f"{_format_relative(divergence.max_before)} at most "
            f"before. Rounding does not do that."
        )
    return (
        f"It is rounding that has grown: apart since step {divergence.first_step}, by "
        f"{_format_relative(divergence.max_before)} at most "
        f"before step {divergence.step}. Where training is at the edge of stability, that is no error. To know, "
        f"compare in float64: --float64."
    )


def _format_name(divergence: Divergence) -> str:
    names = {"num_tokens": "Token counts", "loss": "Losses", "grad_norm": "Gradient norms"}
    if divergence.name.startswith("learning_rate"):
        return f"Learning rates{escape_markup(divergence.name.removeprefix('learning_rate'))}"
    return names.get(divergence.name, f"The {escape_markup(divergence.name)}")


def _describe_step(diff: RunDiff) -> Iterator[str]:
    step = diff.replayed
    if step is None:
        if diff.unavailable_reason:
            yield f"No step was done again: {escape_markup(diff.unavailable_reason)}"
        return
    mode = f" ({escape_markup(step.mode)})" if step.mode else ""
    yield f"\n[bold]step {step.step}, done again in both layouts[/bold]{mode}"
    for directory, started in zip(diff.runs, step.starts, strict=True):
        yield f"  {escape_markup(directory)} from {escape_markup(started)}"
    rows = "the same" if step.has_same_rows else "[bold]differ[/bold]: the data, or their order"
    yield f"  rows of the step        {rows}"
    yield f"  parameters before it    {_describe_tensors(step.parameters_before)}"
    outputs = f"not compared: {escape_markup(step.reason)}" if step.outputs is None else _describe_tensors(step.outputs)
    yield f"  outputs of modules      {outputs}"
    for name, (one, other) in step.values.items():
        apart = "the same" if one == other else f"{_format_number(one)} against {_format_number(other)}"
        yield f"  {name.replace('_', ' '):<23} {apart}"
    yield f"  gradients, not clipped  {_describe_tensors(step.gradients)}"
    yield f"  parameters behind it    {_describe_tensors(step.parameters_after)}"
    yield _describe_conclusion(step)


def _describe_tensors(diffs: TensorDiffs) -> str:
    first, furthest = diffs.first, diffs.largest
    if first is None:
        most = furthest.relative if furthest is not None else 0.0
        return f"the same in all {diffs.num_tensors}, " + (f"to {_format_relative(most)}" if most else "bit for bit")
    reported = (
        first.reason or f"relatively {_format_relative(first.relative)}, absolutely {_format_relative(first.absolute)}"
    )
    more = (
        f"; furthest apart is {escape_markup(furthest.name)}, by {_format_relative(furthest.relative)}"
        if furthest
        else ""
    )
    return (
        f"[bold]{diffs.num_beyond_tolerance} of {diffs.num_tensors} differ, first "
        f"{escape_markup(first.name)}[/bold]: {escape_markup(reported)}{more}"
    )


def _describe_conclusion(step: StepComparison) -> str:
    if not step.has_same_rows:
        return "The two steps had other data: look at data, seed and batch_size of the run files."
    if step.parameters_before.first is not None:
        return "The parameters differ before the step: what parts them is earlier, or in what was loaded."
    if step.outputs is not None and step.outputs.first is not None:
        return (
            f"From the same rows and parameters, {escape_markup(step.outputs.first.name)} is the first to compute "
            "otherwise."
        )
    if step.gradients.first is not None:
        return (
            f"Forward is the same, and the gradient of {escape_markup(step.gradients.first.name)} is not: backward, or "
            "how gradients are summed over ranks and microbatches, differs."
        )
    if step.parameters_after.first is not None:
        return (
            "The gradients are the same, and the parameters behind the step are not: rates, clipping or the optimizer."
        )
    if step.is_same:
        parted = "; what parted the runs is dropout" if "dropout" in step.mode else ""
        return f"Step {step.step}, done again, is the same in both, to {step.tolerance:g}{parted}."
    return "All tensors are the same; the metrics of the step are not."
