"""Measured memory against sizes known by construction."""

from __future__ import annotations

import ctypes
import hashlib
import threading

import torch
from support.measurements import RankMemory, measure_memory
from torch import Tensor

from meshwright._compat.torch import GLOO_THREAD_NAME
from meshwright_plan.meter import StepMeter

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
    assert memory.peak == RankMemory(0, 0, 0, 2 * 4 * MB)
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


def test_what_a_thread_of_gloo_is_about_to_release_is_not_held() -> None:
    def work() -> None:
        sent, is_on = [_floats(MB)], threading.Event()

        def let_go() -> None:
            set_name = ctypes.CDLL(None).prctl
            set_name(15, GLOO_THREAD_NAME.encode(), 0, 0, 0)
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

    meter = StepMeter(is_real=True)
    meter.begin_step()
    with meter:
        work()
    assert meter.peak == 4 * MB
