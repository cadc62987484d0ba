"""Attention heads under tensor parallelism.

The ranks must divide the query heads. Where they do not divide the key and value heads, each rank computes those that
its query heads read, from a replicated weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...base.errors import ModelError
from .module_styles import Plan
from .plan import text_config

_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")


@dataclass(frozen=True)
class SharedHeads:
    """Key and value projections of an attention module that ranks share.

    Attributes:
        attention: name of the module.
        rows: by name of each replicated parameter, the rows that this rank uses; int64.
        groups: this rank's query heads per key and value head.
    """

    attention: str
    rows: dict[str, Tensor]
    groups: int


def check_heads(model: nn.Module, plan: Plan, size: int, rank: int) -> list[SharedHeads]:
    """Return attention modules whose key and value heads the ranks do not divide; raises ModelError for query heads."""
    shared = []
    parents = dict.fromkeys(name.rpartition(".")[0] for name, style in plan.modules.items() if style == "colwise")
    config = text_config(model)
    for name in parents:
        attention = model.get_submodule(name)
        counts = (getattr(attention, each, None) for each in _COUNTS)
        heads = next((each for each in counts if isinstance(each, int) and each > 0), None)
        is_attention = heads is not None or hasattr(attention, "num_key_value_groups") or hasattr(attention, "head_dim")
        if not is_attention:
            continue
        groups, width = getattr(attention, "num_key_value_groups", None), getattr(attention, "head_dim", None)
        key = f"{name}.k_proj"
        if isinstance(groups, int) and isinstance(width, int) and plan.modules.get(key) == "colwise":
            kv_heads = int(model.get_submodule(key).out_features) // width
            heads = kv_heads * groups
            _check_divides(name, heads, size)
            if kv_heads % size:
                shared.append(_share(model, plan, name, kv_heads, groups, size, rank))
        else:
            heads = heads or getattr(config, "num_attention_heads", None)
            if isinstance(heads, int):
                _check_divides(name, heads, size)
    return shared


def _share(model: nn.Module, plan: Plan, name: str, kv_heads: int, groups: int, size: int, rank: int) -> SharedHeads:
    count = kv_heads * groups // size
    read = [(rank * count + index) // groups for index in range(count)]
    distinct = list(dict.fromkeys(read))
    per_head = len(read) // len(distinct)
    # If each head is read by equally many, in order, attention repeats them itself; else each query head gets its own.
    chosen = distinct if read == [head for head in distinct for _ in range(per_head)] else read
    rows: dict[str, Tensor] = {}
    for projection in (f"{name}.k_proj", f"{name}.v_proj"):
        layer = model.get_submodule(projection)
        width = int(layer.out_features) // kv_heads
        index = torch.cat([torch.arange(head * width, (head + 1) * width) for head in chosen])
        # Also parameters of adapters that have the output along their first dim.
        named = plan.parameters.items()
        rows |= {each: index for each, style in named if each.startswith(f"{projection}.") and style == "colwise"}
    return SharedHeads(name, rows, len(read) // len(chosen))


def _check_divides(name: str, heads: int, size: int) -> None:
    if heads % size:
        divisors = ", ".join(str(each) for each in range(1, heads + 1) if heads % each == 0)
        raise ModelError(
            f"{name} has {heads} attention heads, which tp_size={size} does not divide. Set tp_size to one of "
            f"{divisors}."
        )
