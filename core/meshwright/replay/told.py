"""A replay, and what two runs differ in, as text for people; no torch here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from .start import Replayed, Value

_EXPECTED = {
    "float64": "float64 agrees to 1e-9, and a bug shows at 1e-3",
    "float32": "float32 agrees to about 1e-6 after one step, and to less after each further one",
    "bfloat16": "bfloat16 agrees to about 1e-2 after one step, and to less after each further one",
}


def shown(replayed: Replayed) -> Group:
    """The numbers of a step beside those that were written, and what follows from them."""
    return Group(*_headline(replayed), _numbers(replayed), *map(Text.from_markup, _verdict(replayed)))


def _headline(replayed: Replayed) -> Iterator[RenderableType]:
    done, checkpoint = replayed.beginning
    begun = f"from {checkpoint}" if checkpoint else "from the beginning of the run"
    steps = replayed.step - done
    yield Text.from_markup(
        f"[bold]replay[/bold] of {escape(replayed.run)}, step {replayed.step}: {escape(replayed.strategy)} on "
        f"{replayed.mesh}, {escape(begun)} ({steps} step{'s' if steps > 1 else ''})"
    )


def _numbers(replayed: Replayed) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "metrics.jsonl", "replayed", ""):
        table.add_column(name, no_wrap=True)
    for each in replayed.values:
        table.add_row(each.name.replace("_", " "), number(each.written), number(each.replayed), _apart(each))
    return table


def _apart(value: Value) -> str:
    if value.is_same:
        return "the same, bit for bit"
    if value.written is None or value.replayed is None:
        return "[bold]only one[/bold]"
    return f"{abs(value.written - value.replayed):.3g} apart, relatively {value.apart:.2g}"


def number(value: float | None) -> str:
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
        yield replayed.note
    yield from _shares(replayed)


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
        yield f"the work of data rank {share} differs between ranks {one} and {other}, first in the {told['tensor']}"
    if found["unsteady"]:
        yield f"ranks that do not agree with themselves: {', '.join(map(str, found['unsteady']))}"
    suspects = ", ".join(map(str, found["suspects"]))
    if found["why"]:
        yield f"No rank is named: {found['why']}."
    elif len(found["suspects"]) == 1:
        yield f"[bold]Suspect: the hardware of rank {suspects}[/bold]. Take it out, and test it."
    else:
        yield (
            f"[bold]Suspect: the hardware of one of the ranks {suspects}[/bold], which disagree. Of two data ranks "
            f"none can tell which; three can."
        )


def relatively(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "without bound"
