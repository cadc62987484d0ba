"""Make this rank's stages: of a whole model that is taken apart, or of the module that the user gives for a stage."""

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
    Routers,
    StrategyError,
    StrategyManager,
    Weights,
    asks_for_router_loss,
    equal_weights,
    find_routers,
    forward_options,
    is_meta,
    model_layout,
)

from .config import PipelineConfig, number_of_stages
from .cut.boundary import Cut
from .cut.split import split_model
from .cut.stage_model import own_parameters, separate_parts, take_stage
from .cut.study import Study
from .cut.trial_runs import trial_values, try_stages
from .run.orders import Orders
from .run.stage import GivenStage, PipelineStage, StageRouters
from .state.names import Names, first_names, trained_parts


@dataclass(frozen=True)
class Setting:
    """What a pipeline has besides the model; `inner` makes a manager of the inner strategy on the mesh of a stage."""

    config: PipelineConfig
    mesh: Mesh
    inner: Callable[[Mesh], StrategyManager]

    def orders(self, stages: int) -> Orders:
        degrees = self.mesh.degrees
        return Orders(self.config, stages=stages, ranks=degrees.pp, rank=self.mesh.axis_rank("pp"))

    def stage_manager(self) -> DataParallelManager:
        manager = self.inner(self.mesh.stage())
        if not (isinstance(manager, DataParallelManager) and manager.runs_in_pipeline):
            raise StrategyError(
                f"{type(manager).__name__} cannot train one stage of a pipeline: it does not say that it can run many "
                f"forwards before their backwards (runs_in_pipeline). Set pp_size=1, or use another strategy."
            )
        if self.config.patch_stage_backward_maybe_with_nosync and not manager.reduces_once:
            raise StrategyError(
                "patch_stage_backward_maybe_with_nosync=true asks for gradients to be reduced once, and the options of "
                "the inner strategy for each microbatch's. Let it defer the reduction (fsdp2: "
                "defer_fsdp_grad_sync=true), or set patch_stage_backward_maybe_with_nosync=false."
            )
        return manager

    def options(self, index: int, orders: Orders) -> dict[str, Any]:
        return {
            "is_first": index == 0,
            "is_last": index == len(orders.placement) - 1,
            "dtype": getattr(torch, self.config.dtype) if self.config.dtype is not None else None,
            "splits": orders.splits,
        }


@dataclass(frozen=True)
class Stages:
    """A model in stages, as one rank knows it; `here` are its own, by their numbers, ascending."""

    here: Mapping[int, PipelineStage]
    orders: Orders
    names: Names


def take_apart(model: nn.Module, weights: Weights | None, setting: Setting) -> Stages:
    """Make stages of a whole model, which is taken apart in place. Collective.

    The model is the same on all ranks, and may be on the meta device. What cannot be cut, divided or trained is refused
    on all ranks, before anything is changed.
    """
    mesh = setting.mesh
    weights = equal_weights(model, weights, mesh)
    layout = model_layout(model)
    with trial_values(model, weights, mesh.device):
        cut, split, found = mesh.world.together(lambda: _divided(model, layout, setting))
    sums = torch.float64 if next(model.parameters()).dtype == torch.float64 else torch.float32
    orders = setting.orders(len(split))
    names = Names.of_model(model, layout, cut, split)
    # All that may be refused, before the model is taken apart.
    managers = {index: setting.stage_manager() for index in orders.here}
    for manager in managers.values():
        manager.check_model(model)
    parts = dict(zip(managers, separate_parts(model, len(managers)), strict=True))
    stages: dict[int, PipelineStage] = {}
    for index, part in parts.items():
        boundary = cut.boundary(split[index])
        take_stage(part, cut, split[index], boundary)
        routers = StageRouters(*found, sums) if found is not None else None
        options = setting.options(index, orders)
        stages[index] = PipelineStage(managers[index], boundary, **options, routers=routers)
    own_parameters(list(parts.values()))
    # NCCL wants the first collective of a group to be of all its ranks, which a batch between two is not.
    dist.all_reduce(torch.zeros((), device=mesh.device), group=mesh.group("pp"))
    for index, part in parts.items():
        stage, blocks = stages[index], split[index]
        mesh.world.together(
            lambda stage=stage, part=part, blocks=blocks: stage.parallelize(part, cut, blocks, weights)  # type: ignore[misc]
        )
    return Stages(stages, orders, names)


def _divided(
    model: nn.Module, layout: ModelLayout, setting: Setting
) -> tuple[Cut, tuple[range, ...], tuple[RouterLoss, Routers] | None]:
    """How the model is cut, the blocks of each stage, and the router loss and its routers, where the model has one."""
    study = Study(model, layout, forward_options(model, in_parts=True))
    routers = None
    if asks_for_router_loss(model):
        loss = RouterLoss(model.config)
        routers = (loss, find_routers(model, loss, study.run_with_router_logits))
    blocks, runs_in = study.cut.blocks, study.cut.runs_in
    count = number_of_stages(setting.config, layers=len(blocks), ranks=setting.mesh.degrees.pp)
    split = split_model(model, layout, setting.config, count, blocks=blocks, runs_in=runs_in)
    return study.cut_at([part.start for part in split[1:]]), tuple(split), routers


def take_as_given(model: nn.Module, weights: Weights | None, setting: Setting) -> Stages:
    """Take a module with its weights for a stage; see [Note: given stages] in `cut.trial_runs`. Collective."""
    config, mesh = setting.config, setting.mesh
    ranks, index = mesh.degrees.pp, mesh.axis_rank("pp")
    unfilled = "a stage that is given with patch_inner_model=false must have its weights, but is on the meta device."
    mesh.world.raise_together(ModelError(unfilled) if is_meta(model) else None)
    if number_of_stages(config, layers=4 * ranks, ranks=ranks) != ranks:
        raise ConfigError(
            f"patch_inner_model=false gives each rank one stage, and pp_schedule={config.pp_schedule!r} takes "
            f"more. Use 1f1b or gpipe."
        )
    orders = setting.orders(ranks)
    known: list[Any] = [None] * ranks
    mine = (first_names(model), trained_parts(model, model_layout(model)), list(model.state_dict()))
    dist.all_gather_object(known, mine, group=mesh.group("pp"))
    names = Names.of_stages(known)
    boundary = try_stages(model, mesh, forward_options(model))
    stage = GivenStage(setting.stage_manager(), boundary, **setting.options(index, orders))
    mesh.world.together(lambda: stage.parallelize_as_given(model, weights))
    return Stages({index: stage}, orders, names)
