"""Train a model in stages, each under a manager of the inner strategy.

[Note: copies] A parameter that several stages need, such as the weight of tied embedding and head, is a parameter of
each, with the gradient of all. Equal gradients and equal optimizer states keep the copies equal; in norms and in state
only the first counts.
Source: Huang et al. 2019, arXiv:1811.06965; torch.distributed.pipelining for the names of schedules.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from meshwright.base.errors import BatchError, ConfigError, ModelError, StrategyError
from meshwright.manager.data_parallel import DataParallelManager
from meshwright.manager.given_mesh import as_mesh
from meshwright.manager.start import asks_for_router_loss, check_trainable, equal_weights
from meshwright.mesh.mesh import Mesh
from meshwright.mesh.sizes import CLAIMABLE_AXES, Degrees
from meshwright.model.layout import ModelLayout
from meshwright.model.weights import Weights, is_meta
from meshwright.step.batch import check_step
from meshwright.step.forward_options import forward_options
from meshwright.step.router_loss import RouterLoss, Routers, find_routers
from meshwright.strategy.ask import model_layout
from meshwright.strategy.contract import IGNORED_LABEL, Batch, OptimizerFactory, StrategyManager
from meshwright.strategy.registry import get_strategy
from meshwright.tensors.norms import check_clip
from meshwright.tensors.state import OptimizerState, ShardedState, TensorKind

from .config import PipelineConfig, number_of_microbatches, number_of_stages, schedule_of
from .cut.given_stages import try_stages
from .cut.split import split_model
from .cut.stage_model import Cut, take_stage
from .cut.trial_runs import Study
from .cut.trial_weights import lent_values
from .run.actions import Run
from .run.routing import Idle, StageRouters
from .run.stage import GivenStage, PipelineStage
from .run.users_loss import check_loss, loss_of
from .schedule.order import Action, Kind, Schedule
from .schedule.timeline import with_communication
from .state.carry import broadcast, gathered
from .state.optimizer import NoStages, StageOptimizers
from .state.parameter_names import Names, first_names
from .state.pieces_of_stages import loading_stages, stages_state


class PipelineManager(StrategyManager):
    """Pipeline parallelism around another strategy; see `StrategyManager`.

    Args:
        config: options.
        device_mesh: of all ranks; a `meshwright.mesh.mesh.Mesh`, or a DeviceMesh of torch with an axis `pp`, see
            `meshwright.manager.given_mesh.as_mesh`.
        inner: makes a manager of the inner strategy on the mesh of a stage; or a strategy's name, with its defaults.

    Raises:
        MeshError: a DeviceMesh that is not understood.
        ConfigError: an option that cannot act.
        StrategyError: the inner strategy cannot run in a pipeline.
    """

    config: PipelineConfig

    def __init__(
        self,
        config: PipelineConfig,
        device_mesh: Mesh | DeviceMesh,
        inner: Callable[[Mesh], StrategyManager] | str = "single",
    ) -> None:
        if isinstance(inner, str):
            spec = get_strategy(inner)
            inner, axes = (lambda mesh: spec.build(spec.config_cls(), mesh)), spec.axes | {"pp"}
        else:
            axes = frozenset(CLAIMABLE_AXES)
        mesh = as_mesh(device_mesh, axes)
        check_options(config, mesh.degrees)
        self.config, self.mesh = config, mesh
        self._loss = loss_of(config.loss_fn)
        if self._loss is not None and mesh.degrees.tp > 1:
            raise ConfigError(
                f"loss_fn with tp_size={mesh.degrees.tp}: the logits are divided over the ranks of tp, and only the "
                f"token loss knows how. Set tp_size=1, or leave loss_fn out."
            )
        self._inner = inner
        self._stages: dict[int, PipelineStage] = {}
        self._routers: tuple[RouterLoss, Routers] | None = None
        self._optimizer: Optimizer | None = None
        self._tried_out: set[bool] = set()
        self._plans: dict[tuple[int, bool], tuple[Action, ...]] = {}

    # -- the model

    @property
    def model_parts(self) -> Sequence[nn.Module]:
        self._require_model()
        return [stage.manager.model for stage in self._stages.values()]

    def parallelize(self, model: nn.Module, weights: Weights | None = None) -> nn.Module:
        if self._stages:
            raise StrategyError("parallelize was called twice on one manager. Build another manager for another model.")
        taken_apart = self.config.patch_inner_model
        self.mesh.world.together(lambda: check_trainable(model, may_be_frozen=not taken_apart, router_loss=taken_apart))
        vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)
        if self._loss is not None:
            dtype = next(model.parameters()).dtype
            check_loss(self._loss, vocab_size=vocab_size or 7, dtype=dtype, device=self.mesh.device)
        self._wide = next(model.parameters()).dtype == torch.float64
        self._vocab_size = vocab_size
        take = self._take_apart if self.config.patch_inner_model else self._take_as_given
        take(model, weights)
        return next(iter(self._stages.values())).manager.module

    def _take_apart(self, model: nn.Module, weights: Weights | None) -> None:
        """Make this rank's stages from a whole model."""
        weights = equal_weights(model, weights, self.mesh)
        layout = model_layout(model)
        with lent_values(model, weights, self.mesh.device):
            cut, self.split = self.mesh.world.together(lambda: self._divided(model, layout))
        self._place()
        self._names = Names.of_model(model, cut, self.split)
        mine = [index for index, rank in enumerate(self._placement) if rank == self.mesh.axis_rank("pp")]
        # All that may be refused, before the model is taken apart.
        managers = [self._inner_manager() for _ in mine]
        for manager in managers:
            manager.check_model(model)
        for index, manager, part in zip(mine, managers, separate_parts(model, len(mine)), strict=True):
            boundary = cut.boundary(self.split[index])
            take_stage(part, cut, self.split[index], boundary)
            manager.model = part
            self._stages[index] = PipelineStage(manager, boundary, **self._stage_options(index))
        own_parameters([stage.manager.model for stage in self._stages.values()])
        for index, stage in self._stages.items():
            blocks = self.split[index]
            self.mesh.world.together(lambda stage=stage, blocks=blocks: stage.parallelize(cut, blocks, weights))  # type: ignore[misc]

    def _take_as_given(self, model: nn.Module, weights: Weights | None) -> None:
        """Take a module for this rank's stage; see [Note: given stages] in `given_stages`."""
        ranks, index = self.mesh.degrees.pp, self.mesh.axis_rank("pp")
        self.mesh.world.raise_together(
            ModelError(
                "a stage that is given with patch_inner_model=false must have its weights, but is on the meta device."
            )
            if is_meta(model)
            else None
        )
        if number_of_stages(self.config, layers=4 * ranks, ranks=ranks) != ranks:
            raise ConfigError(
                f"patch_inner_model=false gives each rank one stage, and pp_schedule={self.config.pp_schedule!r} takes "
                f"more. Use 1f1b or gpipe."
            )
        self.split = tuple(range(each, each + 1) for each in range(ranks))
        self._place()
        stages: list[Any] = [None] * ranks
        mine = (first_names(model), list(model.state_dict()))
        dist.all_gather_object(stages, mine, group=self.mesh.group("pp"))
        self._names = Names.of_stages(stages)
        boundary = try_stages(model, self.mesh, forward_options(model))
        manager = self._inner_manager()
        manager.model = model
        stage = GivenStage(manager, boundary, **self._stage_options(index))
        self.mesh.world.together(lambda: stage.parallelize_as_given(weights))
        self._stages[index] = stage

    def _place(self) -> None:
        """Find out what of the schedule does not depend on the number of microbatches."""
        schedule = self._schedule(len(self.split), self._least_microbatches)
        self._placement = schedule.placement
        self._splits = any(action.kind is Kind.BACKWARD_INPUT for order in schedule.orders for action in order)

    def _stage_options(self, index: int) -> dict[str, Any]:
        dtype = getattr(torch, self.config.dtype) if self.config.dtype is not None else None
        is_first, is_last = index == 0, index == len(self.split) - 1
        ends = {"is_first": is_first, "is_last": is_last}
        routers = None
        if self._routers is not None:
            routers = StageRouters(*self._routers, torch.float64 if self._wide else torch.float32)
        return {**ends, "dtype": dtype, "loss": self._loss, "splits": self._splits, "routers": routers}

    def _divided(self, model: nn.Module, layout: ModelLayout) -> tuple[Cut, tuple[range, ...]]:
        """How the model is cut, and the blocks of each stage."""
        study = Study(model, layout, forward_options(model, in_parts=True))
        if asks_for_router_loss(model):
            loss = RouterLoss(model.config)
            self._routers = (loss, find_routers(model, loss, study.run_with_router_logits))
        blocks, runs_in = study.cut.blocks, study.cut.runs_in
        count = number_of_stages(self.config, layers=len(blocks), ranks=self.mesh.degrees.pp)
        split = split_model(model, layout, self.config, count, blocks=blocks, runs_in=runs_in)
        return study.cut_at([part.start for part in split[1:]]), tuple(split)

    def _inner_manager(self) -> DataParallelManager:
        """For one stage.

        Raises:
            StrategyError: the inner strategy cannot train it; on all ranks alike.
        """
        manager = self._inner(self.mesh.stage())
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
        manager.in_pipeline = True
        return manager

    # -- the optimizer

    def build_optimizer(self, factory: OptimizerFactory) -> Optimizer:
        self._require_model()
        trained = [stage.manager for stage in self._stages.values() if any(True for _ in stage.manager.trainable())]
        self.mesh.world.together(lambda: [manager.build_optimizer(self._named(factory)) for manager in trained])
        rates: list[Any] = [None] * self.mesh.degrees.pp
        mine = trained[0].optimizer.param_groups[0]["lr"] if trained else None
        dist.all_gather_object(rates, mine, group=self.mesh.group("pp"))
        rate = next((each for each in rates if each is not None), 0.0)
        self._optimizer = StageOptimizers(trained) if trained else NoStages(rate)
        return self._optimizer

    def _named(self, factory: OptimizerFactory) -> OptimizerFactory:
        """The factory sees the names of the unwrapped model, so copies of one parameter get the same options."""
        return lambda named: factory([(self._names.canonical[name], parameter) for name, parameter in named])

    def optimizer_step(self) -> None:
        if self._optimizer is None:
            raise StrategyError("the manager has no optimizer yet: call manager.build_optimizer(factory) first.")
        self._optimizer.step()

    # -- steps

    def forward_backward(self, microbatches: Sequence[Batch], *, num_tokens: Tensor) -> Tensor:
        pieces = self._pieces(microbatches, num_tokens)
        for stage in self._stages.values():
            stage.manager.gradients.check_none_pending()
            if not stage.manager.module.training:
                stage.manager.module.train()
        with self._around(microbatches):
            self._try_out(pieces[0], training=True)
            losses = self._run(pieces, train=True)
        for stage in self._stages.values():
            self.mesh.world.together(stage.manager.finish_gradients)
        self._sum_copies()
        return self._sum_over_ranks(losses)

    def eval_loss(self, microbatches: Sequence[Batch], *, num_tokens: Tensor) -> Tensor:
        pieces = self._pieces(microbatches, num_tokens)
        modules = [stage.manager.module for stage in self._stages.values()]
        before = [module.training for module in modules]
        for module in modules:
            module.eval()
        try:
            with self._around(microbatches), torch.no_grad():
                self._try_out(pieces[0], training=False)
                losses = self._run(pieces, train=False)
        finally:
            for stage, training in zip(self._stages.values(), before, strict=True):
                stage.manager.module.train(training)
                stage.manager.after_eval()
        return self._sum_over_ranks(losses)

    @contextmanager
    def _around(self, microbatches: Sequence[Batch]) -> Iterator[None]:
        with ExitStack() as contexts:
            for stage in self._stages.values():
                contexts.enter_context(stage.manager.forward.around_step())
                contexts.enter_context(stage.manager.around_step(microbatches))
            yield

    def _pieces(self, microbatches: Sequence[Batch], num_tokens: Tensor) -> list[Batch]:
        """The step's microbatches as the schedule takes them, equally many on all ranks."""
        self._require_model()
        multiple = max(stage.manager.forward.sequence_multiple for stage in self._stages.values())
        microbatches = check_step(
            microbatches, num_tokens, self.mesh, vocab_size=self._vocab_size, sequence_multiple=multiple
        )
        self.mesh.world.together(lambda: self._check_sizes(microbatches))
        if self.mesh.degrees.cp > 1:
            self.mesh.world.together(lambda: self._check_division(microbatches))
        pieces = [piece for batch in microbatches for piece in cut_batch(batch, self.config.pp_microbatch_size)]
        (most,) = self.mesh.world.reduce_ints([len(pieces)], dist.ReduceOp.MAX)
        for stage in self._stages.values():
            stage.num_tokens, stage.microbatches = num_tokens, most
        length = self._run_length(most)
        most = -(-most // length) * length
        # Ranks of one stage gather and reduce together, so all run the same schedule.
        idle = Idle(pieces[0], labels=torch.full_like(pieces[0]["labels"], IGNORED_LABEL))
        return pieces + [idle] * (most - len(pieces))

    def _check_division(self, microbatches: Sequence[Batch]) -> None:
        for stage in self._stages.values():
            stage.manager.forward.check_division(microbatches)

    def _try_out(self, piece: Batch, *, training: bool) -> None:
        """See `Forward.try_out`; each stage finds what is wrong with its own part, and the last what it may do of the
        loss."""
        if training in self._tried_out:
            return
        for stage in self._stages.values():
            self.mesh.world.together(
                lambda stage=stage: stage.try_out(piece, training=training and stage.is_last)  # type: ignore[misc]
            )
        self._tried_out.add(training)

    def _check_sizes(self, microbatches: Sequence[Batch]) -> None:
        size = self.config.pp_microbatch_size
        for batch in microbatches:
            count, length = batch["input_ids"].shape
            if count % size:
                raise BatchError(
                    f"a microbatch of {count} sequences does not divide into pipeline microbatches of "
                    f"pp_microbatch_size={size}. Use a multiple of it, or another pp_microbatch_size."
                )
            if self.config.pp_seq_len not in (None, length):
                raise BatchError(
                    f"sequences of {length} tokens, but pp_seq_len={self.config.pp_seq_len}. Make them equal, or leave "
                    f"pp_seq_len out."
                )

        try:
            number_of_microbatches(self.config, sequences=sum(batch["input_ids"].shape[0] for batch in microbatches))
        except ConfigError as error:
            raise BatchError(str(error)) from None

    def _run(self, pieces: Sequence[Batch], *, train: bool) -> list[Tensor]:
        """The losses of the pieces, on the last stage's rank."""
        device = self.mesh.device
        forward = next(iter(self._stages.values())).manager.forward
        kinds = [Idle if isinstance(piece, Idle) else dict for piece in pieces]
        batches = [kind(forward.on_device(forward.divide(piece))) for kind, piece in zip(kinds, pieces, strict=True)]
        length = self._run_length(len(batches))
        losses: list[Tensor] = []
        for start in range(0, len(batches), length):
            run = Run(self._stages, self._placement, self.mesh.group("pp"), device, train=train)
            is_last = start + length >= len(batches)
            run(self._plan(length, train=train), batches[start : start + length], is_last=is_last)
            losses += [run.losses[index] for index in sorted(run.losses)]
        return losses

    def _plan(self, microbatches: int, *, train: bool) -> tuple[Action, ...]:
        """This rank's actions."""
        if (microbatches, train) not in self._plans:
            schedule = self._schedule(len(self.split), microbatches)
            if not train:
                forwards = tuple(tuple(a for a in order if a.kind is Kind.FORWARD) for order in schedule.orders)
                schedule = replace(schedule, orders=forwards)
            self._plans[microbatches, train] = with_communication(schedule)[self.mesh.axis_rank("pp")]
        return self._plans[microbatches, train]

    @property
    def _least_microbatches(self) -> int:
        """Some number of microbatches that the schedule takes."""
        sequences = self.config.run_size or self.config.pp_microbatch_size
        return number_of_microbatches(self.config, sequences=sequences)

    def _run_length(self, pieces: int) -> int:
        """Microbatches of one run of the schedule."""
        return number_of_microbatches(self.config, sequences=pieces * self.config.pp_microbatch_size)

    def _schedule(self, stages: int, microbatches: int) -> Schedule:
        return schedule_of(self.config, ranks=self.mesh.degrees.pp, stages=stages, microbatches=microbatches)

    def _sum_over_ranks(self, losses: Sequence[Tensor]) -> Tensor:
        # In float64, so that the sum does not depend on how microbatches are spread over ranks.
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        if losses:
            total += torch.stack(list(losses)).sum(dtype=torch.float64)
        for axis in ("dp_cp", "pp"):
            dist.all_reduce(total, group=self.mesh.group(axis))
        return total if self._wide else total.float()

    # -- copies of one parameter, see [Note: copies]

    def _sum_copies(self) -> None:
        """Give each copy of a parameter the sum of their gradients."""
        shared = self._names.shared
        if not shared:
            return
        mine = {(name, index): self._parameter(index, name) for name, holders in shared.items() for index in holders}
        found = [
            int(any(p is not None and p.grad is not None for (n, _), p in mine.items() if n == name)) for name in shared
        ]
        used = self.mesh.world.reduce_ints(found, dist.ReduceOp.MAX)
        for (name, holders), is_used in zip(shared.items(), used, strict=True):
            if is_used:
                self._sum_copies_of(holders, {index: mine[name, index] for index in holders})

    def _sum_copies_of(self, holders: Sequence[int], copies: Mapping[int, nn.Parameter | None]) -> None:
        here = {index: parameter for index, parameter in copies.items() if parameter is not None}
        if not here:
            return
        group, rank = self.mesh.group("pp"), self.mesh.axis_rank("pp")
        ranks = sorted({self._placement[index] for index in holders})
        # Each rank's own copies first, then all ranks' in the same order, so that all get the same bits.
        parts = [self._stages[index].manager.gradients.copy_of(parameter) for index, parameter in here.items()]
        own = torch.stack(parts).sum(0)
        received = {other: torch.empty_like(own) for other in ranks if other != rank}
        operations = [dist.P2POp(dist.isend, own, group=group, group_peer=other) for other in received]
        operations += [
            dist.P2POp(dist.irecv, tensor, group=group, group_peer=other) for other, tensor in received.items()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        total = torch.stack([own if other == rank else received[other] for other in ranks]).sum(0)
        for index, parameter in here.items():
            self._stages[index].manager.gradients.take_sum(parameter, total.clone() if len(here) > 1 else total)

    def _parameter(self, index: int, canonical: str) -> nn.Parameter | None:
        """What is trained of the copy of a parameter on a stage of this rank."""
        stage = self._stages.get(index)
        if stage is None:
            return None
        names = stage.manager.model.named_parameters()
        copy = next(parameter for name, parameter in names if self._names.canonical[name] == canonical)
        return stage.manager.gradients.trained_as(copy)

    # -- norms

    def clip_grad_norm(self, max_norm: float | None, norm_type: float = 2.0) -> Tensor:
        self._require_model()
        check_clip(max_norm, norm_type)
        norms = []
        for index, stage in self._stages.items():
            later = [
                self._parameter(index, name) for name, holders in self._names.shared.items() if index in holders[1:]
            ]
            norms.append(stage.manager.gradients.total_norm(norm_type, without=[p for p in later if p is not None]))
        stacked = torch.stack([norm.to(self.mesh.device, torch.float64) for norm in norms])
        infinite = math.isinf(norm_type)
        total = stacked.max() if infinite else (stacked**norm_type).sum()
        dist.all_reduce(total, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=self.mesh.group("pp"))
        norm = total if infinite else total ** (1.0 / norm_type)
        if max_norm is not None:
            for stage in self._stages.values():
                stage.manager.gradients.scale(norm, max_norm)
        return norm

    # -- whole parameters, and state

    @contextmanager
    def unshard(self) -> Iterator[Sequence[nn.Module]]:
        self._require_model()
        with ExitStack() as contexts:
            yield [part for stage in self._stages.values() for part in contexts.enter_context(stage.manager.unshard())]

    def state_dict(self, *, full: bool = False) -> dict[str, Any]:
        self._require_model()
        parts = [stage.manager.state_dict(full=full) for stage in self._stages.values()]
        if not full:
            return {"stages": dict(zip(self._stages, parts, strict=True))}
        return self._names.merged(self._gathered(parts), with_optimizer=self._optimizer is not None)

    def _gathered(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The whole states of all stages, on the first rank; each lies on the first rank of its stage."""
        if self.mesh.stage().world.rank != 0:
            return []
        mine = dict(zip(self._stages, parts, strict=True))
        states = gathered(mine, self.mesh.group("pp"), self.mesh.device)
        found = {index: state for each in states for index, state in each.items()}
        return [found[index] for index in sorted(found)]

    def load_state_dict(self, state: Mapping[str, Any], *, full: bool = False) -> None:
        self._require_model()
        if not full:
            for index, stage in self._stages.items():
                stage.manager.load_state_dict(state["stages"][index])
            return
        stage_world = self.mesh.stage().world
        self.mesh.world.together(lambda: self._names.check(state["model"]))
        whole: Any = None
        if stage_world.rank == 0:
            held = {name for stage in self._stages.values() for name in stage.manager.model.state_dict(keep_vars=True)}
            held |= {self._names.canonical.get(name, name) for name in held}

            def wanted(path: Sequence[Any]) -> bool:
                # ("model", name) or ("optimizer", "state", name, key).
                return not held.isdisjoint(path[1:3])

            whole = broadcast(state, self.mesh.group("pp"), self.mesh.device, wanted=wanted)
        empty: Mapping[str, Any] = {"model": {}, "optimizer": {}}
        for stage in self._stages.values():
            names = list(stage.manager.model.state_dict(keep_vars=True))
            trained = [name for name, _ in stage.manager.model.named_parameters()]
            part = self._names.part(whole, names, trained) if whole is not None else empty
            self.mesh.world.together(lambda stage=stage, part=part: stage.manager.load_state_dict(part, full=True))  # type: ignore[misc]

    def sharded_state(self) -> ShardedState:
        self._require_model()
        state = stages_state(self._managers, self._names)
        return ShardedState(state.model, OptimizerState()) if isinstance(self._optimizer, NoStages) else state

    @contextmanager
    def loading(self, optimizer: OptimizerState[TensorKind] | None) -> Iterator[ShardedState]:
        self._require_model()
        with loading_stages(self._managers, self._names, optimizer) as target:
            yield target
        if isinstance(self._optimizer, NoStages) and optimizer is not None:
            self._optimizer.follow(optimizer.groups)

    @property
    def _managers(self) -> dict[int, DataParallelManager]:
        return {index: stage.manager for index, stage in self._stages.items()}

    def _require_model(self) -> None:
        if not self._stages:
            raise StrategyError("the manager has no model yet: call manager.parallelize(model) first.")


def check_options(config: PipelineConfig, degrees: Degrees) -> None:
    """Refuse options that cannot act yet.

    Raises:
        ConfigError: names the option.
    """
    if config.patch_inner_model != config.patch_causal_lm_model:
        raise ConfigError(
            f"patch_inner_model={config.patch_inner_model} and patch_causal_lm_model={config.patch_causal_lm_model}: "
            f"either the whole model is taken apart, or each rank gives its stage. Make them equal."
        )
    if not config.patch_inner_model:
        for name in ("layers_per_stage", "module_fqns_per_model_part"):
            if getattr(config, name) is not None:
                raise ConfigError(
                    f"{name} divides a model, but with patch_inner_model=false each rank gives its stage. "
                    f"Leave one of them out."
                )
        if degrees.cp > 1:
            raise ConfigError(
                f"patch_inner_model=false with cp_size={degrees.cp}: stages are given hidden states, and which "
                f"positions these have is not known. Set cp_size=1."
            )
        if degrees.tp > 1:
            raise ConfigError(
                f"patch_inner_model=false with tp_size={degrees.tp}: which layers of a stage are sharded is not known. "
                f"Set tp_size=1."
            )
    if config.scale_grads_in_schedule:
        raise ConfigError(
            "scale_grads_in_schedule=true divides gradients by the number of microbatches, but the loss is divided by "
            "the step's tokens already. Set it to false."
        )


def cut_batch(batch: Batch, size: int) -> list[Batch]:
    """Pieces of `size` sequences; tensors that do not have one row for each sequence go whole into each."""
    count = batch["input_ids"].shape[0]
    return [
        {
            name: tensor[start : start + size] if tensor.shape[:1] == (count,) else tensor
            for name, tensor in batch.items()
        }
        for start in range(0, count, size)
    ]


def separate_parts(model: nn.Module, count: int) -> list[nn.Module]:
    """The model and copies of its modules, which share all parameters."""
    shared = [{id(parameter): parameter for parameter in model.parameters()} for _ in range(count - 1)]
    return [model, *(copy.deepcopy(model, memo) for memo in shared)]


def own_parameters(parts: Sequence[nn.Module]) -> None:
    """Give each part parameters of its own where an earlier part has the same."""
    taken: set[nn.Parameter] = set()
    for part in parts:
        made: dict[nn.Parameter, nn.Parameter] = {}
        for module in part.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter in taken:
                    if parameter not in made:
                        made[parameter] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                    setattr(module, name, made[parameter])
        taken.update(part.parameters())
