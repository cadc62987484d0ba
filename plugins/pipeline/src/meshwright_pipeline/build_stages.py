"""Build this rank's stages, by splitting the full model or from a module that the user supplies as a stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.plugin import (
    ConfigError,
    DataParallelManager,
    Mesh,
    ModelError,
    ModelLayout,
    RouterLoss,
    RouterModules,
    StrategyError,
    StrategyManager,
    Weights,
    find_routers,
    get_forward_options,
    has_meta_tensors,
    has_router_loss,
    model_layout,
    sync_initial_weights,
)

from .config import PipelineConfig, compute_num_stages
from .partition.analyzer import PartitionAnalyzer
from .partition.boundary import ModelPartition
from .partition.split import split_model
from .partition.stage_model import copy_for_stages, reduce_to_stage, unshare_parameters
from .partition.trial_runs import probe_stages, temporary_weights
from .runtime.rank_schedule import RankSchedule
from .runtime.stage import PipelineStage, StageRouters, UserStage
from .state.parameter_names import StagedParameterNames, find_first_names, find_trainable_parts


@dataclass(frozen=True)
class StageFactory:
    """Build the parts of a pipeline that do not depend on the model.

    `build_inner_manager` returns a manager of the inner strategy for the mesh of a stage.
    """

    config: PipelineConfig
    mesh: Mesh
    build_inner_manager: Callable[[Mesh], StrategyManager]

    def build_rank_schedule(self, stages: int) -> RankSchedule:
        degrees = self.mesh.degrees
        return RankSchedule(self.config, num_stages=stages, pp_size=degrees.pp, pp_rank=self.mesh.axis_rank("pp"))

    def build_stage_manager(self) -> DataParallelManager:
        manager = self.build_inner_manager(self.mesh.get_stage_mesh())
        if not (isinstance(manager, DataParallelManager) and manager.supports_pipeline):
            raise StrategyError(
                f"{type(manager).__name__} cannot train one stage of a pipeline: it does not declare that it can run "
                f"several forwards before their backwards (supports_pipeline). Set pp_size=1, or use another strategy."
            )
        if self.config.patch_stage_backward_maybe_with_nosync and not manager.reduces_once_per_step:
            raise StrategyError(
                "patch_stage_backward_maybe_with_nosync=true requires that gradients are reduced once per step, but "
                "the inner strategy's options reduce them for each microbatch. Defer the reduction (fsdp2: "
                "defer_fsdp_grad_sync=true), or set patch_stage_backward_maybe_with_nosync=false."
            )
        return manager

    def stage_options(self, index: int, orders: RankSchedule) -> dict[str, Any]:
        return {
            "is_first": index == 0,
            "is_last": index == len(orders.placement) - 1,
            "dtype": getattr(torch, self.config.dtype) if self.config.dtype is not None else None,
            "splits_backward": orders.splits_backward,
        }


@dataclass(frozen=True)
class StagedModel:
    """One rank's view of a model in stages; `local_stages` are those of this rank, by stage number, ascending."""

    local_stages: Mapping[int, PipelineStage]
    rank_schedule: RankSchedule
    parameter_names: StagedParameterNames


def split_into_stages(model: nn.Module, weights: Weights | None, factory: StageFactory) -> StagedModel:
    """Split the full model into stages, in place. Collective.

    The model is the same on all ranks, and may be on the meta device. If it cannot be split or trained, raise the error
    on all ranks, before the model is changed.
    """
    mesh = factory.mesh
    weights = sync_initial_weights(model, weights, mesh)
    layout = model_layout(model)
    with temporary_weights(model, weights, mesh.device):
        cut, split, found = mesh.world.run_on_all_ranks(lambda: _analyze_and_split(model, layout, factory))
    sums = torch.float64 if next(model.parameters()).dtype == torch.float64 else torch.float32
    orders = factory.build_rank_schedule(len(split))
    names = StagedParameterNames.from_model(model, layout, cut, split)
    # Run all checks before the model is changed.
    managers = {index: factory.build_stage_manager() for index in orders.local_stages}
    for manager in managers.values():
        manager.check_model(model)
    parts = dict(zip(managers, copy_for_stages(model, len(managers)), strict=True))
    stages: dict[int, PipelineStage] = {}
    for index, part in parts.items():
        boundary = cut.build_boundary(split[index])
        reduce_to_stage(part, cut, split[index], boundary)
        routers = StageRouters(*found, sums) if found is not None else None
        options = factory.stage_options(index, orders)
        stages[index] = PipelineStage(managers[index], boundary, **options, routers=routers)
    unshare_parameters(list(parts.values()))
    # In NCCL the first collective of a group must include all its ranks; a batch of transfers has only two.
    dist.all_reduce(torch.zeros((), device=mesh.device), group=mesh.group("pp"))
    for index, part in parts.items():
        stage, blocks = stages[index], split[index]
        mesh.world.run_on_all_ranks(
            lambda stage=stage, part=part, blocks=blocks: stage.parallelize(part, cut, blocks, weights)  # type: ignore[misc]
        )
    return StagedModel(stages, orders, names)


def _analyze_and_split(
    model: nn.Module, layout: ModelLayout, factory: StageFactory
) -> tuple[ModelPartition, tuple[range, ...], tuple[RouterLoss, RouterModules] | None]:
    """Return the partition of the model, the blocks of each stage, and the router loss with its routers, if any."""
    study = PartitionAnalyzer(model, layout, get_forward_options(model, is_partial=True))
    routers = None
    if has_router_loss(model):
        loss = RouterLoss(model.config)
        routers = (loss, find_routers(model, loss, study.run_with_router_logits))
    blocks, runs_in = study.partition.blocks, study.partition.runs_on_stage
    count = compute_num_stages(factory.config, num_layers=len(blocks), pp_size=factory.mesh.degrees.pp)
    split = split_model(model, layout, factory.config, count, blocks=blocks, runs_in=runs_in)
    return study.partition_at([part.start for part in split[1:]]), tuple(split), routers


def use_given_stage(model: nn.Module, weights: Weights | None, factory: StageFactory) -> StagedModel:
    """Use a module with its weights as a stage; see [Note: user stages] in `partition.trial_runs`. Collective."""
    config, mesh = factory.config, factory.mesh
    ranks, index = mesh.degrees.pp, mesh.axis_rank("pp")
    unfilled = (
        "a stage that is passed with patch_inner_model=false must have its weights, but is on the meta device. "
        "Initialize it on the CPU or on an accelerator."
    )
    mesh.world.raise_on_all_ranks(ModelError(unfilled) if has_meta_tensors(model) else None)
    if compute_num_stages(config, num_layers=4 * ranks, pp_size=ranks) != ranks:
        raise ConfigError(
            f"with patch_inner_model=false each rank has one stage, but pp_schedule={config.pp_schedule!r} needs "
            f"more. Use 1f1b or gpipe."
        )
    orders = factory.build_rank_schedule(ranks)
    known: list[Any] = [None] * ranks
    mine = (find_first_names(model), find_trainable_parts(model, model_layout(model)), list(model.state_dict()))
    dist.all_gather_object(known, mine, group=mesh.group("pp"))
    names = StagedParameterNames.from_stages(known)
    boundary = probe_stages(model, mesh, get_forward_options(model))
    stage = UserStage(factory.build_stage_manager(), boundary, **factory.stage_options(index, orders))
    mesh.world.run_on_all_ranks(lambda: stage.parallelize_user_stage(model, weights))
    return StagedModel({index: stage}, orders, names)
