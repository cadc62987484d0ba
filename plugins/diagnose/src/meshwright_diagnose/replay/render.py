"""Render a replay, and what two runs differ in, as text; without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table

from meshwright.plugin import plain, styled

if TYPE_CHECKING:
    from rich.text import Text

    from .diff import Diff, Parted, Step
    from .start import Replayed, Value
    from .tensors import Differences

_EXPECTED = {
    "float64": "float64 agrees to 1e-9, and a bug shows at 1e-3",
    "float32": "float32 agrees to about 1e-6 after one step, and to less after each further one",
    "bfloat16": "bfloat16 agrees to about 1e-2 after one step, and to less after each further one",
}


def shown(replayed: Replayed) -> Group:
    """Render the numbers of a step next to those that were written, and what follows from them."""
    done, checkpoint = replayed.beginning
    begun = f"from {checkpoint}" if checkpoint else "from the beginning of the run"
    steps = replayed.step - done
    headline = styled(
        f"[bold]replay[/bold] of {plain(replayed.run)}, step {replayed.step}: {plain(replayed.strategy)} on "
        f"{replayed.mesh}, {plain(begun)} ({steps} step{'s' if steps > 1 else ''})"
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "metrics.jsonl", "replayed", ""):
        table.add_column(name, no_wrap=True)
    for each in replayed.values:
        table.add_row(each.name.replace("_", " "), _number(each.written), _number(each.replayed), _apart(each))
    parts: list[RenderableType] = [headline, table, *map(styled, (*_verdict(replayed), *_shares(replayed)))]
    return Group(*parts)


def _apart(value: Value) -> str | Text:
    if value.is_same:
        return "the same, bit for bit"
    if value.written is None or value.replayed is None:
        return styled("[bold]only one[/bold]")
    return f"{abs(value.written - value.replayed):.3g} apart, relatively {value.apart:.2g}"


def _number(value: float | None) -> str:
    return "-" if value is None else repr(value)


def _verdict(replayed: Replayed) -> Iterator[str]:
    within = f"to {replayed.tolerance:g}"
    if replayed.is_same:
        yield f"The step is the same, {within if replayed.tolerance else 'bit for bit'}."
    else:
        yield f"[bold]The step is not the same[/bold]{f', {within}' if replayed.tolerance else ''}."
    if replayed.tolerance:
        yield f"Sums are in another order here: {_EXPECTED[replayed.precision]}."
    elif not replayed.is_same:
        yield (
            "What may have changed: the code or a library, the machine, the data, or a kernel that sums in no fixed "
            "order; or a rank has computed wrongly: see --compare-rank."
        )
    if replayed.note:
        yield plain(replayed.note)


def _shares(replayed: Replayed) -> Iterator[str]:
    found = replayed.shares
    if found is None:
        return
    if replayed.is_sound:
        yield (
            f"The work of data rank {replayed.asked}, and of all others, comes to the same bits on another rank: "
            f"{found['compared']} outputs and gradients on each. No rank is suspect."
        )
        return
    for share, told in found["shares"].items():
        one, other = told["ranks"]
        where = plain(told["tensor"])
        yield f"the work of data rank {share} differs between ranks {one} and {other}, first in the {where}"
    if found["unsteady"]:
        yield f"ranks that do not agree with themselves: {', '.join(map(str, found['unsteady']))}"
    suspects = ", ".join(map(str, found["suspects"]))
    if found["why"]:
        yield f"No rank is named: {plain(found['why'])}."
    elif len(found["suspects"]) == 1:
        yield f"[bold]Suspect: the hardware of rank {suspects}[/bold]. Take it out, and test it."
    else:
        yield (
            f"[bold]Suspect: the hardware of one of the ranks {suspects}[/bold], which disagree. Of two data ranks "
            f"none can tell which; three can."
        )


def _relatively(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "without bound"


def compared(found: Diff) -> Group:
    """Render where two runs differ, and what is known of why."""
    lines = [f"[bold]diff[/bold] of {plain(found.runs[0])} and {plain(found.runs[1])}"]
    for what, settings in (("by which numbers follow", found.settings), ("of the layout", found.layout)):
        for name, one, other in settings:
            told = f"{plain(name)} is {plain(one)} against {plain(other)}"
            lines.append(f"run files differ in what is {what}: {told}")
    return Group(*map(styled, (*lines, *_course(found), *_step(found))))


def _course(found: Diff) -> Iterator[str]:
    first, last = found.course.steps
    parted = found.parted
    if parted is None:
        largest = max(found.course.largest.get(name, 0.0) for name in ("loss", "grad_norm"))
        apart = f"to {_relatively(largest)}, relatively" if largest else "bit for bit"
        yield f"[bold]They agree[/bold] in steps {first} to {last}: losses and norms {apart}."
        return
    name, is_rate = _name(parted), parted.name.startswith("learning_rate")
    meaning = ": the schedule or its resume differs" if is_rate else ""
    if parted.name == "num_tokens":
        meaning = ": the data, or how they are laid out, differ"
    yield f"[bold]{name} part{'' if name.endswith('s') else 's'} at step {parted.step}[/bold]: " + (
        f"{_number(parted.one)} against {_number(parted.other)}{meaning}"
    )
    if not meaning:
        yield _way(parted)
    for directory, step in zip(found.runs, found.resumed, strict=True):
        if step is not None:
            yield f"{plain(directory)} went on after step {step} (events.jsonl), and has done step {parted.step} since"
    for other in found.course.parted[1:]:
        yield f"then {_name(other).lower()} at step {other.step}: {_number(other.one)} against {_number(other.other)}"


def _way(parted: Parted) -> str:
    if parted.is_jump:
        return (
            f"It is a jump: {_relatively(parted.apart)} apart, relatively, and {_relatively(parted.before)} at most "
            f"before. Rounding does not do that."
        )
    return (
        f"It is rounding that has grown: apart since step {parted.first}, by {_relatively(parted.before)} at most "
        f"before step {parted.step}. Where training is at the edge of stability, that is no error. To know, "
        f"compare in float64: --float64."
    )


def _name(parted: Parted) -> str:
    names = {"num_tokens": "Token counts", "loss": "Losses", "grad_norm": "Gradient norms"}
    if parted.name.startswith("learning_rate"):
        return f"Learning rates{plain(parted.name.removeprefix('learning_rate'))}"
    return names.get(parted.name, f"The {plain(parted.name)}")


def _step(found: Diff) -> Iterator[str]:
    step = found.replayed
    if step is None:
        if found.why_not:
            yield f"No step was done again: {plain(found.why_not)}"
        return
    mode = f" ({plain(step.mode)})" if step.mode else ""
    yield f"\n[bold]step {step.step}, done again in both layouts[/bold]{mode}"
    for directory, begun in zip(found.runs, step.beginnings, strict=True):
        yield f"  {plain(directory)} from {plain(begun)}"
    rows = "the same" if step.same_rows else "[bold]differ[/bold]: the data, or their order"
    yield f"  rows of the step        {rows}"
    yield f"  parameters before it    {_tensors(step.before)}"
    outputs = f"not compared: {plain(step.reason)}" if step.outputs is None else _tensors(step.outputs)
    yield f"  outputs of modules      {outputs}"
    for name, (one, other) in step.values.items():
        apart = "the same" if one == other else f"{_number(one)} against {_number(other)}"
        yield f"  {name.replace('_', ' '):<23} {apart}"
    yield f"  gradients, not clipped  {_tensors(step.gradients)}"
    yield f"  parameters behind it    {_tensors(step.after)}"
    yield _conclusion(step)


def _tensors(found: Differences) -> str:
    first, furthest = found.first, found.largest
    if first is None:
        most = furthest.relative if furthest is not None else 0.0
        return f"the same in all {found.count}, " + (f"to {_relatively(most)}" if most else "bit for bit")
    told = first.why or f"relatively {_relatively(first.relative)}, absolutely {_relatively(first.absolute)}"
    more = f"; furthest apart is {plain(furthest.name)}, by {_relatively(furthest.relative)}" if furthest else ""
    return f"[bold]{found.beyond} of {found.count} differ, first {plain(first.name)}[/bold]: {plain(told)}{more}"


def _conclusion(step: Step) -> str:
    if not step.same_rows:
        return "The two steps had other data: look at data, seed and batch_size of the run files."
    if step.before.first is not None:
        return "The parameters differ before the step: what parts them is earlier, or in what was loaded."
    if step.outputs is not None and step.outputs.first is not None:
        return f"From the same rows and parameters, {plain(step.outputs.first.name)} is the first to compute otherwise."
    if step.gradients.first is not None:
        return (
            f"Forward is the same, and the gradient of {plain(step.gradients.first.name)} is not: backward, or how "
            f"gradients are summed over ranks and microbatches, differs."
        )
    if step.after.first is not None:
        return (
            "The gradients are the same, and the parameters behind the step are not: rates, clipping or the optimizer."
        )
    if step.is_same:
        parted = "; what parted the runs is dropout" if "dropout" in step.mode else ""
        return f"Step {step.step}, done again, is the same in both, to {step.tolerance:g}{parted}."
    return "All tensors are the same; what the step was told to be is not."
