"""Attention of this rank's queries, by the model's own attention function.

[Note: two ways] "allgather" gathers keys and values of all positions; each rank attends with its own queries. "ulysses"
exchanges positions for heads, so that each rank attends with all positions of its heads, and back. In between the
function runs that the model would use without context parallelism, on what it would see: softcap, sinks, scaling and
dropout are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from ..._compat.transformers import attention_of
from ...base.errors import ModelError
from .exchange import GatherPositions, heads_for_positions, positions_for_heads
from .mask import PositionMask

# What attention functions of transformers are given beside tensors, and what acts the same on a part of the queries.
# `sliding_window` is in the mask already.
KNOWN = frozenset(
    {"dropout", "scaling", "sliding_window", "softcap", "position_ids", "cache_position", "use_cache"}
    | {"output_router_logits"}
)
PER_HEAD = frozenset({"s_aux", "sinks"})
LARGEST_MASK = 2**24
"""Elements of a mask; where it would have more, queries are taken in blocks, which are computed again in backward."""

Core = Callable[..., tuple[Tensor, Any]]


def attend(
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls for each attention layer while context parallelism is on.

    Args:
        implementation: name of the attention that the model would use.
        query: of this rank, (B, H, P, D); keys and values with as many heads or fewer.
        attention_mask: a PositionMask.
        options: further keywords; one that is not known to be right on a part of the positions is refused.

    Returns:
        (B, P, H, D), and no weights.

    Raises:
        ModelError: the layer cannot attend so.
    """
    mask = _checked_mask(module, query, key, attention_mask)
    share = mask.share
    without_mask = mask.is_causal and implementation == "sdpa"
    _check_options(module, options, share.way, without_mask=without_mask)
    copies = 1
    if share.way == "ulysses":
        copies = _copies_of_heads(module, query.shape[1], key.shape[1], share.size)
    core = attention_of(module, implementation)
    if mask.observer is not None:
        return mask.observer.attend(query, key, value), None
    layer = _Layer(core, implementation, module, mask, options, without_mask)
    if share.way == "ulysses":
        return layer.exchanged(query, key, value, copies), None
    return layer.gathered(query, key, value), None


@dataclass(frozen=True)
class _Layer:
    """One call of one layer.

    Attributes:
        core: the model's own attention function.
        implementation: its name in transformers.
        module: the layer.
        mask: of the call.
        options: keywords for `core`.
        without_mask: whether `core` would be given no mask by transformers, and take it for causal.
    """

    core: Core
    implementation: str
    module: nn.Module
    mask: PositionMask
    options: Mapping[str, Any]
    without_mask: bool

    def gathered(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # One message for both.
        sizes = [key.shape[-1], value.shape[-1]]
        key, value = GatherPositions.apply(torch.cat([key, value], -1), self.mask.share.group).split(sizes, -1)
        if not self.without_mask:
            return self._masked(query, key, value, whole=False)
        # Two chunks of queries that follow each other.
        chunk = self.mask.part // 2
        starts = self.mask.share.starts(self.mask.length)
        return torch.cat(
            [
                output
                for rows, start in zip(query.split(chunk, 2), starts, strict=True)
                for output in self._causal(rows, key, value, start)
            ],
            1,
        )

    def exchanged(self, query: Tensor, key: Tensor, value: Tensor, copies: int) -> Tensor:
        group = self.mask.share.group
        if copies > 1:
            # Each rank gets the heads that its queries read.
            key, value = (each.repeat_interleave(copies, 1) for each in (key, value))
        query, key, value = (heads_for_positions(each, group) for each in (query, key, value))
        if self.without_mask:
            output = self._run(query, key, value, None)
        else:
            output = self._masked(query, key, value, whole=True)
        return positions_for_heads(output, group)

    def _run(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        # By what is there: in recomputation, nobody else says which heads the layer has.
        with _grouped(self.module, query.shape[1] // key.shape[1]):
            return self.core(self.module, query, key, value, mask, **self.options)[0]

    def _causal(self, query: Tensor, key: Tensor, value: Tensor, start: int) -> Iterator[Tensor]:
        """Attention of queries at positions from `start` on, each to all keys up to its own."""
        count = query.shape[2]
        keys = start + count
        if query.device.type != "cpu" and count > 1:
            # Kernels know this mask, and make no tensor of it.
            yield self._run(query, key[:, :, :keys], value[:, :, :keys], causal_lower_right(count, keys))
            return
        step = max(1, LARGEST_MASK // keys)
        if step >= count:
            rows = torch.arange(start, keys, device=query.device)
            yield self._run(query, key[:, :, :keys], value[:, :, :keys], self.mask.of(rows, keys))
            return
        for first in range(start, keys, step):
            rows = torch.arange(first, min(keys, first + step), device=query.device)
            part = query[:, :, first - start : first - start + step]
            yield self._block(part, key, value, rows, first + len(rows))

    def _masked(self, query: Tensor, key: Tensor, value: Tensor, *, whole: bool) -> Tensor:
        """Attention of this rank's queries, or of all, under any mask."""
        step = max(1, LARGEST_MASK // (query.shape[0] * self.mask.length))
        if step >= query.shape[2]:
            return self._run(query, key, value, self.mask.made(whole=whole))
        rows = self.mask.rows(whole=whole)
        return torch.cat(
            [
                self._block(part, key, value, some, self.mask.length)
                for part, some in zip(query.split(step, 2), rows.split(step), strict=True)
            ],
            1,
        )

    def _block(self, query: Tensor, key: Tensor, value: Tensor, rows: Tensor, keys: int) -> Tensor:
        """Attention of some of the queries, at `rows`, to the first keys.

        It is computed again in backward: the masks of all of them are too large to be held.
        """

        def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self._run(query, key, value, self.mask.of(rows, keys))

        key, value = key[:, :, :keys], value[:, :, :keys]
        # Parameters that the function reads itself, such as sinks, are in their places in forward only.
        has_own = any(True for _ in self.module.parameters(recurse=False))
        if has_own or not torch.is_grad_enabled():
            return run(query, key, value)
        output: Tensor = checkpoint(run, query, key, value, use_reentrant=False)
        return output


def _copies_of_heads(module: nn.Module, heads: int, kv_heads: int, ranks: int) -> int:
    """How many copies of each key head make their number one that the ranks divide.

    Raises:
        ModelError: the ranks do not divide the query heads, or the layer has a parameter for each head.
    """
    advice = "Set cp_attention=allgather, or choose another cp_size."
    if heads % ranks:
        raise ModelError(
            f"cp_attention='ulysses' divides the heads of attention, but {type(module).__name__} has {heads} of them "
            f"on each rank, which cp_size={ranks} does not divide. {advice}"
        )
    own = [name for name, each in module.named_parameters(recurse=False) if heads in each.shape]
    if own:
        raise ModelError(
            f"cp_attention='ulysses' divides the heads of attention, but {type(module).__name__} holds {own[0]} for "
            f"all of them. {advice}"
        )
    groups = heads // kv_heads
    copies = next(each for each in range(1, groups + 1) if not groups % each and not kv_heads * each % ranks)
    if kv_heads != heads and not hasattr(module, "num_key_value_groups"):
        raise ModelError(
            f"{type(module).__name__} has fewer key than query heads but no num_key_value_groups, so they cannot be "
            f"divided by cp_attention='ulysses'. {advice}"
        )
    return copies


@contextmanager
def _grouped(module: nn.Module, groups: int) -> Iterator[None]:
    """Let a layer's attention take so many query heads for each key head."""
    before = getattr(module, "num_key_value_groups", None)
    if before is None or before == groups:
        yield
        return
    module.num_key_value_groups = groups
    try:
        yield
    finally:
        module.num_key_value_groups = before


def _checked_mask(module: nn.Module, query: Tensor, key: Tensor, mask: Any) -> PositionMask:
    name = type(module).__name__
    if not isinstance(mask, PositionMask):
        raise ModelError(
            f"{name} attends with a mask ({type(mask).__name__}) that was not made by transformers' mask functions for "
            f"this step, so it cannot be divided by context parallelism. Set cp_size=1."
        )
    if query.shape[2] != mask.part or key.shape[2] != mask.part:
        raise ModelError(
            f"{name} attends from {query.shape[2]} to {key.shape[2]} positions where this rank has {mask.part}, as "
            f"cross-attention does, which context parallelism cannot divide. Set cp_size=1."
        )
    return mask


def _check_options(module: nn.Module, options: Mapping[str, Any], way: str, *, without_mask: bool) -> None:
    name = type(module).__name__
    for option, value in options.items():
        if not isinstance(value, Tensor) and not value:
            continue
        if option in PER_HEAD and way == "ulysses":
            raise ModelError(
                f"{name} gives its attention {option}, for all heads, which cp_attention='ulysses' divides. "
                f"Set cp_attention=allgather."
            )
        if option not in KNOWN | PER_HEAD | {"is_causal"}:
            raise ModelError(
                f"{name} gives its attention {option}={_told(value)}, of which it is not known whether it is right on "
                f"a part of the positions. Set cp_size=1."
            )
    given = options.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if given is None else given
    if without_mask and not is_causal:
        raise ModelError(
            f"{name} is given a causal mask but attends without causality (is_causal=False), which context parallelism "
            f"does not do. Set cp_size=1."
        )


def _told(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]
