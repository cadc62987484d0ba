"""Canaries: each adjustment of megatron-fsdp still works."""

from __future__ import annotations

import gc
import importlib
import inspect

import pytest
import torch
from torch.distributed.distributed_c10d import _coalescing_manager

from meshwright import StrategyError
from meshwright.testing import Case
from meshwright_megatron_fsdp._compat import wrap_model, wrapped_model
from meshwright_megatron_fsdp._compat.cpu_torch import use_cpu_torch
from meshwright_megatron_fsdp._compat.package import check_version, import_package
from meshwright_testing import pool
from meshwright_testing.case import rank_microbatches
from meshwright_testing.parity import build_manager, train_steps


def test_versions_that_have_not_been_tested_are_refused() -> None:
    for version in ("0.6.1", "0.6.1+local", "0.6.9"):
        check_version(version)
    for version in ("0.2.3", "0.6.0", "0.7.0", "1.0"):
        with pytest.raises(StrategyError, match=r"Install one of these: pip install 'megatron-fsdp>=0.6.1,<0.7'"):
            check_version(version)


class _Owner:
    pass


def test_torch_inside_the_package_answers_for_cuda_and_only_while_held() -> None:
    module = importlib.import_module("megatron_fsdp.param_and_grad_buffer")
    import_package()
    cuda = dict(vars(torch.cuda))
    first, second = _Owner(), _Owner()
    use_cpu_torch(first)
    release = use_cpu_torch(second)
    assert torch.cpu.Stream().record_event() is None
    assert module.torch.cuda.Stream().record_event() is not None
    assert module.torch.cuda.current_device() == 0
    assert module.torch.tensor([1]).cuda().tolist() == [1]
    assert module.torch.nn is torch.nn
    with pytest.raises(AttributeError):
        module.torch.cuda.memory_allocated  # noqa: B018
    assert module._coalescing_manager is not _coalescing_manager
    del first
    gc.collect()
    assert module.torch is not torch
    release()
    assert module.torch is torch
    assert module._coalescing_manager is _coalescing_manager
    assert vars(torch.cuda) == cuda


def _gathered() -> list[list[float]]:
    """What is in the outputs when asynchronous collectives return, which gloo would still be writing to."""
    module = importlib.import_module("megatron_fsdp.param_and_grad_buffer")
    import_package()
    release = use_cpu_torch(owner := _Owner())
    mine = torch.full((2,), float(torch.distributed.get_rank() + 1))
    outputs = [torch.zeros(4) for _ in range(3)]
    handle = module.torch.distributed.all_gather_into_tensor(outputs[0], mine, async_op=True)
    with module._coalescing_manager(torch.distributed.group.WORLD, async_ops=True) as event:
        for output in outputs[1:]:
            module.torch.distributed.all_gather_into_tensor(output_tensor=output, input_tensor=mine, async_op=True)
    found = [output.tolist() for output in outputs]
    handle.wait()
    event.wait()
    release()
    del owner
    return found


def test_collectives_on_a_cpu_are_done_when_they_return() -> None:
    for outputs in pool(2).run(_gathered):
        assert outputs == [[1.0, 1.0, 2.0, 2.0]] * 3


def test_what_the_shorter_calls_of_the_package_leave_out() -> None:
    arguments = inspect.signature(import_package().fully_shard_model).parameters
    assert not {"suggested_communication_unit_size", "bucket_size"} & set(arguments)
    stock = importlib.import_module("megatron_fsdp.megatron_fsdp").MegatronFSDP
    # It gathers nothing over the outer axis; see `gathered`.
    assert "outer" not in inspect.getsource(stock.start_param_sync)
    # And its shards are checked by functions that a plan leaves out.
    module = importlib.import_module("megatron_fsdp.param_and_grad_buffer")
    source = inspect.getsource(module.make_fsdp_dtensor)
    assert all(f"{name}(" in source for name in wrap_model.SHARD_SIZE_COLLECTIVES)
    uneven = inspect.getsource(importlib.import_module("megatron_fsdp.uneven_dtensor"))
    assert "all_gather_object" in uneven


def _inside() -> list[bool]:
    case = Case()
    manager = build_manager("megatron_fsdp", {}, {}, case)
    fsdp = manager._fsdp
    train_steps(manager, case, range(1))
    sharded = [type(p).__name__ for p in manager.model.parameters()]
    wrapped_model.use_raw_parameters(fsdp)
    raw = [type(p).__name__ for p in manager.model.parameters()]
    wrapped_model.use_sharded_parameters(fsdp)
    batch = rank_microbatches(case, 0, manager.mesh.data_rank, manager.mesh.data_size)[0]
    loss = manager.module(input_ids=batch["input_ids"]).logits.sum()
    idle = not wrapped_model.is_in_backward(fsdp)
    seen = []
    handle = fsdp.raw_param["lm_head.weight"].register_post_accumulate_grad_hook(
        lambda p: seen.append((wrapped_model.is_in_backward(fsdp), p in wrapped_model.find_pending_parameters(fsdp)))
    )
    loss.backward()
    handle.remove()
    hookless = not wrapped_model.remove_gradient_hooks(fsdp).keys() - set(fsdp.raw_param.values())
    return [set(sharded) != set(raw), idle, seen == [(True, True)], not wrapped_model.is_in_backward(fsdp), hookless]


def test_states_and_hooks_of_a_wrapped_model() -> None:
    assert pool(2).run(_inside) == [[True] * 5] * 2
