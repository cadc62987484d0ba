"""Which rank has which positions, and attention of this rank's queries by the model's own attention function.

A sequence is cut into 2n chunks for n ranks, and rank r has the chunks r and 2n - 1 - r: under a causal mask an early
chunk attends to few positions and a late one to many, so all ranks have equal work.

[Note: two ways] "allgather" gathers keys and values of all positions; each rank attends with its own queries.
"ulysses" exchanges positions for heads, so that each rank attends with all positions of its heads, and back. In between
runs the function that the model uses without context parallelism, so softcap, sinks, scaling and dropout are its own.

Shapes: B sequences, H heads, S positions of all ranks, P = S / n of this rank, D features of a head.
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
    """This rank's share of each sequence: its place on the axis `cp`, and how positions are exchanged."""

    group: dist.ProcessGroup
    num_ranks: int
    rank: int
    method: CPAttentionMethod

    def get_positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """Return this rank's positions of a sequence, whose length 2 x `size` divides; int64."""
        return shard_positions(torch.arange(length, device=device), 0, self.rank, self.num_ranks)

    def get_chunk_starts(self, length: int) -> tuple[int, int]:
        """Return the first positions of this rank's two chunks."""
        chunk = length // (2 * self.num_ranks)
        return self.rank * chunk, (2 * self.num_ranks - 1 - self.rank) * chunk

    def shard(self, full: Tensor) -> Tensor:
        """Return this rank's positions of a tensor (B, S, ...)."""
        return shard_positions(full, 1, self.rank, self.num_ranks)


def shard_positions(full: Tensor, dim: int, rank: int, num_ranks: int) -> Tensor:
    """Return a rank's positions of a tensor that has all of them along `dim`."""
    chunks = full.chunk(2 * num_ranks, dim)
    return torch.cat([chunks[rank], chunks[2 * num_ranks - 1 - rank]], dim)


def unshard_positions(parts: Sequence[Tensor] | Tensor, dim: int) -> Tensor:
    """Return all positions in order along `dim`, from the parts of all ranks."""
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)], dim)


def shard_for_all_ranks(full: Tensor, dim: int, num_ranks: int) -> Tensor:
    """Return the parts of all ranks, stacked along a new first dim."""
    return torch.stack([shard_positions(full, dim, rank, num_ranks) for rank in range(num_ranks)])


class GatherPositions(torch.autograd.Function):
    """Gather the positions of all ranks along `dim`, such as (B, H, P, D) to (B, H, S, D); gradients are summed."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup, dim: int = 2) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return unshard_positions(all_gather(part[None], 0, group), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        parts = shard_for_all_ranks(grad, ctx.dim, dist.get_world_size(ctx.group))
        return reduce_scatter(parts, 0, ctx.group)[0], None, None


def gather_positions(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather (B, P, ...) to (B, S, ...) on all ranks, with a gradient if it is floating point."""
    if local.is_floating_point():
        whole: Tensor = GatherPositions.apply(local, group, 1)
        return whole
    # A bool is sent as a byte.
    return unshard_positions(all_gather(local.to(torch.uint8)[None], 0, group), 1).to(local.dtype)


def gather_last_tokens(part_BK: Tensor, real_BP: Tensor, sequence_shard: SequenceShard) -> Tensor:
    """Return for each sequence what the rank with its last token (padding aside) has, on all ranks, with a gradient.

    `part_BK` is what this rank has of each sequence; `real_BP` are its tokens that are no padding, bool.
    """
    positions_P = sequence_shard.get_positions(sequence_shard.num_ranks * real_BP.shape[1], part_BK.device)
    every_RB = all_gather(positions_P.where(real_BP, -1).amax(1)[None], 0, sequence_shard.group)
    # A rank has two pieces of each sequence; the value is put into the second one.
    pieces = gather_positions(torch.stack([torch.zeros_like(part_BK), part_BK], 1), sequence_shard.group)
    second_B = 2 * sequence_shard.num_ranks - 1 - every_RB.argmax(0)
    return pieces[torch.arange(len(part_BK), device=part_BK.device), second_B]


def scatter_heads(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange all heads of this rank's positions for this rank's heads of all: (B, H, P, D) to (B, H/n, S, D)."""
    by_rank = torch.stack(local.chunk(dist.get_world_size(group), 1))
    return unshard_positions(AllToAll.apply(by_rank, None, None, group), 2)


def gather_heads(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange back an output that has positions before heads: (B, S, H/n, D) to (B, P, H, D)."""
    received = AllToAll.apply(shard_for_all_ranks(local, 1, dist.get_world_size(group)), None, None, group)
    return torch.cat(received.unbind(0), 2)


# -- attention

# Keywords of transformers' attention functions that mean the same for a part of the queries. `sliding_window` is in the
# mask already.
SUPPORTED_OPTIONS = frozenset(
    {"dropout", "scaling", "sliding_window", "softcap", "position_ids", "cache_position", "use_cache"}
    | {"output_router_logits"}
)
PER_HEAD_OPTIONS = frozenset({"s_aux", "sinks"})
MAX_MASK_ELEMENTS = 2**24
"""Elements of a mask; with more, queries are taken in blocks, which are recomputed in backward."""

MaskFunction = Callable[..., Tensor]


@dataclass(eq=False)
class PositionMask:
    """The attention mask of some layers for one microbatch, as a function of positions.

    Transformers describes every mask (causal, sliding, chunked, ...) by a function of a query's and a key's position,
    from which it makes a tensor for consecutive queries. The function (of sequence, head, query and key) is kept here
    and evaluated by transformers' own code, `make`, at this rank's positions. A model that looks into its mask fails,
    and is refused. `observer` replaces attention while the model is checked; `length` and `part` are positions of a
    full sequence, and of it on this rank; `is_causal`: a query attends to exactly its own position and all before.
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
        """The positions of the queries from which this rank attends."""
        device, exchanges = self.arguments["device"], self.sequence_shard.method == "ulysses"
        return (
            torch.arange(self.length, device=device)
            if exchanges
            else self.sequence_shard.get_positions(self.length, device)
        )

    def build(self, query_positions: Tensor, num_keys: int | None = None) -> Tensor:
        """Return the mask of queries at `query_positions` and the first `num_keys` keys: (B, 1, rows, keys)."""

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
        """The mask of all these queries and all keys."""
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

    The query is (B, H, P, D) of this rank, keys and values have as many heads or fewer, and the mask is a PositionMask.
    An option that is not known to be right for a part of the positions raises ModelError. Returns (B, P, H, D).
    """
    mask = _check_mask(module, query, key, attention_mask)
    without_mask = mask.is_causal and implementation == "sdpa"
    _check_options(module, options, mask.sequence_shard.method, without_mask=without_mask)
    exchanges = mask.sequence_shard.method == "ulysses"
    copies = _count_head_copies(module, query.shape[1], key.shape[1], mask.sequence_shard.num_ranks) if exchanges else 1
    layer = _AttentionCall(get_attention_function(module, implementation), module, mask, options, without_mask)
    if mask.probe is not None:
        return mask.probe.attend(query, key, value), None
    return layer.run_ulysses(query, key, value, copies) if exchanges else layer.run_allgather(query, key, value), None


@dataclass(frozen=True)
class _AttentionCall:
    """One call of one layer, whose attention function is `core`.

    `skips_mask`: transformers would give it no mask, and it would assume a causal one.
    """

    core: Callable[..., tuple[Tensor, Any]]
    module: nn.Module
    mask: PositionMask
    options: Mapping[str, Any]
    skips_mask: bool

    def run_allgather(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # One message for both.
        sizes = [key.shape[-1], value.shape[-1]]
        key, value = GatherPositions.apply(torch.cat([key, value], -1), self.mask.sequence_shard.group).split(sizes, -1)
        if not self.skips_mask:
            return self._run_masked(query, key, value)
        # Two chunks of consecutive queries.
        starts = self.mask.sequence_shard.get_chunk_starts(self.mask.length)
        parts = zip(query.split(self.mask.local_length // 2, 2), starts, strict=True)
        return torch.cat([output for rows, start in parts for output in self._run_causal(rows, key, value, start)], 1)

    def run_ulysses(self, query: Tensor, key: Tensor, value: Tensor, num_copies: int) -> Tensor:
        group = self.mask.sequence_shard.group
        if num_copies > 1:
            # Each rank gets the heads that its queries read.
            key, value = (each.repeat_interleave(num_copies, 1) for each in (key, value))
        query, key, value = (scatter_heads(each, group) for each in (query, key, value))
        if self.skips_mask:
            return gather_heads(self._run(query, key, value, None), group)
        return gather_heads(self._run_masked(query, key, value), group)

    def _run(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        # From the tensors' shapes: in recomputation nothing else knows how many query heads read a key head.
        name, groups = "num_key_value_groups", query.shape[1] // key.shape[1]
        is_set = getattr(self.module, name, None) in (None, groups)
        with nullcontext() if is_set else temporary_attribute(self.module, name, groups):
            return self.core(self.module, query, key, value, mask, **self.options)[0]

    def _run_causal(self, query: Tensor, key: Tensor, value: Tensor, start: int) -> Iterator[Tensor]:
        """Attend from consecutive positions, from `start` on, each to all keys up to its own."""
        count = query.shape[2]
        keys = start + count
        step = max(1, MAX_MASK_ELEMENTS // keys)
        if query.device.type != "cpu" and count > 1:
            # Kernels know this mask and make no tensor of it.
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
        """Attend from queries at `rows` to the first keys, recomputed in backward: all masks together are too large."""

        def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self._run(query, key, value, self.mask.build(rows, keys))

        key, value = key[:, :, :keys], value[:, :, :keys]
        # Parameters that the function reads itself, such as sinks, are in place during forward only.
        has_own = any(True for _ in self.module.parameters(recurse=False))
        if has_own or not torch.is_grad_enabled():
            return run(query, key, value)
        output: Tensor = checkpoint(run, query, key, value, use_reentrant=False)
        return output


def _count_head_copies(module: nn.Module, heads: int, kv_heads: int, num_ranks: int) -> int:
    """Return how many copies of each key head make their number divisible by the ranks; raises ModelError."""
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
            f"{name} attends from {query.shape[2]} to {key.shape[2]} positions where this rank has {mask.local_length}, as "
            f"cross-attention does, which context parallelism cannot divide. Set cp_size=1."
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
            shown = f"a tensor of shape {tuple(value.shape)}" if is_tensor else repr(value)[:80]
            raise ModelError(
                f"{name} gives its attention {option}={shown}, of which it is not known whether it is right on "
                f"a part of the positions. Set cp_size=1."
            )
    given = options.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if given is None else given
    if without_mask and not is_causal:
        raise ModelError(
            f"{name} is given a causal mask but attends without causality (is_causal=False), which context parallelism "
            f"does not do. Set cp_size=1."
        )
