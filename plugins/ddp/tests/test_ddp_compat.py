"""Canaries: they fail when a name of torch that `_compat` uses goes away or changes."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from meshwright.testing import pool
from meshwright_ddp import _compat


def _collectives() -> tuple[list[float], list[float]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(2.0 * size) + rank
    own = whole[2 * rank : 2 * rank + 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _compat.reduce_scatter(own, whole, op=dist.ReduceOp.AVG, group=dist.group.WORLD, async_op=True).wait()
        reduced = own.tolist()
        _compat.all_gather(whole, own, group=dist.group.WORLD, async_op=True).wait()
    return reduced, whole.tolist()


def test_collectives_work_in_place_average_and_do_not_warn() -> None:
    for rank, (reduced, whole) in enumerate(pool(2).run(_collectives)):
        assert reduced == [2 * rank + 0.5, 2 * rank + 1.5]
        assert whole == [0.5, 1.5, 2.5, 3.5]


@pytest.mark.parametrize("wanted", [True, False])
def test_the_argument_that_syncs_buffers_is_one_of_torchs(wanted: bool) -> None:
    ((name, value),) = _compat.syncing_buffers(wanted).items()
    assert value is wanted
    assert name in inspect.signature(DistributedDataParallel.__init__).parameters
