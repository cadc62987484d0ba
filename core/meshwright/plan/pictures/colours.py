"""Colours of pictures of plans, on light and on dark ground.

Each has a contrast of 3 to 1 or more to its ground, and texts have 4.5 or more (WCAG 2.2, 1.4.3 and 1.4.11).
"""

from __future__ import annotations

GROUND = {
    "ground": ("#ffffff", "#14171c"),
    "panel": ("#f4f6f8", "#1c2128"),
    "text": ("#1c2330", "#e6e9ee"),
    "quiet": ("#586173", "#a3adbb"),
    "line": ("#d5dae1", "#343b46"),
    "limit": ("#b3261e", "#ff8a80"),
    "good": ("#1a7f4b", "#5fd39a"),
    "focus": ("#1d5fd0", "#8ab4ff"),
}
OWNER = {
    "parameters": ("#2b5c9e", "#6f9fe8"),
    "gradients": ("#7b4ea3", "#b892e6"),
    "optimizer": ("#1f7a74", "#4fb8ae"),
    "gathered": ("#2f8fc9", "#8fd0f5"),
    "activations": ("#c9691a", "#f0a05a"),
    "communication": ("#b8324a", "#f07a8c"),
    "temporary": ("#8a7610", "#d9c050"),
    "other": ("#6b7280", "#9aa3b0"),
}
PHASE = {
    "forward": ("#3f6fc4", "#7aa2ee"),
    "backward": ("#22855a", "#52c08f"),
    "optimizer": ("#a8660f", "#e5ad55"),
}
LINK = {
    "inside": ("#7b4ea3", "#b892e6"),
    "between": ("#c2410c", "#ff9563"),
}
FIT = {
    "fits": ("#1a7f4b", "#5fd39a"),
    "too large": ("#b3261e", "#ff8a80"),
}
ALL = {"": GROUND, "owner-": OWNER, "phase-": PHASE, "link-": LINK, "fit-": FIT}


def variables() -> str:
    """All as variables of CSS, the dark ones where they are preferred."""
    light, dark = ("".join(f"--{name}:{pair[place]};" for name, pair in _named()) for place in (0, 1))
    return f":root{{color-scheme:light dark;{light}}}\n@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"


def _named() -> list[tuple[str, tuple[str, str]]]:
    return [(f"{prefix}{name}".replace(" ", "-"), pair) for prefix, each in ALL.items() for name, pair in each.items()]


def contrast(one: str, other: str) -> float:
    """Of two colours, as WCAG defines it: from 1 to 21."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
