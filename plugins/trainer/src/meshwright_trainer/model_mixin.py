"""Model of a trainer on a mesh: its manager, optimizer and files."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.plugin import (
    CheckpointError,
    ConfigError,
    ExternalAdapterInjection,
    Mesh,
    OptimizerFactory,
    PretrainedRequest,
    StrategyError,
    StrategyManager,
    Weights,
    get_registry,
    open_for_injection,
    open_pretrained_model,
    open_world,
    resolve,
)

from ._compat import (
    needs_materialized_weights,
    remove_fused_head,
    set_signature_columns,
    use_one_device,
    use_reference_adapter,
)
from .accelerator import MeshAccelerator
from .arguments import (
    apply_training_arguments,
    check_arguments,
    check_model,
    find_training_arguments,
    parse_mesh_options,
    set_router_loss_config,
)
from .checkpoint import (
    RngState,
    check_checkpoint_directory,
    find_newest_checkpoint,
    load_trainer_checkpoint,
    save_trainer_checkpoint,
)

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object

PAIR_TRAINERS = frozenset({"DPOTrainer", "RewardTrainer"})
"""Trainers of pairs. Their microbatches have all chosen rows before all rejected ones."""


class MeshModelMixin(Trainer):
    """Part of `MeshTrainerMixin` that loads, shards, optimizes and saves the model.

    For overridden private methods of Trainer, see `_compat.OVERRIDDEN_METHODS`."""

    model: Any
    ref_model: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    control: Any
    _metrics: Any
    _total_train_tokens: Any

    def __init__(self, model: Any = None, *args: Any, mesh: Any = None, **kwargs: Any) -> None:
        self.mesh_options = parse_mesh_options(mesh)
        self._manager: StrategyManager | None = None
        self._managed_model: nn.Module | None = None
        self._rng_state: RngState | None = None
        self._reference_manager: StrategyManager | None = None
        self._weights: dict[int, Weights] = {}
        self._adapter: ExternalAdapterInjection | None = None
        own = find_training_arguments([*args, *kwargs.values()])
        check_arguments(own, type(self), kwargs)
        is_path = isinstance(model, (str, Path))
        if (
            is_path
            and "RewardTrainer" not in _get_class_names(type(self))
            and not needs_materialized_weights(str(model), own, kwargs)
        ):
            super().__init__(**self._load_from_path(str(model), *args, **kwargs))
        else:
            super().__init__(model, *args, **kwargs)
        if self._adapter is not None:
            finish = self._adapter.finish
            self._weights[id(self.model)] = self.mesh.world.run_on_all_ranks(lambda: finish(self.model))
        if self.optimizer is not None or self.lr_scheduler is not None:
            raise ConfigError(
                "optimizers=(...) has parameters that are replaced when the model is sharded. Pass "
                "optimizer_cls_and_kwargs=(class, options), or set optim and lr_scheduler_type in args."
            )
        for each in (self.model, getattr(self, "ref_model", None)):
            if each is not None:
                check_model(each)
                remove_fused_head(each)

    def _open_mesh(self, args: Any) -> None:
        use_one_device(args)
        world, given = open_world(args.device), self.mesh_options
        options = apply_training_arguments(args, given, get_registry().get(given.strategy))
        wrapped = {name: dict(values) for name, values in options.wrapper_config.items()}
        if self.rows_per_group > 1 and (given.sizes.pp_size or 1) > 1:
            wrapped.setdefault("pipeline", {}).setdefault("pp_microbatch_size", self.rows_per_group)
        self.stack, degrees = resolve(
            options.strategy, options.sizes, world.size, config=options.strategy_config, wrapper_config=wrapped
        )
        self.mesh = Mesh(degrees, world)

    def _load_from_path(self, path: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return arguments for the trainer's constructor, with a model on the meta device instead of a path.

        Each rank later reads its shard from the files. The reference model is loaded the same way. The trainer injects
        the adapter, since it infers from `peft_config` that the base model is the reference. Collective."""
        given = inspect.signature(super().__init__).bind(path, *args, **kwargs).arguments
        if given.get("args") is None:
            raise ConfigError(
                f"model={path!r} is a path, which requires args. Pass args, such as TrainingArguments(output_dir=...)."
            )
        self._open_mesh(given["args"])
        options = dict(getattr(given["args"], "model_init_kwargs", None) or {})
        attention = options.pop("attn_implementation", None)
        wanted = PretrainedRequest(
            path,
            dtype=options.pop("dtype", "float32" if hasattr(given["args"], "model_init_kwargs") else None),
            seed=given["args"].seed,
            revision=options.pop("revision", None),
            trust_remote_code=options.pop("trust_remote_code", None),
        )
        if options:
            raise ConfigError(
                f"model_init_kwargs has {sorted(options)[0]!r}, which is not supported when each rank reads its shard "
                f"of the files. Leave it out, or pass a model instead of a path. Supported keys: dtype, revision, "
                f"attn_implementation, trust_remote_code (the commit of the code)."
            )

        def placed(model: nn.Module) -> nn.Module:
            if attention is not None:
                model.set_attn_implementation(attention)
            return model

        def read() -> nn.Module:
            model, weights = open_pretrained_model(self.mesh.world, wanted)
            self._weights[id(model)] = weights
            return placed(model)

        if given.get("peft_config") is not None:
            adapted = replace(wanted, peft=given["peft_config"])
            base, self._adapter = open_for_injection(self.mesh.world, adapted, where="peft_config")
            given |= {"model": placed(base), "peft_config": self._adapter.config}
        else:
            given["model"] = read()
            if "DPOTrainer" in _get_class_names(type(self)) and given.get("ref_model") is None:
                given["ref_model"] = read()
        given |= given.pop("kwargs", {})
        return given

    def create_accelerator_and_postprocess(self) -> None:
        if not hasattr(self, "mesh"):
            self._open_mesh(self.args)
        super().create_accelerator_and_postprocess()
        self.accelerator = MeshAccelerator(self.accelerator, self.mesh)
        self.gather_function = self.accelerator.gather_for_metrics

    @property
    def rows_per_group(self) -> int:
        """Number of rows of a microbatch that form a group."""
        return 2 if PAIR_TRAINERS & _get_class_names(type(self)) else 1

    @property
    def manager(self) -> StrategyManager:
        """Manager of the model. The first access shards the model, which is collective."""
        if self._manager is None or self._managed_model is not self.model:
            self._shard()
        return self._manager  # type: ignore[return-value]

    def _shard(self) -> None:
        model = self.model
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._forward_parameters = frozenset(inspect.signature(base.forward).parameters)
        set_router_loss_config(self)
        set_signature_columns(self)
        self._parameter_names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        self._dtype = next(iter(model.parameters())).dtype
        self._decayed_names = frozenset(self.get_decay_parameter_names(model))
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        self._vocab_size = 0 if head is None else int(head.weight.shape[0])
        self._num_parameters = model.num_parameters(exclude_embeddings=True) if hasattr(model, "num_parameters") else 0
        generators = RngState()
        self._manager = self.stack.build(self.mesh)
        self._manager.parallelize(model, self._weights.pop(id(model), None))
        # A layout that draws random numbers must not change the order of the data.
        generators.restore()
        self._managed_model = self.model = self.model_wrapped = self._manager.model_parts[0]
        # Trainer enables it when training starts. The strategy already has it; see `apply_training_arguments`.
        self.model.activation_checkpointing_enable = lambda **_: None

    # -- training

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        pass

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        manager = self.manager
        if not isinstance(self.optimizer, ManagerOptimizer) or self.optimizer.manager is not manager:
            cls, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
            factory = build_optimizer_factory(
                cls, options, self._decayed_names, self.args.weight_decay, all_names=self._parameter_names
            )
            manager.build_optimizer(factory)
            self.optimizer = ManagerOptimizer(manager)
        self.lr_scheduler = None
        self.create_scheduler(max_steps, optimizer=manager.optimizer)
        if resume_from_checkpoint is not None:
            self._load_state(resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self.manager.clip_grad_norm(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        norm = self.manager.clip_grad_norm(None) if grad_norm is None else grad_norm
        return self.manager.read_scalars(norm)[0]

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """See `Trainer.train`. With True it resumes from the newest valid checkpoint."""
        _ = self.manager
        if resume_from_checkpoint is True:
            found = find_newest_checkpoint(self.mesh.world, Path(self.args.output_dir))
            if found is None:
                raise CheckpointError(
                    f"resume_from_checkpoint=True, but output_dir={self.args.output_dir!r} has no valid checkpoint. "
                    f"Leave it out to start from scratch."
                )
            resume_from_checkpoint = str(found)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    @contextmanager
    def _use_reference(self) -> Iterator[StrategyManager]:
        """Context with a manager that computes the reference model.

        It is a separate manager with the same layout, or, for a model with adapters, the model's own manager with the
        reference adapter or without adapters."""
        if self.ref_model is None:
            with use_reference_adapter(self.manager.model_parts):
                yield self.manager
            return
        if self._reference_manager is None:
            generators = RngState()
            self._reference_manager = self.stack.build(self.mesh)
            self._reference_manager.parallelize(self.ref_model, self._weights.pop(id(self.ref_model), None))
            generators.restore()
            self.ref_model = self._reference_manager.model_parts[0]
        yield self._reference_manager

    # -- files

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        pass

    def _save_rng_state(self, output_dir: str) -> None:
        pass

    def _load_rng_state(self, checkpoint: str | None) -> None:
        # Restore the generators of the checkpoint after Trainer has skipped batches.
        if checkpoint is not None and self._rng_state is not None:
            self._rng_state.restore()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        check_checkpoint_directory(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        self._load_state(self.state.best_model_checkpoint)

    def _load_state(self, directory: str) -> None:
        """Load a trainer's checkpoint, written under any layout. Collective."""
        load_trainer_checkpoint(self.manager, Path(directory), self.lr_scheduler)
        self._rng_state = RngState()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as `save_pretrained` does; in a checkpoint, its training state too. Collective."""
        directory = Path(output_dir or self.args.output_dir)
        tokenizer = self.processing_class if hasattr(self.processing_class, "save_pretrained") else None
        save_trainer_checkpoint(
            self.manager,
            directory,
            step=self.state.global_step,
            scheduler=self.lr_scheduler,
            tokenizer=tokenizer,
            with_state=_internal_call and not self.args.save_only_model,
        )
        if self.mesh.rank == 0:
            torch.save(self.args, directory / "training_args.bin")


def _get_class_names(cls: type) -> frozenset[str]:
    return frozenset(each.__name__ for each in cls.__mro__)


class ManagerOptimizer:
    """Optimizer for Trainer whose `step` calls the manager. Other attributes are those of the manager's optimizer."""

    def __init__(self, manager: StrategyManager) -> None:
        self.manager = manager

    def step(self, closure: Callable[[], float] | None = None) -> None:
        if closure is not None:
            raise ConfigError("the optimizer of a mesh does not support closures. Call step() without arguments.")
        self.manager.optimizer_step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager.optimizer, name)


def build_optimizer_factory(
    cls: Callable[..., Optimizer],
    options: Mapping[str, Any],
    decayed: Collection[str],
    weight_decay: float,
    *,
    all_names: Collection[str],
) -> OptimizerFactory:
    """Return an optimizer factory with Trainer's two parameter groups: with and without weight decay.

    Names are those of the full model. A name that is not in `all_names` is a StrategyError."""

    def factory(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        named = list(named_parameters)
        strange = sorted({name for name, _ in named} - set(all_names))
        if strange:
            raise StrategyError(f"the strategy names a parameter {strange[0]!r}, which the model does not have.")
        groups = [
            {"params": [each for name, each in named if (name in decayed) == is_decayed], "weight_decay": decay}
            for is_decayed, decay in ((True, weight_decay), (False, 0.0))
        ]
        return cls([group for group in groups if group["params"]], **options)

    return factory
