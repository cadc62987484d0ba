"""Sharding of positions over ranks, and attention of this rank's queries by the model's own attention function.

A sequence is split into 2n chunks for n ranks, and rank r has the chunks r and 2n - 1 - r. Under a causal mask an early
chunk attends to few positions and a late one to many, so all ranks have equal work.

[Note: attention methods] "allgather" gathers keys and values of all positions, and each rank attends with its own
queries. "ulysses" uses an all-to-all: each rank attends with all positions of its share of the heads, and a second
all-to-all restores the sharding by positions. Both call the attention function that the model uses without context
parallelism, so softcap, sinks, scaling and dropout are the model's own.

Shapes: B sequences, H heads, S positions of all ranks, P = S / n positions of this rank, D features of a head.
Source: Dubey et al. 2024, arXiv:2407.21783, section 3.3.2; Jacobs et al. 2023, arXiv:2309.14509, for "ulysses".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from ..._compat.torch import all_gather, reduce_scatter
from ..._compat.transformers import get_attention_function
from ...base.errors import ModelError
from ...tensors.ops import temporary_attribute
from ..tensor.collectives import AllToAll
from .probe import AttentionProbe

CPAttentionMethod = Literal["allgather", "ulysses"]


@dataclass(frozen=True)
class SequenceShard:
    """Sharding of each sequence over the axis `cp`: this rank's index, and the communication method."""

    group: dist.ProcessGroup
    num_ranks: int
    rank: int
    method: CPAttentionMethod

    def get_positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """Return this rank's positions of a sequence; int64. 2 x `num_ranks` must divide `length`."""
        return shard_positions(torch.arange(length, device=device), 0, self.rank, self.num_ranks)

    def get_chunk_starts(self, length: int) -> tuple[int, int]:
        """Return the first positions of this rank's two chunks."""
        chunk = length // (2 * self.num_ranks)
        return self.rank * chunk, (2 * self.num_ranks - 1 - self.rank) * chunk

    def shard(self, full: Tensor) -> Tensor:
        """Return this rank's positions of a tensor (B, S, ...) as (B, P, ...)."""
        return shard_positions(full, 1, self.rank, self.num_ranks)


def shard_positions(full: Tensor, dim: int, rank: int, num_ranks: int) -> Tensor:
    """Return one rank's positions of a tensor that has all positions along `dim`."""
    chunks = full.chunk(2 * num_ranks, dim)
    return torch.cat([chunks[rank], chunks[2 * num_ranks - 1 - rank]], dim)


def unshard_positions(parts: Sequence[Tensor] | Tensor, dim: int) -> Tensor:
    """Return all positions in order along `dim`, from all ranks' shards."""
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)], dim)


def shard_for_all_ranks(full: Tensor, dim: int, num_ranks: int) -> Tensor:
    """Return all ranks' shards, stacked along a new first dim."""
    return torch.stack([shard_positions(full, dim, rank, num_ranks) for rank in range(num_ranks)])


class GatherPositions(torch.autograd.Function):
    """Gather all ranks' positions along `dim`, such as (B, H, P, D) to (B, H, S, D). Backward reduce-scatters."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup, dim: int = 2) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return unshard_positions(all_gather(part[None], 0, group), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        parts = shard_for_all_ranks(grad, ctx.dim, dist.get_world_size(ctx.group))
        return reduce_scatter(parts, 0, ctx.group)[0], None, None


def gather_positions(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather (B, P, ...) to (B, S, ...) on all ranks; differentiable if the dtype is floating-point."""
    if local.is_floating_point():
        full: Tensor = GatherPositions.apply(local, group, 1)
        return full
    # bool is sent as uint8.
    return unshard_positions(all_gather(local.to(torch.uint8)[None], 0, group), 1).to(local.dtype)


def gather_last_tokens(part_BK: Tensor, real_BP: Tensor, sequence_shard: SequenceShard) -> Tensor:
    """Return on all ranks, for each sequence, the row of the rank with its last non-padding token; differentiable.

    Args:
        part_BK: this rank's row of each sequence.
        real_BP: whether this rank's tokens are not padding; bool.
    """
    positions_P = sequence_shard.get_positions(sequence_shard.num_ranks * real_BP.shape[1], part_BK.device)
    last_positions_RB = all_gather(positions_P.where(real_BP, -1).amax(1)[None], 0, sequence_shard.group)
    # A rank has two chunks of each sequence; the row is stored in the second one.
    chunks = gather_positions(torch.stack([torch.zeros_like(part_BK), part_BK], 1), sequence_shard.group)
    second_chunk_B = 2 * sequence_shard.num_ranks - 1 - last_positions_RB.argmax(0)
    return chunks[torch.arange(len(part_BK), device=part_BK.device), second_chunk_B]


def scatter_heads(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange all heads of this rank's positions for its heads of all positions: (B, H, P, D) to (B, H/n, S, D)."""
    by_rank = torch.stack(local.chunk(dist.get_world_size(group), 1))
    return unshard_positions(AllToAll.apply(by_rank, None, None, group), 2)


def gather_heads(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Undo `scatter_heads` for an output with positions before heads: (B, S, H/n, D) to (B, P, H, D)."""
    received = AllToAll.apply(shard_for_all_ranks(local, 1, dist.get_world_size(group)), None, None, group)
    return torch.cat(received.unbind(0), 2)


# -- attention

# Keywords of transformers' attention functions that have the same meaning for a subset of the queries. The mask already
# contains `sliding_window`.
SUPPORTED_OPTIONS = frozenset(
    {"dropout", "scaling", "sliding_window", "softcap", "position_ids", "cache_position", "use_cache"}
    | {"output_router_logits"}
)
PER_HEAD_OPTIONS = frozenset({"s_aux", "sinks"})
MAX_MASK_ELEMENTS = 2**24
"""Maximum elements of a mask. Beyond that, queries are processed in blocks, which are recomputed in backward."""

MaskFunction = Callable[..., Tensor]


@dataclass(eq=False)
class PositionMask:
    """The attention mask of one or more layers for one microbatch, as a function of positions.

    transformers describes every mask (causal, sliding, chunked, ...) by a function of a query's and a key's position,
    and materializes it for consecutive queries. This class keeps the function and evaluates it with transformers' own
    code at this rank's positions. A model that reads the mask tensor itself fails, and is rejected.

    Attributes:
        probe: replaces attention while the model is probed.
        make_mask: transformers' function that materializes a mask.
        function: the mask as a function of sequence, head, query and key indices.
        length, local_length: positions of a full sequence, and of its shard on this rank.
        is_causal: whether a query attends to exactly its own position and all before it.
        arguments: other arguments of `make_mask`.
    """

    sequence_shard: SequenceShard
    probe: AttentionProbe | None
    make_mask: Callable[..., Tensor]
    function: MaskFunction
    length: int
    local_length: int
    is_causal: bool
    arguments: Mapping[str, Any]

    @functools.cached_property
    def query_positions(self) -> Tensor:
        """Positions of the queries that this rank attends with."""
        device, is_ulysses = self.arguments["device"], self.sequence_shard.method == "ulysses"
        return (
            torch.arange(self.length, device=device)
            if is_ulysses
            else self.sequence_shard.get_positions(self.length, device)
        )

    def build(self, query_positions: Tensor, num_keys: int | None = None) -> Tensor:
        """Return the mask of queries at `query_positions` and the first `num_keys` keys: (B, 1, queries, keys)."""

        def at_rows(sequence: Any, head: Any, query: Any, key: Any) -> Tensor:
            return self.function(sequence, head, query_positions[query], key)

        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        lengths = {
            "q_length": query_positions.shape[0],
            "kv_length": num_keys or self.length,
            "q_offset": 0,
            "kv_offset": 0,
        }
        return self.make_mask(mask_function=at_rows, **lengths, **skips, **self.arguments)

    @functools.cached_property
    def full(self) -> Tensor:
        """The mask of all of this rank's queries and all keys."""
        return self.build(self.query_positions)


def attend(
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute an attention layer under context parallelism; transformers calls this.

    Args:
        query: (B, H, P, D) of this rank. Keys and values may have fewer heads.
        attention_mask: a PositionMask.

    Returns:
        The output (B, P, H, D), and None for the attention weights.

    Raises:
        ModelError: the mask is not a PositionMask of these positions, or an option is not known to work on sharded
            positions.
    """
    mask = _check_mask(module, query, key, attention_mask)
    without_mask = mask.is_causal and implementation == "sdpa"
    _check_options(module, options, mask.sequence_shard.method, without_mask=without_mask)
    is_ulysses = mask.sequence_shard.method == "ulysses"
    copies = (
        _count_head_copies(module, query.shape[1], key.shape[1], mask.sequence_shard.num_ranks) if is_ulysses else 1
    )
    call = _AttentionCall(get_attention_function(module, implementation), module, mask, options, without_mask)
    if mask.probe is not None:
        return mask.probe.attend(query, key, value), None
    return call.run_ulysses(query, key, value, copies) if is_ulysses else call.run_allgather(query, key, value), None


@dataclass(frozen=True)
class _AttentionCall:
    """One call of one attention layer.

    Attributes:
        core: the model's own attention function.
        skips_mask: whether transformers would pass no mask, in which case `core` assumes a causal one.
    """

    core: Callable[..., tuple[Tensor, Any]]
    module: nn.Module
    mask: PositionMask
    options: Mapping[str, Any]
    skips_mask: bool

    def run_allgather(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # One collective for both.
        sizes = [key.shape[-1], value.shape[-1]]
        key, value = GatherPositions.apply(torch.cat([key, value], -1), self.mask.sequence_shard.group).split(sizes, -1)
        if not self.skips_mask:
            return self._run_masked(query, key, value)
        # The queries are two chunks of consecutive positions.
        starts = self.mask.sequence_shard.get_chunk_starts(self.mask.length)
        parts = zip(query.split(self.mask.local_length // 2, 2), starts, strict=True)
        return torch.cat([output for rows, start in parts for output in self._run_causal(rows, key, value, start)], 1)

    def run_ulysses(self, query: Tensor, key: Tensor, value: Tensor, num_copies: int) -> Tensor:
        group = self.mask.sequence_shard.group
        if num_copies > 1:
            # Each rank gets the key heads that its query heads read.
            key, value = (each.repeat_interleave(num_copies, 1) for each in (key, value))
        query, key, value = (scatter_heads(each, group) for each in (query, key, value))
        if self.skips_mask:
            return gather_heads(self._run(query, key, value, None), group)
        return gather_heads(self._run_masked(query, key, value), group)

    def _run(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        # Derived from shapes: during recomputation the number of query heads per key head is not known otherwise.
        name, groups = "num_key_value_groups", query.shape[1] // key.shape[1]
        is_set = getattr(self.module, name, None) in (None, groups)
        with nullcontext() if is_set else temporary_attribute(self.module, name, groups):
            return self.core(self.module, query, key, value, mask, **self.options)[0]

    def _run_causal(self, query: Tensor, key: Tensor, value: Tensor, start: int) -> Iterator[Tensor]:
        """Attend with consecutive queries from position `start`, each to all keys up to its own."""
        count = query.shape[2]
        keys = start + count
        step = max(1, MAX_MASK_ELEMENTS // keys)
        if query.device.type != "cpu" and count > 1:
            # Kernels support this mask without materializing it.
            yield self._run(query, key[:, :, :keys], value[:, :, :keys], causal_lower_right(count, keys))
        elif step >= count:
            rows = torch.arange(start, keys, device=query.device)
            yield self._run(query, key[:, :, :keys], value[:, :, :keys], self.mask.build(rows, keys))
        else:
            for first in range(start, keys, step):
                rows = torch.arange(first, min(keys, first + step), device=query.device)
                part = query[:, :, first - start : first - start + step]
                yield self._run_query_block(part, key, value, rows, first + len(rows))

    def _run_masked(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        step = max(1, MAX_MASK_ELEMENTS // (query.shape[0] * self.mask.length))
        if step >= query.shape[2]:
            return self._run(query, key, value, self.mask.full)
        parts = zip(query.split(step, 2), self.mask.query_positions.split(step), strict=True)
        return torch.cat([self._run_query_block(part, key, value, rows, self.mask.length) for part, rows in parts], 1)

    def _run_query_block(self, query: Tensor, key: Tensor, value: Tensor, rows: Tensor, keys: int) -> Tensor:
        """Attend with a block of queries to the first keys. Recompute it in backward to not keep all blocks' masks."""

        def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self._run(query, key, value, self.mask.build(rows, keys))

        key, value = key[:, :, :keys], value[:, :, :keys]
        # The module's own parameters, such as sinks, are in place during forward only, so it cannot be recomputed.
        has_own = any(True for _ in self.module.parameters(recurse=False))
        if has_own or not torch.is_grad_enabled():
            return run(query, key, value)
        output: Tensor = checkpoint(run, query, key, value, use_reentrant=False)
        return output


def _count_head_copies(module: nn.Module, heads: int, kv_heads: int, num_ranks: int) -> int:
    """Return the smallest number of copies of each key head that makes their count divisible by the ranks.

    Raises:
        ModelError: the heads cannot be divided over the ranks.
    """
    name = type(module).__name__
    divides = f"cp_attention='ulysses' divides the heads of attention, but {name}"
    advice = "Set cp_attention=allgather, or choose another cp_size."
    if heads % num_ranks:
        raise ModelError(
            f"{divides} has {heads} of them on each rank, which cp_size={num_ranks} does not divide. {advice}"
        )
    own = [each for each, parameter in module.named_parameters(recurse=False) if heads in parameter.shape]
    if own:
        raise ModelError(f"{divides} holds {own[0]} for all of them. {advice}")
    if kv_heads != heads and not hasattr(module, "num_key_value_groups"):
        raise ModelError(
            f"{name} has fewer key than query heads but no num_key_value_groups, so they cannot be "
            f"divided by cp_attention='ulysses'. {advice}"
        )
    groups = heads // kv_heads
    return next(each for each in range(1, groups + 1) if not groups % each and not kv_heads * each % num_ranks)


def _check_mask(module: nn.Module, query: Tensor, key: Tensor, mask: Any) -> PositionMask:
    name = type(module).__name__
    if not isinstance(mask, PositionMask):
        raise ModelError(
            f"{name} attends with a mask ({type(mask).__name__}) that was not made by transformers' mask functions for "
            f"this step, so it cannot be divided by context parallelism. Set cp_size=1."
        )
    if query.shape[2] != mask.local_length or key.shape[2] != mask.local_length:
        raise ModelError(
            f"{name} attends from {query.shape[2]} to {key.shape[2]} positions where this rank has "
            f"{mask.local_length}, as cross-attention does, which context parallelism cannot divide. Set cp_size=1."
        )
    return mask


def _check_options(module: nn.Module, options: Mapping[str, Any], way: str, *, without_mask: bool) -> None:
    name = type(module).__name__
    for option, value in options.items():
        is_tensor = isinstance(value, Tensor)
        if not is_tensor and not value:
            continue
        if option in PER_HEAD_OPTIONS and way == "ulysses":
            raise ModelError(
                f"{name} gives its attention {option}, for all heads, which cp_attention='ulysses' divides. "
                f"Set cp_attention=allgather."
            )
        if option not in SUPPORTED_OPTIONS | PER_HEAD_OPTIONS | {"is_causal"}:
            value_repr = f"a tensor of shape {tuple(value.shape)}" if is_tensor else repr(value)[:80]
            raise ModelError(
                f"{name} gives its attention {option}={value_repr}, of which it is not known whether it is right on "
                f"a part of the positions. Set cp_size=1."
            )
    requested = options.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if requested is None else requested
    if without_mask and not is_causal:
        raise ModelError(
            f"{name} is given a causal mask but attends without causality (is_causal=False), which context parallelism "
            f"does not do. Set cp_size=1."
        )
