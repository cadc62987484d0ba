"""Sizes and times in words, in the unit that suits, and round values for axes."""

from __future__ import annotations

import math

TIMES, DASH, MINUS = "\N{MULTIPLICATION SIGN}", "\N{EN DASH}", "\N{MINUS SIGN}"


def size_text(size: float) -> str:
    """Bytes."""
    for unit, one in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= one:
            return f"{size / one:,.2f} {unit}" if size < 100 * one else f"{size / one:,.0f} {unit}"
    return f"{size:,.0f} B"


def time_text(seconds: float) -> str:
    """Seconds."""
    for unit, one in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= one:
            return f"{seconds / one:,.3g} {unit}" if seconds < 100 * one else f"{seconds / one:,.0f} {unit}"
    return f"{seconds / 1e-6:,.3g} µs"


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round values in a range, about so many."""
    rough = max(high - low, 1e-12) / count
    scale = 10 ** math.floor(math.log10(rough))
    step = next(scale * each for each in (1, 2, 2.5, 5, 10) if scale * each >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [step * place for place in range(first, math.floor(high / step + 1e-9) + 1)]
