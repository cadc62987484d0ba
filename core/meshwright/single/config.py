"""Options of `single`."""

from __future__ import annotations

from ..strategy.spec import StrategyConfig


class SingleConfig(StrategyConfig):
    """Options of `single`: those that every strategy has."""
