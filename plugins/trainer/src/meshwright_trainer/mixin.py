"""Trainers of transformers and TRL over a manager: their loop, data, callbacks and losses, our steps and checkpoints.

[Note: a step] Trainer goes microbatch by microbatch, and a manager takes all of a step at once: microbatches are held
until the last one of a step is there. How many tokens there are, which rank sees what, the norm and the clipping are
the manager's; what is minimized is the trainer's own loss, see [Note: the trainer's own loss] in `stand_in`.

[Note: ranks that share a batch] What Trainer calls a process is a data rank; see `accelerator`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer

from meshwright.base.errors import CheckpointError, ConfigError
from meshwright.mesh.mesh import Mesh
from meshwright.mesh.world import open_world
from meshwright.model.weights import Weights
from meshwright.objectives.registry import get_objective
from meshwright.step.agreement import count_tokens
from meshwright.strategy.contract import Objective, StrategyManager
from meshwright.strategy.registry import get_registry
from meshwright.strategy.stack import resolve
from meshwright.train.from_pretrained import Wanted, opened

from ._compat import PrivateMethods, note_columns, one_device, prepared, without_adapters, without_fused_head
from .accelerator import DataRanks
from .arguments import adopt_router_loss, arguments_among, check_arguments, layout_options
from .evaluation import evaluated
from .mesh_options import mesh_options
from .objective import REFERENCE, TrainerLoss
from .optimizer import SteppedByManager, grouped
from .stand_in import ROWS, labels_of, numbered
from .state import Generators, load, newest, save

OF_FORWARD = ("input_ids", "attention_mask", "position_ids", "token_type_ids")
"""Entries of a trainer's microbatch that the model is called with."""
PAIRED = frozenset({"DPOTrainer", "RewardTrainer"})
"""Trainers of pairs, whose microbatches have all chosen rows before the rejected ones."""


class MeshTrainerMixin(PrivateMethods):
    """Goes before a class that derives from `transformers.Trainer`: `class Mine(MeshTrainerMixin, SFTTrainer)`.

    Args:
        model: a module, the same on every rank; or, where the trainer takes one, a path, of which each rank reads what
            it keeps.
        mesh: keys of a run file (`{"strategy": "fsdp2", "tp_size": 2, "strategy_config": {...}}`), the path of a run
            file, `MeshArguments`, or None: `fsdp2` over all ranks.
        args, kwargs: the trainer's own.

    Raises:
        ConfigError: an argument cannot be honoured; before anything is sent, and on every rank.
        MeshError, ModelError, StrategyError: as of `meshwright.resolve` and `StrategyManager.parallelize`.
    """

    def __init__(self, model: Any = None, *args: Any, mesh: Any = None, **kwargs: Any) -> None:
        self.mesh_options = mesh_options(mesh)
        self._manager: StrategyManager | None = None
        self._managed: nn.Module | None = None
        self._held: list[dict[str, Any]] = []
        self._losses: dict[bool, TrainerLoss] = {}
        self._generators: Generators | None = None
        self._reference_manager: StrategyManager | None = None
        check_arguments(arguments_among([*args, *kwargs.values()]), type(self), kwargs)
        self._weights: dict[int, Weights] = {}
        if isinstance(model, (str, Path)) and "RewardTrainer" not in _names(type(self)):
            super().__init__(**self._read(str(model), *args, **kwargs))
        else:
            super().__init__(model, *args, **kwargs)
        if self.optimizer is not None or self.lr_scheduler is not None:
            raise ConfigError(
                "optimizers=(...) was made over parameters that are no longer those that are trained once the model is "
                "sharded. Give optimizer_cls_and_kwargs=(class, options), or optim and lr_scheduler_type in args."
            )
        for each in (self.model, getattr(self, "ref_model", None)):
            without_fused_head(each)

    # -- mesh, model and optimizer

    def _open_mesh(self, args: Any) -> None:
        """Have every rank its place; collective."""
        one_device(args)
        world, given = open_world(args.device), self.mesh_options
        options = layout_options(args, given, get_registry().get(given.strategy))
        wrapped = {name: dict(values) for name, values in options.wrapper_config.items()}
        if self.rows_of_group > 1 and (given.sizes.pp_size or 1) > 1:
            wrapped.setdefault("pipeline", {}).setdefault("pp_microbatch_size", self.rows_of_group)
        self.stack, degrees = resolve(
            options.strategy, options.sizes, world.size, config=options.strategy_config, wrapper_config=wrapped
        )
        self.mesh = Mesh(degrees, world)

    def _read(self, path: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The arguments of the trainer's own constructor, where the model is a path: in its place a model on the meta
        device, of which each rank reads from the files what it keeps; the reference model likewise. Collective."""
        given = inspect.signature(super().__init__).bind(path, *args, **kwargs).arguments
        if given.get("args") is None:
            raise ConfigError(f"model={path!r} is a path: give args, too, such as TrainingArguments(output_dir=...).")
        self._open_mesh(given["args"])
        options = dict(getattr(given["args"], "model_init_kwargs", None) or {})
        attention = options.pop("attn_implementation", None)
        wanted = Wanted(
            path,
            dtype=options.pop("dtype", "float32" if hasattr(given["args"], "model_init_kwargs") else None),
            seed=given["args"].seed,
            revision=options.pop("revision", None),
            trusted=options.pop("trust_remote_code", None),
        )
        if options:
            raise ConfigError(
                f"model_init_kwargs has {sorted(options)[0]!r}, which is not read where each rank reads its part of "
                f"the files. Leave it out, or give a model instead of a path. Read are: dtype, revision, "
                f"attn_implementation, trust_remote_code (the commit of the code)."
            )

        def read(peft: Any) -> nn.Module:
            model, weights = opened(self.mesh.world, replace(wanted, peft=peft))
            if attention is not None:
                model.set_attn_implementation(attention)
            self._weights[id(model)] = weights
            return model

        peft = given.pop("peft_config", None)
        given["model"] = read(peft)
        if "DPOTrainer" in _names(type(self)) and given.get("ref_model") is None and peft is None:
            given["ref_model"] = read(None)
        given |= given.pop("kwargs", {})
        return given

    def create_accelerator_and_postprocess(self) -> None:
        if not hasattr(self, "mesh"):
            self._open_mesh(self.args)
        super().create_accelerator_and_postprocess()
        self.accelerator = DataRanks(self.accelerator, self.mesh)
        self.gather_function = self.accelerator.gather_for_metrics

    @property
    def rows_of_group(self) -> int:
        """How many rows of a microbatch belong together."""
        return 2 if PAIRED & _names(type(self)) else 1

    @property
    def manager(self) -> StrategyManager:
        """Of the model, which is sharded on first use; collective then."""
        if self._manager is None or self._managed is not self.model:
            self._shard()
        return self._manager  # type: ignore[return-value]

    def _shard(self) -> None:
        model = self.model
        adopt_router_loss(self)
        note_columns(self)
        self._names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        self._dtype = next(iter(model.parameters())).dtype
        self._decayed = frozenset(self.get_decay_parameter_names(model))
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        self._vocab_size = 0 if head is None else int(head.weight.shape[0])
        self._num_parameters = model.num_parameters(exclude_embeddings=True) if hasattr(model, "num_parameters") else 0
        self._losses.clear()
        generators = Generators()
        self._manager = self.stack.build(self.mesh)
        self._manager.parallelize(model, self._weights.pop(id(model), None))
        # A layout that draws numbers must not change the order of the data.
        generators.restore()
        self._managed = self.model = self.model_wrapped = self._manager.model_parts[0]
        # Trainer switches it on where it trains; the layout has it, see `layout_options`.
        self.model.activation_checkpointing_enable = lambda **_: None

    def begin_training(self, max_steps: int, checkpoint: str | None) -> None:
        """Have optimizer and schedule, and the state of a checkpoint; collective."""
        manager = self.manager
        if not isinstance(self.optimizer, SteppedByManager) or self.optimizer.manager is not manager:
            cls, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
            factory = grouped(cls, options, self._decayed, self.args.weight_decay, known=self._names)
            manager.build_optimizer(factory)
            self.optimizer = SteppedByManager(manager)
        self.lr_scheduler = None
        self.create_scheduler(max_steps, optimizer=manager.optimizer)
        if checkpoint is not None:
            self.load_state(checkpoint)

    def load_state(self, directory: str) -> None:
        """Load a checkpoint that a trainer has written under any layout; collective."""
        load(self.manager, Path(directory), self.lr_scheduler)
        self._generators = Generators()

    def restore_generators(self) -> None:
        """Put the generators back to where the checkpoint had them, after batches were passed over."""
        if self._generators is not None:
            self._generators.restore()

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """See `Trainer.train`. With True it goes on from the newest checkpoint that is whole.

        Raises:
            CheckpointError: there is none.
        """
        _ = self.manager
        if resume_from_checkpoint is True:
            found = newest(self.mesh.world, Path(self.args.output_dir))
            if found is None:
                raise CheckpointError(
                    f"resume_from_checkpoint=True, but output_dir={self.args.output_dir!r} has no whole checkpoint. "
                    f"Leave it out to begin anew."
                )
            resume_from_checkpoint = str(found)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    # -- one step

    def get_tp_size(self) -> int:
        """Ranks that share a batch."""
        return self.mesh.world.size // self.mesh.data_size if hasattr(self, "mesh") else 1

    @property
    def processes_of_loss(self) -> int:
        """How many processes a loss is to think there are, so that what it multiplies by them is right."""
        return self.get_tp_size()

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Hold a microbatch; with the last one of a step, compute its gradients. The loss of the whole step, then."""
        self._set_training(True)
        self._held.append(prepared(self, inputs))
        if not self.accelerator.gradient_state.sync_gradients:
            return torch.zeros((), device=self.args.device)
        held, self._held = self._held, []
        manager = self.manager
        self._set_training(True)
        objective = self._objective(takes_logits=False)
        batches = self._batches(held, objective)
        count = manager.announce(batches, objective=objective)
        loss = manager.forward_backward(batches, num_tokens=count, objective=objective)
        self._log_loss(objective)
        return loss.detach()

    def _objective(self, *, takes_logits: bool) -> Objective | None:
        """What is minimized; None: the cross entropy of the labels."""
        is_plain = type(self).compute_loss is Trainer.compute_loss and self.compute_loss_func is None
        if is_plain and not takes_logits:
            smoothing = self.args.label_smoothing_factor
            return get_objective({"name": "cross_entropy", "label_smoothing": smoothing}) if smoothing else None
        if takes_logits not in self._losses:
            self._losses[takes_logits] = TrainerLoss(
                self,
                on="tokens" if self._vocab_size else "outputs",
                rows=self.rows_of_group,
                is_mean=getattr(self, "loss_is_scaled_for_ga", None) is False or not self._vocab_size,
                vocab_size=self._vocab_size,
                dtype=self._dtype,
                takes_logits=takes_logits,
            )
        return self._losses[takes_logits]

    def _batches(self, held: Sequence[dict[str, Any]], objective: Objective | None) -> list[dict[str, Tensor]]:
        """What the manager takes of the trainer's microbatches."""
        batches = []
        for number, inputs in enumerate(held):
            batch = {name: inputs[name] for name in OF_FORWARD if inputs.get(name) is not None}
            batch["labels"] = labels_of(inputs)
            if isinstance(objective, TrainerLoss):
                order = objective.order(len(batch["input_ids"]), batch["input_ids"].device)
                batch = {name: tensor[order] for name, tensor in batch.items()} | {ROWS: numbered(number, order)}
            batches.append(batch)
        if isinstance(objective, TrainerLoss):
            objective.begin(self._with_reference(held))
        return batches

    def _with_reference(self, held: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Microbatches with log-probabilities of the reference model, where the loss compares with one; collective."""
        if not hasattr(self, "ref_model") or getattr(self, "precompute_ref_logps", False):
            return [dict(inputs) for inputs in held]
        with self._reference() as manager:
            stats = manager.token_stats(self._batches(held, None), ["log_probs"])
        known = [each["log_probs"][:, :-1] for each in stats]
        return [{**inputs, REFERENCE: each} for inputs, each in zip(held, known, strict=True)]

    @contextmanager
    def _reference(self) -> Iterator[StrategyManager]:
        """What has the reference model: a manager of its own, under the same layout; or, of a model with adapters, the
        model's, without them."""
        if self.ref_model is None:
            with without_adapters(self.manager.model_parts):
                yield self.manager
            return
        if self._reference_manager is None:
            generators = Generators()
            self._reference_manager = self.stack.build(self.mesh)
            self._reference_manager.parallelize(self.ref_model, self._weights.pop(id(self.ref_model), None))
            generators.restore()
            self.ref_model = self._reference_manager.model_parts[0]
        yield self._reference_manager

    def _log_loss(self, objective: Objective | None) -> None:
        if isinstance(objective, TrainerLoss) and objective.is_here and hasattr(self, "_metrics"):
            objective.log()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """See `Trainer.log`; what losses log is known on the last ranks of a pipeline, and told to all."""
        losses = list(self._losses.values())
        if self.mesh.degrees.pp > 1 and losses and hasattr(self, "_metrics"):
            world = self.mesh.world
            mine = world.rank if any(each.is_here for each in losses) else -1
            source = world.reduce_ints([mine], dist.ReduceOp.MAX)[0]
            if source >= 0:
                box = [self._metrics, self._total_train_tokens]
                dist.broadcast_object_list(box, group=world.group, group_src=source)
                self._metrics, self._total_train_tokens = box
        super().log(logs, *args, **kwargs)

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        """Of this rank: 6 for each token and parameter but the embeddings', over the ranks that share the batch."""
        return 6 * inputs["input_ids"].numel() * self._num_parameters // self.get_tp_size()

    # -- evaluation

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        return self._each_once(super().get_eval_dataloader, *args, **kwargs)

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        return self._each_once(super().get_test_dataloader, *args, **kwargs)

    def _each_once(self, make: Any, *args: Any, **kwargs: Any) -> Any:
        """A data loader that gives no row twice, so that data ranks may have different numbers of batches."""
        self.accelerator.even_batches = False
        try:
            return make(*args, **kwargs)
        finally:
            self.accelerator.even_batches = True

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """See `Trainer.evaluation_loop`; the loss is that of all targets, each counted once."""
        only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        _ = self.manager
        self.callback_handler.eval_dataloader = dataloader
        self._set_training(False)
        return evaluated(self, dataloader, takes_predictions=not only, metric_key_prefix=metric_key_prefix)

    def _set_training(self, is_training: bool) -> None:
        """TRL logs under the name of what the model is in."""
        for part in self.manager.model_parts:
            part.train(is_training)

    def evaluate_batch(self, inputs: dict[str, Any], *, takes_logits: bool) -> tuple[float, int, Tensor | None]:
        """The loss of a microbatch of each data rank, over what it is divided by; and this rank's predictions, where
        they are known. Collective."""
        objective = self._objective(takes_logits=takes_logits)
        batches = self._batches([inputs], objective)
        count = count_tokens(batches, self.mesh, objective)
        if not int(count):
            return 0.0, 0, None
        loss = self.manager.eval_loss(batches, num_tokens=count, objective=objective)
        self._set_training(False)
        self._log_loss(objective)
        predictions = objective.kept.of(0).get("predictions") if isinstance(objective, TrainerLoss) else None
        return float(loss), int(count), predictions

    # -- files

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as `save_pretrained` does; within a checkpoint, its state beside it. Collective."""
        directory = Path(output_dir or self.args.output_dir)
        tokenizer = self.processing_class if hasattr(self.processing_class, "save_pretrained") else None
        save(
            self.manager,
            directory,
            step=self.state.global_step,
            scheduler=self.lr_scheduler,
            tokenizer=tokenizer,
            with_state=_internal_call and not self.args.save_only_model,
        )
        if self.mesh.rank == 0:
            torch.save(self.args, directory / "training_args.bin")


def _names(cls: type) -> frozenset[str]:
    """Names of a class and all that it derives from."""
    return frozenset(each.__name__ for each in cls.__mro__)
