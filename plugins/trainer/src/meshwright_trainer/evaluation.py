"""Evaluation on a mesh: the loss over all targets, each counted once, and predictions if metrics need them.

Trainer averages the means of batches, and repeats batches on ranks that have none left. Here the sum over all targets
is divided by their number, and a rank without a batch runs one whose labels are all masked.

Shapes: B rows of a microbatch, S positions of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import EvalPrediction
from transformers.trainer_utils import EvalLoopOutput

from meshwright.plugin import IGNORE_INDEX, Mesh

from .objective import get_labels

PADDING_VALUE = -100
"""Padding of predictions and labels of different lengths, as in Trainer."""
IDLE_KEY = "is_idle"
"""Key of a microbatch whose labels are all masked."""


def run_evaluation(trainer: Any, dataloader: Any, *, takes_predictions: bool, metric_key_prefix: str) -> EvalLoopOutput:
    """Evaluate on the batches of this data rank's loader, and gather predictions on every rank. Collective."""
    sums, counts, samples = 0.0, 0, 0
    found: list[dict[str, np.ndarray]] = []
    try:
        for inputs, rows in _iter_microbatches(trainer, dataloader):
            trainer.accelerator.has_batch = [bool(each) for each in rows]
            loss, count, predicted = trainer.evaluate_batch(inputs, takes_logits=takes_predictions)
            sums, counts, samples = sums + loss * count, counts + count, samples + sum(rows)
            if takes_predictions:
                found += _gather_predictions(trainer.mesh, inputs, predicted)
            handler = trainer.callback_handler
            trainer.control = handler.on_prediction_step(trainer.args, trainer.state, trainer.control)
    finally:
        trainer.accelerator.has_batch = None
    arrays = {name: _concatenate([each[name] for each in found]) for name in (found[0] if found else ())}
    predictions, labels = arrays.get("predictions"), arrays.get("labels")
    metrics: dict[str, Any] = {}
    if trainer.compute_metrics is not None and found:
        given = {"inputs": arrays["inputs"]} if "inputs" in trainer.args.include_for_metrics else {}
        metrics = dict(trainer.compute_metrics(EvalPrediction(predictions=predictions, label_ids=labels, **given)))
    prefix = f"{metric_key_prefix}_"
    if counts:
        metrics[f"{prefix}loss"] = sums / counts
    metrics = {name if name.startswith(prefix) else prefix + name: _to_scalar(value) for name, value in metrics.items()}
    return EvalLoopOutput(predictions=predictions, label_ids=labels, metrics=metrics, num_samples=samples)


def _to_scalar(value: Any) -> Any:
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value


def _iter_microbatches(trainer: Any, dataloader: Any) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Yield the microbatches of this data rank with the number of rows on each data rank.

    All ranks yield equally many, as many as the rank with the most."""
    mesh = trainer.mesh
    iterator = iter(dataloader)
    last: Any = None
    while True:
        inputs = next(iterator, None)
        mine = 0 if inputs is None or not mesh.is_data_leader else len(inputs["input_ids"])
        rows = mesh.world.reduce_ints([mine if rank == mesh.data_rank else 0 for rank in range(mesh.data_size)])
        if not any(rows):
            return
        if last is None and not all(rows):
            # A rank that has had no batch needs one of another rank as a template.
            reported: list[Any] = [None] * mesh.world.size
            dist.all_gather_object(reported, inputs, group=mesh.world.group)
            last = trainer._prepare_inputs(next(each for each in reported if each is not None))
        if inputs is None:
            inputs = {**last, "labels": torch.full_like(get_labels(last), IGNORE_INDEX), IDLE_KEY: True}
        else:
            last = inputs = trainer._prepare_inputs(inputs)
        yield inputs, rows


def _gather_predictions(mesh: Mesh, inputs: dict[str, Any], predicted: Tensor | None) -> list[dict[str, np.ndarray]]:
    """Return predictions, labels and inputs of the microbatch of each data rank that has predictions. Collective."""
    mine: dict[str, np.ndarray] | None = None
    # Of ranks with equal predictions, the first reports them.
    is_reporter = all(mesh.axis_rank(axis) == 0 for axis in ("cp", "tp"))
    if predicted is not None and is_reporter and IDLE_KEY not in inputs:
        found = {"predictions": predicted, "labels": get_labels(inputs), "inputs": inputs["input_ids"]}
        mine = {name: _to_numpy(value) for name, value in found.items()}
    reported: list[Any] = [None] * mesh.world.size
    dist.all_gather_object(reported, (mesh.data_rank, mine), group=mesh.world.group)
    return [each for _, each in sorted(reported, key=lambda pair: pair[0]) if each is not None]


def _concatenate(arrays: list[np.ndarray]) -> np.ndarray:
    """Concatenate arrays along dim 0, padded to the same length along dim 1."""
    if arrays[0].ndim > 1:
        length = max(each.shape[1] for each in arrays)
        pads = [[(0, 0), (0, length - each.shape[1]), *[(0, 0)] * (each.ndim - 2)] for each in arrays]
        arrays = [np.pad(each, pad, constant_values=PADDING_VALUE) for each, pad in zip(arrays, pads, strict=True)]
    return np.concatenate(arrays)


def _to_numpy(tensor: Tensor) -> np.ndarray:
    wide = tensor.detach().float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.detach()
    return wide.cpu().numpy()
