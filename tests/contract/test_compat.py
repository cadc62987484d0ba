"""Canaries for the private names of torch that core's `_compat` modules use: each fails when torch changes under it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import meshwright_ddp._compat
import meshwright_fsdp2._compat
from meshwright import StrategyError
from meshwright._compat import torch as torch_versions
from meshwright._compat.torch import (
    GLOO_THREAD_NAME,
    count_flops,
    draws_random_numbers,
    get_group_timeout,
    get_mutated_arguments,
    get_own_parameters,
    get_storage_key,
    get_version,
    is_propagating_shapes,
    list_process_groups,
    new_group_timeout,
    packed_shard,
    queue_after_backward,
)
from meshwright.files.versions import get_min_torch_version
from meshwright.tensors.state import gather_full_tensor
from meshwright_plan._compat import is_in_backward, pass_through_collective
from meshwright_testing import pool
from meshwright_testing.workers import GROUP_TIMEOUT_S


def _names_of_threads() -> set[str]:
    dist.barrier()
    return {(task / "comm").read_text(encoding="utf-8").strip() for task in Path("/proc/self/task").iterdir()}


def test_threads_of_gloo_are_known_by_their_name() -> None:
    assert all(GLOO_THREAD_NAME in names for names in pool(2).run(_names_of_threads))


def _timeouts() -> tuple[timedelta, timedelta, timedelta, list[bool]]:
    own = dist.new_group(backend="gloo", timeout=timedelta(seconds=7))
    with new_group_timeout(timedelta(seconds=11)):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
    inner = mesh.get_group("inner")
    return (
        get_group_timeout(),
        get_group_timeout(own),
        get_group_timeout(inner),
        [own in list_process_groups(), inner in list_process_groups()],
    )


def test_timeouts_of_groups_that_are_made_in_the_context_are_set() -> None:
    for world, own, inner, are_live in pool(2).run(_timeouts):
        assert world == timedelta(seconds=GROUP_TIMEOUT_S)
        assert (own, inner) == (timedelta(seconds=7), timedelta(seconds=11))
        assert are_live == [True, True]


def _packed() -> tuple[list[float], list[float], list[int]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    made = distribute_tensor(torch.arange(8.0), mesh, [packed_shard(0, 2)])
    columns = distribute_tensor(torch.arange(24.0).view(3, 8), mesh, [packed_shard(1, 2)])
    assert torch.equal(gather_full_tensor(columns), torch.arange(24.0).view(3, 8))
    return made.to_local().tolist(), gather_full_tensor(made).tolist(), columns.to_local()[0].int().tolist()


def test_a_packed_shard_divides_each_part() -> None:
    for rank, (local, whole, columns) in enumerate(pool(2).run(_packed)):
        assert local == [[0.0, 1.0, 4.0, 5.0], [2.0, 3.0, 6.0, 7.0]][rank]
        assert whole == list(range(8))
        assert columns == [[0, 1, 4, 5], [2, 3, 6, 7]][rank]


@pytest.mark.parametrize("module", [torch_versions, meshwright_ddp._compat, meshwright_fsdp2._compat])
def test_shims_for_old_versions_of_torch_go_when_none_of_them_is_supported(module: ModuleType) -> None:
    oldest = tuple(map(int, get_min_torch_version().split(".")))
    assert oldest < (2, 13), f"delete what {module.__name__}.SHIMS lists: {', '.join(module.SHIMS)}"
    assert all(callable(getattr(module, name)) for name in module.SHIMS)


def test_what_torch_names_again_is_called_by_its_new_name() -> None:
    if hasattr(dist, "all_gather_single"):
        assert torch_versions.all_gather_single is dist.all_gather_single
        assert torch_versions.reduce_scatter_single is dist.reduce_scatter_single
        assert meshwright_ddp._compat.broadcast_buffers_kwargs(True) == {"forward_sync_buffers": True}
        assert torch_versions.compiles_attention_in_float64()
    else:
        assert meshwright_ddp._compat.broadcast_buffers_kwargs(False) == {"broadcast_buffers": False}
        assert not torch_versions.compiles_attention_in_float64()


def test_the_end_of_a_backward_comes_behind_all_gradients_and_may_raise() -> None:
    leaf, ended = torch.ones(2, requires_grad=True), []

    def end() -> None:
        ended.append(leaf.grad is not None)
        raise StrategyError("reported")

    output = leaf * 2
    output.register_hook(lambda grad: queue_after_backward(end))
    with pytest.raises(StrategyError, match="reported"):
        output.sum().backward()
    assert ended == [True]


def test_operators_that_draw_random_numbers_are_known() -> None:
    aten, x = torch.ops.aten, torch.ones(1, 2, 3, 4)
    assert draws_random_numbers(aten.bernoulli.default, (x,), {})
    assert draws_random_numbers(aten.native_dropout.default, (x, 0.5, True), {})
    assert not draws_random_numbers(aten.native_dropout.default, (x, 0.0, True), {})
    for attention in (aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention):
        arguments = [each.name for each in attention.default._schema.arguments]
        given = (x,) * arguments.index("dropout_p")
        assert not draws_random_numbers(attention.default, given, {})
        assert draws_random_numbers(attention.default, (*given, 0.1), {})
    assert not draws_random_numbers(aten.mm.default, (x, x), {})


def test_arithmetic_is_that_of_products_attention_and_convolutions() -> None:
    aten = torch.ops.aten
    left, right = torch.ones(2, 3), torch.ones(3, 5)
    assert count_flops(aten.mm.default, (left, right), {}, left @ right) == 2 * 2 * 3 * 5
    assert count_flops(aten.addmm.default, (torch.ones(5), left, right), {}, left @ right) == 2 * 2 * 3 * 5
    assert count_flops(aten.bmm.default, (left[None], right[None]), {}, (left @ right)[None]) == 2 * 2 * 3 * 5
    image, kernel = torch.ones(1, 2, 8), torch.ones(4, 2, 3)
    made = torch.nn.functional.conv1d(image, kernel)
    assert count_flops(aten.convolution.default, (image, kernel), {}, made) == 2 * 4 * 6 * (2 * 3)
    assert count_flops(aten.silu.default, (left,), {}, left) == 0


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 7), (7, 3), (1, 6)])
def test_arithmetic_of_attention_is_that_of_pairs_that_act_on_each_other(queries: int, keys: int) -> None:
    aten = torch.ops.aten
    query, key, value = torch.ones(2, 4, queries, 8), torch.ones(2, 2, keys, 8), torch.ones(2, 2, keys, 6)
    every = torch.ones(queries, keys)
    from_begin, from_end = every.tril(), every.tril(keys - queries)
    given, rows = (query, key, value), torch.empty(0)
    cpu, efficient = aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_efficient_attention
    flash = aten._scaled_dot_product_flash_attention
    for operator, args, kwargs, acting in (
        (cpu.default, given, {}, every),
        (cpu.default, (*given, 0.0, True), {}, from_begin),
        (cpu.default, given, {"is_causal": True}, from_begin),
        (cpu.default, given, {"attn_mask": from_end.bool()}, from_end),
        (efficient.default, (*given, None, True), {}, every),
        (efficient.default, (*given, None, True, 0.0, True), {}, from_begin),
        (efficient.default, (*given, from_end, True), {}, from_end),
        (flash.default, given, {}, every),
        (flash.default, (*given, 0.0, True), {}, from_end),
        (aten.scaled_dot_product_attention.default, given, {"is_causal": True}, from_begin),
        ("flex_attention", (*given, None, None), {}, from_end),
    ):
        pairs = 2 * 4 * int(acting.sum())
        assert count_flops(operator, args, kwargs, None) == pairs * 2 * (8 + 6)
    backward = (query, *given, query, rows)
    for operator, args, kwargs, acting in (
        (aten._scaled_dot_product_flash_attention_for_cpu_backward, (*backward, 0.0, False), {}, every),
        (aten._scaled_dot_product_flash_attention_for_cpu_backward, (*backward, 0.0, True), {}, from_begin),
        (
            aten._scaled_dot_product_flash_attention_for_cpu_backward,
            (*backward, 0.0, False),
            {"attn_mask": 1},
            from_end,
        ),
        (aten._scaled_dot_product_flash_attention_backward, (*backward, rows, rows, 5, 5, 0.0, True), {}, from_end),
        (
            aten._scaled_dot_product_efficient_attention_backward,
            (query, *given, None, query, rows, rows, rows, 0.0, [True] * 4, True),
            {},
            from_begin,
        ),
    ):
        # Scores again, and the gradients of values, of probabilities, of queries and of keys.
        pairs = 2 * 4 * int(acting.sum())
        assert count_flops(operator.default, args, kwargs, None) == pairs * 2 * (8 + 6 + 6 + 8 + 8)


def test_storages_versions_and_arguments_that_are_written_are_known() -> None:
    tensor, aten = torch.zeros(4, 4), torch.ops.aten
    assert get_storage_key(tensor)[0] == get_storage_key(tensor[1:, 2])[0] == get_storage_key(tensor.detach())[0]
    assert get_storage_key(tensor)[0] != get_storage_key(torch.zeros(4, 4))[0]
    before = get_version(tensor)
    tensor.view(2, 8).add_(1)
    assert get_version(tensor) == before + 1
    operators = (aten.normal_.default, aten.add.out, aten.add.Tensor)
    assert [get_mutated_arguments(each) for each in operators] == [(0,), ("out",), ()]


def test_what_is_put_among_a_modules_own_parameters_is_what_its_forward_sees():
    layer = nn.Linear(2, 3)
    before = layer.weight
    get_own_parameters(layer)["weight"] = torch.zeros(3, 2)
    get_own_parameters(layer)["bias"] = None
    assert layer(torch.ones(1, 2)).tolist() == [[0.0, 0.0, 0.0]]
    get_own_parameters(layer)["weight"] = before
    assert layer.weight is before
    assert dict(layer.named_parameters()) == {"weight": before}


def test_it_is_known_when_shapes_are_asked_for_and_when_backward_runs() -> None:
    seen: list[bool] = []
    value = torch.ones(3, requires_grad=True)
    value.register_hook(lambda _: seen.append(is_in_backward()))
    value.sum().backward()
    assert seen == [True]
    assert not is_in_backward()
    assert not is_propagating_shapes()
    with FakeTensorMode():
        assert is_propagating_shapes()


def test_what_stands_for_a_result_is_handed_on() -> None:
    tensor = torch.ones(2)
    wrap, wait = (
        getattr(torch.ops._c10d_functional, name).default for name in ("_wrap_tensor_autograd", "wait_tensor")
    )
    assert wait(tensor) is tensor
    assert pass_through_collective(wait, [tensor]) is tensor
    assert type(pass_through_collective(wrap, [tensor])) is type(wrap(tensor))
    assert pass_through_collective(torch.ops.aten.add.Tensor, [tensor]) is None
