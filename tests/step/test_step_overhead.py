"""What a step sends over the control plane and waits for, counted, for every stack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.caught_errors import catch_error
from support.measurements import count_reads
from support.tiers import mark_mostly_slow

from meshwright import count_tokens, open_world
from meshwright.testing import Case
from meshwright.tracing.collectives import CollectiveTrace, record_collectives
from meshwright_testing import pool
from meshwright_testing.case import rank_microbatches
from meshwright_testing.parity import build_manager

ZERO1 = {"engine": "bucketed", "use_distributed_optimizer": True, "overlap_grad_reduce": True}
NAN = {"report_nan_in_param_grad": True, "check_for_nan_in_grad": True}
ROUNDS = {1: 0, 2: 1, 4: 2}
"""Of a message, by the number of ranks: log2 of it."""

STACKS: dict[str, tuple[str, dict[str, Any], dict[str, int], Case, dict[str, Any]]] = {
    "single": ("single", {}, {}, Case(), {}),
    "ddp": ("ddp", {}, {}, Case(), {}),
    "ddp bucketed zero1": ("ddp", ZERO1, {}, Case(), {}),
    "fsdp2": ("fsdp2", {}, {}, Case(), {}),
    "fsdp2 tp2": ("fsdp2", {}, {"tp_size": 2}, Case(), {}),
    "fsdp2 cp2": ("fsdp2", {}, {"cp_size": 2}, Case(), {}),
    "fsdp2 ep2 recomputed": (
        *("fsdp2", {"activation_checkpointing": "full"}, {"ep_size": 2}),
        *(Case(model_type="qwen3_moe"), {}),
    ),
    "megatron_fsdp nan": ("megatron_fsdp", NAN, {}, Case(), {}),
    "pp2 fsdp2": ("fsdp2", {}, {"pp_size": 2}, Case(microbatches=2), {}),
    "pp2 fsdp2 interleaved": (
        *("fsdp2", {}, {"pp_size": 2}, Case(microbatches=2, layers=8)),
        {"pipeline": {"pp_schedule": "interleaved1f1b"}},
    ),
}
FORWARDS = {"pp2 fsdp2": 6, "pp2 fsdp2 interleaved": 12}
"""Of a rank, where a pipeline cuts its microbatches."""
HOST = ("meshwright_testing/case.py", "step/handshake.py", "mesh/world.py", "optim/optimizer.py")
"""Reads of what is in host memory: batches, messages of the control plane, and an optimizer's counters of steps."""
LAYERS = 4
"""Of the mixture of experts."""


def _step(
    strategy: str, config: dict[str, Any], sizes: dict[str, int], case: Case, wrapper: Mapping[str, Any]
) -> tuple[list[CollectiveTrace], CollectiveTrace, Counter[str]]:
    """The messages of a third step, what else it communicates, and what a fourth one reads."""
    manager = build_manager(strategy, config, sizes, case, wrapper_config=wrapper)
    world, messages = manager.mesh.world, []
    exchanged = world._reduce_now

    def noted(*numbers: Any) -> Any:
        # In the thread of the message, which no other note sees.
        answers: list[Any] = []
        sent = record_collectives(lambda: answers.append(exchanged(*numbers)), {"world": dist.group.WORLD})
        messages.append(sent.filter("send", "world"))
        return answers[0]

    def step(index: int) -> None:
        batches = rank_microbatches(case, index, manager.mesh.data_rank, manager.mesh.data_size)
        loss = manager.forward_backward(batches, num_tokens=manager.begin_step_sync(batches))
        manager.read_scalars(loss, manager.clip_grad_norm(case.max_norm))
        manager.optimizer_step()

    step(0)
    step(1)
    world._reduce_now = noted
    traffic = record_collectives(lambda: step(2), {"world": dist.group.WORLD})
    world._reduce_now = exchanged
    return messages, traffic, count_reads(lambda: step(3))


def _expected_reads(stack: str, reads: Mapping[str, int]) -> dict[str, int]:
    """Of values on the device: one at the end, and what is said of each in docs/reference/proofs/performance.md."""
    expected = {"manager/gradients.py": 1}
    if "ep2" in stack:
        # How many rows each rank sends and receives, and nothing again in recomputation. The experts themselves are
        # eager here, as float64 on a CPU asks for, with a loop over those that are chosen.
        expected["parallel/expert.py"] = LAYERS
        expected["qwen3_moe/modeling_qwen3_moe.py"] = reads["qwen3_moe/modeling_qwen3_moe.py"]
    if "cp2" not in stack:
        expected["transformers/masking_utils.py"] = FORWARDS.get(stack, 1)
    return expected


@pytest.mark.parametrize("stack", mark_mostly_slow(STACKS, "single"))
def test_a_step_sends_one_message_in_log2_rounds_and_waits_once(stack: str) -> None:
    ranks = 1 if stack == "single" else 4
    for messages, traffic, reads in pool(ranks).run(_step, *STACKS[stack]):
        (sent,) = messages
        assert len(sent) == ROUNDS[ranks]
        assert all(each.nbytes == 96 for each in sent)
        assert not [each for each in traffic.filter("send", "world") if each.dtype == torch.int64]
        assert {place: reads[place] for place in reads if place not in HOST} == _expected_reads(stack, reads)


# -- a step that is announced


def _announced(culprit: int, reader: int | None) -> list[str]:
    """Good and bad steps that are announced, whose count a rank reads alone before all do something else together."""
    case = Case(microbatches=2)
    manager = build_manager("fsdp2", {}, {}, case)
    mesh = manager.mesh
    good = rank_microbatches(case, 0, mesh.data_rank, mesh.data_size)
    texts, total = [], int(count_tokens(good, mesh))
    outside = [{**each, "labels": each["labels"] + 10**6} for each in good]
    for bad in (good[:1], outside, good):
        mine = bad if mesh.rank == culprit else good
        count, announced = count_tokens(good, mesh), manager.begin_step_sync(mine)
        if mesh.rank == reader:
            assert (int(count), type(int(announced))) == (total, int)
        dist.barrier()
        texts.append(catch_error(manager.eval_loss, mine, num_tokens=announced))
    # Nobody reads this one, nor trains on it.
    manager.begin_step_sync(good)
    texts.append(catch_error(manager.eval_loss, good, num_tokens=torch.tensor(7 + (mesh.rank == culprit))))
    announced = manager.begin_step_sync(good)
    texts.append(catch_error(manager.eval_loss, [*good], num_tokens=announced))
    if mesh.rank == culprit:
        texts.append(catch_error(count_tokens, good, mesh))
    else:
        texts.append(catch_error(lambda: manager.eval_loss(good, num_tokens=manager.begin_step_sync(good))))
    assert float(manager.eval_loss(good, num_tokens=announced)) > 0
    return texts


@pytest.mark.parametrize(("culprit", "reader"), mark_mostly_slow([(1, None), (1, 0), (1, 1)]))
def test_an_announced_step_is_refused_alike_on_all_ranks_whoever_reads_its_count(culprit, reader):
    texts, others = pool(2).run(_announced, culprit, reader)
    assert texts == others
    few, outside, good, differ, exchanged, mixed = texts
    assert "BatchError: " in few
    assert "between 1 and 2" in few
    assert "labels range from" in outside
    assert good == ""
    assert "disagree on num_tokens: between 7 and 8" in differ
    assert "others than those that were announced" in exchanged
    assert "do not call alike" in mixed


# -- messages of the control plane


def _exchanged(seed: int) -> list[Any]:
    world = open_world("cpu")
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-(2**40), 2**40, (world.size, 6), generator=generator)
    mine = values[world.rank].tolist()
    sums, highs = world.reduce_sum_and_max(mine[:4], mine[4:])
    expected = values[:, :4].sum(0).tolist(), values[:, 4:].amax(0).tolist()
    low = world.reduce_ints(mine, dist.ReduceOp.MIN)
    return [(sums, highs) == expected, low == values.amin(0).tolist()]


@pytest.mark.parametrize("ranks", mark_mostly_slow([1, 2, 3, 4], 2))
def test_sums_and_highest_values_are_those_of_all_ranks(ranks: int) -> None:
    assert pool(ranks).run(_exchanged, ranks) == [[True, True]] * ranks
