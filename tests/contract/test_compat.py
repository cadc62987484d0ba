"""Canaries for the private names of torch that core's `_compat` modules use: each fails when torch changes under it."""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import meshwright_ddp._compat
import meshwright_fsdp2._compat
from meshwright import Mesh, MeshSizes, StrategyError, open_world
from meshwright._compat import torch_versions
from meshwright._compat.arithmetic import arithmetic
from meshwright._compat.chat_templates import render_marked
from meshwright._compat.peft import (
    active_copies,
    base_name,
    file_names,
    low_rank,
    merge_layer,
    saved_copies,
    stand_in,
    sum_norms,
    with_low_rank,
    wrapped,
    wrappers,
    wrappers_of_parameters,
)
from meshwright._compat.peft_tying import adapted_on_meta
from meshwright._compat.planning import Fakes, handed_on, in_backward, is_asking_for_shapes
from meshwright._compat.torch import (
    GLOO_THREAD,
    TorchDispatchMode,
    after_backward,
    all_gather,
    all_reduce,
    all_to_all,
    draws_random_numbers,
    foreach_copy_,
    foreach_mul_,
    foreach_norm,
    gather_packed,
    group_timeout,
    groups_with_timeout,
    is_packed,
    is_sharded,
    live_groups,
    own_parameters,
    packed_shard,
    reduce_scatter,
    storage_of,
    version_of,
    written_arguments,
)
from meshwright._compat.transformers import (
    attention_of,
    attention_setting,
    for_documents,
    is_left_out_of_files,
    load_state_dict_as_pretrained,
    mask_maker,
    nested_configs,
    register_attention,
    saved_together,
    set_attention,
    to_saved_format,
)
from meshwright.files.versions import oldest_torch
from meshwright.model.pretrained.files import Held
from meshwright.model.pretrained.recorded import Recorded
from meshwright.tensors.state import whole_tensor
from meshwright.testing import pool
from meshwright.testing.models import case_model, tiny_model
from meshwright.testing.pool import GROUP_TIMEOUT_S
from meshwright.tracing._compat import bound_arguments, process_group, unwraps_itself


def _flattened() -> tuple[list[int], tuple[str, ...], int]:
    world = open_world("cpu")
    mesh = Mesh(MeshSizes(dp_replicate_size=2, cp_size=2, dp_size=2).resolve(world.size), world)
    sliced = mesh["dp_replicate", "dp_shard_cp"]
    return mesh["dp_cp"].mesh.tolist(), sliced.mesh_dim_names, sliced.get_local_rank("dp_shard_cp")


@pytest.mark.slow
def test_flattened_views_are_registered_in_the_root_mesh() -> None:
    for rank, (ranks, names, coordinate) in enumerate(pool(4).run(_flattened)):
        assert ranks == [0, 1, 2, 3]
        assert names == ("dp_replicate", "dp_shard_cp")
        assert coordinate == rank % 2


def _names_of_threads() -> set[str]:
    dist.barrier()
    return {(task / "comm").read_text(encoding="utf-8").strip() for task in Path("/proc/self/task").iterdir()}


def test_threads_of_gloo_are_known_by_their_name() -> None:
    assert all(GLOO_THREAD in names for names in pool(2).run(_names_of_threads))


def _timeouts() -> tuple[timedelta, timedelta, timedelta, list[bool]]:
    own = dist.new_group(backend="gloo", timeout=timedelta(seconds=7))
    with groups_with_timeout(timedelta(seconds=11)):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
    inner = mesh.get_group("inner")
    return group_timeout(), group_timeout(own), group_timeout(inner), [own in live_groups(), inner in live_groups()]


def test_timeouts_of_groups_that_are_made_in_the_context_are_set() -> None:
    for world, own, inner, are_live in pool(2).run(_timeouts):
        assert world == timedelta(seconds=GROUP_TIMEOUT_S)
        assert (own, inner) == (timedelta(seconds=7), timedelta(seconds=11))
        assert are_live == [True, True]


def test_foreach_norm_is_the_norm_of_each_tensor_in_the_dtype_asked_for() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.full((2, 2), -2.0)]
    for norm_type, expected in ((1.0, [7.0, 8.0]), (2.0, [5.0, 4.0]), (math.inf, [4.0, 2.0])):
        norms = foreach_norm(tensors, norm_type, torch.float64)
        assert [float(norm) for norm in norms] == expected
        assert {norm.dtype for norm in norms} == {torch.float64}
    assert foreach_norm([], 2.0) == []


def test_foreach_mul_scales_in_place_by_a_scalar_tensor() -> None:
    tensors = [torch.ones(2), torch.full((3, 1), 2.0)]
    foreach_mul_(tensors, torch.tensor(0.5))
    assert [t.flatten().tolist() for t in tensors] == [[0.5] * 2, [1.0] * 3]
    foreach_mul_([], torch.tensor(0.5))


def test_foreach_copy_rounds_to_the_dtype_of_the_target() -> None:
    targets = [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.float64), torch.zeros(0)]
    sources = [torch.tensor([1.001, 3.0]), torch.arange(3.0), torch.zeros(0)]
    foreach_copy_(targets, sources)
    assert [target.tolist() for target in targets] == [[1.0, 3.0], [0.0, 1.0, 2.0], []]
    foreach_copy_([], [])


class _Names(TorchDispatchMode):
    """Notes the collectives that are issued, with their groups, and the tensor classes that are left to themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: dict[str, str] = {}
        self.left: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(unwraps_itself, types)):
            self.left |= {kind.__name__ for kind in types}
            return NotImplemented
        arguments = bound_arguments(func, args, kwargs or {})
        group = arguments.get("process_group", arguments.get("group_name"))
        if group is not None:
            self.groups[str(func)] = process_group(group).group_name
        return func(*args, **(kwargs or {}))


def _collectives_of_three_kinds() -> tuple[dict[str, str], set[str], str]:
    mesh = Mesh(MeshSizes().resolve(open_world("cpu").size, {"dp_shard"}), open_world("cpu"))["dp_shard"]
    local = torch.ones(2)
    with _Names() as mode:
        dist.all_reduce(local, group=mesh.get_group())
        total = DTensor.from_local(local, mesh, [Partial()]).redistribute(mesh, [Replicate()])
        total + 1
    return mode.groups, mode.left, mesh.get_group().group_name


def test_a_dispatch_mode_sees_collectives_with_their_groups_also_those_inside_a_dtensor() -> None:
    for groups, left, name in pool(2).run(_collectives_of_three_kinds):
        assert groups == {"c10d.allreduce_.default": name, "_c10d_functional.all_reduce.default": name}
        assert "DTensor" in left


def _functional_collectives() -> list[Tensor]:
    group, rank = dist.group.WORLD, dist.get_rank()
    # Transposed, so not contiguous.
    given = (torch.arange(8.0).view(4, 2) + 10 * rank).T
    before = given.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answers = [
            all_reduce(given, "sum", group),
            all_reduce(given, "max", group),
            all_gather(given, 0, group),
            all_gather(given, -1, group),
            reduce_scatter(given, 0, group),
            reduce_scatter(given, -1, group),
            all_to_all(given, group),
        ]
    assert torch.equal(given, before)
    return answers


def test_functional_collectives_make_new_tensors_of_strided_ones_along_any_dim_without_warnings() -> None:
    parts = [(torch.arange(8.0).view(4, 2) + 10 * rank).T for rank in range(2)]
    total = parts[0] + parts[1]
    for rank, answers in enumerate(pool(2).run(_functional_collectives)):
        expected = [
            total,
            parts[1],
            torch.cat(parts, 0),
            torch.cat(parts, 1),
            total[rank : rank + 1],
            total[:, 2 * rank : 2 * rank + 2],
            torch.stack([part[rank] for part in parts]),
        ]
        for answer, wanted in zip(answers, expected, strict=True):
            torch.testing.assert_close(answer, wanted, rtol=0, atol=0)


def _packed() -> tuple[list[float], list[float], list[int]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    made = distribute_tensor(torch.arange(8.0), mesh, [packed_shard(0, 2)])
    columns = distribute_tensor(torch.arange(24.0).view(3, 8), mesh, [packed_shard(1, 2)])
    assert torch.equal(whole_tensor(columns), torch.arange(24.0).view(3, 8))
    return made.to_local().tolist(), whole_tensor(made).tolist(), columns.to_local()[0].int().tolist()


def test_a_packed_shard_divides_each_part() -> None:
    for rank, (local, whole, columns) in enumerate(pool(2).run(_packed)):
        assert local == [[0.0, 1.0, 4.0, 5.0], [2.0, 3.0, 6.0, 7.0]][rank]
        assert whole == list(range(8))
        assert columns == [[0, 1, 4, 5], [2, 3, 6, 7]][rank]


def _packed_over_two_axes() -> list[bool]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = torch.arange(24.0).view(3, 8)
    layer = nn.Linear(8, 3, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(full, mesh["tp"], [packed_shard(1, 2)]))
    fully_shard(layer, mesh=mesh["dp"])
    return [is_packed(layer.weight), torch.equal(whole_tensor(layer.weight.detach()), full)]


@pytest.mark.slow
def test_packed_parts_are_gathered_where_another_axis_shards_another_dim() -> None:
    assert pool(4).run(_packed_over_two_axes) == [[True, True]] * 4


def test_packed_parts_that_do_not_divide_are_refused() -> None:
    class Mesh:
        ndim, shape = 1, (3,)

    odd = torch.empty(8)
    tensor = type("Odd", (), {"device_mesh": Mesh(), "placements": (packed_shard(0, 2),), "shape": odd.shape})()
    with pytest.raises(StrategyError, match=r"2 packed parts of 8 features cannot be gathered over 3 ranks"):
        gather_packed(tensor)


@pytest.mark.parametrize("module", [torch_versions, meshwright_ddp._compat, meshwright_fsdp2._compat])
def test_shims_for_old_versions_of_torch_go_when_none_of_them_is_supported(module: ModuleType) -> None:
    oldest = tuple(map(int, oldest_torch().split(".")))
    assert oldest < (2, 13), f"delete what {module.__name__}.SHIMS lists: {', '.join(module.SHIMS)}"
    assert all(callable(getattr(module, name)) for name in module.SHIMS)


def test_what_torch_names_anew_is_called_by_its_new_name() -> None:
    if hasattr(dist, "all_gather_single"):
        assert torch_versions.all_gather_single is dist.all_gather_single
        assert torch_versions.reduce_scatter_single is dist.reduce_scatter_single
        assert meshwright_ddp._compat.buffer_option(True) == {"forward_sync_buffers": True}
        assert torch_versions.compiles_attention_in_float64()
    else:
        assert meshwright_ddp._compat.buffer_option(False) == {"broadcast_buffers": False}
        assert not torch_versions.compiles_attention_in_float64()


def _placements_after_fully_shard() -> list[list[bool]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tp"], [Shard(0)]))
    layer.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), mesh["tp"], [Replicate()]))
    fully_shard(layer, mesh=mesh["dp"])
    return [[is_sharded(placement) for placement in parameter.placements] for parameter in (layer.weight, layer.bias)]


@pytest.mark.slow
def test_placements_that_divide_are_known_also_where_fully_shard_divides_further() -> None:
    assert [is_sharded(each) for each in (Shard(0), packed_shard(0, 2), Replicate(), Partial())] == [
        True,
        True,
        False,
        False,
    ]
    for weight, bias in pool(4).run(_placements_after_fully_shard):
        assert weight == [True, True]
        assert bias == [True, False]


def test_the_end_of_a_backward_comes_behind_all_gradients_and_may_raise() -> None:
    leaf, ended = torch.ones(2, requires_grad=True), []

    def end() -> None:
        ended.append(leaf.grad is not None)
        raise StrategyError("told")

    output = leaf * 2
    output.register_hook(lambda grad: after_backward(end))
    with pytest.raises(StrategyError, match="told"):
        output.sum().backward()
    assert ended == [True]


def test_views_share_the_key_of_their_storage() -> None:
    tensor = torch.zeros(4, 4)
    assert storage_of(tensor)[0] == storage_of(tensor[1:, 2])[0] == storage_of(tensor.detach())[0]
    assert storage_of(tensor)[0] != storage_of(torch.zeros(4, 4))[0]


def test_written_arguments_are_known() -> None:
    aten = torch.ops.aten
    assert written_arguments(aten.normal_.default) == (0,)
    assert written_arguments(aten.add.out) == ("out",)
    assert written_arguments(aten.add.Tensor) == ()


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
    assert arithmetic(aten.mm.default, (left, right), {}, left @ right) == 2 * 2 * 3 * 5
    assert arithmetic(aten.addmm.default, (torch.ones(5), left, right), {}, left @ right) == 2 * 2 * 3 * 5
    assert arithmetic(aten.bmm.default, (left[None], right[None]), {}, (left @ right)[None]) == 2 * 2 * 3 * 5
    image, kernel = torch.ones(1, 2, 8), torch.ones(4, 2, 3)
    made = torch.nn.functional.conv1d(image, kernel)
    assert arithmetic(aten.convolution.default, (image, kernel), {}, made) == 2 * 4 * 6 * (2 * 3)
    assert arithmetic(aten.silu.default, (left,), {}, left) == 0


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
        assert arithmetic(operator, args, kwargs, None) == pairs * 2 * (8 + 6)
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
        assert arithmetic(operator.default, args, kwargs, None) == pairs * 2 * (8 + 6 + 6 + 8 + 8)


def test_writing_into_a_tensor_or_its_view_raises_its_version() -> None:
    tensor = torch.ones(4)
    before = version_of(tensor)
    tensor.view(2, 2).add_(1)
    assert version_of(tensor) == before + 1


def test_a_state_dict_is_loaded_as_a_directory_without_copies_of_its_tensors() -> None:
    model = tiny_model(tied=True)
    whole = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    recorded: dict[str, Tensor] = {name: Recorded.of(Held(value)) for name, value in whole.items()}
    dropped = recorded.pop("model.norm.weight")
    loaded, found = load_state_dict_as_pretrained(model.config, {**recorded, "extra": dropped}, torch.float64)
    assert (set(found["missing_keys"]), set(found["unexpected_keys"])) == ({"model.norm.weight"}, {"extra"})
    state = loaded.state_dict(keep_vars=True)
    assert state["lm_head.weight"] is state["model.embed_tokens.weight"]
    for name, value in state.items():
        # What is missing, and buffers that are not saved, have values; all else is as it was given.
        assert isinstance(value, Recorded) == (name != "model.norm.weight"), name
    assert not any(buffer.is_meta for buffer in loaded.buffers())
    assert type(loaded) is type(model)


def test_every_configuration_of_a_model_is_found_and_changes_by_itself() -> None:
    from transformers import AutoConfig

    model = tiny_model()
    model.config.other = AutoConfig.for_model("gpt2")
    assert nested_configs(model) == [model.config]
    nested = AutoConfig.for_model("gemma3")
    holder = nn.Module()
    holder.config = nested
    assert set(map(id, nested_configs(holder))) == {
        id(each) for each in (nested, nested.text_config, nested.vision_config)
    }
    set_attention(nested, "one")
    set_attention(nested.text_config, "other")
    assert [attention_setting(nested), attention_setting(nested.text_config)] == ["one", "other"]
    assert nested._attn_implementation == "one"


def test_a_model_calls_what_is_registered_with_the_mask_of_the_same_name() -> None:
    seen: list[Any] = []

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        seen.append((mask, sorted(options)))
        return query.transpose(1, 2).contiguous(), None

    register_attention("meshwright_canary", attend, lambda **arguments: sorted(arguments))
    model = tiny_model()
    for config in nested_configs(model):
        set_attention(config, "meshwright_canary")
    ids = torch.arange(6)[None]
    # A mask that is longer than the tokens is one of keys.
    model(input_ids=ids, position_ids=ids + 3, attention_mask=torch.ones(1, 12), use_cache=False)
    mask, options = seen[0]
    assert {"mask_function", "q_length", "kv_length", "attention_mask", "allow_is_causal_skip", "use_vmap"} <= set(mask)
    assert {"dropout", "scaling"} <= set(options)
    assert len(seen) == model.config.num_hidden_layers


def test_the_attention_function_of_a_layer() -> None:
    layer = tiny_model().model.layers[0].self_attn
    tensors = [torch.randn(2, heads, 5, 4, dtype=torch.float64) for heads in (12, 2, 2)]
    rule = {"mask_function": lambda b, h, q, k: k <= q, "batch_size": 2, "q_length": 5, "kv_length": 5}
    rule |= {"allow_is_causal_skip": False, "dtype": torch.float64}
    found = [
        attention_of(layer, name)(layer, *tensors, mask_maker(name)(**rule), scaling=0.5)[0]
        for name in ("eager", "sdpa")
    ]
    assert attention_of(layer, "eager").__name__ == "eager_attention_forward"
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-6)


def test_documents_are_kept_apart() -> None:
    positions_BS = torch.tensor([[0, 1, 2, 0, 1]])
    function, are_several = for_documents(lambda b, h, q, k: k <= q, positions_BS)
    zero = torch.tensor(0)
    seen = [[bool(function(zero, zero, torch.tensor(q), torch.tensor(k))) for k in range(5)] for q in range(5)]
    assert are_several
    assert [sum(row) for row in seen] == [1, 2, 3, 1, 2]
    assert not for_documents(lambda b, h, q, k: k <= q, torch.arange(5)[None])[1]


def test_experts_are_saved_one_by_one_as_save_pretrained_saves_them(tmp_path: Path) -> None:
    model = case_model("mixtral", tied=None, seed=0, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        expected = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    state = model.state_dict()
    groups = saved_together(model, list(state))
    assert sorted(name for group in groups for name in group) == sorted(state)
    made: dict[str, Tensor] = {}
    for group in groups:
        part = to_saved_format(model, {name: state[name] for name in group})
        assert not made.keys() & part.keys()
        made.update(part)
    assert made.keys() == expected.keys() != state.keys()
    assert all(torch.equal(made[name], expected[name]) for name in expected)
    # Sizes are known without values.
    sizes = {
        n: t.nbytes for g in groups for n, t in to_saved_format(model, {k: state[k].to("meta") for k in g}).items()
    }
    assert sizes == {name: tensor.nbytes for name, tensor in expected.items()}


def test_what_a_model_says_it_makes_anew_is_not_saved(tmp_path: Path) -> None:
    model = tiny_model()
    model._keys_to_ignore_on_save = [r"layers\.0\..*bias", "model.norm.weight"]
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = set(file.keys())
    left_out = {name for name in model.state_dict() if is_left_out_of_files(model, name)}
    assert left_out == model.state_dict().keys() - saved == {"model.norm.weight"}


def test_what_is_put_among_a_modules_own_parameters_is_what_its_forward_sees():
    layer = nn.Linear(2, 3)
    before = layer.weight
    own_parameters(layer)["weight"] = torch.zeros(3, 2)
    own_parameters(layer)["bias"] = None
    assert layer(torch.ones(1, 2)).tolist() == [[0.0, 0.0, 0.0]]
    own_parameters(layer)["weight"] = before
    assert layer.weight is before
    assert dict(layer.named_parameters()) == {"weight": before}


def test_a_chat_template_tells_which_characters_it_has_marked():
    template = "{% for m in messages %}[{% generation %}{{ m.content }}{{ end }}{% endgeneration %}]{% endfor %}"
    messages = [{"role": "assistant", "content": "one"}, {"role": "assistant", "content": ""}]
    assert render_marked(template, messages, None, {"end": "."}) == ("[one.][.]", [(1, 5), (7, 8)])


def test_peft_adapts_models_without_memory_and_merges_layers_by_themselves() -> None:
    """`adapted_on_meta`, `wrappers` and `merge_layer`: what peft's own loading and `merge_and_unload` rely on."""
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj"], modules_to_save=["lm_head"])
    with torch.device("meta"):
        model = adapted_on_meta(tiny_model(tied=False), {"default": config})
    assert all(parameter.is_meta for parameter in model.parameters())
    assert [name for name, _ in wrappers(model)] == [
        f"base_model.model.model.layers.{index}.self_attn.q_proj" for index in range(3)
    ]
    assert active_copies(model) == {
        "base_model.model.lm_head.original_module.weight": False,
        "base_model.model.lm_head.modules_to_save.default.weight": True,
    }
    layer = dict(wrappers(get_peft_model(tiny_model(tied=False), config)))[
        "base_model.model.model.layers.1.self_attn.q_proj"
    ]
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    weight, left, right = (layer.get_parameter(f"{name}.weight").clone() for name in _FACTORS)
    merged = merge_layer(layer, "q_proj")
    assert torch.equal(merged.get_parameter("weight"), weight + left @ right * 3)


def test_peft_wraps_layers_embeddings_and_parameters_as_low_rank_says() -> None:
    """The attributes by which adapters are placed along `tp` and `ep`, and the copies that `modules_to_save` makes."""
    options = {"r": 2, "use_dora": True, "lora_dropout": 0.1, "target_modules": ["embed_tokens", "o_proj"]}
    model = get_peft_model(tiny_model(tied=False), LoraConfig(**options, modules_to_save=["lm_head"]))
    layers = {base_name(name): layer for name, layer in wrappers(model)}
    embedding, linear = (low_rank(layers[f"model.{each}"]) for each in ("embed_tokens", "layers.0.self_attn.o_proj"))
    assert embedding is not None
    assert linear is not None
    assert embedding.inner == ("lora_embedding_A.default",)
    assert embedding.outer == ("lora_embedding_B.default", "lora_magnitude_vector.default.weight")
    assert linear.inner == ("lora_A.default.weight",)
    assert linear.outer == ("lora_B.default.weight", "lora_magnitude_vector.default.weight")
    assert [type(each) for each in linear.dropouts] == [nn.Dropout]
    assert saved_copies(model, "base_model.model.lm_head")[1] == "base_model.model.lm_head.modules_to_save.default"
    (magnitude,) = linear.magnitudes
    asked: list[int] = []
    sum_norms(magnitude, lambda squares: asked.append(1) or 4 * squares, lambda: True)  # type: ignore[func-returns-value]
    value = model(input_ids=torch.arange(4)[None]).logits
    assert asked == [1]
    assert value.isfinite().all()


def test_peft_stacks_the_adapters_of_experts_as_ranks_of_experts_take_them() -> None:
    config = LoraConfig(r=2, target_parameters=["mlp.experts.down_proj"], target_modules=[])
    model = get_peft_model(case_model("mixtral", tied=None, seed=0, dtype=torch.float64), config)
    (_, layer), *_ = wrappers(model)
    assert wrappers_of_parameters(model, wrapped(layer))[0] is layer
    nn.init.normal_(layer.lora_B["default"].weight)
    weight = layer.get_param().detach()
    expected = weight + layer.get_delta_weight("default")
    torch.testing.assert_close(with_low_rank(layer, weight[1:3], 1), expected[1:3], rtol=0, atol=1e-14)


def test_wrappers_of_peft_hold_wrappers() -> None:
    config = LoraConfig(r=2, target_parameters=["experts.gate_up_proj", "experts.down_proj"], target_modules=[])
    model = get_peft_model(case_model("mixtral", tied=None, seed=0, dtype=torch.float64), config)
    outermost = [name for name, _ in wrappers(model, outermost=True)]
    assert all(name.endswith(".mlp.experts") for name in outermost)
    assert [name for name, _ in wrappers(model)] == [
        name for outer in outermost for name in (outer, f"{outer}.base_layer")
    ]


def test_peft_tells_the_names_in_an_adapters_file_and_copies_stand_ins_without_memory() -> None:
    model = get_peft_model(tiny_model(tied=False), LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    names = file_names(model)
    path = "base_model.model.model.layers.0.self_attn.q_proj"
    assert names[f"{path}.lora_magnitude_vector"] == f"{path}.lora_magnitude_vector.default.weight"
    assert names[f"{path}.lora_A.weight"] == f"{path}.lora_A.default.weight"
    copied = copy.deepcopy(stand_in(nn.Parameter(torch.empty(1000, 1000))))
    assert copied.untyped_storage().nbytes() == 4
    assert copied.isnan().all()


def test_tensors_without_memory_have_shapes_and_no_weak_references() -> None:
    fakes, real = Fakes(), torch.ones(3, 4)
    (made,) = (fakes.computed(torch.ops.aten.mul.Tensor, (), (real, 2), {}),)
    assert fakes.knows(made)
    assert not fakes.knows(real)
    assert not Fakes().knows(made)
    assert (made.shape, fakes.device(made), weakref.getweakrefs(made)) == (real.shape, torch.device("cpu"), [])


def test_what_torch_has_found_out_about_an_operator_is_found_again() -> None:
    aten, fakes = torch.ops.aten, Fakes()
    base = fakes.computed(aten.mul.Tensor, (), (torch.ones(6, 4), 2), {})

    def metadata(given: torch.Tensor) -> tuple[Any, ...]:
        return given.shape, given.stride(), given.storage_offset(), given.dtype, fakes.device(given)

    for operator, args in (
        (aten.mul.Tensor, (base, base)),
        (aten.mul.Tensor, (base, 2)),
        (aten.mul.Tensor, (base.to(torch.int64), 2)),
        (aten.mul.Tensor, (base.to(torch.int64), 2.0)),
        (aten.slice.Tensor, (base, 0, 1, 4)),
        (aten.slice.Tensor, (base, 0, 2, 4)),
        (aten.split.Tensor, (base, 2)),
        (aten.cat.default, ([base, base], 1)),
        (aten.sum.dim_IntList, (base, [1], True)),
    ):
        first = fakes.computed(operator, (), args, {})
        hits = FakeTensorMode.cache_hits
        again, anew = fakes.computed(operator, (), args, {}), Fakes()._mode.dispatch(operator, (), args, {})
        # Torch's own table was not asked but for `anew`.
        assert FakeTensorMode.cache_hits <= hits + 1
        for one, two, other in zip(*map(_several, (first, again, anew)), strict=True):
            assert metadata(one) == metadata(two) == metadata(other)
            is_view = operator in (aten.slice.Tensor, aten.split.Tensor)
            assert (two.untyped_storage()._cdata == base.untyped_storage()._cdata) == is_view
            assert fakes.knows(two)
            assert two is not one
    assert fakes.computed(aten.add_.Tensor, (), (base, 1), {}) is base
    assert fakes.computed(aten.add_.Tensor, (), (base, 1), {}) is base


def _several(given: torch.Tensor | tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [given] if isinstance(given, torch.Tensor) else list(given)


def test_it_is_known_when_shapes_are_asked_for_and_when_backward_runs() -> None:
    seen: list[bool] = []
    value = torch.ones(3, requires_grad=True)
    value.register_hook(lambda _: seen.append(in_backward()))
    value.sum().backward()
    assert seen == [True]
    assert not in_backward()
    assert not is_asking_for_shapes()
    with FakeTensorMode():
        assert is_asking_for_shapes()


_FACTORS = ("base_layer", "lora_B.default", "lora_A.default")


def test_what_stands_for_a_result_is_handed_on() -> None:
    tensor = torch.ones(2)
    wrap, wait = (
        getattr(torch.ops._c10d_functional, name).default for name in ("_wrap_tensor_autograd", "wait_tensor")
    )
    assert wait(tensor) is tensor
    assert handed_on(wait, [tensor]) is tensor
    assert type(handed_on(wrap, [tensor])) is type(wrap(tensor))
    assert handed_on(torch.ops.aten.add.Tensor, [tensor]) is None
