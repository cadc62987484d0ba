"""Freeze and unfreeze parameters between steps.

[Note: frozen later] `parallelize` settles which parameters may train: engines lay out units, buckets and hooks for
these. A parameter that is frozen later (`requires_grad_(False)`) still gets a gradient in a step, since engines see the
flags of `parallelize`; the gradient is dropped before the norm is taken and the optimizer steps. So no engine meets
flags that change, and freezing works alike under all of them. What was frozen in `parallelize` has no place in any
engine, nor in the optimizer: to train it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from ..base.errors import StrategyError


class TrainableParameters:
    """The parameters of one model that may train, by name; see [Note: frozen later].

    Args:
        model: after `parallelize`; its parameters may be other objects later, under the same names.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters as they are now, with their names, whether frozen later or not."""
        return ((name, parameter) for name, parameter in self._model.named_parameters() if name in self._names)

    def frozen(self) -> set[str]:
        """The names of those that are frozen now."""
        return {name for name, parameter in self.named() if not parameter.requires_grad}

    def check_unfrozen(self) -> None:
        """Refuse parameters that require a gradient now, but did not in `parallelize`.

        Raises:
            StrategyError: on this rank.
        """
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and name not in self._names:
                raise StrategyError(
                    f"{name} requires a gradient, but was frozen when the model was parallelized, so no optimizer "
                    f"holds it. Call parallelize with all parameters unfrozen that are to train at some time, and "
                    f"freeze them afterwards."
                )

    @contextmanager
    def unfrozen(self) -> Iterator[None]:
        """Give all of them the flags of `parallelize` inside."""
        frozen = [parameter for _, parameter in self.named() if not parameter.requires_grad]
        _set_flags(frozen, True)
        try:
            yield
        finally:
            _set_flags(frozen, False)


def _set_flags(parameters: Iterable[nn.Parameter], value: bool) -> None:
    for parameter in parameters:
        parameter.requires_grad_(value)
