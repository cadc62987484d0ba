"""Manager of the pipeline strategy. A manager of the inner strategy trains each stage.

Source: Huang et al. 2019, arXiv:1811.06965; names of schedules from torch.distributed.pipelining.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.plugin import (
    CLAIMABLE_AXES,
    MODEL_KEYS,
    Batch,
    BatchRequirements,
    BoundObjective,
    ConfigError,
    DataParallelManager,
    Mesh,
    Objective,
    ObjectiveAccumulator,
    StatisticsRecorder,
    StepBookkeeping,
    StepReduction,
    StrategyManager,
    TokenStatistic,
    Weights,
    begin_step_sync,
    build_merger,
    check_clip_options,
    check_no_pending_gradients,
    check_not_owned,
    check_trainable,
    coerce_config,
    compute_frozen_share,
    finish_step_sync,
    from_device_mesh,
    get_forward_arguments,
    get_strategy,
    model_inputs,
    model_layout,
    require_model,
    split_unsharded_columns,
    sync_tie_config,
)

from .build_stages import StagedModel, StageFactory, split_into_stages, use_given_stage
from .config import PipelineConfig, check_options
from .partition.split import PipelineCostModel, build_cost_model
from .runtime.custom_loss import build_loss_objective
from .runtime.executor import PipelineTimelineRecorder, run_step
from .runtime.rank_schedule import check_batch_sizes, map_microbatches, pad_microbatches, split_batch
from .runtime.stage import PipelineStage, check_activation_budget, choose_activations
from .state.parameter_names import StagedParameterNames
from .state.shared_parameters import SharedParameters
from .state.stateful_manager import StagedStateManager


class PipelineManager(StagedStateManager):
    """Pipeline parallelism around another strategy; see `StrategyManager`.

    One thing, since every method of a step runs over the managers of this rank's stages.

    Args:
        config: options, or a mapping of them.
        device_mesh: mesh of all ranks: a `meshwright.Mesh`, or a torch DeviceMesh with an axis `pp`; see
            `meshwright.mesh.mesh.from_device_mesh`.
        inner: function that returns a manager of the inner strategy for the mesh of a stage, or a strategy's name,
            which uses its default options.

    Raises:
        MeshError: the DeviceMesh is not supported.
        ConfigError: an option would have no effect or is invalid.
        StrategyError: the inner strategy cannot run in a pipeline.
    """

    config: PipelineConfig

    def __init__(
        self,
        config: PipelineConfig | Mapping[str, Any],
        device_mesh: Mesh | DeviceMesh,
        inner: Callable[[Mesh], StrategyManager] | str = "single",
    ) -> None:
        config = coerce_config(PipelineConfig, config, where="PipelineManager")
        if isinstance(inner, str):
            spec = get_strategy(inner)
            inner, axes = (lambda mesh: spec.build(spec.config_cls(), mesh)), spec.axes | {"pp"}
        else:
            axes = frozenset(CLAIMABLE_AXES)
        mesh = from_device_mesh(device_mesh, axes)
        check_options(config, mesh.degrees)
        self.config, self.mesh = config, mesh
        self._stage_factory = StageFactory(config, mesh, inner)
        self._loss_objective = build_loss_objective(config.loss_fn)
        if self._loss_objective is not None and mesh.degrees.tp > 1:
            raise ConfigError(
                f"loss_fn with tp_size={mesh.degrees.tp}: the logits are sharded over the ranks of tp, which only the "
                f"token loss supports. Set tp_size=1, or leave loss_fn out."
            )
        self._staged_model: StagedModel | None = None
        self._probed: set[bool] = set()
        self._gradients_are_checked = False
        self._max_length = 0
        self._steps, self._recorder = StepBookkeeping(mesh, self._trainable_parameters), StatisticsRecorder()
        self.timeline = PipelineTimelineRecorder(mesh.device, mesh.axis_rank("pp"))
        """Recorder of timelines; see `meshwright_run.run_logs`."""

    # -- the model

    def parallelize(self, model: nn.Module, weights: Weights | None = None) -> nn.Module:
        check_not_owned(model, has_model=self._staged_model is not None)
        sync_tie_config(model)
        taken_apart = self.config.patch_inner_model
        self.mesh.world.run_on_all_ranks(
            lambda: check_trainable(model, may_be_frozen=not taken_apart, supports_router_loss=taken_apart)
        )
        self._vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)
        self._forward_arguments = get_forward_arguments(model) if taken_apart else MODEL_KEYS
        self._loss_dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
        self.adapter_merger = build_merger(model) if taken_apart else None
        take = split_into_stages if taken_apart else use_given_stage
        self._staged_model = take(model, weights, self._stage_factory)
        check_activation_budget(self._stages, self._staged_model.rank_schedule, self.config.pp_schedule)
        self._shared_parameters = SharedParameters(
            self._staged_model.parameter_names, self._managers, self._staged_model.rank_schedule.placement, self.mesh
        )
        return next(iter(self._managers.values())).module

    @property
    def _require_staged_model(self) -> StagedModel:
        return require_model(self._staged_model)

    @property
    def _stages(self) -> Mapping[int, PipelineStage]:
        return self._require_staged_model.local_stages

    @property
    def _managers(self) -> dict[int, DataParallelManager]:
        return {index: stage.manager for index, stage in self._stages.items()}

    @property
    def _names(self) -> StagedParameterNames:
        return self._require_staged_model.parameter_names

    def build_cost_model(self, model: nn.Module) -> PipelineCostModel | None:
        """Return the stages of a model for a plan; see `meshwright_plan.pipeline_extrapolation.StageCostModel`."""
        return build_cost_model(model, model_layout(model), self.config, self.mesh.degrees.pp)

    # -- steps

    def forward_backward(
        self, microbatches: Sequence[Batch], *, num_tokens: Tensor, objective: Objective | None = None
    ) -> Tensor:
        self._finalize_step()
        given = self._bind_objective(objective)
        pieces = self._split_microbatches(microbatches, num_tokens, given)
        managers = self._managers.values()
        check_no_pending_gradients(self._trainable_parameters())
        for manager in managers:
            if not manager.module.training:
                manager.module.train()
        with self._step_context(model_inputs(given, microbatches)):
            tally = self._build_accumulator(pieces[0], given)
            inputs = map_microbatches(pieces, lambda piece: model_inputs(given, [piece])[0])
            choose_activations(self._stages, self._require_staged_model.rank_schedule, inputs, self.mesh.world)
            losses = self._run_schedule(pieces, given, is_training=True)
        # Only the first step can detect that a stage's gradients are wrong.
        together = self.mesh.world.run_on_all_ranks
        finishing = {index: manager.finish_gradients for index, manager in self._managers.items()}
        found = {index: each() if self._gradients_are_checked else together(each) for index, each in finishing.items()}
        self._gradients_are_checked = True
        shared = self._shared_parameters.sum_gradients(found)
        for manager in managers:
            manager.drop_frozen_gradients()
        ending = self._steps.start_reduction(list(found.values()), shared, tally)
        return self._reduce_loss(losses, tally, ending)

    def _trainable_parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for manager in self._managers.values() for parameter in manager.iter_trainable())

    def eval_loss(
        self, microbatches: Sequence[Batch], *, num_tokens: Tensor, objective: Objective | None = None
    ) -> Tensor:
        losses, tally = self._run_evaluation(microbatches, num_tokens, self._bind_objective(objective))
        return self._reduce_loss(losses, tally, self._steps.build_eval_reduction(tally))

    def token_stats(self, microbatches: Sequence[Batch], names: Sequence[TokenStatistic]) -> list[dict[str, Tensor]]:
        self._recorder.start(names)
        require_model(self._staged_model)
        self._run_evaluation(microbatches, None, self._steps.bind_recorder(self._recorder, self._forward_arguments))
        sizes = [batch["labels"].shape for batch in microbatches]
        return _gather_token_stats(self._recorder, sizes, self.mesh, self._loss_dtype)

    def _run_evaluation(
        self, microbatches: Sequence[Batch], num_tokens: Tensor | None, given: BoundObjective | None
    ) -> tuple[list[Tensor], ObjectiveAccumulator | None]:
        pieces = self._split_microbatches(microbatches, num_tokens, given)
        managers = self._managers.values()
        before = [manager.module.training for manager in managers]
        for manager in managers:
            manager.module.eval()
        try:
            with self._step_context(model_inputs(given, microbatches)), torch.no_grad():
                tally = self._build_accumulator(pieces[0], given)
                losses = self._run_schedule(pieces, given, is_training=False)
        finally:
            for manager, training in zip(managers, before, strict=True):
                manager.module.train(training)
                manager.after_eval()
        return losses, tally

    def _finalize_step(self) -> None:
        self._steps.finalize()

    def read_scalars(self, *values: Tensor) -> list[float]:
        return self._steps.read_scalars(*values)

    @property
    def last_sums(self) -> Mapping[str, Tensor]:
        return self._steps.last_sums

    def _bind_objective(self, objective: Objective | None) -> BoundObjective | None:
        require_model(self._staged_model)
        return self._steps.bind_objective(
            self._loss_objective if objective is None else objective, self._forward_arguments
        )

    def _split_microbatches(
        self, microbatches: Sequence[Batch], num_tokens: Tensor | None, given: BoundObjective | None
    ) -> list[Batch]:
        """Return the step's microbatches of `pp_microbatch_size` sequences, padded to an equal number on all ranks."""
        size = self.config.pp_microbatch_size
        agreed = finish_step_sync(microbatches, num_tokens, self.mesh, self._build_requirements(given))
        self._max_length = agreed.max_length
        pieces = [piece for batch in agreed.microbatches for piece in split_batch(batch, size)]
        for stage in self._stages.values():
            stage.begin_step(agreed.num_tokens, microbatches=agreed.max_count)
        # The ranks of one stage gather and reduce together, so all must run the same schedule.
        length = self._require_staged_model.rank_schedule.microbatches_per_run(agreed.max_count)
        return pad_microbatches(pieces, -(-agreed.max_count // length) * length)

    def _run_schedule(
        self, microbatches: Sequence[Batch], given: BoundObjective | None, *, is_training: bool
    ) -> list[Tensor]:
        """Return the losses of the microbatches on the rank of the last stage; an empty list on other ranks."""
        orders, forward = self._require_staged_model.rank_schedule, next(iter(self._managers.values())).forward_runner
        has_last = any(stage.is_last for stage in self._stages.values())

        def part(piece: Batch) -> Batch:
            divided = forward.shard_batch(piece, given)
            return forward.to_device(divided if has_last else split_unsharded_columns(divided)[0])

        batches = map_microbatches(microbatches, part)
        return run_step(self._stages, orders, self.mesh, batches, is_training=is_training, recorder=self.timeline)

    @contextmanager
    def _step_context(self, microbatches: Sequence[Batch]) -> Iterator[None]:
        with ExitStack() as contexts:
            for manager in self._managers.values():
                contexts.enter_context(manager.enter_step(microbatches, self._max_length))
            yield

    def _build_accumulator(self, piece: Batch, given: BoundObjective | None) -> ObjectiveAccumulator | None:
        """Return the accumulator of an objective, after all stages are probed; see `ForwardRunner.probe`.

        The last stage also probes the loss and the objective."""
        takes_loss = given is None or given.input_kind == "tokens"
        stages, (inputs,) = self._stages.values(), model_inputs(given, [piece])
        if takes_loss not in self._probed:
            for stage in stages:
                self.mesh.world.run_on_all_ranks(lambda stage=stage: stage.probe(inputs, takes_loss=takes_loss))  # type: ignore[misc]
            self._probed.add(takes_loss)
        last = next((stage for stage in stages if stage.is_last), None)
        tally = self._steps.start_accumulator(
            given, None if last is None else functools.partial(last.probe_objective, piece)
        )
        for stage in stages:
            stage.set_objective(tally)
        return tally

    def _build_requirements(self, given: BoundObjective | None) -> BatchRequirements:
        size = self.config.pp_microbatch_size
        multiple = max(manager.forward_runner.sequence_multiple for manager in self._managers.values())
        frozen = compute_frozen_share(self.mesh, self._shared_parameters.iter_frozen())
        # Bound methods compare equal in every step, unlike new closures, which would repeat the handshake.
        return BatchRequirements(
            self._vocab_size,
            multiple,
            self._check_batches,
            self._count_microbatches,
            objective=given,
            rows_per_chunk=size,
            frozen_share=frozen,
        )

    def _count_microbatches(self, microbatches: Sequence[Batch]) -> int:
        return sum(batch["input_ids"].shape[0] // self.config.pp_microbatch_size for batch in microbatches)

    def begin_step_sync(self, microbatches: Sequence[Batch], *, objective: Objective | None = None) -> Tensor:
        return begin_step_sync(microbatches, self.mesh, self._build_requirements(self._bind_objective(objective)))

    def _check_batches(self, microbatches: Sequence[Batch]) -> None:
        check_batch_sizes(microbatches, self.config)
        for manager in self._managers.values():
            manager.check_step(microbatches)

    def _reduce_loss(
        self, losses: Sequence[Tensor], tally: ObjectiveAccumulator | None, ending: StepReduction
    ) -> Tensor:
        mesh, alike = self.mesh, self.mesh.group("tp") if self.mesh.degrees.tp > 1 else None
        sharers = next(iter(self._managers.values())).forward_runner.replicas
        further = None if tally is None else tally.sums / sharers
        total = ending.all_reduce(
            losses,
            mesh.device,
            extra_sums=further,
            group=mesh.group("dp_cp"),
            replica_group=alike,
            stage_group=mesh.group("pp"),
        )
        return self._steps.unpack_loss(total, tally, ending).to(self._loss_dtype)

    def gradient_norms(self) -> dict[str, float]:
        require_model(self._staged_model)
        return self._shared_parameters.norms_by_part()

    def clip_grad_norm(self, max_norm: float | None, norm_type: float = 2.0) -> Tensor:
        check_clip_options(max_norm, norm_type)
        norm = self._shared_parameters.total_norm(norm_type)
        if max_norm is not None:
            for manager in self._managers.values():
                manager.gradients.clip(norm, max_norm)
        return norm


def _gather_token_stats(
    recorder: StatisticsRecorder, sizes: Sequence[torch.Size], mesh: Mesh, dtype: torch.dtype
) -> list[dict[str, Tensor]]:
    """Return the statistics that the last stage recorded, for each microbatch (B, S) of the step. Collective."""
    names, counts = recorder.names, [size.numel() for size in sizes]
    values = torch.zeros(len(names), sum(counts), device=mesh.device, dtype=dtype)
    for index, name in enumerate(names if recorder.recorded else ()):
        values[index] = torch.cat([piece[name].flatten() for piece in recorder.recorded])
    # All ranks but one contribute zeros, so nothing is rounded.
    dist.all_reduce(values, group=mesh.group("pp"))
    return [
        {
            name: (found.bool() if name == "is_top1" else found).unflatten(0, size)
            for name, found in zip(names, of_batch, strict=True)
        }
        for of_batch, size in zip(values.split(counts, 1), sizes, strict=True)
    ]
