"""Measured collectives against numbers worked out by hand, on real process groups."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from meshwright import Mesh, MeshSizes, count_tokens, open_world
from meshwright.testing import Case, pool
from meshwright.testing.case import share
from meshwright.testing.collectives import Collective, Traffic, measure_collectives
from meshwright.testing.parity import build_manager, train_steps


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


def _tensor_parallel() -> tuple[int, Traffic, Traffic]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    loss = None

    def forward() -> None:
        nonlocal loss
        loss = model(torch.ones(5, 8, requires_grad=True)).sum()

    groups = {"tp": mesh.get_group()}
    seen = measure_collectives(forward, groups)
    return 5 * 8 * 4, seen, measure_collectives(lambda: loss.backward(), groups)


def test_tensor_parallel_all_reduces_once_in_forward_and_once_in_backward() -> None:
    for size, forward, backward in pool(2).run(_tensor_parallel):
        assert forward.calls == (Collective("all_reduce", "tp", 2, torch.float32, size),)
        assert backward.calls == (Collective("all_reduce", "tp", 2, torch.float32, size),)


def _hsdp() -> tuple[Traffic, Traffic]:
    world = open_world("cpu")
    mesh = Mesh(MeshSizes(dp_replicate_size=2, dp_size=4).resolve(world.size), world)
    model = nn.Linear(4, 6)  # 24 + 6 elements, both divisible by 2
    fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"], reshard_after_forward=True)
    groups = {"shard": mesh.group("dp_shard"), "replicate": mesh.group("dp_replicate")}
    loss = None

    def forward() -> None:
        nonlocal loss
        loss = model(torch.ones(2, 4)).sum()

    return measure_collectives(forward, groups), measure_collectives(lambda: loss.backward(), groups)


def test_hsdp_gathers_and_scatters_along_one_axis_and_reduces_shards_along_the_other() -> None:
    for forward, backward in pool(4).run(_hsdp):
        gather = Collective("all_gather", "shard", 2, torch.float32, 30 * 4)
        assert forward.calls == (gather,)
        assert backward.calls == (
            gather,
            Collective("reduce_scatter", "shard", 2, torch.float32, 30 * 4),
            Collective("all_reduce", "replicate", 2, torch.float32, 15 * 4),
        )


def _ddp_step() -> tuple[int, Traffic]:
    case = Case()
    manager = build_manager("ddp", {}, {}, case)
    train_steps(manager, case, range(1))
    batches = share(case, 1, manager.mesh.data_rank, manager.mesh.data_size)
    tokens = count_tokens(batches, manager.mesh)
    seen = measure_collectives(lambda: manager.forward_backward(batches, num_tokens=tokens))
    return sum(p.numel() * p.element_size() for p in manager.model_parts[0].parameters()), seen


def test_reductions_that_ddp_issues_in_c_plus_plus_are_seen() -> None:
    for size, traffic in pool(2).run(_ddp_step):
        large = [each for each in traffic.of("all_reduce") if each.bytes > 1000]
        assert sum(each.bytes for each in large) == size


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
