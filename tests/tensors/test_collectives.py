"""Measured collectives against numbers worked out by hand; those of strategies and of DDP's C++: test_traffic.py."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshwright.tracing.collectives import Collective, Traffic, measure_collectives
from meshwright_testing import pool


def _plain(traffic: Traffic) -> list[tuple[str, int, torch.dtype, int]]:
    return [(each.kind, each.ranks, each.dtype, each.bytes) for each in traffic]


def _in_place() -> Traffic:
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

    return measure_collectives(work)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_bytes_are_those_of_the_whole_tensor_whichever_operation_carries_it() -> None:
    for traffic in pool(2).run(_in_place):
        assert _plain(traffic)[:-1] == [
            ("all_gather", 2, torch.float32, 24),
            ("reduce_scatter", 2, torch.float32, 24),
            ("all_gather", 2, torch.float32, 24),
            ("all_reduce", 2, torch.float64, 48),
            ("broadcast", 2, torch.int32, 24),
            ("all_to_all", 2, torch.float32, 24),
            ("gather", 2, torch.float32, 24),
            ("reduce", 2, torch.float32, 24),
        ]
        assert traffic.calls[-1].kind == "barrier"


def _functional() -> Traffic:
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

    return measure_collectives(work)


def test_functional_collectives_measure_like_those_in_place() -> None:
    for traffic in pool(2).run(_functional):
        assert _plain(traffic) == [
            ("all_gather", 2, torch.float32, 24),
            ("reduce_scatter", 2, torch.float32, 24),
            ("all_reduce", 2, torch.float32, 24),
            ("all_reduce", 2, torch.float32, 36),
        ]


def _redistribute() -> Traffic:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("axis",))
    local = torch.ones(2, 5, requires_grad=True)

    def work() -> None:
        whole = DTensor.from_local(local, mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
        (whole.to_local(grad_placements=[Replicate()]) ** 2).sum().backward()

    return measure_collectives(work, {"mine": mesh.get_group()})


def test_a_redistributed_dtensor_is_seen_under_the_name_of_its_group() -> None:
    for traffic in pool(2).run(_redistribute):
        assert traffic.calls == (Collective("all_gather", "mine", 2, torch.float32, 2 * 2 * 5 * 4),)


def test_traffic_selects_and_adds_up() -> None:
    a = Collective("all_gather", "dp", 4, torch.bfloat16, 10)
    b = Collective("all_reduce", "tp", 2, torch.float32, 3)
    traffic = Traffic((a, b, a))
    assert (traffic.bytes, len(traffic)) == (23, 3)
    assert traffic.of("all_gather").bytes == 20
    assert traffic.of(group="tp").calls == (b,)
    assert len(traffic.of("all_gather", "tp")) == 0
    assert Counter(str(traffic).splitlines()) == {
        "all_gather, dp (4 ranks), torch.bfloat16: 2 calls, 20 bytes": 1,
        "all_reduce, tp (2 ranks), torch.float32: 1 calls, 3 bytes": 1,
    }
