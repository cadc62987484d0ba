"""The collectives of tensor parallelism and its loss against the same arithmetic on whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.base.types import IGNORE_INDEX
from meshwright.parallel.tensor.collectives import (
    Copy,
    Gather,
    GatherWithPartialGrad,
    Reduce,
    ReduceScatter,
    ShardedVocabulary,
    Split,
    chunk_sizes,
    gather_uneven,
)
from meshwright.step.chunked_loss import HiddenRows, compute_token_loss
from meshwright.step.tokens import shift_labels, sum_token_loss
from meshwright.tracing.collectives import record_collectives
from meshwright_testing import pool


def test_chunks_are_those_of_torch() -> None:
    for size in range(1, 12):
        for count in range(1, 7):
            sizes = [len(chunk) for chunk in torch.arange(size).chunk(count)]
            assert chunk_sizes(size, count) == sizes + [0] * (count - len(sizes))
    assert chunk_sizes(0, 3) == [0, 0, 0]


# -- autograd functions: chains of them take a leaf, equal on all ranks, to a scalar that is too; weights, of which each
#    rank has its own where a tensor is used in parts, make every element count differently

SHAPE = (3, 8, 5)


def _leaf(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def _weights(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 + seed), dtype=torch.float64)


def _own(tensor: Tensor, dim: int) -> Tensor:
    sizes = chunk_sizes(tensor.shape[dim], dist.get_world_size())
    return tensor.split(sizes, dim)[dist.get_rank()]


def _whole_weights(ranks: int) -> Tensor:
    return torch.stack([_weights(rank) for rank in range(ranks)]).sum(0)


def _in_parts(whole: Tensor, group: Any) -> Tensor:
    """The sum over ranks of a tensor that each uses in part, with weights of its own."""
    return Reduce.apply((_weights(dist.get_rank()) * whole).sum(), group)


def _given_whole(x: Tensor, dim: int, group: Any) -> Tensor:
    part = Split.apply(x, dim, group) ** 2
    return GatherWithPartialGrad.apply(part, gather_uneven(part.detach(), dim, x.shape[dim], group), dim, group)


def _of_chunks(part: Tensor, x: Tensor, dim: int, group: Any) -> Tensor:
    return Gather.apply(part**2, dim, x.shape[dim], group)


def _partial(x: Tensor, dim: int, group: Any) -> Tensor:
    return ReduceScatter.apply(_weights(dist.get_rank()) * Copy.apply(x, group), dim, group)


Chain = Callable[[Tensor, int, Any], Tensor]
Whole = Callable[[Tensor, int], Tensor]
SQUARES: Whole = lambda x, ranks: (_whole_weights(ranks) * x**2).sum()  # noqa: E731
CHAINS: dict[str, tuple[Chain, Whole, bool]] = {
    "copy-reduce": (lambda x, dim, group: _in_parts(Copy.apply(x, group) ** 2, group), SQUARES, True),
    "split-gather": (
        lambda x, dim, group: (_weights(0) * _of_chunks(Split.apply(x, dim, group), x, dim, group)).sum(),
        lambda x, ranks: (_weights(0) * x**2).sum(),
        True,
    ),
    "split-gather_for_parts": (
        lambda x, dim, group: _in_parts(
            GatherWithPartialGrad.apply(Split.apply(x, dim, group) ** 2, None, dim, group), group
        ),
        SQUARES,
        False,
    ),
    "split-given_for_parts": (lambda x, dim, group: _in_parts(_given_whole(x, dim, group), group), SQUARES, False),
    "reduce_scatter-gather": (
        lambda x, dim, group: (_weights(9) * _of_chunks(_partial(x, dim, group), x, dim, group)).sum(),
        lambda x, ranks: (_weights(9) * (_whole_weights(ranks) * x) ** 2).sum(),
        False,
    ),
}
"""By name: the chain, what it computes, and whether it takes sizes that the ranks do not divide."""


def _run_chain(name: str, dim: int) -> tuple[Tensor, Tensor]:
    x = _leaf(0)
    value = CHAINS[name][0](x, dim, dist.group.WORLD)
    value.backward()
    assert x.grad is not None
    return value.detach(), x.grad


TWO_OR_FOUR = pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])


@TWO_OR_FOUR
@pytest.mark.parametrize(
    ("name", "dim"), [(name, dim) for name, chain in CHAINS.items() for dim in (0, 1, -1) if chain[2] or dim == 1]
)
def test_collectives_and_their_gradients_are_those_of_whole_tensors(name: str, dim: int, ranks: int) -> None:
    x = _leaf(0)
    expected = CHAINS[name][1](x, ranks)
    expected.backward()
    for value, grad in pool(ranks).run(_run_chain, name, dim):
        torch.testing.assert_close(value, expected.detach(), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(grad, x.grad, rtol=1e-13, atol=1e-13)


def _chunks() -> list[Tensor]:
    whole = torch.arange(20.0).view(2, 10).T
    return [gather_uneven(_own(whole, dim), dim, whole.shape[dim], dist.group.WORLD) for dim in (0, 1, -1, -2)]


@TWO_OR_FOUR
def test_gather_puts_uneven_chunks_in_order_also_empty_ones_and_strided_tensors(ranks: int) -> None:
    whole = torch.arange(20.0).view(2, 10).T
    for gathered in pool(ranks).run(_chunks):
        assert all(torch.equal(each, whole) for each in gathered)


# -- the loss


def _labels(shape: tuple[int, int], vocab: int, masked: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    labels_BS = torch.randint(0, vocab, shape, generator=generator)
    # The ends of every rank's part.
    labels_BS[0, : min(vocab, shape[1])] = torch.arange(vocab)[: shape[1]]
    if masked == "ragged":
        labels_BS[torch.rand(shape, generator=generator) < 0.4] = IGNORE_INDEX
        labels_BS[1] = IGNORE_INDEX
    if masked == "all":
        labels_BS[:] = IGNORE_INDEX
    return labels_BS


def _logits(shape: tuple[int, int], vocab: int, dtype: torch.dtype, scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return (torch.randn(*shape, vocab, generator=generator, dtype=torch.float64) * scale).to(dtype)


def _of_shards(logits_BSL: Tensor, labels_BS: Tensor, vocab: int) -> Tensor:
    vocabulary = ShardedVocabulary.from_group(dist.group.WORLD, vocab)
    rows = HiddenRows.from_logits(logits_BSL, vocabulary=vocabulary)
    return compute_token_loss(rows, shift_labels(labels_BS).flatten(), torch.tensor(1), chunk_rows=10)


def _sharded_loss(vocab: int, dtype: torch.dtype, scale: float, masked: str) -> tuple[Tensor, Tensor, int]:
    """Loss, gradient of this rank's logits, bytes communicated."""
    whole_BSV = _logits((3, 9), vocab, dtype, scale)
    sizes = chunk_sizes(vocab, dist.get_world_size())
    start = sum(sizes[: dist.get_rank()])
    logits_BSL = whole_BSV[..., start : start + sizes[dist.get_rank()]].clone().requires_grad_()
    before_BSL = logits_BSL.detach().clone()
    labels_BS = _labels((3, 9), vocab, masked)
    losses: list[Tensor] = []

    def work() -> None:
        losses.append(_of_shards(logits_BSL, labels_BS, vocab))
        (losses[0] / 7).backward()

    traffic = record_collectives(work)
    assert torch.equal(logits_BSL.detach(), before_BSL), "logits were changed in place"
    assert logits_BSL.grad is not None
    return losses[0].detach(), logits_BSL.grad, traffic.nbytes


@pytest.mark.parametrize(
    ("vocab", "dtype", "scale", "masked"),
    [
        (7, torch.float64, 1.0, "ragged"),
        (7, torch.float64, 1.0, "all"),
        # Of four ranks, two have no entry.
        (2, torch.float64, 1.0, "none"),
        # exp() of these overflows.
        (7, torch.float32, 1e4, "ragged"),
        (131, torch.bfloat16, 4.0, "ragged"),
    ],
    ids=str,
)
@TWO_OR_FOUR
def test_loss_of_sharded_logits_is_that_of_whole_ones(ranks, vocab, dtype, scale, masked):
    whole_BSV = _logits((3, 9), vocab, dtype, scale).requires_grad_()
    expected = sum_token_loss(whole_BSV, _labels((3, 9), vocab, masked))
    (expected / 7).backward()
    answers = pool(ranks).run(_sharded_loss, vocab, dtype, scale, masked)
    grad_BSV = torch.cat([grad for _, grad, _ in answers], -1)
    # Half precision is computed in float32, and its gradient rounded to its own.
    rtol, atol = {torch.float64: (1e-13, 1e-13), torch.float32: (1e-6, 1e-6)}.get(dtype, (1e-2, 1e-4))
    for loss, grad, sent in answers:
        assert loss.dtype == expected.dtype
        assert grad.dtype == dtype
        torch.testing.assert_close(loss, expected.detach(), rtol=min(rtol, 1e-6), atol=min(atol, 1e-6))
        # Three numbers of each rank per position, whatever the vocabulary.
        assert sent == ranks * 3 * 3 * 9 * expected.element_size()
    torch.testing.assert_close(grad_BSV, whole_BSV.grad, rtol=rtol, atol=atol)


def _loss_without_mercy() -> list[float]:
    """Logits of -inf, as models give to entries that are never to be chosen; a whole part of them too."""
    logits_BSL = torch.tensor([-torch.inf if dist.get_rank() else 0.0, -torch.inf]).double().repeat(1, 3, 1)
    logits_BSL.requires_grad_()
    loss = _of_shards(logits_BSL, torch.zeros(1, 3, dtype=torch.int64), 4)
    loss.backward()
    assert logits_BSL.grad is not None
    return [float(loss), float(logits_BSL.grad.abs().max())]


def test_entries_that_are_never_chosen_give_no_nan() -> None:
    assert pool(2).run(_loss_without_mercy) == [[0.0, 0.0]] * 2
