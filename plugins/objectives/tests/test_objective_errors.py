"""What can be wrong with an objective: one error on all ranks, naming it, and nothing is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright import BatchError, MeshwrightError, count_tokens
from meshwright.base.types import Batch
from meshwright.step.tokens import Tokens
from meshwright_testing.case import Case, rank_microbatches
from meshwright_testing.parity import build_manager, full_weights
from meshwright_testing.workers import pool


def _weighted(tokens: Tokens, batch: Batch) -> Tensor:
    return -(tokens.log_probs * batch["weights"]).sum()


def _mean(tokens: Tokens, batch: Batch) -> Tensor:
    return -tokens.log_probs.sum() / tokens.mask.sum()


def _vector(tokens: Tokens, batch: Batch) -> Tensor:
    return -tokens.sum_by_sequence(tokens.log_probs)


def _detached(tokens: Tokens, batch: Batch) -> Tensor:
    return -tokens.log_probs.detach().sum()


def _text(tokens: Tokens, batch: Batch) -> Any:
    return "loss"


def _bad_sums(tokens: Tokens, batch: Batch) -> Any:
    return -tokens.log_probs.sum(), {"each": tokens.log_probs}


def _failing(tokens: Tokens, batch: Batch) -> Tensor:
    raise ZeroDivisionError("by nothing")


def _bad_ids(tokens: Tokens, batch: Batch) -> Tensor:
    return tokens.log_probs_for(tokens.targets).sum()


class _Pairs:
    name, group_size = "pairs", 5

    def __call__(self, tokens: Tokens, batch: Batch) -> Tensor:
        return -tokens.log_probs.sum()


class _Needy(_Pairs):
    name, group_size, columns = "needy", 1, ("rewards",)


class _Counting(_Pairs):
    name, group_size = "counting", 1

    def count(self, batch: Batch) -> Any:
        return 0.5


class _OnNothing(_Pairs):
    name, group_size, input_kind = "elsewhere", 1, "hidden"


class _Breaks:
    """As the token loss, until it breaks in one way at the second step, on some ranks."""

    name = "breaking"

    def __init__(self, how: str, breaks: bool) -> None:
        self.how, self.breaks, self.calls = how, breaks, 0

    def __call__(self, tokens: Tokens, batch: Batch) -> Any:
        value, sums = -tokens.log_probs.sum(), {"n": tokens.mask.sum()}
        if not (self.breaks and "break" in batch and bool(batch["break"].any())):
            return value, sums
        if self.how == "raises":
            raise RuntimeError("the ledger is out of ink")
        if self.how == "refuses":
            raise BatchError("the ledger is full")
        if self.how == "nan":
            return value * float("nan"), sums
        if self.how == "names":
            return value, {"m": sums["n"]}
        return value[None], sums


def _batches(step: int, data_rank: int, data_size: int, **columns: Callable[[Tensor], Tensor]) -> list[Batch]:
    return [
        {**batch, **{name: make(batch["input_ids"]) for name, make in columns.items()}}
        for batch in rank_microbatches(Case(microbatches=2), step, data_rank, data_size)
    ]


LAYOUTS: list[Any] = [
    pytest.param("ddp", {}, {}, 2, id="ddp"),
    pytest.param("fsdp2", {}, {"cp_size": 2}, 2, id="cp2", marks=pytest.mark.slow),
    pytest.param("fsdp2", {}, {"pp_size": 2}, 4, id="pp2", marks=pytest.mark.slow),
]


def _refused(strategy: str, config: Any, sizes: Any, case: str) -> tuple[str, bool]:
    """The error of the first step, and whether the weights are as they were and the next step trains."""
    manager = build_manager(strategy, config, sizes, Case())
    mesh = manager.mesh
    before = full_weights(manager)
    columns: dict[str, Callable[[Tensor], Tensor]] = {"weights": lambda ids: ids.double().sin()}
    objective, on_this = CASES[case][0], mesh.rank == 0
    if case == "column of one rank":
        columns = columns if on_this else {}
    elif case == "dtype of one rank" and on_this:
        columns = {"weights": lambda ids: ids}
    elif case == "short column":
        columns = {"weights": lambda ids: ids.double()[:1]}
    elif case == "no column":
        columns = {}
    elif case == "other objectives" and on_this:
        objective = _Needy.__call__
    batches = _batches(0, mesh.data_rank, mesh.data_size, **columns)
    try:
        tokens = torch.tensor(7) if case != "count" else count_tokens(batches, mesh, objective)
        manager.forward_backward(batches, num_tokens=tokens, objective=objective)
        reported = "no error"
    except MeshwrightError as error:
        reported = f"{type(error).__name__}: {error}"
    is_same = all(torch.equal(before[name], each) for name, each in full_weights(manager).items())
    good = _batches(1, mesh.data_rank, mesh.data_size, weights=lambda ids: ids.double().sin())
    loss = manager.forward_backward(good, num_tokens=count_tokens(good, mesh), objective=_weighted)
    manager.optimizer_step()
    trained = any(not torch.equal(before[name], each) for name, each in full_weights(manager).items())
    return reported, is_same and trained and bool(loss.isfinite())


CASES: dict[str, tuple[Any, str]] = {
    "mean": (_mean, "ConfigError: the objective '_mean' gives * it is no sum over sequences"),
    "vector": (_vector, "ConfigError: the objective '_vector' returns a tensor of torch.float64 (2,)"),
    "detached": (_detached, "ConfigError: the objective '_detached' returns a value without a gradient"),
    "text": (_text, "ConfigError: the objective '_text' returns a value of type str"),
    "sums": (_bad_sums, "ConfigError: the objective '_bad_sums' returns a tensor of torch.float64 *as 'each'"),
    "failing": (_failing, "ConfigError: the objective '_failing' fails: ZeroDivisionError: by nothing"),
    "ids": (_bad_ids, "ConfigError: log_probs_for takes int64 ids of shape (B, S, K)"),
    "pairs": (_Pairs(), "BatchError: *cannot be taken 5 by 5, as the objective 'pairs' takes them"),
    "needy": (_Needy(), "BatchError: *lacks the column 'rewards', which the objective 'needy' needs"),
    "count": (_Counting(), "BatchError: the count of objective 'counting' must be an int, at least 0, not 0.5"),
    "on": (_OnNothing(), "BatchError: the objective 'elsewhere' has input_kind='hidden'"),
    "not callable": (3, "BatchError: objective must be callable as objective(tokens, batch), not 3"),
    "column of one rank": (_weighted, "BatchError: ranks disagree on the objective, or on the columns"),
    "dtype of one rank": (_weighted, "BatchError: ranks disagree on the objective, or on the columns"),
    "short column": (_weighted, "BatchError: *weights has the shape (1, 16)"),
    "no column": (_weighted, "ConfigError: the objective '_weighted' asks for 'weights', which the batch has not"),
    "other objectives": (_weighted, "BatchError: ranks disagree on the objective, or on the columns"),
}
"""The objective, and the beginning of its error; * stands for anything before the rest."""


SLOW = pytest.mark.slow
FIRST = ("mean", "column of one rank", "failing")


@pytest.mark.parametrize(("strategy", "config", "sizes", "ranks"), LAYOUTS)
@pytest.mark.parametrize("case", [pytest.param(name, marks=() if name in FIRST else SLOW) for name in CASES])
def test_an_objective_that_is_none_is_refused_before_the_first_step(strategy, config, sizes, ranks, case):
    found = pool(ranks).run(_refused, strategy, config, sizes, case)
    assert len(set(found)) == 1, found
    reported, is_sound = found[0]
    start, *rest = CASES[case][1].split("*")
    assert reported.startswith(start), reported
    assert all(each in reported for each in rest), reported
    assert is_sound


def _breaking(strategy: str, config: Any, sizes: Any, how: str, reads: bool) -> tuple[str, bool]:
    """The error at the second step, where the objective breaks on one data rank, and whether that trained nothing."""
    manager = build_manager(strategy, config, sizes, Case())
    mesh = manager.mesh
    objective = _Breaks(how, mesh.data_rank == mesh.data_size - 1)
    reported, weights = "no error", {}
    for step in range(2):
        batches = _batches(
            step, mesh.data_rank, mesh.data_size, **{"break": lambda ids, step=step: torch.full_like(ids[:, 0], step)}
        )
        num_tokens = manager.begin_step_sync(batches, objective=objective)
        weights = full_weights(manager)
        try:
            loss = manager.forward_backward(batches, num_tokens=num_tokens, objective=objective)
            if reads:
                manager.read_scalars(loss, manager.clip_grad_norm(1.0))
            manager.optimizer_step()
        except MeshwrightError as error:
            reported = f"{type(error).__name__} in step {step + 1}: {error}"
    after = full_weights(manager)
    held = any(p.grad is not None for part in manager.model_parts for p in part.parameters())
    return reported, not held and all(torch.equal(weights[name], each) for name, each in after.items())


@pytest.mark.parametrize(("strategy", "config", "sizes", "ranks"), LAYOUTS)
@pytest.mark.parametrize(
    ("how", "text", "reads"),
    [
        ("raises", "ConfigError in step 2: the objective 'breaking' fails: RuntimeError: the ledger is out of", True),
        ("refuses", "BatchError in step 2: the ledger is full", False),
        ("nan", "NonFiniteError in step 2: the objective 'breaking' is not finite", True),
        ("nan", "NonFiniteError in step 2: the objective 'breaking' is not finite", False),
        ("names", "ConfigError in step 2: the objective 'breaking' returns sums named ['m']", False),
        ("shape", "ConfigError in step 2: the objective 'breaking' returns a tensor of torch.float64 (1,)", True),
    ],
)
def test_an_objective_that_breaks_on_one_rank_is_reported_on_all_and_trains_nothing(
    strategy: str, config: Any, sizes: Any, ranks: int, how: str, text: str, reads: bool
) -> None:
    found = pool(ranks).run(_breaking, strategy, config, sizes, how, reads)
    assert len(set(found)) == 1, found
    reported, trained_nothing = found[0]
    assert reported.startswith(text), reported
    assert trained_nothing


def _broken_evaluation(strategy: str, config: Any, sizes: Any) -> list[str]:
    manager = build_manager(strategy, config, sizes, Case())
    mesh = manager.mesh
    reported = []
    for how in ("raises", "nan"):
        objective = _Breaks(how, mesh.data_rank == mesh.data_size - 1)
        batches = _batches(0, mesh.data_rank, mesh.data_size, **{"break": lambda ids: torch.zeros_like(ids[:, 0])})
        manager.eval_loss(batches, num_tokens=torch.tensor(7), objective=objective)
        batches = [{**batch, "break": torch.ones_like(batch["break"])} for batch in batches]
        try:
            manager.eval_loss(batches, num_tokens=torch.tensor(7), objective=objective)
        except MeshwrightError as error:
            reported.append(f"{type(error).__name__}: {error}")
    try:
        manager.token_stats(batches, ["log_probs", "perplexity"])  # type: ignore[list-item]
    except MeshwrightError as error:
        reported.append(f"{type(error).__name__}: {error}")
    return reported


@pytest.mark.parametrize(("strategy", "config", "sizes", "ranks"), LAYOUTS)
def test_an_evaluation_tells_what_breaks_in_it_on_all_ranks(strategy: str, config: Any, sizes: Any, ranks: int) -> None:
    found = pool(ranks).run(_broken_evaluation, strategy, config, sizes)
    assert all(each == found[0] for each in found), found
    raised, nan, stats = found[0]
    assert raised.startswith("ConfigError: the objective 'breaking' fails")
    assert nan.startswith("NonFiniteError: the objective 'breaking' is not finite")
    assert "there is no 'perplexity'; there are log_probs, logsumexp" in stats
