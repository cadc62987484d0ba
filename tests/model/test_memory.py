"""Measured memory against sizes known by construction."""

from __future__ import annotations

import copy
import ctypes
import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.measures import Held, measure_memory
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshwright._compat.torch import GLOO_THREAD
from meshwright_plan.meter import StepMeter
from meshwright_testing.workers import pool

MB = 2**20


def _floats(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.float32)


def test_peak_counts_what_lives_at_once_and_not_what_comes_one_after_the_other() -> None:
    kept: list[Tensor] = []

    def work() -> None:
        for _ in range(3):
            first = _floats(MB)
            second = first + 1
            del first, second

    def keep_views() -> None:
        whole = _floats(MB)
        kept.extend([whole[:10], whole.view(2, -1).t()])

    memory = measure_memory(work, [])
    assert memory.peak == Held(0, 0, 0, 2 * 4 * MB)
    assert memory.after.total == 0
    memory = measure_memory(keep_views, [])
    assert memory.peak.other == memory.after.other == 4 * MB


def test_storage_that_is_resized_to_nothing_is_free_and_counts_again_when_it_is_filled() -> None:
    first = _floats(MB)

    def work() -> None:
        first.add_(1)
        first.untyped_storage().resize_(0)
        second = _floats(MB // 2)
        assert second.numel() == MB // 2
        del second
        first.untyped_storage().resize_(4 * MB)
        first.zero_()
        third = _floats(MB // 4)
        third.add_(1)

    memory = measure_memory(work, [])
    assert memory.peak.other == 4 * MB + MB
    assert memory.after.other == 4 * MB


def test_parameters_gradients_and_optimizer_state_are_told_apart() -> None:
    model = nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    size = 4 * 512 * 512
    inputs = torch.ones(1, 512)

    def backward() -> None:
        model(inputs).sum().backward()

    first = measure_memory(backward, [model], optimizer)
    assert first.after == Held(size, size, 0, 4 * 512)
    step = measure_memory(optimizer.step, [model], optimizer)
    assert step.after.optimizer == 2 * size + 4
    again = measure_memory(optimizer.step, [model], optimizer)
    assert (again.peak.parameters, again.peak.gradients, again.peak.optimizer) == (size, size, 2 * size + 4)
    optimizer.zero_grad()
    assert measure_memory(lambda: None, [model], optimizer).after == Held(size, 0, 2 * size + 4, 0)


def test_activations_are_what_autograd_keeps() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh()) for _ in range(8)))
    inputs = torch.ones(1024, 64)
    losses: list[Tensor] = []
    memory = measure_memory(lambda: losses.append(model(inputs).sum()), [model])
    # The input, which is counted as it is used, and the outputs of eight tanh; those of the linears are not kept.
    assert memory.after.other == 9 * 4 * 1024 * 64 + 4
    assert memory.peak.other == 10 * 4 * 1024 * 64


def test_a_parameter_that_two_modules_share_counts_once() -> None:
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    assert measure_memory(lambda: None, [first, second]).after == Held(4 * 64, 0, 0, 0)


def _first_seen() -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (1,))
    value = distribute_tensor(torch.ones(3, 5, 7), mesh, [Shard(0)])
    found = []
    memory = measure_memory(lambda: found.append(torch.lgamma(value).sum(2)), [])
    return memory.peak.total, memory.after.total


def test_operators_that_dtensor_first_sees_are_measured() -> None:
    # The shapes that DTensor asks for are those of tensors without memory, which count nothing.
    assert pool(1).run(_first_seen) == [(4 * (105 + 105 + 15), 4 * (105 + 15))]


def test_what_is_measured_can_be_copied_saved_and_measured_by_another_meter_within(tmp_path: Path) -> None:
    first = _floats(10)

    def work() -> None:
        first.add_(1)
        copied = copy.deepcopy(first)
        torch.save(first, tmp_path / "first.pt")
        assert torch.equal(torch.load(tmp_path / "first.pt"), copied)
        assert measure_memory(lambda: first.add_(1), []).after.total == 40
        first.untyped_storage().resize_(0)

    assert measure_memory(work, []).after.total == 0
    assert type(first.untyped_storage()) is torch.UntypedStorage


@pytest.mark.slow
def test_the_cost_of_an_operation_does_not_grow_with_what_is_held() -> None:
    def seconds(count: int) -> float:
        held = [_floats(1) for _ in range(count)]

        def work() -> None:
            for each in held:
                each.add_(1)
            start = time.perf_counter()
            for _ in range(300):
                held[0].add_(1)
            times.append(time.perf_counter() - start)

        times: list[float] = []
        measure_memory(work, [])
        return times[0]

    assert min(seconds(20_000) for _ in range(3)) < 5 * min(seconds(20) for _ in range(3))


def _measured_peak(work: Callable[[], None]) -> int:
    return measure_memory(work, []).peak.total


def _step_peak(work: Callable[[], None]) -> int:
    meter = StepMeter(is_real=True)
    meter.begin()
    with meter:
        work()
    return meter.peak


@pytest.mark.parametrize("peak_of", [_measured_peak, _step_peak], ids=["measured", "planned"])
def test_what_a_thread_of_gloo_is_about_to_let_go_of_is_not_held(peak_of):
    def work() -> None:
        sent, is_on = [_floats(MB)], threading.Event()

        def let_go() -> None:
            set_name = ctypes.CDLL(None).prctl
            set_name(15, GLOO_THREAD.encode(), 0, 0, 0)
            is_on.set()
            # Busy, without Python's lock.
            hashlib.sha256(bytes(64 * MB)).digest()
            sent.clear()

        thread = threading.Thread(target=let_go)
        thread.start()
        is_on.wait()
        received = _floats(MB)
        assert not sent
        assert received.numel() == MB
        thread.join()

    assert peak_of(work) == 4 * MB
