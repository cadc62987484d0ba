"""`meshwright strategies`: what there is to choose from."""

from __future__ import annotations

from textwrap import indent, wrap

from ..files.terminal import say
from ..mesh.sizes import CLAIMABLE_AXES
from ..strategy.contract import StrategySpec
from ..strategy.registry import Registry, get_registry


def strategies() -> None:
    """List the strategies: installed, broken (with the reason), and installable."""
    say(described(get_registry()))


def described(registry: Registry) -> str:
    """Return a block for each strategy, wrapped at 80 columns."""
    blocks = [_block(spec, registry.owner(name)) for name, spec in registry.strategies.items()]
    for title, lines in (
        ("broken", [str(failure) for failure in registry.failures]),
        ("installable, from a clone of meshwright", [f"{n}: {line}" for n, line in registry.installable.items()]),
    ):
        if lines:
            # Not wrapped, so that reasons and commands can be copied.
            blocks.append("\n".join([f"{title}:", *(indent(line, "  ") for line in lines)]))
    return "\n\n".join(blocks) + "\n"


def _block(spec: StrategySpec, owner: str) -> str:
    rows = {
        "aliases": ", ".join(spec.aliases),
        "shards": ", ".join(axis for axis in CLAIMABLE_AXES if axis in spec.axes) or "nothing",
        "wraps": "another strategy" if spec.wraps else "",
        "plugin": owner,
    }
    texts = [spec.summary, *(f"{label}: {text}" for label, text in rows.items() if text)]
    lines = [line for text in texts for line in wrap(text, 76, break_long_words=False)]
    return "\n".join([spec.name, *(f"    {line}" for line in lines)])
