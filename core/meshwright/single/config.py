"""Options of `single`."""

from __future__ import annotations

from ..model.activation_options import ActivationCheckpointing, activation_field
from ..strategy.contract import StrategyConfig


class SingleConfig(StrategyConfig):
    """Options of `single`."""

    activation_checkpointing: ActivationCheckpointing = activation_field()
