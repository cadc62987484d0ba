"""Canaries for the private names that meshwright_fsdp2._compat uses: each fails when they change under it."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import modeling_flash_attention_utils as flash

from meshwright.testing import Case
from meshwright_fsdp2._compat import (
    _find_param_groups,
    disable_packed_sequence_check,
    keep_unsharded_after_forward,
    upcast_accumulated_grads,
)
from meshwright_testing import pool
from meshwright_testing.parity import build_manager


def _infos() -> list[bool]:
    units = build_manager("fsdp2", {"reshard_after_forward": 2}, {}, Case())._sharding.unit_modules
    groups = [group for unit in units for group in _find_param_groups(unit)]
    before = [group.post_forward_mesh_info for group in groups]
    with suppress(KeyError), keep_unsharded_after_forward(units):
        held = all(group.post_forward_mesh_info is None for group in groups)
        raise KeyError
    same = [group.post_forward_mesh_info for group in groups] == before
    return [len(groups) == len(units), held, same, all(info.mesh.size() == 4 for info in before)]


@pytest.mark.slow
def test_what_reshards_after_forward_can_be_kept_and_put_back() -> None:
    assert pool(4).run(_infos) == [[True] * 4] * 4


def _added_up() -> None:
    mixed = {"mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}
    manager = build_manager("fsdp2", mixed, {}, Case(dtype="float32"))
    (root,) = manager.model_parts
    assert isinstance(root, FSDPModule)
    root.unshard()
    parameter = next(root.parameters(recurse=False), None) or next(root.parameters())
    small = 2.0**-12
    for gradient in (1.0, small):
        parameter.grad = torch.full_like(parameter, gradient)
        assert parameter.grad.dtype == torch.bfloat16
        upcast_accumulated_grads([each for each in root.modules() if isinstance(each, FSDPModule)])
        assert parameter.grad is None
    modules = [each for each in root.modules() if isinstance(each, FSDPModule)]
    units = [group.fsdp_params for each in modules for group in _find_param_groups(each)]
    sums = [[each.unsharded_accumulated_grad for each in unit] for unit in units]
    (unit,) = [each for each in sums if each[0] is not None]
    # Others of its unit have zeros, and other units nothing.
    assert all(each.dtype == torch.float32 for each in unit)
    assert sorted({value for each in unit for value in each.flatten().tolist()}) == [0.0, 1.0 + small]
    assert all(each is None for other in sums if other is not unit for each in other)


@pytest.mark.slow
def test_gradients_that_wait_are_added_up_in_the_dtype_of_reductions() -> None:
    pool(1).run(_added_up)


def test_the_check_for_packed_sequences_is_found_and_put_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    original = flash._is_packed_sequence
    with suppress(KeyError), disable_packed_sequence_check() as found:
        assert found
        assert flash._is_packed_sequence(torch.tensor([[0, 1, 0, 1]]), 1) is False
        raise KeyError
    assert flash._is_packed_sequence is original
    assert original(torch.tensor([[0, 1, 0, 1]]), 1)
    monkeypatch.delattr(flash, "_is_packed_sequence")
    with disable_packed_sequence_check() as found:
        assert not found
