"""Measured collectives against numbers worked out by hand; those of strategies and of DDP's C++: test_traffic.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional

from meshwright.tracing.collectives import Collective, CollectiveTrace, record_collectives
from meshwright_testing import pool


def _in_place() -> CollectiveTrace:
    part, whole = torch.ones(3), torch.ones(6)

    def work() -> None:
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part, whole)
        dist.all_gather([torch.empty(3), torch.empty(3)], part)
        dist.all_reduce(whole.double())
        dist.broadcast(whole.int(), 0)
        dist.all_to_all_single(torch.empty(6), whole)
        dist.gather(part, [part, part] if dist.get_rank() == 0 else None)
        dist.reduce(whole, 1)
        dist.barrier()

    return record_collectives(work)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_bytes_are_those_of_the_whole_tensor_whichever_operation_carries_it() -> None:
    kinds = ["all_gather", "reduce_scatter", "all_gather", "all_reduce", "broadcast", "all_to_all", "gather", "reduce"]
    dtypes = {"all_reduce": torch.float64, "broadcast": torch.int32}
    for traffic in pool(2).run(_in_place):
        assert [each.kind for each in traffic] == [*kinds, "barrier"]
        for each in traffic.calls[:-1]:
            assert (each.num_ranks, each.dtype) == (2, dtypes.get(each.kind, torch.float32))
            assert each.nbytes == 6 * each.dtype.itemsize


def _functional() -> CollectiveTrace:
    import torch.distributed._functional_collectives as functional

    part, whole = torch.ones(3), torch.ones(6)

    def work() -> None:
        for result in (
            functional.all_gather_tensor(part, 0, dist.group.WORLD),
            functional.reduce_scatter_tensor(whole, "sum", 0, dist.group.WORLD),
            functional.all_reduce(whole, "sum", dist.group.WORLD),
            *functional.all_reduce_coalesced([whole, part], "sum", dist.group.WORLD),
        ):
            functional.wait_tensor(result)

    return record_collectives(work)


def test_functional_collectives_measure_like_those_in_place() -> None:
    sent = [("all_gather", 24), ("reduce_scatter", 24), ("all_reduce", 24), ("all_reduce", 36)]
    for traffic in pool(2).run(_functional):
        assert [(each.kind, each.nbytes) for each in traffic] == sent


def test_traffic_selects_and_adds_up() -> None:
    a = Collective("all_gather", "dp", 4, torch.bfloat16, 10)
    b = Collective("all_reduce", "tp", 2, torch.float32, 3)
    traffic = CollectiveTrace((a, b, a))
    assert (traffic.nbytes, len(traffic)) == (23, 3)
    assert traffic.filter("all_gather").nbytes == 20
    assert traffic.filter(group="tp").calls == (b,)
    assert len(traffic.filter("all_gather", "tp")) == 0
