"""What was found, in one form for a terminal, for JSON and for the exit code."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from meshwright.plugin import MeshwrightError, RankError

State = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        area: such as "versions"; findings of one area are shown together.
        state: with "warning", training works, perhaps not as well as it could.
        mend: how to fix it; empty if ok.
        exit_code: of the command if this is wrong: 2 for what the user can correct, 1 for what failed when tried.
    """

    area: str
    name: str
    state: State
    said: str
    mend: str = ""
    exit_code: int = MeshwrightError.exit_code


def failed(area: str, name: str, said: str, mend: str) -> Finding:
    """Return a finding about something that failed when it was tried."""
    return Finding(area, name, "wrong", said, mend, RankError.exit_code)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return the exit code of the command; 0 if nothing is wrong."""
    return max((each.exit_code for each in findings if each.state == "wrong"), default=0)


def as_plain(findings: Iterable[Finding]) -> dict[str, Any]:
    """Return values for JSON."""
    found = list(findings)
    rows = [{name: value for name, value in asdict(each).items() if name != "exit_code"} for each in found]
    return {"exit_code": exit_code(found), "findings": rows}


def as_lines(findings: Iterable[Finding]) -> list[str]:
    """Return a line for each finding, below its area, and one for how to fix it."""
    found = list(findings)
    lines: list[str] = []
    for area in dict.fromkeys(each.area for each in found):
        lines.append(area)
        for each in found:
            if each.area == area:
                lines.append(f"  {each.state:<8} {each.name}: {each.said}")
                lines += [f"           {each.mend}"] if each.mend else []
    counts = {state: sum(each.state == state for each in found) for state in ("wrong", "warning", "ok")}
    return [*lines, ", ".join(f"{count} {state}" for state, count in counts.items())]
