"""Activations within a budget, or in host memory: what is held to the byte, and that nothing else changes."""

from __future__ import annotations

import functools
import itertools
import re
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checkpoints import catch_error_text
from support.measurements import measure_memory
from support.tiers import mark_mostly_slow
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.base.errors import ConfigError
from meshwright.model import forward_order
from meshwright.model.activation_budget import (
    SINGLE_STAGE,
    ActivationPlan,
    BackwardStart,
    BudgetedBlocks,
    SavedActivations,
)
from meshwright.model.activation_options import ActivationOptions
from meshwright.model.forward_order import WrapOrder
from meshwright.model.layout import infer_layout
from meshwright.model.offload import OffloadedBlocks
from meshwright.model.operators import BlockProfile, Operator
from meshwright.model.recompute import checkpoint_blocks
from meshwright.step.tokens import sum_token_loss
from meshwright.tensors.ops import list_tensors
from meshwright.testing import Case
from meshwright.tracing.observers import OperationObserver
from meshwright_testing import pool
from meshwright_testing.models import build_case_model, case_vocab_size
from meshwright_testing.parity import build_manager, full_weights, train_steps

LARGE = 1e3
"""A budget in which everything is held [GB]."""


# -- the knapsack


def _profile(*operators: tuple[int, float], whole: int = 100, inputs: int = 10, others: float = 1.0) -> BlockProfile:
    held = tuple(Operator(index, *each) for index, each in enumerate(operators))
    return BlockProfile(inputs, whole, others + sum(each.recompute_cost for each in held), held)


def _best(profiles: list[BlockProfile], limit: int) -> float:
    """The least cost within a limit, by trying all choices."""

    def options(profile: BlockProfile) -> Iterable[SavedActivations]:
        for count in range(len(profile.operators) + 1):
            for kept in itertools.combinations(profile.operators, count):
                size, cost = sum(each.nbytes for each in kept), sum(each.recompute_cost for each in kept)
                yield SavedActivations(False, frozenset(each.key for each in kept), size, profile.recompute_cost - cost)
        yield SavedActivations(True, frozenset(), profile.saved_bytes, 0.0)

    choices, found = ActivationPlan([profiles], SINGLE_STAGE), float("inf")
    for made in itertools.product(*map(options, profiles)):
        choices.saved = [list(made)]
        if choices.peak_bytes <= limit:
            found = min(found, choices.recompute_cost)
    return found


def test_what_is_held_spares_almost_as_much_as_the_best_choice() -> None:
    generator = torch.Generator().manual_seed(0)

    def number(below: int) -> int:
        return int(torch.randint(1, below, (), generator=generator))

    for _ in range(20):
        profiles = [_profile(*((number(40), number(50)) for _ in range(3))) for _ in range(3)]
        largest = max(operator.recompute_cost for profile in profiles for operator in profile.operators)
        for limit in range(ActivationPlan([profiles], SINGLE_STAGE).peak_bytes, 340, 15):
            choices = ActivationPlan([profiles], SINGLE_STAGE)
            choices.fill_budget(limit)
            assert choices.peak_bytes <= limit
            assert choices.recompute_cost <= _best(profiles, limit) + largest + 1


def test_microbatches_in_flight_count_and_those_of_all_stages() -> None:
    profile = _profile((50, 9.0))
    moments = [BackwardStart((3, 1), 0), BackwardStart((2, 2), 1)]
    choices = ActivationPlan([[profile], [profile]], moments)
    assert choices.peak_bytes == 4 * 10 + 100
    choices.saved[0][0] = SavedActivations(True, frozenset(), 100, 0.0)
    assert choices.peak_bytes == max(3 * 110 + 10, 2 * 110 + 2 * 10 + 100)


def test_what_one_rank_cannot_hold_is_released_and_nobody_takes_it_again() -> None:
    profile = _profile((30, 90.0), (20, 5.0), (25, 4.0))
    choices = ActivationPlan([[profile, profile, profile]], SINGLE_STAGE)
    choices.fill_budget(3 * 10 + 100 + 30 + 30)
    assert [(each.saves_all, set(each.operator_keys)) for each in choices.saved[0]] == [
        (False, {0}),
        (False, {0}),
        (True, set()),
    ]
    choices.release_operator(0, 0, [0, 1, 0])
    assert choices.peak_bytes == 3 * 10 + 100 + 30
    choices.fill_remaining(3 * 10 + 100 + 30 + 30)
    # The first and the last may hold anything but that, the second keeps what it has.
    first, second, last = choices.saved[0]
    assert 0 in second.operator_keys
    assert not first.saves_all
    assert not last.saves_all
    assert first.operator_keys | last.operator_keys == {1, 2}
    assert choices.peak_bytes <= 3 * 10 + 100 + 30 + 30


# -- one process


def _measured(model_type: str) -> tuple[nn.Module, BudgetedBlocks, Callable[[], Tensor]]:
    model = build_case_model(model_type, tied=None, seed=0, dtype=torch.float64).train()
    ids = torch.randint(0, case_vocab_size(model_type), (2, 32), generator=torch.Generator().manual_seed(0))
    blocks = checkpoint_blocks(model, infer_layout(model), ActivationOptions(budget_gb=LARGE))
    assert isinstance(blocks, BudgetedBlocks)
    with torch.no_grad(), blocks.measure():
        model(input_ids=ids, use_cache=False)
    return model, blocks, lambda: sum_token_loss(model(input_ids=ids, use_cache=False).logits, ids)


def _held_behind_forward(model: nn.Module, run: Callable[[], Tensor]) -> tuple[int, Tensor]:
    losses: list[Tensor] = []
    memory = measure_memory(lambda: losses.append(run()), [model])
    losses[0].backward()
    return memory.after.other, losses[0].detach()


@pytest.mark.parametrize("model_type", mark_mostly_slow(["llama", "mixtral", "rwkv"]))
def test_what_blocks_hold_is_foreseen_to_the_byte_and_changes_no_bit(model_type: str) -> None:
    plain, blocks, run = _measured(model_type)
    blocks.set_saved([SavedActivations(True, frozenset(), each.saved_bytes, 0.0) for each in blocks.profiles])
    _, loss = _held_behind_forward(plain, run)
    outside = set()
    low, high = ActivationPlan([blocks.profiles], SINGLE_STAGE), ActivationPlan([blocks.profiles], SINGLE_STAGE)
    high.fill_budget(2**62)
    for share in (0.0, 0.3, 0.6):
        model, blocks, run = _measured(model_type)
        choices = ActivationPlan([blocks.profiles], SINGLE_STAGE)
        choices.fill_budget(int(low.peak_bytes + share * (high.peak_bytes - low.peak_bytes)))
        blocks.set_saved(choices.saved[0])
        held, found = _held_behind_forward(model, run)
        outside.add(
            held - sum(p.input_bytes + c.nbytes for p, c in zip(blocks.profiles, choices.saved[0], strict=True))
        )
        assert torch.equal(found, loss)
        for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
            assert (expected.grad is None) == (parameter.grad is None)
            assert expected.grad is None or torch.equal(expected.grad, parameter.grad)
    # What is not of blocks is the same under every budget.
    assert max(outside) - min(outside) <= 64
    assert high.recompute_cost == 0


class _Dropping(nn.Module):
    """Each block draws three times, between results that may be held."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        # One operator, as on accelerators; on a CPU, functional.dropout writes numbers into memory that is there.
        x = torch.native_dropout(x, 0.5, True)[0]
        x = torch.native_dropout(self.first(x).tanh(), 0.5, True)[0]
        return torch.native_dropout(self.second(x).sin(), 0.5, True)[0]


def test_random_numbers_are_drawn_again_by_all_operators_that_draw() -> None:
    """Whatever single operator blocks hold, and where they hold nothing, gradients are those of whole blocks."""

    def gradient(held: int | None) -> tuple[int, Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"blocks": nn.ModuleList([_Dropping() for _ in range(3)])})
        blocks = checkpoint_blocks(model, infer_layout(model), ActivationOptions(budget_gb=LARGE))
        assert isinstance(blocks, BudgetedBlocks)
        x = torch.randn(8, 16, requires_grad=True)

        def run(x: Tensor) -> Tensor:
            for block in model["blocks"]:
                x = block(x)
            return x

        with torch.no_grad(), blocks.measure():
            run(x)
        operators = blocks.profiles[0].operators
        keys = frozenset(() if held is None else [each.key for each in operators[held : held + 1]])
        blocks.set_saved([SavedActivations(held == -1, keys, 0, 0.0)] * 3)
        torch.manual_seed(1)
        run(x).sum().backward()
        assert x.grad is not None
        return len(operators), x.grad

    count, whole = gradient(-1)
    assert count > 2
    assert all(torch.equal(gradient(held)[1], whole) for held in (None, *range(count)))


def test_a_larger_microbatch_is_reported_once() -> None:
    model, blocks, run = _measured("llama")
    blocks.set_saved([SavedActivations(True, frozenset(), each.saved_bytes, 0.0) for each in blocks.profiles])
    run()
    with pytest.warns(UserWarning, match=r"1.50 times as large as those of the first step"):
        model(input_ids=torch.zeros((3, 32), dtype=torch.int64), use_cache=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(input_ids=torch.zeros((3, 32), dtype=torch.int64), use_cache=False)


# -- real ranks


class _Held(OperationObserver):
    """Counts what blocks are given and make, forward and recomputation, at times when no block runs: `peak` bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._depth = 0
        self._is_new = False
        self._modules: list[nn.Module] = []
        self._live: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def around(self, module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
        self._modules.append(module)

        def forward(*args: Any, **kwargs: Any) -> Any:
            self._sample()
            self._see((args, kwargs))
            self._depth += 1
            try:
                result = original(*args, **kwargs)
            finally:
                self._depth -= 1
                self._is_new = True
            for tensor in list_tensors(result):
                # The next block is given it, or what lies behind the last.
                self._live.discard(tensor.untyped_storage())
            return result

        return forward

    def observe(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if self._depth:
            # Views of parameters are no activations.
            given = {id(tensor.untyped_storage()) for tensor in list_tensors((args, kwargs))}
            self._see([each for each in list_tensors(result) if id(each.untyped_storage()) not in given])
        else:
            self._sample()

    def _sample(self) -> None:
        if self._is_new and not self._depth:
            # What a block has gathered of its parameters is none of its activations.
            parameters = [each for module in self._modules for each in module.parameters()]
            gathered = {each.untyped_storage() for each in parameters if not isinstance(each, DTensor)}
            self.peak = max(self.peak, sum(each.nbytes() for each in set(self._live) - gathered))
            self._is_new = False

    def _see(self, value: Any) -> None:
        self._live.update(tensor.untyped_storage() for tensor in list_tensors(value))


def _trained(
    strategy: str, config: dict[str, Any], sizes: dict[str, int], case: Case, wrapper: dict[str, Any] | None
) -> tuple[int, list[float], dict[str, Tensor]]:
    """Bytes that blocks held at once in a second step with the same batch, losses, and weights after it."""
    held = _Held()
    original, seen = forward_order.wrap_forward, set[nn.Module]()

    def put(module: nn.Module, layer: WrapOrder, make: Callable[..., Any]) -> None:
        if layer is WrapOrder.RECOMPUTED and module not in seen:
            seen.add(module)
            original(module, WrapOrder.TENSOR, functools.partial(held.around, module))
        original(module, layer, make)

    from meshwright.model import recompute

    recompute.wrap_forward = put  # type: ignore[attr-defined]
    try:
        manager = build_manager(strategy, config, sizes, case, wrapper_config=wrapper)
    finally:
        recompute.wrap_forward = original  # type: ignore[attr-defined]
    losses = train_steps(manager, case, range(1))[0]
    with held:
        losses += train_steps(manager, case, range(1))[0]
    return held.peak, losses, full_weights(manager)


def _within_budgets(
    strategy: str, config: dict[str, Any], sizes: dict[str, int], case: Case, wrapper: dict[str, Any] | None = None
) -> tuple[float, bool]:
    """The share of a budget that was held, and whether losses and weights are those without recomputation."""

    def trained(budget: float) -> tuple[int, list[float], dict[str, Tensor]]:
        options = config | {"activation_checkpointing": {"budget_gb": budget}}
        return _trained(strategy, options, sizes, case, wrapper)

    plain = _trained(strategy, config, sizes, case, wrapper)
    with pytest.raises(ConfigError, match="cannot be met") as error:
        trained(1e-9)
    least = int(float(re.findall(r"to at least ([0-9.]+)", str(error.value))[0]) * 1e9)
    whole = trained(LARGE)
    most = torch.tensor(whole[0])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    budget = least + 0.4 * (int(most) - least)
    found = trained(budget / 1e9)
    return found[0] / budget, all(each[1] == plain[1] and _same(each[2], plain[2]) for each in (whole, found))


def _same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


CASE = Case(layers=6, sequences=8)
PIPELINED = Case(layers=8, sequences=8)
RANKS: list[Any] = [
    pytest.param("fsdp2", 2, {"reshard_after_forward": True}, {}, CASE, None, id="fsdp2"),
    pytest.param("fsdp2", 2, {"sequence_parallel": True}, {"tp_size": 2}, CASE, None, id="tp"),
    pytest.param("fsdp2", 2, {}, {"cp_size": 2}, CASE, None, id="cp"),
    pytest.param("megatron_fsdp", 2, {}, {}, CASE, None, id="megatron_fsdp"),
    pytest.param("ddp", 2, {"engine": "bucketed"}, {}, CASE, None, id="ddp-bucketed"),
    pytest.param("single", 1, {}, {}, CASE, None, id="single"),
    pytest.param("fsdp2", 2, {}, {"pp_size": 2}, PIPELINED, {"pipeline": {"pp_schedule": "1f1b"}}, id="1f1b"),
    pytest.param("fsdp2", 2, {}, {"ep_size": 2}, Case("mixtral", shares=(8, 4)), None, id="ep"),
]


@pytest.mark.parametrize(("strategy", "ranks", "config", "sizes", "case", "wrapper"), mark_mostly_slow(RANKS))
def test_ranks_hold_what_the_budget_allows_and_train_bit_for_bit(
    strategy: str, ranks: int, config: Any, sizes: Any, case: Case, wrapper: Any
) -> None:
    found = pool(ranks).run(_within_budgets, strategy, config, sizes, case, wrapper)
    assert all(is_same for _, is_same in found)
    # The budget is of the rank that has most.
    assert 0.9 <= max(used for used, _ in found) <= 1.1, found


# -- host memory


def test_what_blocks_hold_goes_to_host_memory_and_back_once() -> None:
    plain, blocks, run = _measured("llama")
    blocks.set_saved([SavedActivations(True, frozenset(), each.saved_bytes, 0.0) for each in blocks.profiles])
    held, loss = _held_behind_forward(plain, run)
    # Beside the hidden states of each block, the first is given two tables of positions.
    hidden = blocks.profiles[-1].input_bytes
    expected = sum(each.saved_bytes + hidden for each in blocks.profiles)
    model = build_case_model("llama", tied=None, seed=0, dtype=torch.float64).train()
    moved = checkpoint_blocks(model, infer_layout(model), ActivationOptions(offload="cpu"))
    assert isinstance(moved, OffloadedBlocks)
    ids = torch.randint(0, case_vocab_size("llama"), (2, 32), generator=torch.Generator().manual_seed(0))
    found = sum_token_loss(model(input_ids=ids, use_cache=False).logits, ids)
    assert (moved.bytes_offloaded, moved.bytes_restored) == (expected, 0)
    found.backward()
    assert (moved.bytes_offloaded, moved.bytes_restored) == (expected, expected)
    assert torch.equal(found, loss)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    del held
    model.eval()
    model(input_ids=ids, use_cache=False).logits.sum().backward()
    assert moved.bytes_offloaded == expected


def _offloaded(
    strategy: str, config: dict[str, Any], sizes: dict[str, int], case: Case, wrapper: dict[str, Any] | None
) -> tuple[bool, int, int, int]:
    """Whether training is bit for bit that without; bytes that went out, came back, and are activations of a step."""

    def trained(options: dict[str, Any]) -> tuple[list[Any], list[float], dict[str, Tensor]]:
        manager = build_manager(strategy, config | options, sizes, case, wrapper_config=wrapper)
        losses = train_steps(manager, case, range(1))[0]
        parts = [each.checkpointed_blocks for each in getattr(manager, "_managers", {0: manager}).values()]
        return parts, losses, full_weights(manager)

    _, losses, weights = trained({})
    parts, found, moved = trained({"activation_checkpointing": {"offload": "cpu"}})
    assert all(isinstance(each, OffloadedBlocks) for each in parts)
    out, back = sum(each.bytes_offloaded for each in parts), sum(each.bytes_restored for each in parts)
    expected = out
    if case.model_type == "mixtral":
        profiles = trained({"activation_checkpointing": {"budget_gb": LARGE}})[0][0].profiles
        expected = sum(each.saved_bytes + profiles[-1].input_bytes for each in profiles)
    return found == losses and _same(weights, moved), out, back, expected


@pytest.mark.parametrize(
    ("strategy", "config", "sizes", "case", "wrapper"),
    mark_mostly_slow(
        [
            ("fsdp2", {"reshard_after_forward": True}, {}, Case(), None),
            ("fsdp2", {"sequence_parallel": True}, {"tp_size": 2}, Case(), None),
            # Experts are gathered within their blocks, and are no activations.
            ("fsdp2", {}, {"ep_size": 2}, Case("mixtral"), None),
            ("fsdp2", {}, {"pp_size": 2}, Case(layers=4), {"pipeline": {"pp_schedule": "interleaved_zero_bubble"}}),
        ]
    ),
    ids=["fsdp2", "tp", "ep", "pipeline"],
)
def test_ranks_train_bit_for_bit_with_activations_in_host_memory(
    strategy: str, config: Any, sizes: Any, case: Case, wrapper: Any
) -> None:
    for same, out, back, expected in pool(2).run(_offloaded, strategy, config, sizes, case, wrapper):
        assert same
        assert back == out == expected > 0


def _refused(config: dict[str, Any], sizes: dict[str, int], case: Case, wrapper: dict[str, Any] | None) -> str:
    def work() -> None:
        manager: Any = build_manager("fsdp2", config, sizes, case, wrapper_config=wrapper)
        manager.module(input_ids=torch.zeros((1, 8), dtype=torch.int64))

    return catch_error_text(work)


@pytest.mark.parametrize(
    ("mode", "config", "sizes", "text"),
    [
        ({"budget_gb": 1}, {"enable_compile": True}, {}, "{budget_gb: 1.0} acts on operators one by one, but with"),
        ({"budget_gb": 1}, {}, {"pp_size": 2}, "Use a schedule that does not split backwards"),
        ({"budget_gb": 0}, {}, {}, "activation_checkpointing.budget_gb: Input should"),
        ({"budget_gb": 1}, {}, {}, "budget_gb=1 is divided over the blocks by the first forward_backward"),
        ({"budget_gb": 1, "offload": "cpu"}, {}, {}, "takes one of"),
    ],
    ids=["compile", "schedule", "zero", "by hand", "both"],
)
def test_what_cannot_be_kept_is_refused(mode: Any, config: Any, sizes: Any, text: str) -> None:
    wrapper = {"pipeline": {"pp_schedule": "interleaved_zero_bubble"}} if sizes else None
    found = pool(2).run(_refused, {"activation_checkpointing": mode, **config}, sizes, Case(layers=4), wrapper)
    assert found[0] == found[1]
    assert text in found[0]
