"""Recompute the activations of blocks in backward instead of holding them.

[Note: instance forwards] A block keeps its class, its name and its hooks: only `block.forward`, as an attribute of the
instance, is replaced. So no parameter gets another name, hooks of sharding run around the recomputation and not in it,
and what wraps later (compile, then sharding) wraps this.

"full" holds a block's inputs only. "selective" holds, besides, the results that cost most for their size: every second
matrix product, all of attention, and what came over the network, so that nothing is communicated twice.
Source: Chen et al. 2016, arXiv:1604.06174; torch.utils.checkpoint; the policy of torchtitan's selective per-op mode.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ._compat import is_attention, is_communication, is_matrix_product
from .errors import ConfigError, ModelError
from .layout import ModelLayout

Mode = Literal["full", "selective"]


def checkpoint_blocks(model: nn.Module, layout: ModelLayout, mode: Mode | bool) -> None:
    """Let every block recompute its activations in backward; in place.

    Acts while a block trains and gradients are on; evaluation and generation run as before. Random numbers (dropout)
    are drawn again as they were.

    Args:
        model: before compile and before sharding.
        layout: of the model.
        mode: "full" or True, "selective", or False for nothing.

    Raises:
        ConfigError: no such mode.
        ModelError: the model has no blocks.
    """
    if mode is False:
        return
    if mode not in (True, "full", "selective"):
        raise ConfigError(f"activation_checkpointing={mode!r} is not one of false, true, 'full', 'selective'.")
    if not layout.blocks:
        raise ModelError(
            f"activation_checkpointing={mode!r} acts on blocks, but {type(model).__name__} has no stack of blocks. "
            f"Set activation_checkpointing=false, or describe the model through the hook model_layout."
        )
    # One block may stand in several places.
    for block in dict.fromkeys(model.get_submodule(name) for name in layout.blocks):
        block.forward = _recomputed(block, selective=mode == "selective")


def _recomputed(block: nn.Module, *, selective: bool) -> Callable[..., Any]:
    original = block.forward
    options = {"context_fn": _selective_contexts} if selective else {}

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return original(*args, **kwargs)
        return checkpoint(original, *args, use_reentrant=False, preserve_rng_state=True, **options, **kwargs)

    return forward


def _selective_contexts() -> Any:
    """The two contexts of one forward of one block, which counts its own matrix products."""
    counts: Counter[bool] = Counter()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if is_attention(op) or is_communication(op):
            return CheckpointPolicy.MUST_SAVE
        if is_matrix_product(op):
            # Forward and recomputation count alike, each on its own.
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
