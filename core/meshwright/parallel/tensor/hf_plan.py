"""The tensor-parallel plan of a model of transformers, in styles of torch; the function is the reference's."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from ...base.errors import ConfigError, MissingPlanError
from ...strategy.ask import model_layout
from ...strategy.registry import Registry
from .module_styles import Plan
from .names import wildcards
from .plan import find_plan, translate_to_torch_parallel_style
from .plan_sources import plans_within
from .torch_styles import NamedStyle


def get_hf_tp_shard_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """The model's own plan, as styles that `torch.distributed.tensor.parallel.parallelize_module` takes.

    It is the plan that strategies use where none is given, so a run with it trains as a run without it does. A style
    that torch has no equal of, such as those of experts, is a `NamedStyle`, which `tp_plan` takes and torch refuses.

    Args:
        model: a model of transformers, or one that has such models inside, whose plans are merged.

    Returns:
        Style by the name of a module or parameter; `*` stands for a number.

    Raises:
        MissingPlanError: the model has no plan.
    """
    own = plans_within(model)
    if not own:
        raise MissingPlanError(
            f"{type(model).__name__} has no tensor-parallel plan of its own (tp_plan). Give one as a dict."
        )
    plan = find_plan(model, model_layout(model), registry=Registry([]))
    names = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    # What follows from the styles of modules is not repeated.
    implied = Plan(plan.source)
    for name, style in plan.modules.items():
        implied.name(name, style, model)
    single = {name: style for name, style in plan.parameters.items() if implied.parameters.get(name) != style}
    found = _merged(plan.modules, names) | _merged(single, parameters)
    return {name: _torch_style(style) for name, style in found.items()}


def _merged(styles: dict[str, str], names: list[str]) -> dict[str, str]:
    """The same with one entry for all names that differ in numbers alone, where they have one style."""
    found: dict[str, str] = {}
    alike: dict[str, set[str | None]] = {}
    for name in names:
        alike.setdefault(wildcards(name), set()).add(styles.get(name))
    for name, style in styles.items():
        found[wildcards(name) if len(alike.get(wildcards(name), ())) == 1 else name] = style
    return found


def _torch_style(name: str) -> ParallelStyle:
    try:
        return translate_to_torch_parallel_style(name)
    except ConfigError:
        return NamedStyle(name)
