"""Freeze and unfreeze parameters between steps.

[Note: frozen later] Strategies lay out units, buckets and hooks for the parameters that train when `parallelize` is
called. A parameter that is frozen later (`requires_grad_(False)`) still gets a gradient, since within a step all have
the flags of `parallelize`; the gradient is dropped before the norm is taken and the optimizer steps. So freezing works
the same under every strategy. A parameter that was frozen in `parallelize` is in no optimizer, and cannot be trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..base.errors import StrategyError


class TrainableParameters:
    """The parameters of one model that may train, by name; see [Note: frozen later].

    Args:
        model: after `parallelize`; its parameters may be replaced by others of the same names.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters as they are now, whether frozen later or not."""
        return ((name, parameter) for name, parameter in self._model.named_parameters() if name in self._names)

    def frozen(self) -> set[str]:
        """Return the names of those that are frozen now."""
        return {name for name, parameter in self.named() if not parameter.requires_grad}

    def check_unfrozen(self) -> None:
        """Refuse a parameter that requires a gradient now, but did not in `parallelize`; StrategyError on this rank."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and name not in self._names:
                raise StrategyError(
                    f"{name} requires a gradient, but was frozen when the model was parallelized, so no optimizer "
                    f"holds it. Call parallelize with all parameters unfrozen that are to train at some time, and "
                    f"freeze them afterwards."
                )

    @contextmanager
    def unfrozen(self) -> Iterator[None]:
        """Give all parameters the flags of `parallelize` within the context."""
        frozen = [parameter for _, parameter in self.named() if not parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
