"""megatron_fsdp_strategy_parallelize: a loop by hand on a plain DeviceMesh."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from meshwright import ConfigError, MeshwrightError, model_layout
from meshwright.parallel.tensor.plan_sources import find_plan
from meshwright.step.tokens import sum_token_loss
from meshwright_megatron_fsdp import (
    HAVE_NVFSDP,
    MegatronFSDPConfig,
    megatron_fsdp_strategy_parallelize,
    nvfsdp_strategy_parallelize,
    reference_api,
)
from meshwright_testing import pool
from meshwright_testing.models import build_tiny_model

slow = pytest.mark.slow


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    norms = [p for name, p in named.items() if "norm" in name]
    others = [p for name, p in named.items() if "norm" not in name]
    return torch.optim.AdamW([{"params": norms, "weight_decay": 0.0}, {"params": others, "lr": 3e-3}], lr=1e-2)


def _apart(
    mesh: DeviceMesh,
    axis: str,
    *arguments: Any,
    function: Any = nvfsdp_strategy_parallelize,
    halves: bool = False,
    **options: Any,
) -> float:
    """Train three steps by hand, sequences divided along one axis; how far the model is from one process.

    Args:
        halves: accumulate over two microbatches.
    """
    rank, ranks = mesh.get_local_rank(axis), mesh[axis].size()
    model, alone = build_tiny_model(seed=0), build_tiny_model(seed=0)
    module, optimizer = function(model, mesh, _optimizer(model), *arguments, **options)
    reference = _optimizer(alone)
    for step in range(3):
        ids = torch.randint(131, (2 * ranks, 6), generator=torch.Generator().manual_seed(step))
        mine = ids[2 * rank :][:2]
        if halves:
            with module.no_sync():
                (sum_token_loss(module(input_ids=mine[:1]).logits, mine[:1]) / (10 * ranks)).backward()
            mine = mine[1:]
        (sum_token_loss(module(input_ids=mine).logits, mine) / (10 * ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.zero_grad()
        (sum_token_loss(alone(input_ids=ids).logits, ids) / (10 * ranks)).backward()
        reference.step()
    with torch.no_grad():
        return float((module(input_ids=ids).logits - alone(input_ids=ids).logits).abs().max())


def _loop(options: dict[str, Any]) -> float:
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    return _apart(mesh, "data_parallel", halves=True, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"data_parallel_sharding_strategy": "params"},
        pytest.param({"data_parallel_sharding_strategy": "optim", "nvfsdp_unit_modules": ["LlamaMLP"]}, marks=slow),
    ],
    ids=str,
)
def test_a_loop_by_hand_equals_one_process_and_keeps_the_groups(options: dict[str, Any]) -> None:
    assert max(pool(2).run(_loop, options)) < 1e-11


AXES = ("data_parallel", "context_parallel", "tensor_parallel")


def _asked(cases: list[dict[str, Any]], shape: tuple[int, ...], axes: tuple[str, ...]) -> list[Any]:
    """What the function makes a manager with: options other than the defaults, and ranks of data and of tensors."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    usual, found = MegatronFSDPConfig().to_dict(), []

    class Noted(Exception):
        pass

    def note(config: Any, mesh: Any) -> None:
        changed = {name: value for name, value in config.to_dict().items() if value != usual[name]}
        found.append((changed, mesh.degrees.dp, mesh.degrees.tp))
        raise Noted

    original, reference_api.MegatronFSDPManager = reference_api.MegatronFSDPManager, note
    try:
        for options in cases:
            with suppress(Noted):
                nvfsdp_strategy_parallelize(build_tiny_model(), mesh, **options)
    finally:
        reference_api.MegatronFSDPManager = original
    return found


BLOCKS = ["LlamaDecoderLayer"]
SWITCHES = (
    "grad_reduce_in_fp32 preserve_fp32_weights average_in_collective disable_bucketing calculate_per_token_loss "
    "nccl_ub fsdp_double_buffer"
)
PLAIN = {
    "megatron_fsdp_unit_modules": ["transformers.models.llama.modeling_llama.LlamaForCausalLM"],
    "data_parallel_sharding_strategy": "optim_grads_params",
}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"nvfsdp_unit_modules": BLOCKS}, {"megatron_fsdp_unit_modules": BLOCKS}),
    ({"data_parallel_sharding_strategy": "grads_params"}, {}),
    ({"init_nvfsdp_with_meta_device": True}, {"init_fsdp_with_meta_device": True}),
    ({"check_for_nan_in_grad": False}, {"check_for_nan_in_grad": False}),
    *((each, each) for each in ({name: True} for name in SWITCHES.split())),
    *(
        ({"data_parallel_sharding_strategy": "optim", name: False},) * 2
        for name in ("overlap_grad_reduce", "overlap_param_gather")
    ),
]


@slow
def test_each_argument_is_an_option_of_the_manager() -> None:
    found = pool(2).run(_asked, [options for options, _ in CASES], (2, 1, 1), AXES)
    assert found == [[(PLAIN | changes, 2, 1) for _, changes in CASES]] * 2


@slow
def test_arguments_that_name_the_axes_and_the_plan_act() -> None:
    axes = ("rows", "middle", "columns")
    names: dict[str, Any] = dict(zip(("dp_mesh_name", "cp_mesh_name", "tp_mesh_name"), axes, strict=True))
    for shape, expected in (((2, 1, 1), (PLAIN, 2, 1)), ((1, 2, 1), (PLAIN, 2, 1)), ((1, 1, 2), (PLAIN, 1, 2))):
        assert pool(2).run(_asked, [names], shape, axes) == [[expected]] * 2
    plan = {"model.layers.*.mlp.gate_proj": "colwise_gather_output"}
    found = pool(2).run(_asked, [names | {"tp_shard_plan": plan}], (1, 1, 2), axes)
    assert found == [[(PLAIN | {"tp_plan": plan}, 1, 2)]] * 2


WHOLE, POSITIONS = Replicate(), Shard(1)
LAYER = "model.layers.*"
PLAN: dict[str, Any] = {
    "model.embed_tokens": RowwiseParallel(input_layouts=WHOLE),
    **{f"{LAYER}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    f"{LAYER}.self_attn.o_proj": RowwiseParallel(),
    f"{LAYER}.mlp.gate_proj": ColwiseParallel(),
    f"{LAYER}.mlp.up_proj": ColwiseParallel(),
    f"{LAYER}.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=WHOLE),
}
ON_POSITIONS: dict[str, Any] = PLAN | {
    "model.embed_tokens": RowwiseParallel(input_layouts=WHOLE, output_layouts=POSITIONS),
    f"{LAYER}.input_layernorm": SequenceParallel(),
    f"{LAYER}.post_attention_layernorm": SequenceParallel(),
    "model.norm": SequenceParallel(),
    f"{LAYER}.self_attn.o_proj": RowwiseParallel(output_layouts=POSITIONS),
    f"{LAYER}.mlp.down_proj": RowwiseParallel(output_layouts=POSITIONS),
    "lm_head": ColwiseParallel(input_layouts=POSITIONS, output_layouts=Shard(-1), use_local_output=False),
}


def _by_position(name: str, form: str) -> float:
    """How far the model is from one process; `form` says along which axis its two ranks lie, and with which plan."""
    axis, plan = {"context": ("context", None), "tensor": ("tensor", PLAN), "positions": ("tensor", ON_POSITIONS)}[form]
    mesh = init_device_mesh("cpu", (1, 2, 1) if axis == "context" else (1, 1, 2), mesh_dim_names=AXES)
    function = {"nvfsdp": nvfsdp_strategy_parallelize, "megatron": megatron_fsdp_strategy_parallelize}[name]
    # What the loop does over the context axis is its affair; here each of its ranks has other sequences.
    along = "context_parallel" if axis == "context" else "data_parallel"
    return _apart(mesh, along, BLOCKS, plan, "optim_grads", False, function=function)


@slow
@pytest.mark.parametrize(
    ("name", "form"), [("nvfsdp", "positions"), ("nvfsdp", "tensor"), ("nvfsdp", "context"), ("megatron", "context")]
)
def test_arguments_by_position_a_context_axis_and_torch_styles_train_as_one_process(name: str, form: str) -> None:
    assert max(pool(2).run(_by_position, name, form)) < 1e-11


NAMES = (
    "model device_mesh optimizer nvfsdp_unit_modules tp_shard_plan data_parallel_sharding_strategy "
    "init_nvfsdp_with_meta_device grad_reduce_in_fp32 preserve_fp32_weights overlap_grad_reduce overlap_param_gather "
    "check_for_nan_in_grad average_in_collective disable_bucketing calculate_per_token_loss "
    "keep_fp8_transpose_cache_when_using_custom_fsdp nccl_ub fsdp_double_buffer dp_mesh_name cp_mesh_name tp_mesh_name "
    "options"
)


def test_the_signature_is_that_of_the_reference() -> None:
    defaults = {name: p.default for name, p in inspect.signature(nvfsdp_strategy_parallelize).parameters.items()}
    expected: dict[str, Any] = dict.fromkeys(NAMES.split(), False)
    expected |= dict.fromkeys(("model", "device_mesh", "options"), inspect.Parameter.empty)
    expected |= dict.fromkeys(("optimizer", "nvfsdp_unit_modules", "tp_shard_plan"))
    expected |= dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather", "check_for_nan_in_grad"), True)
    expected |= dict(zip(("dp_mesh_name", "cp_mesh_name", "tp_mesh_name"), AXES, strict=True))
    expected["data_parallel_sharding_strategy"] = "optim_grads_params"
    assert list(defaults.items()) == list(expected.items())
    assert HAVE_NVFSDP is True


def _own_plan(plan: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    model = build_tiny_model()
    layout = model_layout(model)
    found = find_plan(model, layout, plan)
    names = [name for name in found.module_styles if not name.startswith("model.layers.1")]
    return {name: found.module_styles[name] for name in names}, found.uses_sequence_parallel


def test_torch_styles_mean_what_ours_do() -> None:
    for plan, shards in ((PLAN, False), (ON_POSITIONS, True)):
        styles, reported = _own_plan(plan)
        assert reported is shards
        assert styles["model.embed_tokens"] == "embedding_rowwise"
        assert styles["model.layers.0.self_attn.q_proj"] == "colwise"
        assert styles["model.layers.0.mlp.down_proj"] == "rowwise"
        assert styles["lm_head"] == "colwise_gather_output"
        assert "model.norm" not in styles
    split = {"model.layers.*.mlp.down_proj": RowwiseParallel(input_layouts=WHOLE)}
    assert _own_plan(split)[0]["model.layers.0.mlp.down_proj"] == "rowwise_split_input"
    for wrong in (RowwiseParallel(output_layouts=Shard(-1)), ColwiseParallel(use_local_output=False)):
        with pytest.raises(ConfigError, match="which no style of meshwright is equal to"):
            _own_plan({"model.layers.*.mlp.down_proj": wrong})


def _refused() -> list[str]:
    mesh, found = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")), []
    for what in ("axis", "stepped", "stranger", "option"):
        model = build_tiny_model()
        optimizer = _optimizer(build_tiny_model() if what == "stranger" else model)
        if what == "stepped":
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        name = "data_parallel" if what == "axis" else "dp"
        options = {"zero": 3} if what == "option" else {}
        with pytest.raises(MeshwrightError) as caught:
            megatron_fsdp_strategy_parallelize(model, mesh, optimizer, dp_mesh_name=name, **options)
        found.append(str(caught.value))
    return found


def test_what_is_refused() -> None:
    first, second = pool(2).run(_refused)
    assert first == second
    axis, stepped, stranger, option = first
    assert "must have all 2 ranks in order" in axis
    assert "has been stepped before sharding" in stepped
    assert "that are not the model's" in stranger
    assert "zero: unknown key" in option
