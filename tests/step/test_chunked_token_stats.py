"""Loss and statistics of tokens, computed from rows of hidden states in chunks, are those of whole logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from support.measurements import measure_memory
from support.tiers import mark_mostly_slow
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright import StrategyError
from meshwright.base.types import TokenStatistic
from meshwright.parallel.tensor.collectives import ShardedVocabulary, chunk_sizes
from meshwright.step.chunked_loss import HiddenRows, Projection, compute_token_loss, compute_token_statistics
from meshwright_testing import pool

N, H, V = 23, 6, 19
STATISTICS: tuple[TokenStatistic, ...] = get_args(TokenStatistic)
TRAINED: tuple[TokenStatistic, ...] = ("log_probs", "logsumexp", "entropy", "mean_logit")
"""Those with a gradient."""
Make = Callable[[list[Tensor]], HiddenRows]


def _capped(logits: Tensor) -> Tensor:
    return torch.tanh(logits / 3.0) * 3.0


def _of_capped(given: list[Tensor]) -> HiddenRows:
    call = lambda rows, tensors: _capped(F.linear(rows, *tensors))  # noqa: E731
    return HiddenRows(given[0], tuple(given[1:]), Projection(call, is_linear=False))


KINDS: dict[str, tuple[int, Make, Callable[[list[Tensor]], Tensor]]] = {
    "linear": (2, lambda given: HiddenRows.from_linear(*given), lambda given: F.linear(*given)),
    "with-bias": (3, lambda given: HiddenRows.from_linear(*given), lambda given: F.linear(*given)),
    "capped": (3, _of_capped, lambda given: _capped(F.linear(*given))),
    "logits": (1, lambda given: HiddenRows.from_logits(given[0]), lambda given: given[0]),
}


def _inputs(count: int, *, dtype: torch.dtype = torch.float64, entries: int = V) -> tuple[list[Tensor], Tensor]:
    """Hidden states, weight and bias; and targets, some of them masked."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(N, H), (entries, H), (entries,)] if count > 1 else [(N, entries)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes[:count]]
    ids_N = torch.randint(entries, (N,), generator=generator)
    ids_N[::4] = -100
    return [each.requires_grad_() for each in made], ids_N


def _expected(logits_NV: Tensor, ids_NK: Tensor) -> dict[str, Tensor]:
    log_NV = logits_NV.log_softmax(-1)
    has_id_NK = ids_NK >= 0
    local_NK = ids_NK.clamp(min=0)
    is_highest_NK = has_id_NK & (logits_NV.gather(1, local_NK) == logits_NV.amax(-1, keepdim=True))
    return {
        "log_probs": torch.where(has_id_NK, log_NV.gather(1, local_NK), 0.0),
        "logsumexp": logits_NV.logsumexp(-1),
        "entropy": -(log_NV.exp() * log_NV).sum(-1),
        "mean_logit": logits_NV.mean(-1),
        "is_top1": is_highest_NK[:, 0] if ids_NK.shape[1] else torch.zeros(len(ids_NK), dtype=torch.bool),
    }


def _columns(ids_N: Tensor, count: int, logits_NV: Tensor) -> Tensor:
    """So many columns of ids, the first of which is often that of the highest logit. The others are random, missing, or
    that of the first again."""
    generator = torch.Generator().manual_seed(5)
    ids_NK = torch.randint(logits_NV.shape[1], (N, count), generator=generator)
    if count:
        ids_NK[:, 0] = torch.where((ids_N >= 0) & (torch.arange(N) % 3 > 0), logits_NV.argmax(-1), ids_N)
    for column in range(1, count):
        ids_NK[column::3, column] = -100
        ids_NK[column + 1 :: 3, column] = ids_NK[column + 1 :: 3, 0]
    return ids_NK


def _weighed(found: dict[str, Tensor], names: Sequence[TokenStatistic] = TRAINED) -> Tensor:
    """A sum in which each value of each statistic counts differently."""
    total = torch.zeros((), dtype=torch.float64)
    for power, name in enumerate(TRAINED):
        if name in names:
            factors = torch.linspace(-1.0, 2.0, found[name].numel(), dtype=torch.float64).view_as(found[name])
            total = total + (found[name] * factors ** (power + 1)).sum()
    return total


def _same_gradients(found: Tensor, expected: Tensor, given: list[Tensor], tolerance: float = 1e-12) -> None:
    mine = torch.autograd.grad(found, given, retain_graph=True)
    for one, other in zip(mine, torch.autograd.grad(expected, given, retain_graph=True), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk_rows", [1, 5, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_statistics_and_loss_and_their_gradients_are_those_of_whole_logits(kind: str, chunk_rows: int) -> None:
    count, make, logits_of = KINDS[kind]
    given, ids_N = _inputs(count)
    for columns in (0, 1, 3):
        ids_NK = _columns(ids_N, columns, logits_of(given).detach())
        expected = _expected(logits_of(given), ids_NK)
        found = compute_token_statistics(make(given), ids_NK, STATISTICS, chunk_rows=chunk_rows)
        assert not found["is_top1"].requires_grad
        for name in STATISTICS:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-13, atol=1e-13)
            # One by one, so that none makes up for another; asked for alone, and with others of which no gradient is.
            alone = compute_token_statistics(make(given), ids_NK, [name], chunk_rows=chunk_rows)
            assert torch.equal(alone[name], found[name])
            for each in (alone, found) if name in TRAINED else ():
                _same_gradients(_weighed(each, [name]), _weighed(expected, [name]), given)
        _same_gradients(_weighed(found), _weighed(expected), given)
    assert 0 < int(expected["is_top1"].sum()) < N
    whole = _expected(logits_of(given), ids_N[:, None])["log_probs"].sum()
    loss = compute_token_loss(make(given), ids_N, torch.tensor(7), chunk_rows=chunk_rows)
    torch.testing.assert_close(loss, -whole / 7, rtol=1e-13, atol=1e-13)
    _same_gradients(3 * loss, -whole / 7 * 3, given)


def _shared_out(entries: int, ids_NK: Tensor) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
    """Statistics, and the gradients of hidden states (summed over ranks) and of this rank's part of the weight."""
    (hidden, weight, bias), ids_N = _inputs(3, entries=entries)
    group: Any = dist.group.WORLD
    vocabulary = ShardedVocabulary.from_group(group, entries)
    here = slice(vocabulary.start, vocabulary.start + chunk_sizes(entries, group.size())[group.rank()])
    mine = [hidden, weight[here].detach().requires_grad_(), bias[here].detach().requires_grad_()]
    rows = HiddenRows.from_linear(*mine, vocabulary=vocabulary)
    found = compute_token_statistics(rows, ids_NK, STATISTICS, chunk_rows=5)
    gradients = torch.autograd.grad(_weighed(found), mine)
    of_loss = torch.autograd.grad(compute_token_loss(rows, ids_N, torch.tensor(7), chunk_rows=5), mine)
    for each in (gradients[0], of_loss[0]):
        dist.all_reduce(each)
    return {name: each.detach() for name, each in found.items()}, list(gradients), list(of_loss)


@pytest.mark.parametrize(("ranks", "entries"), mark_mostly_slow([(2, V), (3, 4)]))
def test_ranks_that_share_the_vocabulary_find_what_one_does(ranks: int, entries: int) -> None:
    """Of four entries, the third rank has none."""
    given, ids_N = _inputs(3, entries=entries)
    logits_NV = F.linear(*given)
    of_loss = torch.autograd.grad(
        -_expected(logits_NV, ids_N[:, None])["log_probs"].sum() / 7, given, retain_graph=True
    )
    for columns in (0, 1, 3):
        ids_NK = _columns(ids_N, columns, logits_NV.detach())
        expected = _expected(logits_NV, ids_NK)
        gradients = torch.autograd.grad(_weighed(expected), given, retain_graph=True)
        answers = pool(ranks).run(_shared_out, entries, ids_NK)
        for found, *of_both in answers:
            for name in STATISTICS:
                torch.testing.assert_close(found[name], expected[name].detach(), rtol=1e-13, atol=1e-13)
            for mine, theirs in zip(of_both, (gradients, of_loss), strict=True):
                torch.testing.assert_close(mine[0], theirs[0], rtol=1e-12, atol=1e-12)
        for index, theirs in ((1, gradients), (2, of_loss)):
            for tensor in (1, 2):
                whole = torch.cat([answer[index][tensor] for answer in answers])
                torch.testing.assert_close(whole, theirs[tensor], rtol=1e-12, atol=1e-12)


def test_the_probability_of_a_token_that_is_almost_certain_has_a_gradient_in_half_precision() -> None:
    """However many others are asked for beside it: p - 1 is rounded once."""
    logits_NV = torch.zeros(4, V, dtype=torch.bfloat16)
    logits_NV[:, 3] = 12.0
    logits_NV.requires_grad_()
    for ids in ([3], [3, -100], [3, 5]):
        ids_NK = torch.tensor([ids]).expand(4, -1)
        found = compute_token_statistics(HiddenRows.from_logits(logits_NV), ids_NK, ["log_probs"], chunk_rows=3)[
            "log_probs"
        ][:, 0]
        expected = torch.autograd.grad(logits_NV.float().log_softmax(-1)[:, 3].sum(), logits_NV)[0]
        torch.testing.assert_close(torch.autograd.grad(found.sum(), logits_NV)[0], expected, rtol=1e-2, atol=0.0)


def test_half_precision_is_computed_in_float32_and_rounded_once() -> None:
    given, ids_N = _inputs(3, dtype=torch.bfloat16)
    # A token that is almost certain: its gradient is p - 1, of which nothing is left where p is rounded first.
    with torch.no_grad():
        given[2][int(ids_N[1])] += 12.0
    loss = compute_token_loss(HiddenRows.from_linear(*given), ids_N, torch.tensor(1), chunk_rows=N)
    logits_NV = F.linear(*given)
    whole = F.cross_entropy(logits_NV.float(), ids_N, reduction="sum")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=1e-6)
    for one, other in zip(torch.autograd.grad(loss, given), torch.autograd.grad(whole, given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_is_frozen_gets_no_gradient_and_what_trains_gets_its_own(frozen: int) -> None:
    given, ids_N = _inputs(3)
    loss = compute_token_loss(HiddenRows.from_linear(*given), ids_N, torch.tensor(1), chunk_rows=5)
    expected = torch.autograd.grad(loss, given)
    given[frozen].requires_grad_(False)
    compute_token_loss(HiddenRows.from_linear(*given), ids_N, torch.tensor(1), chunk_rows=5).backward()
    for index, each in enumerate(given):
        assert each.grad is None if index == frozen else torch.equal(each.grad, expected[index])


def test_gradients_that_wait_for_a_backward_are_made_for_one_microbatch_only() -> None:
    given, ids_N = _inputs(2)
    waiting: WeakSet[Any] = WeakSet()

    def make() -> Any:
        rows = HiddenRows.from_linear(*given)
        return compute_token_loss(rows, ids_N, torch.tensor(7), chunk_rows=5, pending_gradients=waiting)

    first, second = make(), make()
    assert len(waiting) == 1
    # Computed again in backward, which holds what it was given.
    assert second.item() == pytest.approx(first.item(), abs=1e-14)
    _same_gradients(first, second, given)
    assert not waiting
    third = make()
    assert len(waiting) == 1
    third.backward(retain_graph=True)
    with torch.no_grad():
        make()
    assert not waiting
    with pytest.raises(StrategyError, match="was run twice"):
        third.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_of_rows_times_vocabulary_lives(dtype: torch.dtype) -> None:
    head = nn.Linear(4, 1000, bias=False, dtype=dtype)
    head.hidden = nn.Parameter(torch.randn(64, 4, dtype=dtype))

    def work() -> None:
        rows = HiddenRows.from_linear(head.hidden, head.weight)
        compute_token_loss(rows, torch.arange(64), torch.tensor(64), chunk_rows=8).backward()

    peak = measure_memory(work, [head]).peak
    gradients = sum(each.nbytes for each in head.parameters())
    # The logits of a chunk once, or in half precision in float32 and as their gradient; and numbers of each row.
    logits = 8 * 1000 * (4 if dtype == torch.float32 else 4 + 2)
    assert logits + gradients <= peak.total - peak.parameters <= logits + gradients + 4096
