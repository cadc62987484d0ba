"""What a step sends over the control plane and waits for, counted, for every stack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright import BatchError, Mesh, MeshSizes, count_tokens, open_world
from meshwright.testing import Case, pool
from meshwright.testing.case import share
from meshwright.testing.collectives import Traffic, measure_collectives
from meshwright.testing.parity import build_manager
from meshwright.testing.reads import count_reads

ZERO1 = {"engine": "bucketed", "use_distributed_optimizer": True, "overlap_grad_reduce": True}
NAN = {"report_nan_in_param_grad": True, "check_for_nan_in_grad": True}
ROUNDS = {1: 0, 2: 1, 4: 2}
"""Of a message, by the number of ranks: log2 of it."""

STACKS: dict[str, tuple[str, dict[str, Any], dict[str, int], Case, dict[str, Any]]] = {
    "single": ("single", {}, {}, Case(), {}),
    "ddp": ("ddp", {}, {}, Case(), {}),
    "ddp bucketed": ("ddp", {"engine": "bucketed"}, {}, Case(), {}),
    "ddp bucketed zero1": ("ddp", ZERO1, {}, Case(), {}),
    "fsdp2": ("fsdp2", {}, {}, Case(), {}),
    "fsdp2 tp2": ("fsdp2", {}, {"tp_size": 2}, Case(), {}),
    "fsdp2 cp2": ("fsdp2", {}, {"cp_size": 2}, Case(), {}),
    "fsdp2 ep2 recomputed": (
        *("fsdp2", {"activation_checkpointing": "full"}, {"ep_size": 2}),
        *(Case(model_type="qwen3_moe"), {}),
    ),
    "megatron_fsdp": ("megatron_fsdp", {}, {}, Case(), {}),
    "megatron_fsdp nan": ("megatron_fsdp", NAN, {}, Case(), {}),
    "pp2 fsdp2": ("fsdp2", {}, {"pp_size": 2}, Case(microbatches=2), {}),
    "pp2 fsdp2 interleaved": (
        *("fsdp2", {}, {"pp_size": 2}, Case(microbatches=2, layers=8)),
        {"pipeline": {"pp_schedule": "interleaved1f1b"}},
    ),
}
FORWARDS = {"pp2 fsdp2": 6, "pp2 fsdp2 interleaved": 12}
"""Of a rank, where a pipeline cuts its microbatches."""
HOST = ("testing/case.py", "step/batch.py", "step/agreement.py", "mesh/world.py", "optim/optimizer.py")
"""Reads of what is in host memory: batches, messages of the control plane, and an optimizer's counters of steps."""
LAYERS = 4
"""Of the mixture of experts."""


def _step(
    strategy: str, config: dict[str, Any], sizes: dict[str, int], case: Case, wrapper: Mapping[str, Any]
) -> tuple[Traffic, Counter[str]]:
    """What a third step sends, and a fourth one reads, of a loop by hand."""
    manager = build_manager(strategy, config, sizes, case, wrapper_config=wrapper)

    def step(index: int) -> None:
        batches = share(case, index, manager.mesh.data_rank, manager.mesh.data_size)
        loss = manager.forward_backward(batches, num_tokens=count_tokens(batches, manager.mesh))
        manager.read(loss, manager.clip_grad_norm(case.max_norm))
        manager.optimizer_step()

    step(0)
    step(1)
    traffic = measure_collectives(lambda: step(2), {"world": dist.group.WORLD})
    return traffic, count_reads(lambda: step(3))


def _expected_reads(stack: str, reads: Mapping[str, int]) -> dict[str, int]:
    """Of values on the device: one at the end, and what is said of each in docs/performance.md."""
    expected = {"manager/ending.py": 1}
    if "ep2" in stack:
        # How many rows each rank sends and receives, and nothing again in recomputation. The experts themselves are
        # eager here, as float64 on a CPU asks for, with a loop over those that are chosen.
        expected["expert/dispatch.py"] = LAYERS
        expected["qwen3_moe/modeling_qwen3_moe.py"] = reads["qwen3_moe/modeling_qwen3_moe.py"]
    if "cp2" not in stack:
        expected["transformers/masking_utils.py"] = FORWARDS.get(stack, 1)
    return expected


@pytest.mark.parametrize("stack", STACKS)
def test_a_step_sends_one_message_in_log2_rounds_and_waits_once(stack: str) -> None:
    ranks = 1 if stack == "single" else 4
    for traffic, reads in pool(ranks).run(_step, *STACKS[stack]):
        sent = [each for each in traffic.of("send", "world") if each.dtype == torch.int64]
        assert len(sent) == ROUNDS[ranks]
        assert all(each.bytes < 100 for each in sent)
        assert {place: reads[place] for place in reads if place not in HOST} == _expected_reads(stack, reads)


# -- a count of tokens travels with the step


def _told(work: Any) -> str:
    try:
        return str(work())
    except BatchError as error:
        return f"BatchError: {error}"


def _by_hand(culprit: int | None, reader: int | None) -> tuple[list[str], int]:
    """Good and bad steps of a manager that has trained before, where a rank reads a count before it trains."""
    case = Case(microbatches=2)
    manager = build_manager("fsdp2", {}, {}, case)
    mesh = manager.mesh
    good = share(case, 0, mesh.data_rank, mesh.data_size)
    manager.eval_loss(good, num_tokens=count_tokens(good, mesh))
    is_culprit, is_reader = mesh.rank == culprit, mesh.rank == reader
    told = []
    for bad in (good[:1], [{**each, "labels": each["labels"].int()} for each in good], good):
        counted = count_tokens(good, mesh)
        if is_reader:
            told.append(int(counted))
        mine = bad if is_culprit else good
        told.append(_told(lambda mine=mine, counted=counted: float(manager.eval_loss(mine, num_tokens=counted))))
        told.append(int(counted))
    malformed = [{**each, "labels": each["labels"].int()} for each in good] if is_culprit else good
    counted = count_tokens(malformed, mesh)
    # Whoever comes to it hears the same.
    told.append(_told(lambda: int(counted) if is_reader else float(manager.eval_loss(good, num_tokens=counted))))
    # Nobody reads this one, and it is sent all the same before the next message.
    count_tokens(good, mesh)
    told.append(_told(lambda: float(manager.eval_loss(good, num_tokens=torch.tensor(7 + is_culprit)))))
    return [str(each) for each in told], int(count_tokens(good, mesh))


@pytest.mark.parametrize(("culprit", "reader"), [(1, None), (1, 0), (1, 1), (None, None)])
def test_a_count_that_is_read_early_or_late_or_never_leaves_errors_as_they_are(
    culprit: int | None, reader: int | None
) -> None:
    answers = pool(2).run(_by_hand, culprit, reader)
    total = answers[0][1]
    assert all(count == total for _, count in answers)
    alike = [[each for each in told if each != str(total)] for told, _ in answers]
    if culprit is not None or reader is None:
        assert alike[0] == alike[1]
    if culprit is not None:
        text = "\n".join(alike[0])
        assert "between 1 and 2" in text
        assert "labels must be an int64 tensor" in text
        assert "disagree on num_tokens: between 7 and 8" in text


def _numbers() -> list[Any]:
    world = open_world("cpu")
    mesh = Mesh(MeshSizes().resolve(world.size), world)
    case = Case()
    batches = share(case, 0, mesh.data_rank, mesh.data_size)
    eager = count_tokens(batches, mesh)
    world.in_steps = True
    waits = [count_tokens(batches, mesh) for _ in range(5)]
    found = [
        int(waits[4]),
        float(torch.ones(()) / waits[0]),
        waits[1].tolist(),
        torch.stack([waits[2], eager]).tolist(),
    ]
    return [type(eager) is torch.Tensor, int(eager), *found, waits[3].dtype, bool(waits[3] == eager), repr(waits[3])]


def test_a_count_is_a_number_wherever_a_tensor_is() -> None:
    for plain, total, four, one, two, both, dtype, equal, told in pool(3).run(_numbers):
        assert plain
        assert four == two == total
        assert both == [total, total]
        assert one == pytest.approx(1 / total)
        assert (dtype, equal, told) == (torch.int64, True, f"tensor({total})")


# -- messages of the control plane


def _exchanged(seed: int) -> list[Any]:
    world = open_world("cpu")
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-(2**40), 2**40, (world.size, 6), generator=generator)
    mine = values[world.rank].tolist()
    sums, highs = world.exchange(mine[:4], mine[4:])
    expected = values[:, :4].sum(0).tolist(), values[:, 4:].amax(0).tolist()
    low = world.reduce_ints(mine, dist.ReduceOp.MIN)
    return [(sums, highs) == expected, low == values.amin(0).tolist()]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_sums_and_highest_values_are_those_of_all_ranks(ranks: int) -> None:
    assert pool(ranks).run(_exchanged, ranks) == [[True, True]] * ranks
