"""Tasks of one rank for conformance cells: norms by block, an objective, a run in parts, and bad input.

Shapes: B sequences of a microbatch, S positions of each, K ids at each position.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshwright.plugin import (
    IGNORE_INDEX,
    Batch,
    Loop,
    MeshwrightError,
    ScheduleConfig,
    StrategyManager,
    Tokens,
    build_scheduler,
    count_tokens,
    load_checkpoint,
    record_stepped_groups,
    save_checkpoint,
    train_step,
)

from .case import Case, Outcome, rank_microbatches, split_sequences
from .models import case_vocab_size
from .parity import Config, build_manager, build_manager_and_optimizer, full_weights, train_steps
from .workers import pool

# -- norms of gradients by block


@dataclass(frozen=True)
class NormsOutcome:
    """Results of a rank, with those of `gradient_norms` in each step."""

    outcome: Outcome
    by_block: list[dict[str, float]]

    def max_difference(self, expected: NormsOutcome) -> float:
        """Return the largest relative difference of norms; inf if names or order of blocks differ."""
        pairs = list(zip(self.by_block, expected.by_block, strict=True))
        if any(list(mine) != list(theirs) for mine, theirs in pairs):
            return math.inf
        return max(
            _relative_difference(mine[name] - norm, norm) for mine, theirs in pairs for name, norm in theirs.items()
        )

    def max_difference_from_total(self) -> float:
        """Return the largest relative difference between the total norm of a step and that of its norms by block."""
        steps = zip(self.by_block, self.outcome.norms, strict=True)
        return max(_relative_difference(math.hypot(*norms.values()) - total, total) for norms, total in steps)


def _relative_difference(difference: float, expected: float) -> float:
    return abs(difference) / expected if expected else abs(difference)


def train_with_gradient_norms(
    strategy: str,
    config: Config,
    sizes: Config,
    case: Case,
    device: str = "cpu",
    wrapper_config: Config | None = None,
    compute_norms: bool = True,
) -> NormsOutcome:
    """Train and, if `compute_norms`, call `gradient_norms` in each step.

    AssertionError if this changes gradients."""
    manager = build_manager(strategy, config, sizes, case, device=device, wrapper_config=wrapper_config)
    by_block: list[dict[str, float]] = []

    def ask() -> None:
        before = _copy_gradients(manager)
        by_block.append(manager.gradient_norms())
        for one, other in zip(before, _copy_gradients(manager), strict=True):
            if (one is None) != (other is None) or (one is not None and not torch.equal(one, other)):
                raise AssertionError("gradient_norms changed gradients that the optimizer uses.")

    found = train_steps(manager, case, range(case.steps), ask if compute_norms else lambda: None)
    return NormsOutcome(Outcome(*found, full_weights(manager)), by_block)


def _copy_gradients(manager: StrategyManager) -> list[Tensor | None]:
    """Return copies of this rank's gradients of the optimizer's parameters."""
    gradients = [parameter.grad for group in manager.optimizer.param_groups for parameter in group["params"]]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
    return [None if each is None else each.clone() for each in local]


@functools.lru_cache(maxsize=64)
def run_norms_reference(case: Case, device: str = "cpu") -> NormsOutcome:
    """Return the case's outcome with norms under `single`, on one rank, with one microbatch per step."""
    return pool(1).run(train_with_gradient_norms, "single", {}, {}, case.on_one_rank(), device, device=device)[0]


# -- an objective with token weights, sums over sequences, and log-probabilities of other ids


@dataclass(frozen=True)
class ObjectiveOutcome:
    """Results of a rank with an objective. Losses include the extra sums.

    `log_probs` are the results of `token_stats` for the labels of the last step, after it, (sequences, S).
    `first_sequence` is the index of this rank's first sequence in the global batch.
    """

    outcome: Outcome
    first_sequence: int
    log_probs: Tensor

    def max_difference(self, expected: ObjectiveOutcome) -> float:
        """Return the largest difference of log-probabilities from those of one rank that has all sequences."""
        reference = expected.log_probs[self.first_sequence : self.first_sequence + len(self.log_probs)]
        return float((self.log_probs - reference).abs().max())


def preference_objective(tokens: Tokens, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum a loss of weighted tokens, one of signed sequences, and a penalty on the probabilities of other ids."""
    log_probs_B = tokens.sum_by_sequence(tokens.log_probs)
    sequences_B = F.softplus(log_probs_B * batch["signs"]) * tokens.mask.any(1)
    others_BSK = tokens.log_probs_for(batch["ids"]).exp() * (batch["ids"] != IGNORE_INDEX)
    others = (others_BSK.sum(-1) * tokens.mask).sum()
    value = -(tokens.log_probs * batch["weights"]).sum() + sequences_B.sum() + 10.0 * others
    return value, {"correct": tokens.is_top1.sum(), "others": others, "rows": tokens.mask.any(1).sum()}


def add_objective_columns(batch: Batch, vocab_size: int) -> Batch:
    """Return a microbatch with the columns of `preference_objective`, computed from its ids."""
    ids_BS = batch["input_ids"]
    wave_BS = ids_BS.double() + torch.arange(ids_BS.shape[1])
    others_BS = (ids_BS * 7 + 3) % vocab_size
    return {
        **batch,
        "weights": (wave_BS * 0.37).cos(),
        "signs": (wave_BS[:, 0] * 0.3).sin() * 0.1,
        "ids": torch.stack(
            [others_BS, (others_BS + 1) % vocab_size, others_BS.where(ids_BS % 2 == 0, IGNORE_INDEX)], -1
        ),
    }


def train_objective(strategy: str, config: Config, sizes: Config, case: Case, device: str = "cpu") -> ObjectiveOutcome:
    """Train and evaluate with `preference_objective`, and compute token statistics after the last step."""
    manager = build_manager(strategy, config, sizes, case, device=device)
    mesh, entries = manager.mesh, case_vocab_size(case.model_type)
    losses, norms, evaluated = [], [], []

    def seen(loss: Tensor) -> list[float]:
        return [float(loss), *(float(each) for _, each in sorted(manager.last_sums.items()))]

    for step in range(case.steps):
        plain = rank_microbatches(case, step, mesh.data_rank, mesh.data_size)
        batches = [add_objective_columns(batch, entries) for batch in plain]
        count = manager.begin_step_sync(batches, objective=preference_objective)
        losses += seen(manager.forward_backward(batches, num_tokens=count, objective=preference_objective))
        norms.append(float(manager.clip_grad_norm(case.max_norm, case.norm_type)))
        manager.optimizer_step()
        evaluated += seen(
            manager.eval_loss(batches, num_tokens=torch.tensor(int(count)), objective=preference_objective)
        )
    log_probs = torch.cat([each["log_probs"].cpu() for each in manager.token_stats(plain, ["log_probs"])])
    first = sum(split_sequences(case, mesh.data_size)[: mesh.data_rank])
    return ObjectiveOutcome(Outcome(losses, norms, evaluated, full_weights(manager)), first, log_probs)


@functools.lru_cache(maxsize=64)
def run_objective_reference(case: Case, device: str = "cpu") -> ObjectiveOutcome:
    """Return the case's outcome under `single`, on one rank, with one microbatch per step."""
    return pool(1).run(train_objective, "single", {}, {}, case.on_one_rank(), device, device=device)[0]


# -- a run in parts, each from the checkpoint of the previous one, with a schedule and different parameter groups

Settings = frozenset[tuple[str, Any]]
"""Settings of a parameter group: its entries that are numbers, strings or tuples."""


@dataclass(frozen=True)
class PartOutcome:
    """Results of a rank for some steps.

    These include, per step, the learning rate that observers see and the settings of all groups that optimizers
    stepped. Unlike settings, parameters may agree by chance, for example after the last steps of a schedule."""

    outcome: Outcome
    reported_rates: list[float]
    stepped_settings: list[set[Settings]]


def train_part_from_checkpoint(
    strategy: str,
    config: Config,
    sizes: Config,
    case: Case,
    steps: range,
    source: str | None,
    target: str | None,
    device: str = "cpu",
) -> PartOutcome:
    """Train some steps of the case with `train_step`, from the checkpoint `source`, if given, and save `target`."""
    manager, optimizer = build_manager_and_optimizer(strategy, config, sizes, case, seed=steps.start, device=device)
    scheduler = build_scheduler(case.schedule or ScheduleConfig(name="constant"), optimizer, case.steps)
    loop = Loop(
        steps=case.steps,
        batches=lambda step: rank_microbatches(case, step, manager.mesh.data_rank, manager.mesh.data_size),
        scheduler=scheduler,
        max_grad_norm=case.max_norm,
        grad_norm_type=case.norm_type,
    )
    if source is not None:
        # Train another step first, so that there is state to replace.
        train_step(manager, loop, 99)
        load_checkpoint(manager, source, scheduler=scheduler)
    results, stepped = [], []
    for step in steps:
        with record_stepped_groups() as groups:
            results.append(train_step(manager, loop, step))
        stepped.append({_group_settings(group) for group in groups if group["params"]})
    if target is not None:
        save_checkpoint(manager, target, step=steps.stop, scheduler=scheduler)
    outcome = Outcome([each.loss for each in results], [each.grad_norm for each in results], [], full_weights(manager))
    return PartOutcome(outcome, [each.learning_rate for each in results], stepped)


def _group_settings(group: Mapping[str, Any]) -> Settings:
    plain = {key: tuple(value) if isinstance(value, list) else value for key, value in group.items() if key != "params"}
    return frozenset((key, value) for key, value in plain.items() if isinstance(value, int | float | str | tuple))


@functools.lru_cache(maxsize=64)
def run_uninterrupted(case: Case, device: str = "cpu") -> PartOutcome:
    """Return the case's outcome under `single`, on one rank, in one part."""
    arguments: tuple[Any, ...] = ("single", {}, {}, case.on_one_rank(), range(case.steps), None, None, device)
    return pool(1).run(train_part_from_checkpoint, *arguments, device=device)[0]


def find_settings_error(parts: Sequence[PartOutcome], steps: range, expected: PartOutcome) -> str:
    """Return the error in the settings that the ranks of a part stepped with; empty if there is none."""
    for number, step in enumerate(steps):
        known = expected.stepped_settings[step]
        keys = {key for settings in known for key, _ in settings}
        stepped = {
            frozenset(e for e in settings if e[0] in keys)
            for part in parts
            for settings in part.stepped_settings[number]
        }
        if stepped != known:
            return (
                f"step {step + 1} used {_format_settings(stepped - known)} instead of "
                f"{_format_settings(known - stepped)}"
            )
        rates = {value for settings in known for key, value in settings if key == "lr"}
        for rank, part in enumerate(parts):
            if part.reported_rates[number] not in rates:
                return (
                    f"rank {rank} reports the learning rate {part.reported_rates[number]} at step {step + 1} instead "
                    f"of {rates}"
                )
    return ""


def _format_settings(groups: set[Settings]) -> str:
    parts = [", ".join(f"{k}={v}" for k, v in sorted(each) if k in ("lr", "weight_decay")) for each in groups]
    return " and ".join(f"({part})" for part in sorted(parts)) or "nothing"


# -- bad input


def train_on_bad_input(strategy: str, config: Config, sizes: Config, case: Case, device: str) -> tuple[str, float]:
    """Pass bad microbatches on one rank, a bad count and clipping limit on all, then train a step.

    Return the errors, or "accepted", in order, and the loss.
    """
    manager = build_manager(strategy, config, sizes, case, device=device)
    good = rank_microbatches(case, 0, manager.mesh.data_rank, manager.mesh.data_size)
    num_tokens = count_tokens(good, manager.mesh)
    is_last = manager.mesh.rank == manager.mesh.world.size - 1
    texts = []
    for call in (
        lambda: manager.forward_backward([{"input_ids": good[0]["input_ids"]}], num_tokens=num_tokens),
        lambda: manager.forward_backward(good[: -1 if is_last else None], num_tokens=num_tokens),
        lambda: manager.forward_backward(good, num_tokens=num_tokens * 0),
        lambda: manager.clip_grad_norm(-1.0),
        lambda: manager.clip_grad_norm(1.0, norm_type=0.0),
    ):
        try:
            call()
            texts.append("accepted")
        except MeshwrightError as error:
            texts.append(type(error).__name__)
    return " ".join(texts), float(manager.forward_backward(good, num_tokens=num_tokens))
