"""Find the modules of a model that hold stacked experts, by structure.

Such a module has `num_experts`, parameters with as many entries along their first dim, and a forward of hidden states
(T, D), the experts of each token (T, K) and their weights (T, K), as the experts of transformers. Others are refused.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

from torch import nn

from ..._compat.peft import base_name
from ...base.errors import ModelError

_DISPATCHED = ("ep_dispatch_experts", "moe_tp_experts")
"""Names of the dispatching style in a model's own plan; the second is that of transformers 5.17."""


@dataclass(frozen=True)
class Experts:
    """A module of stacked experts: its name and their number."""

    name: str
    count: int


def find_experts(model: nn.Module) -> list[Experts]:
    """Return the modules of stacked experts, in the model's order."""
    return [Experts(name, module.num_experts) for name, module in model.named_modules() if _is_experts(module)]


def check_expert_parallel(model: nn.Module, ep_size: int) -> None:
    """Raise ModelError, on all ranks alike, if a full model's experts cannot be divided over `ep_size` ranks."""
    if ep_size == 1:
        return
    found = find_experts(model)
    missing = _named_by_plan(model) - {base_name(each.name) for each in found}
    if missing or not found:
        told = f"{sorted(missing)[0]} is not of" if missing else "has none of"
        raise ModelError(
            f"ep_size={ep_size} divides experts over ranks, but {type(model).__name__} {told} the kind that can be: a "
            f"module with num_experts, parameters with as many entries along their first dim, and a forward of hidden "
            f"states, indices and weights. Use ep_size=1."
        )
    for each in found:
        if each.count % ep_size:
            divisors = ", ".join(str(size) for size in range(1, each.count + 1) if each.count % size == 0)
            raise ModelError(
                f"ep_size={ep_size} does not divide the {each.count} experts of {each.name}. "
                f"Use one of {divisors} for ep_size."
            )
        _check_own(model, each, ep_size)


def _check_own(model: nn.Module, experts: Experts, ep_size: int) -> None:
    """Refuse experts that hold or share parameters that are not divided with them."""
    inside = {name for name, _ in model.get_submodule(experts.name).named_parameters(prefix=experts.name)}
    by_identity: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_identity.setdefault(id(parameter), []).append(name)
    for names in by_identity.values():
        if inside.intersection(names) and len(names) > 1:
            raise ModelError(
                f"{' and '.join(names)} are one parameter, which cannot be divided over ep_size={ep_size} ranks. "
                f"Untie them, or use ep_size=1."
            )
    for name in sorted(inside):
        if "." in name.removeprefix(f"{experts.name}."):
            raise ModelError(
                f"{experts.name} holds {name} beside its stacked parameters, which all of its experts share, so it "
                f"cannot be divided over ep_size={ep_size} ranks. Use ep_size=1."
            )


def _is_experts(module: nn.Module) -> bool:
    count, own = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    if type(count) is not int or count < 2 or not any(parameter.dim() == 3 for parameter in own):
        return False
    return all(p.dim() > 1 and p.shape[0] == count for p in own) and len(argument_names(module)) == 3


def argument_names(module: nn.Module) -> list[str]:
    """Return the names of the arguments of a module's forward."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, each in inspect.signature(module.forward).parameters.items() if each.kind in kinds]


def _named_by_plan(model: nn.Module) -> set[str]:
    """Return the modules that the model's own expert-parallel plan names, by their names in the base model."""
    of_config: dict[str, str] = getattr(getattr(model, "config", None), "base_model_ep_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    # transformers 5.17 has no plan of the whole model.
    plan = getattr(model, "ep_plan", None) or {f"{prefix}.{name}": style for name, style in of_config.items()}
    patterns = [name for name, style in plan.items() if style in _DISPATCHED]
    regex = [re.compile(re.escape(name).replace(r"\*", r"\d+")) for name in patterns]
    names = {base_name(name) for name, _ in model.named_modules()}
    return {name for name in names if any(each.fullmatch(name) for each in regex)}
