"""One small run for each argument that acts: with it changed and unchanged, on one process and over a mesh."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trainer_cases
import transformers
from datasets import Dataset
from transformers import TrainerCallback

import meshwright_trainer
from meshwright.launch.open_world import open_world

SAVED = {"save_strategy": "steps", "save_steps": 2}
ONE_EPOCH = {"max_steps": -1, "num_train_epochs": 1}


@dataclass(frozen=True)
class Case:
    """An argument.

    Attributes:
        changes: the argument, with others that go with it.
        base: what both runs have.
        kind: of trainer, see `trainer_cases.made`.
        alone: compared on one rank only: ranks get other rows where they do not divide the data, and round otherwise.
        is_same: changes nothing that a run tells.
        tolerance: relative. Trainer's losses and TRL's log-probabilities are of float32; DPO logs differences of them.
        unlike: entries of a log that mean something else over a mesh.
        mesh: of one rank.
    """

    changes: dict[str, Any]
    base: dict[str, Any] | None = None
    kind: str = "trainer"
    alone: bool = False
    is_same: bool = False
    tolerance: float = 1e-5
    unlike: tuple[str, ...] = ()
    mesh: dict[str, Any] | None = None

    @property
    def allowed(self) -> float:
        """Relative; a tenth of it is absolute."""
        return self.tolerance * (10 if self.kind.startswith("dpo") else 1)

    @property
    def name(self) -> str:
        told = "-".join(f"{name}={value}" for name, value in self.changes.items())
        return f"{self.kind}-{told}".translate(str.maketrans(" '\"{}[]:/", "_________"))


CASES = [
    Case({"per_device_train_batch_size": 2}),
    Case({"gradient_accumulation_steps": 3}),
    Case({"max_grad_norm": 0.1}, {"optim": "sgd", "learning_rate": 0.1}),
    Case({"learning_rate": 3e-3}),
    Case({"weight_decay": 5.0}),
    Case({"lr_scheduler_type": "reduce_lr_on_plateau"}, {"learning_rate": 0.1, "eval_steps": 1, "max_steps": 6}),
    Case(
        {"lr_scheduler_kwargs": {"patience": 0, "factor": 0.3}},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "learning_rate": 0.3, "eval_steps": 1, "max_steps": 6},
        tolerance=1e-2,
    ),
    Case({"lr_scheduler_kwargs": {"num_cycles": 1.5}}, {"max_steps": 6}),
    Case({"warmup_steps": 0.75}),
    Case({"optim": "adamw_torch"}, is_same=True),
    Case({"optim": "sgd"}),
    Case({"optim": "adafactor"}, alone=True, mesh={"strategy": "ddp"}),
    Case({"optim_args": "momentum=0.9"}, {"optim": "sgd"}),
    Case({"adam_beta1": 0.5}),
    Case({"adam_beta2": 0.9}),
    Case({"adam_epsilon": 1e-2}),
    Case({"label_smoothing_factor": 0.2}),
    Case({"average_tokens_across_devices": False}, alone=True, is_same=True),
    Case({"max_steps": 6}),
    Case({"num_train_epochs": 2}, ONE_EPOCH),
    Case({"logging_steps": 2}),
    Case({"logging_first_step": True}, {"logging_steps": 3}),
    Case({"logging_strategy": "epoch"}),
    Case({"logging_strategy": "epoch"}),
    Case({"eval_steps": 1}),
    Case({"eval_strategy": "epoch"}, ONE_EPOCH),
    Case({"eval_delay": 3}),
    Case({"eval_on_start": True}),
    # Trainer takes the mean of batches' means.
    Case({"per_device_eval_batch_size": 4}, unlike=("eval_loss",)),
    Case({"prediction_loss_only": True}, {"metrics": True}),
    Case({"include_for_metrics": ["inputs"]}, {"metrics": True}),
    Case({"save_strategy": "steps"}, {"save_steps": 2}),
    Case({"save_strategy": "best"}, {"learning_rate": 0.3, "eval_steps": 1, "metric_for_best_model": "loss"}),
    Case({"save_steps": 3}, SAVED),
    Case({"save_total_limit": 1}, SAVED),
    Case({"save_only_model": True}, SAVED),
    Case({"load_best_model_at_end": True}, {**SAVED, "learning_rate": 0.3, "max_steps": 6}),
    Case(
        {"metric_for_best_model": "count", "greater_is_better": False},
        {**SAVED, "metrics": True, "load_best_model_at_end": True, "learning_rate": 0.3},
    ),
    Case({"greater_is_better": True}, {**SAVED, "load_best_model_at_end": True, "learning_rate": 0.02}),
    Case({"seed": 5}),
    Case({"data_seed": 7}),
    Case({"dataloader_drop_last": True}, {**ONE_EPOCH, "per_device_train_batch_size": 6}, alone=True),
    Case({"dataloader_num_workers": 1}, is_same=True),
    Case({"remove_unused_columns": False}),
    Case({"include_num_input_tokens_seen": "all"}),
    Case({"include_num_input_tokens_seen": "non_padding"}),
    Case({"train_sampling_strategy": "sequential"}),
    Case({"train_sampling_strategy": "group_by_length"}, alone=True),
    Case({"accelerator_config": {"use_seedable_sampler": False}}, alone=True),
    Case(
        {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 3}}}, {"gradient_accumulation_steps": 1}
    ),
    Case({"bf16": True}, {"float32": True}, alone=True, tolerance=1e-2),
    Case({"gradient_checkpointing": True}, is_same=True),
    Case({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, {"gradient_checkpointing": True}, is_same=True),
    Case({"ignore_data_skip": True}, {**SAVED, "resumes": 2}),
    Case({"loss_type": "dft"}, kind="sft"),
    Case({"label_smoothing_factor": 0.2}, kind="sft"),
    Case({"max_length": 8}, kind="sft"),
    Case({"packing": True}, {"max_length": 16}, kind="sft", alone=True),
    Case({"padding_free": True}, {"max_length": None}, kind="sft", alone=True),
    Case({"pad_to_multiple_of": 16}, kind="sft", is_same=True),
    Case({"router_aux_loss_coef": 0.5}, kind="moe", unlike=("aux_loss", "eval_aux_loss")),
    Case({"router_aux_loss_coef": 0.5}, kind="dpo_moe", unlike=("aux_loss", "eval_aux_loss")),
    Case({"beta": 0.1}, kind="dpo"),
    Case({"label_smoothing": 0.1}, {"loss_type": "robust"}, kind="dpo"),
    Case({"ld_alpha": 0.5}, kind="dpo"),
    Case({"max_length": 8}, kind="dpo"),
    *(Case({"loss_type": loss}, kind="dpo") for loss in ("ipo", "bco_pair", "apo_down", "discopop", "sigmoid_norm")),
    Case({"loss_type": ["sigmoid", "hinge"], "loss_weights": [0.3, 2.0]}, kind="dpo"),
    Case({"discopop_tau": 0.5}, {"loss_type": "discopop"}, kind="dpo"),
    Case({"f_divergence_type": "js_divergence"}, kind="dpo"),
    Case({"f_alpha_divergence_coef": 0.3}, {"f_divergence_type": "forward_kl"}, kind="dpo", is_same=True),
    Case({"center_rewards_coefficient": 0.5}, kind="reward"),
    Case({"max_length": 10}, kind="reward", alone=True),
    Case({"disable_dropout": False}, kind="reward", is_same=True),
]
ON_RANKS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "max_grad_norm": 0.1,
    "weight_decay": 5.0,
    "optim": "sgd",
    "label_smoothing_factor": 0.2,
    "num_train_epochs": 2,
    "per_device_eval_batch_size": 4,
    "include_for_metrics": ["inputs"],
    "load_best_model_at_end": True,
    "save_only_model": True,
    "seed": 5,
    "include_num_input_tokens_seen": "non_padding",
    "ignore_data_skip": True,
    "loss_type": "dft",
    "ld_alpha": 0.5,
}
"""Arguments that are tried on two ranks, too."""
FEW = [
    case
    for case in CASES
    if not case.alone and any(ON_RANKS.get(name) == value for name, value in case.changes.items())
]
FEWEST = [case for case in FEW if {"optim", "ld_alpha"} & case.changes.keys()]
"""Those that run first."""


class Counted(TrainerCallback):
    """How often each event of a run is."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()


for _event in ("on_step_end", "on_substep_end", "on_log", "on_evaluate", "on_prediction_step", "on_save"):
    setattr(Counted, _event, lambda self, *_, event=_event, **__: self.counts.update([event]))


class Columns(trainer_cases.Padded):
    """A collator that learns less where a column is not removed."""

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = super().__call__(examples)
        if "note" in examples[0]:
            batch["labels"][:, :8] = -100
        return batch


def metrics(prediction: Any) -> dict[str, float]:
    found = {"count": float((prediction.label_ids != -100).sum()), "mean": float(np.mean(prediction.predictions))}
    if getattr(prediction, "inputs", None) is not None:
        found["ids"] = float(prediction.inputs.sum())
    return found


def told(case: Case, mesh: Any, directory: Path, data_size: int, *, is_changed: bool) -> dict[str, Any]:
    """What a run tells: its log, how often each event was, its state, its files, and the loss of what is left."""
    options = copy.deepcopy({**(case.base or {}), **(case.changes if is_changed else {})})
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        if name in options:
            options[name] //= data_size
    wants_metrics, resumes = options.pop("metrics", False), options.pop("resumes", None)
    is_float32 = options.pop("float32", False)
    trainer = _made(case.kind, mesh, directory, data_size, options, is_float32=is_float32, wants_metrics=wants_metrics)
    counted = Counted()
    trainer.add_callback(counted)
    if resumes:
        trainer.args.max_steps, last = resumes, trainer.args.max_steps
        trainer.train()
        trainer = _made(case.kind, mesh, directory, data_size, {**options, "max_steps": last})
        trainer.add_callback(counted)
        trainer.train(resume_from_checkpoint=str(directory / f"checkpoint-{resumes}"))
    else:
        trainer.train()
    left_out = ("runtime", "per_second", "total_flos", "epoch")
    log = [
        {key: each[key] for key in each if not any(part in key for part in left_out)}
        for each in trainer.state.log_history
    ]
    final = trainer.evaluate().get("eval_loss", 0.0)
    saved = {path.name: path for path in sorted(directory.glob("checkpoint-*"))}
    states = {name: any((path / each).exists() for each in ("optimizer.pt", "mesh")) for name, path in saved.items()}
    best = trainer.state.best_model_checkpoint
    return {
        "log": log,
        "counts": dict(sorted(counted.counts.items())),
        "final": final,
        "steps": trainer.state.global_step,
        "seen": trainer.state.num_input_tokens_seen,
        "best": Path(best).name if best else None,
        "best_metric": trainer.state.best_metric,
        "states": states,
    }


def _made(
    kind: str,
    mesh: Any,
    directory: Path,
    data_size: int,
    options: dict[str, Any],
    *,
    is_float32: bool = False,
    wants_metrics: bool = False,
) -> Any:
    if kind != "trainer":
        return trainer_cases.made(kind, mesh, directory, data_size, **options)
    numbers = trainer_cases.numbers(48, 5)
    rows = [{"input_ids": [int(word) + 2 for word in text.split()], "note": "x"} for text in numbers]
    model = trainer_cases.model()
    return (transformers.Trainer if mesh is None else meshwright_trainer.MeshTrainer)(
        model.float() if is_float32 else model,
        transformers.TrainingArguments(**trainer_cases.arguments(directory, data_size, **options)),
        data_collator=Columns(),
        train_dataset=Dataset.from_list(rows[:40]),
        eval_dataset=Dataset.from_list(rows[40:]),
        compute_metrics=metrics if wants_metrics else None,
        **({} if mesh is None else {"mesh": mesh}),
    )


def across(mesh: dict[str, Any], directory: Path, names: Sequence[str]) -> dict[str, Any]:
    """What runs with changed arguments tell over a mesh; a task of a pool."""
    with open_world("cpu") as world:
        data_size = 1 if mesh.get("tp_size") else world.size
        return {
            case.name: told(case, mesh, directory / case.name, data_size, is_changed=True)
            for case in CASES
            if case.name in names
        }
