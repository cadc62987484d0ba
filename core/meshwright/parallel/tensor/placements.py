"""Where tensor parallelism shards each parameter, and what modules see of it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from ..._compat.torch import is_sharded
from ...base.errors import ModelError
from ...model.layout import ModelLayout
from .collectives import chunk_sizes
from .heads import SharedHeads
from .local_parameters import Cut
from .module_styles import Plan
from .sequence_stream import SequenceParts
from .styles import PACKED_PARTS, STYLES


def placements_of(
    model: nn.Module, layout: ModelLayout, plan: Plan, heads: list[SharedHeads], size: int
) -> dict[str, Placement]:
    """Return the placement of each parameter by each of its names.

    Raises:
        ModelError: tied names differ, or packed parts are not divided by the ranks.
    """
    replicated = {name for shared in heads for name in shared.rows}
    placements: dict[str, Placement] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, own = name.rpartition(".")
        style = plan.parameters.get(name)
        placements[name] = Replicate()
        if style is not None and name not in replicated:
            placements[name] = STYLES[style].place(model.get_submodule(owner), own, parameter)
        _check_packed(name, parameter, placements[name], size)
        _check_not_empty(name, parameter, placements[name], size)
    for names in layout.tied:
        different = {str(placements[name]): name for name in names if name in placements}
        if len(different) > 1:
            told = ", ".join(f"{name} {placement}" for placement, name in different.items())
            raise ModelError(
                f"{' and '.join(names)} are one parameter, but the plan ({plan.source}) shards them in different ways: "
                f"{told}. Give them styles that agree, such as embedding_rowwise for the embedding and "
                f"colwise_gather_output for the head, or replicate for both."
            )
    return placements


def _check_not_empty(name: str, parameter: Tensor, placement: Placement, size: int) -> None:
    if placement.is_shard() and chunk_sizes(parameter.shape[placement.dim], size)[-1] == 0:
        raise ModelError(
            f"{name} of shape {tuple(parameter.shape)} is too small along dim {placement.dim} for tp_size={size}: a "
            f"rank would have nothing of it. Choose a smaller tp_size, or replicate it in a tp_plan."
        )


def _check_packed(name: str, parameter: Tensor, placement: Placement, size: int) -> None:
    if placement.is_shard() or not is_sharded(placement):
        return
    features = parameter.shape[placement.dim]
    if features % (PACKED_PARTS * size):
        raise ModelError(
            f"{name} holds {PACKED_PARTS} packed parts of {features // PACKED_PARTS} features each, which "
            f"tp_size={size} does not divide. Choose a tp_size that does, or replicate it in a tp_plan."
        )


def cuts_of(plan: Plan, heads: list[SharedHeads], parts: SequenceParts | None) -> dict[str, Cut]:
    """Return what modules see of their parameters, where that is not simply the local shard."""
    partial = {name for name, style in plan.parameters.items() if STYLES[style].partial}
    if parts is not None:
        partial |= parts.on_shard
    rows = {name: index for shared in heads for name, index in shared.rows.items()}
    return {name: Cut(name in partial or name in rows, rows.get(name)) for name in partial | rows.keys()}
