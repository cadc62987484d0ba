"""The units: modules that are gathered and reduced as one. What is in no unit, the package puts into buckets."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from meshwright.base.errors import ModelError
from meshwright.model.layout import ModelLayout


def find_units(model: nn.Module, layout: ModelLayout, classes: Sequence[str] | None) -> list[nn.Module]:
    """The modules of the named classes, or the model's blocks, each once, in the order of the model.

    Args:
        model: before it is wrapped.
        layout: of the model.
        classes: names or full paths, matched against the classes of the model's modules; nothing is imported. The
            model's own class means the whole model: nothing in it is a unit of its own.

    Raises:
        ModelError: a class has no module in the model.
    """
    if classes is None:
        return list(dict.fromkeys(model.get_submodule(name) for name in layout.blocks))
    found = []
    for name in classes:
        if name in _names(type(model)):
            return []
        modules = [module for module in model.modules() if name in _names(type(module))]
        if not modules:
            known = sorted({type(module).__name__ for module in model.modules()})
            raise ModelError(
                f"megatron_fsdp_unit_modules names {name!r}, but {type(model).__name__} has no module of that class. "
                f"Its classes: {', '.join(known)}."
            )
        found += modules
    return list(dict.fromkeys(found))


def _names(cls: type) -> tuple[str, str]:
    return cls.__name__, f"{cls.__module__}.{cls.__qualname__}"
