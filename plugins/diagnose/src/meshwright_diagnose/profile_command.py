"""`meshwright profile`: show where the time of profiled steps went, and compare two profiles."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.plugin import JsonFile, tell, told, write

Profile = Annotated[
    Path, typer.Argument(help="A run directory, or a trace (rank-*.json.gz) or summary.json in its directory profile.")
]
Rank = Annotated[int | None, typer.Option(min=0, help="Of which rank, in a directory; default: the first there is.")]
Rows = Annotated[int, typer.Option(min=1, help="How many operators to show.")]
SvgFile = Annotated[Path | None, typer.Option("--svg", help="Draw what is shown here.")]


def show(
    profile: Profile, rank: Rank = None, rows: Rows = 12, json_file: JsonFile = None, svg_file: SvgFile = None
) -> None:
    """Show what the time of profiled steps went to: parts, communication, operators, memory."""
    with told(traceback=False):
        from meshwright_run.profile.show import shown
        from meshwright_run.profile.summary import as_values, load_summary

        summary = load_summary(profile, rank=rank)
        _tell(shown(summary, rows=rows), as_values(summary), json_file, svg_file, title=f"profile show {profile}")


def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="A run directory, a trace, or a summary.json.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    rank: Rank = None,
    rows: Rows = 12,
    json_file: JsonFile = None,
    svg_file: SvgFile = None,
) -> None:
    """Put two profiles side by side: what got slower, and what faster, by what makes most of the difference."""
    with told(traceback=False):
        from meshwright_run.profile.show import compare as compared_of
        from meshwright_run.profile.show import compared
        from meshwright_run.profile.summary import load_summary

        first, second = (load_summary(path, rank=rank) for path in (before, after))
        comparison = compared_of(first, second, (str(before), str(after)))
        what = compared(comparison, rows=rows)
        _tell(what, comparison.as_values(), json_file, svg_file, title=f"profile compare {before} {after}")


def _tell(what: Any, values: dict[str, Any], json_file: Path | None, svg_file: Path | None, *, title: str) -> None:
    from meshwright_run.profile.show import as_svg

    tell(what, values, json_file)
    if svg_file is not None:
        write(svg_file, as_svg(what, title=title))
