"""Trainers of transformers and TRL on a manager, with their own loop, data, callbacks and losses.

[Note: a step] Trainer processes microbatches one by one, but a manager takes all microbatches of a step at once. They
are collected until the last one of a step. The manager counts tokens, shards batches, and computes and clips gradients.
The objective is the trainer's own loss; see [Note: the trainer's own loss] in `objective`.

[Note: ranks that share a batch] A process of Trainer corresponds to a data rank; see `accelerator`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput

from meshwright.plugin import BatchError, Objective, count_tokens, get_objective

from .evaluation import run_evaluation
from .model_mixin import MeshModelMixin
from .objective import REFERENCE_KEY, ROWS_COLUMN, TrainerLoss, get_labels, number_rows

FORWARD_INPUTS = ("input_ids", "attention_mask", "position_ids", "token_type_ids")
"""Keys of a trainer's microbatch that are passed to the model."""


class MeshTrainerMixin(MeshModelMixin):
    """First base of a class that derives from `transformers.Trainer`: `class Mine(MeshTrainerMixin, SFTTrainer)`.

    Args:
        model: a module, equal on every rank, or, if the trainer supports it, a path, from which each rank reads its
            shard.
        args: arguments of the trainer.
        mesh: keys of a run file (`{"strategy": "fsdp2", "tp_size": 2, "strategy_config": {...}}`), the path of a run
            file, `MeshArguments`, or None for `fsdp2` over all ranks.
        kwargs: keyword arguments of the trainer.

    Raises:
        ConfigError: an argument is not supported. Raised on every rank, before the first collective.
        MeshError, ModelError, StrategyError: from `meshwright.resolve` and `StrategyManager.parallelize`.
    """

    def __init__(self, model: Any = None, *args: Any, mesh: Any = None, **kwargs: Any) -> None:
        self._pending_microbatches: list[dict[str, Any]] = []
        self._losses: dict[bool, TrainerLoss] = {}
        super().__init__(model, *args, mesh=mesh, **kwargs)

    def _shard(self) -> None:
        super()._shard()
        self._losses.clear()

    # -- one step

    def get_tp_size(self) -> int:
        return self.mesh.world.size // self.mesh.data_size if hasattr(self, "mesh") else 1

    @property
    def num_loss_processes(self) -> int:
        """Number of processes that the loss sees, since some losses multiply by it."""
        return self.get_tp_size()

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Collect a microbatch; with the last one of a step, compute the gradients and return the loss of the step."""
        self._set_training(True)
        self._pending_microbatches.append(self._prepare_inputs(inputs))
        if not self.accelerator.gradient_state.sync_gradients:
            return torch.zeros((), device=self.args.device)
        held, self._pending_microbatches = self._pending_microbatches, []
        manager = self.manager
        objective = self._get_objective(takes_logits=False)
        batches = self._build_batches(held, objective)
        count = manager.begin_step_sync(batches, objective=objective)
        loss = manager.forward_backward(batches, num_tokens=count, objective=objective)
        self._log_loss(objective)
        return loss.detach()

    def _get_objective(self, *, takes_logits: bool) -> Objective | None:
        """Return the objective to minimize; None for the cross entropy of the labels."""
        is_plain = type(self).compute_loss is Trainer.compute_loss and self.compute_loss_func is None
        if is_plain and not takes_logits:
            smoothing = self.args.label_smoothing_factor
            return get_objective({"name": "cross_entropy", "label_smoothing": smoothing}) if smoothing else None
        if takes_logits not in self._losses:
            self._losses[takes_logits] = TrainerLoss(self, takes_logits=takes_logits)
        return self._losses[takes_logits]

    def _build_batches(
        self, microbatches: Sequence[dict[str, Any]], objective: Objective | None
    ) -> list[dict[str, Tensor]]:
        batches = []
        for number, inputs in enumerate(microbatches):
            self._check_inputs(inputs)
            batch = {name: inputs[name] for name in FORWARD_INPUTS if inputs.get(name) is not None}
            batch["labels"] = get_labels(inputs)
            if isinstance(objective, TrainerLoss):
                order = objective.row_order(len(batch["input_ids"]), batch["input_ids"].device)
                batch = {name: tensor[order] for name, tensor in batch.items()} | {
                    ROWS_COLUMN: number_rows(number, order)
                }
            batches.append(batch)
        if isinstance(objective, TrainerLoss):
            objective.begin_step(self._add_reference(microbatches))
        return batches

    def _check_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Raise BatchError for model inputs that would not be passed to the model here."""
        for name, value in inputs.items():
            is_lost = name == "shift_labels" or name in self._forward_parameters.difference(FORWARD_INPUTS, ["labels"])
            if is_lost and isinstance(value, Tensor):
                raise BatchError(
                    f"a microbatch has {name!r}, which is not passed to the model on a mesh: its inputs are "
                    f"{', '.join(FORWARD_INPUTS)}, and labels of its tokens. Remove it from the data, or from the "
                    f"collator's output."
                )

    def _add_reference(self, microbatches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add log-probabilities of the reference model, if the trainer has one. Collective."""
        if not hasattr(self, "ref_model") or getattr(self, "precompute_ref_logps", False):
            return [dict(inputs) for inputs in microbatches]
        with self._use_reference() as manager:
            stats = manager.token_stats(self._build_batches(microbatches, None), ["log_probs"])
        known = [each["log_probs"][:, :-1] for each in stats]
        return [{**inputs, REFERENCE_KEY: each} for inputs, each in zip(microbatches, known, strict=True)]

    def _log_loss(self, objective: Objective | None) -> None:
        if isinstance(objective, TrainerLoss) and objective.has_run and hasattr(self, "_metrics"):
            objective.log()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """See `Trainer.log`. In a pipeline, the last stage's ranks have the logged values and send them to all."""
        losses = list(self._losses.values())
        if self.mesh.degrees.pp > 1 and losses and hasattr(self, "_metrics"):
            world = self.mesh.world
            mine = world.rank if any(each.has_run for each in losses) else -1
            source = world.reduce_ints([mine], dist.ReduceOp.MAX)[0]
            if source >= 0:
                box = [self._metrics, self._total_train_tokens]
                dist.broadcast_object_list(box, group=world.group, group_src=source)
                self._metrics, self._total_train_tokens = box
        super().log(logs, *args, **kwargs)

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        """Return this rank's operations: 6 per token and parameter, without embeddings, divided by ranks per batch."""
        return 6 * inputs["input_ids"].numel() * self._num_parameters // self.get_tp_size()

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """See `Trainer.get_batch_samples`. A stream ends when any data rank has no batch left."""
        is_stream = isinstance(self.train_dataset, IterableDataset) and self.mesh.data_size > 1
        batches = self._until_any_exhausted(epoch_iterator) if is_stream else epoch_iterator
        return super().get_batch_samples(batches, num_batches, device)

    def _until_any_exhausted(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            found = next(batches, None)
            if not self.mesh.world.reduce_ints([found is not None], dist.ReduceOp.MIN)[0]:
                return
            yield found

    # -- evaluation

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        return self._without_repeats(super().get_eval_dataloader, *args, **kwargs)

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        return self._without_repeats(super().get_test_dataloader, *args, **kwargs)

    def _without_repeats(self, make: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a data loader that repeats no rows, so that data ranks may have different numbers of batches."""
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
        """See `Trainer.evaluation_loop`. The loss counts each target once."""
        only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        _ = self.manager
        self.callback_handler.eval_dataloader = dataloader
        self._set_training(False)
        return self._run_evaluation(dataloader, takes_predictions=not only, metric_key_prefix=metric_key_prefix)

    def _run_evaluation(self, dataloader: Any, *, takes_predictions: bool, metric_key_prefix: str) -> EvalLoopOutput:
        return run_evaluation(
            self, dataloader, takes_predictions=takes_predictions, metric_key_prefix=metric_key_prefix
        )

    def _set_training(self, is_training: bool) -> None:
        """Set the mode of all model parts. TRL logs under the name of the mode."""
        for part in self.manager.model_parts:
            part.train(is_training)

    def evaluate_batch(self, inputs: dict[str, Any], *, takes_logits: bool) -> tuple[float, int, Tensor | None]:
        """Return the loss over one microbatch of each data rank, the count it is divided by, and the predictions.

        Predictions are None on ranks without outputs. Collective."""
        objective = self._get_objective(takes_logits=takes_logits)
        batches = self._build_batches([inputs], objective)
        count = count_tokens(batches, self.mesh, objective)
        if not int(count):
            return 0.0, 0, None
        loss = self.manager.eval_loss(batches, num_tokens=count, objective=objective)
        # A manager restores the mode of its wrapped modules.
        self._set_training(False)
        self._log_loss(objective)
        predictions = objective.saved_statistics[0].get("predictions") if isinstance(objective, TrainerLoss) else None
        return float(loss), int(count), predictions
