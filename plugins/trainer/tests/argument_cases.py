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
    changes: dict[str, Any]  # The argument, with others that go with it
    base: dict[str, Any] | None = None  # What both runs have
    kind: str = "trainer"  # See `trainer_cases.made`
    on_ranks: bool = False  # Tried on two ranks, too
    is_same: bool = False  # Changes nothing that a run tells
    tolerance: float = 1e-5  # Relative: trainers compute losses and log-probabilities in float32
    unlike: tuple[str, ...] = ()  # Entries of a log that mean something else over a mesh
    mesh: dict[str, Any] | None = None  # Of one rank

    def differences(self, wanted: Any, found: Any, *, is_usual: bool = False) -> list[str]:
        # DPO logs differences of log-probabilities.
        allowed = self.tolerance * (10 if self.kind.startswith("dpo") else 1)
        unlike = () if is_usual else (*self.unlike, *(["final"] if "eval_loss" in self.unlike else []))
        return trainer_cases.differences(wanted, found, allowed, 0.1, unlike)

    @property
    def name(self) -> str:
        reported = "-".join(f"{name}={value}" for name, value in self.changes.items())
        return f"{self.kind}-{reported}".translate(str.maketrans(" '\"{}[]:/", "_________"))


PLAIN: dict[str, Any] = {"learning_rate": 3e-3, "warmup_steps": 0.75, "adam_beta1": 0.5, "adam_beta2": 0.9}
PLAIN |= {"adam_epsilon": 1e-2, "max_steps": 6, "logging_steps": 2, "logging_strategy": "epoch", "eval_steps": 1}
PLAIN |= {"eval_delay": 3, "eval_on_start": True, "data_seed": 7, "remove_unused_columns": False}
PLAIN |= {"include_num_input_tokens_seen": "all", "train_sampling_strategy": "sequential"}
ON_RANKS: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "optim": "sgd"}
ON_RANKS |= {"weight_decay": 5.0, "label_smoothing_factor": 0.2, "seed": 5}
ON_RANKS |= {"include_num_input_tokens_seen": "non_padding"}
SAME: dict[str, Any] = {"optim": "adamw_torch", "average_tokens_across_devices": False, "dataloader_num_workers": 1}
SAME |= {"gradient_checkpointing": True}
CASES = [
    *(Case({name: value}) for name, value in PLAIN.items()),
    *(Case({name: value}, on_ranks=True) for name, value in ON_RANKS.items()),
    *(Case({name: value}, is_same=True) for name, value in SAME.items()),
    Case({"max_grad_norm": 0.1}, {"optim": "sgd", "learning_rate": 0.1}, on_ranks=True),
    Case({"lr_scheduler_type": "reduce_lr_on_plateau"}, {"learning_rate": 0.1, "eval_steps": 1, "max_steps": 6}),
    Case(
        {"lr_scheduler_kwargs": {"patience": 0, "factor": 0.3}},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "learning_rate": 0.3, "eval_steps": 1, "max_steps": 6},
        tolerance=1e-2,
    ),
    Case({"lr_scheduler_kwargs": {"num_cycles": 1.5}}, {"max_steps": 6}),
    Case({"optim": "adafactor"}, mesh={"strategy": "ddp"}),
    Case({"optim_args": "momentum=0.9"}, {"optim": "sgd"}),
    Case({"num_train_epochs": 2}, ONE_EPOCH, on_ranks=True),
    Case({"logging_first_step": True}, {"logging_steps": 3}),
    Case({"eval_strategy": "epoch"}, ONE_EPOCH),
    # Trainer takes the mean of batches' means.
    Case({"per_device_eval_batch_size": 4}, unlike=("eval_loss",), on_ranks=True),
    Case({"prediction_loss_only": True}, {"metrics": True}),
    Case({"include_for_metrics": ["inputs"]}, {"metrics": True}, on_ranks=True),
    Case({"save_strategy": "steps"}, {"save_steps": 2}),
    Case({"save_strategy": "best"}, {"learning_rate": 0.3, "eval_steps": 1, "metric_for_best_model": "loss"}),
    Case({"save_steps": 3}, SAVED),
    Case({"save_total_limit": 1}, SAVED),
    Case({"save_only_model": True}, SAVED, on_ranks=True),
    Case({"load_best_model_at_end": True}, {**SAVED, "learning_rate": 0.3, "max_steps": 6}, on_ranks=True),
    Case(
        {"metric_for_best_model": "count", "greater_is_better": False},
        {**SAVED, "metrics": True, "load_best_model_at_end": True, "learning_rate": 0.3},
    ),
    Case({"greater_is_better": True}, {**SAVED, "load_best_model_at_end": True, "learning_rate": 0.02}),
    Case({"dataloader_drop_last": True}, {**ONE_EPOCH, "per_device_train_batch_size": 6}),
    Case({"train_sampling_strategy": "group_by_length"}),
    Case({"accelerator_config": {"use_seedable_sampler": False}}),
    Case(
        {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 3}}}, {"gradient_accumulation_steps": 1}
    ),
    Case({"bf16": True}, {"float32": True}, tolerance=1e-2),
    Case({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, {"gradient_checkpointing": True}, is_same=True),
    Case({"ignore_data_skip": True}, {**SAVED, "resumes": 2}, on_ranks=True),
    Case({"loss_type": "dft"}, kind="sft", on_ranks=True),
    Case({"label_smoothing_factor": 0.2}, kind="sft", on_ranks=True),
    Case({"max_length": 8}, kind="sft"),
    Case({"packing": True}, {"max_length": 16}, kind="sft"),
    Case({"padding_free": True}, {"max_length": None}, kind="sft"),
    Case({"pad_to_multiple_of": 16}, kind="sft", is_same=True),
    Case({"router_aux_loss_coef": 0.5}, kind="moe", unlike=("aux_loss", "eval_aux_loss")),
    Case({"router_aux_loss_coef": 0.5}, kind="dpo_moe", unlike=("aux_loss", "eval_aux_loss")),
    Case({"beta": 0.1}, kind="dpo"),
    Case({"label_smoothing": 0.1}, {"loss_type": "robust"}, kind="dpo"),
    Case({"ld_alpha": 0.5}, kind="dpo", on_ranks=True),
    Case({"max_length": 8}, kind="dpo"),
    *(Case({"loss_type": loss}, kind="dpo") for loss in ("ipo", "bco_pair", "apo_down", "discopop", "sigmoid_norm")),
    Case({"loss_type": ["sigmoid", "hinge"], "loss_weights": [0.3, 2.0]}, kind="dpo"),
    Case({"discopop_tau": 0.5}, {"loss_type": "discopop"}, kind="dpo"),
    Case({"f_divergence_type": "js_divergence"}, kind="dpo"),
    Case({"f_alpha_divergence_coef": 0.3}, {"f_divergence_type": "forward_kl"}, kind="dpo", is_same=True),
    Case({"center_rewards_coefficient": 0.5}, kind="reward"),
    Case({"max_length": 10}, kind="reward"),
    Case({"disable_dropout": False}, kind="reward", is_same=True),
]
FEW = [case for case in CASES if case.on_ranks]
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


def reported(case: Case, mesh: Any, directory: Path, data_size: int, *, is_changed: bool) -> dict[str, Any]:
    """What a run tells: its log, how often each event was, its state, its files, and the loss of what is left."""
    options = copy.deepcopy({**(case.base or {}), **(case.changes if is_changed else {})})
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        if name in options:
            options[name] //= data_size
    wants_metrics, resumes = options.pop("metrics", False), options.pop("resumes", None)
    is_float32, counted = options.pop("float32", False), Counted()
    for stop in [resumes, None] if resumes else [None]:
        trainer = _made(case.kind, mesh, directory, data_size, options, is_float32, wants_metrics)
        trainer.add_callback(counted)
        trainer.args.max_steps = stop or trainer.args.max_steps
        continues = resumes and not stop
        trainer.train(resume_from_checkpoint=str(directory / f"checkpoint-{resumes}") if continues else None)
    state, saved = trainer.state, sorted(directory.glob("checkpoint-*"))
    return {
        "log": trainer_cases.logged(trainer),
        "counts": dict(sorted(counted.counts.items())),
        "final": trainer.evaluate().get("eval_loss", 0.0),
        "steps": state.global_step,
        "seen": state.num_input_tokens_seen,
        "best": Path(state.best_model_checkpoint).name if state.best_model_checkpoint else None,
        "best_metric": state.best_metric,
        "states": {path.name: any((path / each).exists() for each in ("optimizer.pt", "mesh")) for path in saved},
    }


def _made(
    kind: str,
    mesh: Any,
    directory: Path,
    data_size: int,
    options: dict[str, Any],
    is_float32: bool,
    wants_metrics: bool,
) -> Any:
    if kind != "trainer":
        return trainer_cases.made(kind, mesh, directory, data_size, **options)
    rows = [{**row, "note": "x"} for row in trainer_cases.rows_of(48)]
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
        data_size = world.size // trainer_cases.sharing(mesh)
        return {
            case.name: reported(case, mesh, directory / case.name, data_size, is_changed=True)
            for case in CASES
            if case.name in names
        }
