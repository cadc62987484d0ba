"""What two profiles differ in, a step: the whole, parts, communication and operators; no torch here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .summary import Summary


@dataclass(frozen=True)
class Difference:
    """Something that both profiles have, or one of them.

    Attributes:
        before, after: seconds a step in the first and the second; 0 where one lacks it.
        calls: a step; None: it is not called.
    """

    name: str
    before: float
    after: float
    calls: tuple[float, float] | None = None

    @property
    def seconds(self) -> float:
        """How much slower the second is; below 0: faster."""
        return self.after - self.before


@dataclass(frozen=True)
class Comparison:
    """Two profiles side by side; all but `whole` by the size of the difference, the largest first."""

    names: tuple[str, str]
    whole: Sequence[Difference]
    parts: Sequence[Difference]
    communication: Sequence[Difference]
    operators: Sequence[Difference]

    def as_values(self) -> dict[str, Any]:
        """As values of JSON."""
        return asdict(self)


def compare(first: Summary, second: Summary, names: tuple[str, str]) -> Comparison:
    """Put two profiles side by side, by step, so that windows may have other lengths.

    On an accelerator operators are compared by their kernels' time, on a CPU by their own.
    """
    both = (first, second)
    on_device = first.is_on_device and second.is_on_device
    whole = [
        Difference(name, *(getattr(each, attribute) / each.count for each in both))
        for name, attribute in (
            ("time", "seconds"),
            ("computing", "computing_seconds"),
            ("communication", "communication_seconds"),
            ("exposed communication", "exposed_seconds"),
            ("host gaps", "host_seconds"),
        )
    ]
    return Comparison(
        names,
        whole,
        _differences(both, "parts", "seconds"),
        _differences(both, "communication", "seconds"),
        _differences(both, "operators", "device_seconds" if on_device else "seconds"),
    )


def _differences(both: tuple[Summary, Summary], table: str, seconds: str) -> list[Difference]:
    rows: list[dict[str, Any]] = [{row.name: row for row in getattr(each, table)} for each in both]
    found = [
        Difference(
            name,
            *_of(rows, both, name, seconds),
            calls=_of(rows, both, name, "calls"),
        )
        for name in dict.fromkeys([*rows[0], *rows[1]])
    ]
    return sorted(found, key=lambda difference: (-abs(difference.seconds), difference.name))


def _of(
    rows: Iterable[dict[str, Any]], both: tuple[Summary, Summary], name: str, attribute: str
) -> tuple[float, float]:
    before, after = (
        getattr(table[name], attribute) / each.count if name in table else 0.0
        for table, each in zip(rows, both, strict=True)
    )
    return before, after
