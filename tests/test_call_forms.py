"""The call forms of the reference: managers on a DeviceMesh of torch, under the axis names of its documents."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import modeling_flash_attention_utils as flash

import meshwright as mw
import meshwright_fsdp2.packed
import meshwright_megatron_fsdp
from meshwright import Degrees, Mesh, MeshError, ModelError, open_world, optimizer_factory
from meshwright.base.errors import MeshwrightError
from meshwright.testing import Case, pool
from meshwright.testing.case import TOLERANCE, Outcome
from meshwright.testing.models import case_model, tiny_model
from meshwright.testing.parity import difference, full_weights, reference, train_steps
from meshwright_ddp import DDPConfig, DDPManager, DistributedDataParallelConfig
from meshwright_ddp.bucketed import BucketedDataParallel
from meshwright_fsdp2 import FSDP2Config, FSDP2Manager
from meshwright_megatron_fsdp import MegatronFSDPConfig, MegatronFSDPManager
from meshwright_pipeline import PipelineConfig, PipelineManager

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
    manager.parallelize(case_model(CASE.model_type, tied=CASE.tied, seed=0, dtype=torch.float64, layers=CASE.layers))
    manager.build_optimizer(optimizer_factory(CASE.optimizer))
    return Outcome(*train_steps(manager, CASE, range(CASE.steps)), full_weights(manager))


@pytest.mark.parametrize(
    ("strategy", "shape", "names"),
    [
        ("fsdp2", (1, 1, 2, 1, 1), ROOT),
        ("fsdp2", (1, 2), ("data_parallel", "tensor_parallel")),
        ("fsdp2", (1, 2, 1, 1, 2), ROOT),
        ("megatron_fsdp", (1, 2, 1), ("dp", "cp", "tp")),
        ("ddp", (2,), ("data_parallel",)),
        ("pipeline", (2, 1), ("pp", "dp_shard")),
    ],
    ids=str,
)
def test_a_manager_on_a_device_mesh_trains_as_one_process(
    strategy: str, shape: tuple[int, ...], names: tuple[str, ...]
) -> None:
    ranks = int(torch.tensor(shape).prod())
    outcomes = pool(ranks).run(_train, strategy, shape, names)
    assert difference(outcomes, reference(CASE)).worst <= TOLERANCE


def _expert_degree() -> int:
    device_mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("pp", "dp_shard", "tp"))
    moe_mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("pp", "ep_shard", "ep"))
    return FSDP2Manager(FSDP2Config(), device_mesh=device_mesh, moe_mesh=moe_mesh).mesh.degrees.ep


def test_a_mesh_for_experts_tells_their_degree() -> None:
    assert pool(2).run(_expert_degree) == [2, 2]


def _refused(shape: tuple[int, ...], names: tuple[str, ...], part: str | None) -> str:
    whole = init_device_mesh("cpu", shape, mesh_dim_names=names)
    try:
        FSDP2Manager(FSDP2Config(), device_mesh=whole[part] if part else whole)
    except MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize(
    ("shape", "names", "part", "told"),
    [
        ((2, 1), ("rows", "tp"), None, "unknown axis 'rows'. Known: pp, dp_replicate"),
        ((2, 1), ("tp", "dp"), None, "accepted"),
        ((2, 1), ("pp", "dp"), None, "does not shard pp"),
        ((1, 2), ("tp", "dp"), "tp", "takes all 2 ranks in order"),
    ],
    ids=str,
)
def test_a_device_mesh_that_is_not_understood_is_refused_on_all_ranks(
    shape: tuple[int, ...], names: tuple[str, ...], part: str | None, told: str
) -> None:
    texts = pool(2).run(_refused, shape, names, part)
    assert all(told in text for text in texts), texts


def _from_config(theirs: bool) -> tuple[str, list[float]]:
    config: Any = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    if not theirs:
        config = DDPConfig(engine="bucketed", grad_reduce_in_fp32=True)
    hf_config = tiny_model().config
    manager: Any = mw.from_config(hf_config, "ddp", config=config, dtype="float32", device="cpu")
    manager.build_optimizer(optimizer_factory(CASE.optimizer))
    return manager.config.engine, train_steps(manager, CASE, range(2))[0]


def test_from_config_takes_the_references_class() -> None:
    found = pool(2).run(_from_config, True)
    assert found == pool(2).run(_from_config, False)
    assert found[0][0] == "bucketed"


def _gradient_dtype() -> tuple[str, str]:
    world = open_world("cpu")
    mesh = Mesh(Degrees(dp_replicate=world.size), world)
    engines = [
        BucketedDataParallel(tiny_model(dtype=torch.bfloat16), DistributedDataParallelConfig(**options), mesh)
        for options in ({}, {"grad_reduce_in_fp32": True})
    ]
    plain, wide = (str(engine.buffers[0].gradients.dtype) for engine in engines)
    return plain, wide


def test_the_bucketed_class_called_directly_reduces_in_the_dtype_of_its_config() -> None:
    assert pool(2).run(_gradient_dtype) == [("torch.bfloat16", "torch.float32")] * 2


def test_names_of_the_reference_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert issubclass(FSDP2Config, mw.DistributedConfig)
    assert meshwright_megatron_fsdp.HAVE_NVFSDP is True
    packed = torch.tensor([[0, 1, 2, 0, 1]])
    monkeypatch.setattr(meshwright_fsdp2.packed, "_for_good", ExitStack())
    patch: Any = meshwright_fsdp2._patch_is_packed_sequence_for_training
    before = bool(flash._is_packed_sequence(packed, 1))
    patch()
    assert (before, flash._is_packed_sequence(packed, 1)) == (True, False)
    meshwright_fsdp2.packed._for_good.close()
    patch.cache_clear()
    assert bool(flash._is_packed_sequence(packed, 1))
    # Without a process group there is nothing to end.
    meshwright_fsdp2._destroy_dist_connection()


def test_a_model_without_a_plan_raises_what_the_reference_says() -> None:
    with pytest.raises(AssertionError, match="no tensor-parallel plan of its own") as caught:
        meshwright_fsdp2.get_hf_tp_shard_plan(torch.nn.Linear(2, 2))
    assert isinstance(caught.value, ModelError)


def _unclaimed_axis() -> str:
    world = open_world("cpu")
    with pytest.raises(MeshError) as caught:
        FSDP2Manager(FSDP2Config(), Mesh(Degrees(pp=world.size), world))
    return str(caught.value)


def test_a_manager_refuses_a_mesh_with_an_axis_that_it_does_not_shard() -> None:
    assert pool(2).run(_unclaimed_axis)[0].startswith("the mesh is pp=2, but this strategy does not shard pp")


def test_what_is_no_mesh_is_refused() -> None:
    with pytest.raises(MeshError, match="not a str"):
        FSDP2Manager(FSDP2Config(), "dp")  # type: ignore[arg-type]
