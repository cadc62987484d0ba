"""Render the results of `replay` and `diff` as text. Imports no torch."""

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
    "float64": "in float64 results agree to 1e-9, while a bug shows at 1e-3",
    "float32": "in float32 results agree to about 1e-6 after one step, and less after each further one",
    "bfloat16": "in bfloat16 results agree to about 1e-2 after one step, and less after each further one",
}


def render_replay(replayed: ReplayResult) -> Group:
    """Render the replayed values of a step next to the recorded ones, and the conclusion."""
    done, checkpoint = replayed.start
    started = f"from {checkpoint}" if checkpoint else "from the start of the run"
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
        return parse_markup("[bold]one is missing[/bold]")
    return f"differs by {abs(value.recorded - value.replayed):.3g}, relatively by {value.relative_difference:.2g}"


def _format_number(value: float | None) -> str:
    return "-" if value is None else repr(value)


def _describe_verdict(replayed: ReplayResult) -> Iterator[str]:
    within = f"within a relative tolerance of {replayed.tolerance:g}"
    if replayed.is_same:
        yield f"The step is the same{f' {within}' if replayed.tolerance else ', bit for bit'}."
    else:
        yield f"[bold]The step is not the same[/bold]{f' {within}' if replayed.tolerance else ''}."
    if replayed.tolerance:
        yield f"The replay computes sums in another order: {_EXPECTED_PRECISION[replayed.precision]}."
    elif not replayed.is_same:
        yield (
            "Possible causes: the code, a library, the machine or the data have changed; a kernel is nondeterministic; "
            "or a rank computes wrong results (see --compare-rank)."
        )
    if replayed.note:
        yield escape_markup(replayed.note)


def _describe_ranks(replayed: ReplayResult) -> Iterator[str]:
    results = replayed.rank_comparison
    if results is None:
        return
    if replayed.has_consistent_ranks:
        yield (
            f"The work of data rank {replayed.compared_rank}, and of all others, has bitwise the same results on "
            f"another rank: {results['num_compared']} outputs and gradients per rank. No rank is suspect."
        )
        return
    for share, reported in results["mismatches"].items():
        one, other = reported["ranks"]
        where = escape_markup(reported["tensor"])
        yield f"the work of data rank {share} differs between ranks {one} and {other}, first in the {where}"
    if results["inconsistent_ranks"]:
        yield f"ranks whose repeated results differ: {', '.join(map(str, results['inconsistent_ranks']))}"
    suspects = ", ".join(map(str, results["suspects"]))
    if results["reason"]:
        yield f"No suspect can be named: {escape_markup(results['reason'])}."
    elif len(results["suspects"]) == 1:
        yield f"[bold]Suspect: the hardware of rank {suspects}[/bold]. Remove it from the run, and test it."
    else:
        yield (
            f"[bold]Suspect: the hardware of one of the ranks {suspects}[/bold], which disagree. Two data ranks "
            f"cannot show which one is wrong; three can."
        )


def _format_relative(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "inf"


def render_diff(diff: RunDiff) -> Group:
    """Render where two runs differ, and the possible reasons."""
    lines = [f"[bold]diff[/bold] of {escape_markup(diff.runs[0])} and {escape_markup(diff.runs[1])}"]
    for kind, settings in (("that affects results", diff.settings), ("of the layout", diff.layout)):
        for name, one, other in settings:
            reported = f"{escape_markup(name)} is {escape_markup(one)} against {escape_markup(other)}"
            lines.append(f"The run files differ in a setting {kind}: {reported}.")
    return Group(*map(parse_markup, (*lines, *_describe_metrics(diff), *_describe_step(diff))))


def _describe_metrics(diff: RunDiff) -> Iterator[str]:
    first, last = diff.metrics.steps
    divergence = diff.first_divergence
    if divergence is None:
        largest = max(diff.metrics.largest_differences.get(name, 0.0) for name in ("loss", "grad_norm"))
        apart = f"differ relatively by at most {_format_relative(largest)}" if largest else "are the same, bit for bit"
        yield f"[bold]The runs agree[/bold] in steps {first} to {last}: losses and norms {apart}."
        return
    name, is_rate = _format_name(divergence), divergence.name.startswith("learning_rate")
    meaning = ": the schedule, or how it resumed, differs" if is_rate else ""
    if divergence.name == "num_tokens":
        meaning = ": the data or their layout differ"
    yield f"[bold]{name} differ{'' if name.endswith('s') else 's'} at step {divergence.step}[/bold]: " + (
        f"{_format_number(divergence.one)} against {_format_number(divergence.other)}{meaning}"
    )
    if not meaning:
        yield _describe_divergence(divergence)
    for directory, step in zip(diff.runs, diff.resumed_after, strict=True):
        if step is not None:
            yield (
                f"{escape_markup(directory)} resumed after step {step} (events.jsonl), before it ran step "
                f"{divergence.step}"
            )
    for other in diff.metrics.divergences[1:]:
        yield (
            f"next, {_format_name(other).lower()} at step {other.step}: {_format_number(other.one)} against "
            f"{_format_number(other.other)}"
        )


def _describe_divergence(divergence: Divergence) -> str:
    if divergence.is_jump:
        return (
            f"This is a jump: the relative difference is {_format_relative(divergence.relative_difference)}, and was "
            f"at most {_format_relative(divergence.max_before)} before. Rounding does not cause this."
        )
    return (
        f"Differences by rounding have grown: they start at step {divergence.first_step}, and are at most "
        f"{_format_relative(divergence.max_before)} before step {divergence.step}. At the edge of stability this is "
        f"not an error. Compare in float64 to find out: --float64."
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
            yield f"No step was replayed: {escape_markup(diff.unavailable_reason)}"
        return
    mode = f" ({escape_markup(step.mode)})" if step.mode else ""
    yield f"\n[bold]step {step.step}, replayed in both layouts[/bold]{mode}"
    for directory, started in zip(diff.runs, step.starts, strict=True):
        yield f"  {escape_markup(directory)} from {escape_markup(started)}"
    rows = "the same" if step.has_same_rows else "[bold]differ[/bold]: the data or their order"
    yield f"  rows of the step        {rows}"
    yield f"  parameters before it    {_describe_tensors(step.parameters_before)}"
    outputs = f"not compared: {escape_markup(step.reason)}" if step.outputs is None else _describe_tensors(step.outputs)
    yield f"  outputs of modules      {outputs}"
    for name, (one, other) in step.values.items():
        apart = "the same" if one == other else f"{_format_number(one)} against {_format_number(other)}"
        yield f"  {name.replace('_', ' '):<23} {apart}"
    yield f"  unclipped gradients     {_describe_tensors(step.gradients)}"
    yield f"  parameters after it     {_describe_tensors(step.parameters_after)}"
    yield _describe_conclusion(step)


def _describe_tensors(diffs: TensorDiffs) -> str:
    first, largest = diffs.first, diffs.largest
    if first is None:
        most = largest.relative if largest is not None else 0.0
        return f"all {diffs.num_tensors} " + (
            f"agree to {_format_relative(most)}" if most else "are the same, bit for bit"
        )
    reported = (
        first.reason
        or f"by {_format_relative(first.relative)} relatively, {_format_relative(first.absolute)} absolutely"
    )
    more = (
        f"; the largest difference is {_format_relative(largest.relative)}, of {escape_markup(largest.name)}"
        if largest
        else ""
    )
    return (
        f"[bold]{diffs.num_beyond_tolerance} of {diffs.num_tensors} differ, first "
        f"{escape_markup(first.name)}[/bold]: {escape_markup(reported)}{more}"
    )


def _describe_conclusion(step: StepComparison) -> str:
    if not step.has_same_rows:
        return "The data of the step differ: compare data, seed and batch_size in the run files."
    if step.parameters_before.first is not None:
        return "The parameters differ before the step: the cause is an earlier step or the loaded state."
    if step.outputs is not None and step.outputs.first is not None:
        return (
            f"Rows and parameters are the same; {escape_markup(step.outputs.first.name)} is the first module whose "
            "output differs."
        )
    if step.gradients.first is not None:
        return (
            f"The forward is the same, but the gradient of {escape_markup(step.gradients.first.name)} differs: the "
            "cause is the backward, or how gradients are summed over ranks and micro-batches."
        )
    if step.parameters_after.first is not None:
        return (
            "The gradients are the same, but the parameters after the step differ: the cause is the learning rate, "
            "clipping or the optimizer."
        )
    if step.is_same:
        cause = "; the runs differ because of dropout" if "dropout" in step.mode else ""
        return f"The replayed step {step.step} is the same in both layouts, to {step.tolerance:g}{cause}."
    return "All tensors are the same, but the metrics of the step differ."
