"""A tensor-parallel plan for one model: which of its modules and parameters have which style."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from .adapters import spread
from .styles import STYLES, Style


@dataclass
class Plan:
    """Styles by the full names of modules and parameters.

    Attributes:
        source: where it comes from, for errors.
        modules: a style's name for each module that is named.
        parameters: a style's name for each parameter: its own, or its module's.
        shards_positions: whether a style of torch in the plan asks for sequence parallelism.
        is_given: whether a user or a plugin wrote it.
    """

    source: str
    modules: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    shards_positions: bool = False
    is_given: bool = False

    def style(self, module: str) -> Style | None:
        """The style of a module, where it has one."""
        name = self.modules.get(module)
        return None if name is None else STYLES[name]

    def names(self, module: str, model: nn.Module) -> list[str]:
        """The styles of a module, or of the original and trained copies of one."""
        return [self.modules[each] for each, _ in spread(model, module, "replicate") if each in self.modules]

    def name(self, module: str, style: str, model: nn.Module) -> None:
        """Give a module a style, and its parameters."""
        for name, parameters in spread(model, module, style):
            self.modules[name] = style
            self.parameters.update(parameters)

    def drop(self, module: str, model: nn.Module) -> None:
        """Leave a module and its parameters whole."""
        for name, parameters in spread(model, module, "replicate"):
            self.modules.pop(name, None)
            for parameter in parameters:
                self.parameters.pop(parameter, None)
