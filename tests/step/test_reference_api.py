"""The call forms of the reference: managers on a DeviceMesh of torch, under the axis names of its documents."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from support.caught_errors import catch_error
from support.tiers import mark_mostly_slow
from torch.distributed.device_mesh import init_device_mesh
from transformers import modeling_flash_attention_utils as flash

import meshwright as mw
import meshwright_fsdp2
import meshwright_megatron_fsdp
from meshwright import MeshSizes, ModelError, StrategyError, optimizer_factory
from meshwright.testing import Case
from meshwright_ddp import DDPConfig, DDPManager, DistributedDataParallelConfig
from meshwright_fsdp2 import FSDP2Config, FSDP2Manager, forward_wrappers
from meshwright_megatron_fsdp import MegatronFSDPConfig, MegatronFSDPManager
from meshwright_pipeline import PipelineConfig, PipelineManager
from meshwright_testing import pool
from meshwright_testing.case import TOLERANCE, Outcome
from meshwright_testing.models import build_case_model, build_tiny_model
from meshwright_testing.parity import find_max_difference, full_weights, run_reference, train_steps

CASE = Case()
ROOT = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def _manager(strategy: str, shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    """As the reference's documents call it."""
    device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if strategy == "fsdp2":
        config = FSDP2Config(sequence_parallel="tp" in names and shape[-1] > 1)
        return FSDP2Manager(config, device_mesh=device_mesh, moe_mesh=None)
    if strategy == "megatron_fsdp":
        return MegatronFSDPManager(MegatronFSDPConfig(zero_dp_strategy=3), device_mesh=device_mesh)
    if strategy == "ddp":
        return DDPManager(DistributedDataParallelConfig(use_distributed_optimizer=True), device_mesh=device_mesh)
    return PipelineManager(PipelineConfig(pp_schedule="1f1b"), device_mesh=device_mesh, inner="fsdp2")


def _train(strategy: str, shape: tuple[int, ...], names: tuple[str, ...]) -> Outcome:
    manager = _manager(strategy, shape, names)
    manager.parallelize(
        build_case_model(CASE.model_type, tied=CASE.tied, seed=0, dtype=torch.float64, layers=CASE.layers)
    )
    manager.build_optimizer(optimizer_factory(CASE.optimizer))
    return Outcome(*train_steps(manager, CASE, range(CASE.steps)), full_weights(manager))


@pytest.mark.parametrize(
    ("strategy", "shape", "names"),
    mark_mostly_slow(
        [
            ("fsdp2", (1, 2), ("data_parallel", "tensor_parallel")),
            ("fsdp2", (1, 2, 1, 1, 2), ROOT),
            ("megatron_fsdp", (1, 2, 1), ("dp", "cp", "tp")),
            ("ddp", (2,), ("data_parallel",)),
            ("pipeline", (2, 1), ("pp", "dp_shard")),
        ]
    ),
    ids=str,
)
def test_a_manager_on_a_device_mesh_trains_as_one_process(strategy, shape, names):
    ranks = int(torch.tensor(shape).prod())
    outcomes = pool(ranks).run(_train, strategy, shape, names)
    assert find_max_difference(outcomes, run_reference(CASE)).worst <= TOLERANCE


def _refused(shape: tuple[int, ...], names: tuple[str, ...], part: str | None) -> str:
    whole = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return catch_error(FSDP2Manager, FSDP2Config(), device_mesh=whole[part] if part else whole)


@pytest.mark.parametrize(
    ("shape", "names", "part", "text"),
    mark_mostly_slow(
        [
            ((2, 1), ("rows", "tp"), None, "unknown axis 'rows'. Known: pp, dp_replicate"),
            ((2, 1), ("tp", "dp"), None, ""),
            ((2, 1), ("pp", "dp"), None, "does not shard pp"),
            ((1, 2), ("tp", "dp"), "tp", "takes all 2 ranks in order"),
        ]
    ),
    ids=str,
)
def test_a_device_mesh_that_is_not_understood_is_refused_on_all_ranks(shape, names, part, text):
    found = pool(2).run(_refused, shape, names, part)
    assert all(text in each and bool(text) == bool(each) for each in found), found


def test_names_of_the_reference_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert issubclass(FSDP2Config, mw.DistributedConfig)
    assert meshwright_megatron_fsdp.HAVE_NVFSDP is True
    packed = torch.tensor([[0, 1, 2, 0, 1]])
    monkeypatch.setattr(forward_wrappers, "_process_wide_patches", ExitStack())
    patch: Any = meshwright_fsdp2._patch_is_packed_sequence_for_training
    before = bool(flash._is_packed_sequence(packed, 1))
    patch()
    assert (before, flash._is_packed_sequence(packed, 1)) == (True, False)
    forward_wrappers._process_wide_patches.close()
    patch.cache_clear()
    assert bool(flash._is_packed_sequence(packed, 1))
    # Without a process group there is nothing to end.
    meshwright_fsdp2._destroy_dist_connection()


def test_a_model_without_a_plan_raises_what_the_reference_says() -> None:
    with pytest.raises(AssertionError, match="no tensor-parallel plan of its own") as caught:
        meshwright_fsdp2.get_hf_tp_shard_plan(torch.nn.Linear(2, 2))
    assert isinstance(caught.value, ModelError)


POSITIONS: dict[Any, str] = {
    FSDP2Config: "sequence_parallel tp_plan patch_is_packed_sequence mp_policy offload_policy autocast_dtype "
    "activation_checkpointing defer_fsdp_grad_sync backend enable_async_tensor_parallel enable_compile "
    "enable_fsdp2_prefetch fsdp2_backward_prefetch_depth fsdp2_forward_prefetch_depth",
    MegatronFSDPConfig: "sequence_parallel tp_plan megatron_fsdp_unit_modules zero_dp_strategy "
    "init_fsdp_with_meta_device grad_reduce_in_fp32 preserve_fp32_weights overlap_grad_reduce overlap_param_gather "
    "check_for_nan_in_grad average_in_collective disable_bucketing calculate_per_token_loss",
    DDPConfig: "activation_checkpointing backend",
    DistributedDataParallelConfig: "grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather align_param_gather "
    "use_distributed_optimizer num_distributed_optimizer_instances check_for_nan_in_grad check_for_large_grads "
    "bucket_size pad_buckets_for_high_nccl_busbw reduce_scatter_with_fp32_accumulation average_in_collective",
    PipelineConfig: "pp_schedule pp_schedule_csv pp_microbatch_size pp_batch_size layers_per_stage "
    "round_virtual_stages_to_pp_multiple module_fqns_per_model_part patch_inner_model patch_causal_lm_model "
    "patch_stage_backward_maybe_with_nosync dtype scale_grads_in_schedule loss_fn pp_seq_len",
}


@pytest.mark.parametrize("cls", POSITIONS, ids=lambda cls: cls.__name__)
def test_configs_take_their_options_by_position_in_the_references_order(cls: Any) -> None:
    names = POSITIONS[cls].split()
    values = cls().to_dict()
    assert [*cls.positional_fields[: len(names)]] == names
    assert cls(*(values[name] for name in names)) == cls()
    with pytest.raises(TypeError, match="several values for"):
        cls(values[names[0]], **values)
    with pytest.raises(TypeError, match=r"takes \d+ arguments by position: .*; 50 were given"):
        cls(*[None] * 50)


DOORS: dict[str, tuple[str, Any]] = {
    "fsdp2": ("FSDP2Config on dp_shard=2", lambda: FSDP2Config(reshard_after_forward=False)),
    "ddp": ("DDPConfig on dp_replicate=2", lambda: DDPConfig(gradient_as_bucket_view=True)),
    "megatron_fsdp": ("MegatronFSDPConfig on dp_shard=2", lambda: MegatronFSDPConfig(zero_dp_strategy=2)),
}


def _from_doors(path: str, name: str) -> list[str]:
    config, hf_config = DOORS[name][1](), build_tiny_model().config
    options: dict[str, Any] = {"config": config, "dtype": "float64"}
    device_mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    managers: list[Any] = [
        mw.from_config(hf_config, **options, device="cpu"),
        mw.from_config(hf_config, **options, device_mesh=device_mesh),
        mw.from_pretrained(path, **options, device="cpu"),
        mw.from_pretrained(path, **options, device_mesh=device_mesh, dp_size=2),
    ]
    batch = {"input_ids": torch.arange(12).view(2, 6), "labels": torch.arange(12).view(2, 6)}
    losses = [float(each.eval_loss([batch], num_tokens=mw.count_tokens([batch], each.mesh))) for each in managers]
    assert losses[0] == losses[1]
    assert losses[2] == losses[3]
    return [f"{type(each.config).__name__} on {each.mesh.degrees}" for each in managers]


@pytest.mark.parametrize("name", mark_mostly_slow(DOORS))
def test_the_strategy_follows_from_the_config_and_the_sizes_from_a_device_mesh(name: str, tmp_path: Path) -> None:
    build_tiny_model().save_pretrained(tmp_path)
    assert pool(2).run(_from_doors, str(tmp_path), name) == [[DOORS[name][0]] * 4] * 2


def _mixed_up(case: str) -> str:
    device_mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_shard", "tp"))
    forms: dict[str, dict[str, Any]] = {
        "size": {"device_mesh": device_mesh, "tp_size": 2},
        "device": {"device_mesh": device_mesh, "device": "cpu"},
        "experts alone": {"moe_mesh": device_mesh, "device": "cpu"},
        "no mesh": {"device_mesh": "dp"},
        "no config": {"config": PipelineConfig, "device": "cpu"},
        "replicated": {"config": DDPConfig(), "dp_replicate_size": 1, "device": "cpu"},
    }
    return catch_error(mw.from_config, build_tiny_model().config, **forms[case])


@pytest.mark.parametrize(
    ("case", "start"),
    mark_mostly_slow(
        [
            ("size", "MeshError: tp_size=2, but device_mesh has 1. Leave tp_size out."),
            ("device", "MeshError: device_mesh and device both say where"),
            ("experts alone", "MeshError: moe_mesh is the mesh of the experts and needs device_mesh"),
            ("no mesh", "MeshError: a manager takes a meshwright.Mesh or a DeviceMesh of torch, not a str"),
            ("no config", "ConfigError: strategy_config of 'fsdp2' takes a FSDP2Config, not a "),
            ("replicated", "ReplicateSizeError: dp_shard=2, but ddp shards dp_replicate"),
        ]
    ),
    ids=lambda each: each.partition(":")[0],
)
def test_arguments_that_contradict_a_device_mesh_are_refused_on_all_ranks(case: str, start: str) -> None:
    assert all(text.startswith(start) for text in pool(2).run(_mixed_up, case))


def _managers_on(given: Any) -> list[str]:
    device_mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    classes: tuple[Any, ...] = (FSDP2Manager, MegatronFSDPManager, DDPManager, PipelineManager)
    return [catch_error(cls, given, device_mesh).partition("Manager ")[2] for cls in classes]


@pytest.mark.parametrize(("given", "start"), [({}, ""), ({"bogus": 1}, "is not valid"), ("full", "takes a ")], ids=str)
def test_managers_take_a_mapping_for_their_config_and_refuse_what_is_none(given: Any, start: str) -> None:
    (found,) = pool(1).run(_managers_on, given)
    assert all(text.startswith(start) and bool(text) is bool(start) for text in found), found


@pytest.mark.parametrize(("strategy", "config"), [("megatron_fsdp", {}), ("ddp", {"use_megatron_fsdp": True})])
def test_what_cannot_train_a_stage_is_refused_before_ranks_start(strategy: str, config: dict[str, Any]) -> None:
    with pytest.raises(StrategyError, match="cannot train one stage of a pipeline, but pp_size=2"):
        mw.resolve(strategy, MeshSizes(pp_size=2), 2, config=config)
