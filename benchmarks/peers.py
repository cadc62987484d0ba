"""Other libraries as `step.py`'s contestants: each shards the same model and runs the same loop, in its own words.

They are no dependencies. Beside the environment of this project,

    pip install --no-deps nemo-automodel lightning lightning-utilities torchmetrics

is enough for what is called here. megatron-fsdp is there already; its stock call trains right with ZeRO 3 on one axis
and one microbatch a step, so that is what it is compared in.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from contestants import ADAMW, MAX_GRAD_NORM, Contest, Step, Ways, Work, adamw, clip, fsdp2_units, loop_by_hand
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from meshwright.mesh.world import World


def automodel(work: Work, world: World) -> Step:
    """NeMo Automodel's FSDP2Manager, all in the model's dtype."""
    from nemo_automodel.components.distributed.config import FSDP2Config
    from nemo_automodel.components.distributed.fsdp2 import FSDP2Manager

    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    mesh = init_device_mesh(world.device.type, (1, 1, world.size, 1, 1), mesh_dim_names=axes)
    for flat, parts in {"dp": axes[1:3], "dp_shard_cp": axes[2:4], "dp_cp": axes[1:4]}.items():
        mesh[parts]._flatten(mesh_dim_name=flat)
    manager = FSDP2Manager(FSDP2Config(mp_policy=MixedPrecisionPolicy()), device_mesh=mesh)
    module = manager.parallelize(work.model().to(world.device))

    def sync(is_last: bool) -> AbstractContextManager[None]:
        module.set_is_last_backward(is_last)
        module.set_requires_gradient_sync(is_last)
        return nullcontext()

    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters, **ADAMW)
    # FSDP2 averages over ranks.
    ways = Ways(sync, clip=lambda: clip([parameters]), loss_scale=float(world.size))
    return loop_by_hand(module, optimizer, ways, work, world, data_group=dist.group.WORLD)


def fabric_ddp(work: Work, world: World) -> Step:
    """Lightning's Fabric with its DDPStrategy."""
    from lightning.fabric.strategies import DDPStrategy

    return _fabric(DDPStrategy(), work, world, loss_scale=float(world.size))


def fabric_fsdp2(work: Work, world: World) -> Step:
    """Lightning's Fabric with its ModelParallelStrategy, which shards the units that it is reported: those by hand."""
    from lightning.fabric.strategies import ModelParallelStrategy

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        fsdp2_units(model, mesh["data_parallel"])
        return model

    strategy = ModelParallelStrategy(parallelize, data_parallel_size=world.size, tensor_parallel_size=1)
    return _fabric(strategy, work, world, loss_scale=1.0)


def _fabric(strategy: Any, work: Work, world: World, *, loss_scale: float) -> Step:
    from lightning.fabric import Fabric

    # Fabric takes processes that were started for it by these.
    os.environ |= {"LOCAL_RANK": str(world.rank), "NODE_RANK": "0"}
    fabric = Fabric(accelerator=world.device.type, devices=world.size, strategy=strategy)
    fabric.launch()
    module = fabric.setup_module(work.model())
    optimizer = fabric.setup_optimizers(adamw([{"params": list(module.parameters())}]))

    def norm() -> Tensor:
        return fabric.clip_gradients(module, optimizer, max_norm=MAX_GRAD_NORM, error_if_nonfinite=False)

    def sync(is_last: bool) -> AbstractContextManager[None]:
        return fabric.no_backward_sync(module, enabled=not is_last)

    ways = Ways(sync, clip=norm, backward=fabric.backward, loss_scale=loss_scale)
    return loop_by_hand(module, optimizer, ways, work, world, data_group=dist.group.WORLD)


def megatron_fsdp(work: Work, world: World) -> Step:
    """The stock call of the package megatron-fsdp: ZeRO 3."""
    if work.microbatches > 1:
        raise SystemExit("megatron-fsdp: use --microbatches 1, since stock gradients of several are not compared here")
    from megatron_fsdp import fully_shard_model, fully_shard_optimizer
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    from meshwright_megatron_fsdp._compat.cpu_torch import use_cpu_torch

    mesh = init_device_mesh(world.device.type, (world.size, 1), mesh_dim_names=("shard", "tp"))
    if world.device.type == "cpu":
        use_cpu_torch(world)
    module = fully_shard_model(
        work.model().to(world.device),
        device_mesh=mesh,
        dp_shard_dim="shard",
        tp_dim="tp",
        fsdp_unit_modules=[LlamaDecoderLayer],
        device=world.device,
    )
    # gloo cannot multiply within a reduction.
    module.ddp_config.gradient_reduce_div_fusion = world.device.type != "cpu"
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters, **{**ADAMW, "lr": 0.0})
    # It steps once as it is wrapped, which a careful user takes back.
    fully_shard_optimizer(optimizer)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["lr"] = ADAMW["lr"]

    def norm() -> Tensor:
        # torch's clipping asks ranks for the same parameters; a rank has those of its shards alone.
        grads = [p.grad.to_local() for p in parameters if p.grad is not None]
        square = sum((grad.float().square().sum() for grad in grads), torch.zeros((), device=world.device))
        dist.all_reduce(square)
        total = square.sqrt()
        torch._foreach_mul_(grads, (MAX_GRAD_NORM / (total + 1e-6)).clamp(max=1.0))
        return total

    ways = Ways(lambda is_last: nullcontext(), clip=norm, loss_scale=float(world.size))
    return loop_by_hand(module, optimizer, ways, work, world, data_group=dist.group.WORLD)


PEERS = {
    "automodel": Contest(automodel, "fsdp2", {}),
    "fabric-fsdp2": Contest(fabric_fsdp2, "fsdp2", {}),
    "fabric-ddp": Contest(fabric_ddp, "ddp", {}),
    # The stock call does not look at gradients.
    "megatron-fsdp": Contest(megatron_fsdp, "megatron_fsdp", {"check_for_nan_in_grad": False}),
}
"""raw A and raw B are the other library's steps there."""
