"""Objectives equal trl's own code on one process: sum and gradient with respect to logits, float64, to 1e-10.

trl's loss methods are called on bare objects of its trainers, with a model that has logits for weights. orpo is
compared to 1e-6, since trl rounds to float32. Where trl takes a mean over all chosen tokens of a microbatch (sft, orpo,
simpo), one pair at a time is compared: ours is a mean over each answer. What trl lacks is in test_objectives.py.

Shapes: B rows, S positions, V entries of the vocabulary; trl has chosen rows first, then rejected ones.
"""

from __future__ import annotations

import importlib
import warnings
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.objective_cells import PROMPT, S, V, build_microbatch, evaluate_objective, select_rows
from torch import Tensor

from meshwright.objectives import get_objective
from meshwright.step.tokens import Tokens

pytestmark = pytest.mark.slow
PADDING = 0


class Alone:
    """What trl's trainers ask their accelerator for, on one process."""

    device, num_processes, sync_gradients, is_main_process = torch.device("cpu"), 1, True, True
    gather = gather_for_metrics = staticmethod(lambda value: value)
    autocast = staticmethod(nullcontext)

    @staticmethod
    def reduce(value: Tensor, reduction: str) -> Tensor:
        return value


class Says:
    """A model that says the logits which belong to its input: of the answers, or of the others of KTO."""

    training = True

    def __init__(self, *pairs: tuple[Tensor, Tensor]) -> None:
        self._pairs = pairs

    def __call__(self, input_ids: Tensor, labels: Tensor | None = None, **options: Any) -> SimpleNamespace:
        (logits,) = [logits for ids, logits in self._pairs if ids.shape == input_ids.shape and ids.equal(input_ids)]
        if labels is None:
            return SimpleNamespace(logits=logits)
        wanted, log_probs = labels[:, 1:], logits[:, :-1].log_softmax(-1)
        chosen = log_probs.gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
        return SimpleNamespace(
            log_probs=torch.where(wanted != -100, chosen, 0.0),
            entropy=-(log_probs.exp() * log_probs).sum(-1),
            mean_logits=logits[:, :-1].mean(-1),
            is_top1=log_probs.argmax(-1) == wanted,
        )


def trl_class(name: str) -> Any:
    """A trainer of trl, whose import takes seconds."""
    package = {"CPO": "cpo", "GKD": "gkd", "ORPO": "orpo", "ServerDistillation": "server_distillation"}.get(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module(f"trl.experimental.{package}" if package else "trl"), f"{name}Trainer")


def trainer_of(name: str, **attributes: Any) -> Any:
    trainer = object.__new__(trl_class(name))
    usual = {
        "model": SimpleNamespace(training=True),
        "accelerator": Alone(),
        "aux_loss_enabled": False,
        "is_encoder_decoder": False,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    vars(trainer).update(usual | attributes)
    return trainer


@contextmanager
def in_float64():
    """trl makes constants of the default dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def as_trl(tensor: Tensor) -> Tensor:
    """Chosen rows, then rejected ones."""
    return torch.cat([tensor[::2], tensor[1::2]])


def inputs_of(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Ids, and which of them are answers, int64; both (B, S)."""
    answers = (batch["labels"] != -100).long()
    ids = torch.where(answers == 1, batch["labels"], PADDING)
    ids[:, 0] = torch.arange(len(ids))
    return ids, answers


def compare(cell: Any, batch: dict[str, Tensor], trl_mean: Any, *, tolerance: float = 1e-10) -> dict[str, float]:
    """Ours divided by its count against trl's mean; returns the further sums divided so."""
    count = get_objective(cell).count(batch)
    loss, sums, gradient = evaluate_objective(cell, batch)
    logits = batch["logits"].clone().requires_grad_()
    with in_float64():
        wanted = trl_mean(logits)
    (wanted_gradient,) = torch.autograd.grad(wanted, logits)
    torch.testing.assert_close(loss / count, wanted.detach().to(loss.dtype), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient / count, wanted_gradient, rtol=tolerance, atol=tolerance)
    assert gradient.abs().max() > 1e-3
    return {name: float(value) / count for name, value in sums.items()}


# -- preferences


def dpo_of_trl(batch: dict[str, Tensor], trainer: Any) -> Any:
    ids, answers = (as_trl(each) for each in inputs_of(batch))
    masked = torch.where(batch["labels"][:, 1:] != -100, batch["reference_log_probs"][:, :-1], 0.0)
    chosen, rejected = as_trl(masked.sum(1)).chunk(2)
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "completion_mask": answers,
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    return lambda logits: trainer._compute_loss(Says((ids, as_trl(logits))), inputs, False)


def dpo_trainer(**attributes: Any) -> Any:
    usual = {"beta": 0.1, "label_smoothing": 0.0, "loss_types": ["sigmoid"], "loss_weights": [1.0], "ld_alpha": None}
    usual |= {"use_weighting": False, "f_divergence_type": "reverse_kl", "precompute_ref_logps": True}
    return trainer_of("DPO", **usual | attributes)


LOSSES = ["sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "sigmoid_norm"]


@pytest.mark.parametrize(
    ("loss", "smoothing"), [*((loss, 0.0) for loss in LOSSES), ("robust", 0.0), ("robust", 0.1), ("exo_pair", 0.1)]
)
@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_dpo_is_that_of_trl(loss, smoothing, beta):
    batch = build_microbatch(None, seed=1, rows=8)
    trainer = dpo_trainer(beta=beta, label_smoothing=smoothing, loss_types=[loss])
    cell = {"name": "dpo", "loss": loss, "label_smoothing": smoothing, "beta": beta}
    means = compare(cell, batch, dpo_of_trl(batch, trainer))
    assert set(means) < set(trainer._metrics["train"])
    for name, value in means.items():
        assert value == pytest.approx(trainer._metrics["train"][name][0], rel=1e-6), name


def test_dpo_with_the_references_summed_is_the_same():
    batch = build_microbatch(None, seed=2)
    summed = torch.where(batch["labels"][:, 1:] != -100, batch["reference_log_probs"][:, :-1], 0.0).sum(1)
    for given in (batch, batch | {"reference_log_probs": summed}):
        compare("dpo", given, dpo_of_trl(batch, dpo_trainer()))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_without_a_reference_and_with_wrong_labels_is_trls_cpo(smoothing):
    batch = build_microbatch(None, seed=3)
    ids, answers = (as_trl(each) for each in inputs_of(batch))
    trainer = trainer_of("CPO", alpha=0.0, beta=0.3, label_smoothing=smoothing, loss_type="sigmoid")

    def trl_mean(logits: Tensor) -> Tensor:
        found = Says((ids, as_trl(logits)))(ids, labels=ids.masked_fill(answers == 0, -100)).log_probs.sum(1)
        return trainer.cpo_loss(*found.chunk(2))[0].mean()

    compare({"name": "dpo", "beta": 0.3, "label_smoothing": smoothing, "reference_free": True}, batch, trl_mean)


@pytest.mark.parametrize("pair", range(3))
def test_dpo_with_a_supervised_term_is_that_of_trl(pair):
    batch = select_rows(build_microbatch(None, seed=4, rows=6), slice(2 * pair, 2 * pair + 2))
    trainer = dpo_trainer(loss_types=["sigmoid", "sft"], loss_weights=[1.0, 0.8])
    compare({"name": "dpo", "rpo_alpha": 0.8}, batch, dpo_of_trl(batch, trainer))


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("seed", range(3))
def test_kto_is_that_of_trl(loss, seed):
    batch, other = build_microbatch(None, seed=seed, rows=6), build_microbatch(None, seed=seed + 10, rows=6)
    batch["desirable"] = torch.tensor([True, False, True, True, False, False])
    (ids, answers), (other_ids, other_answers) = inputs_of(batch), inputs_of(other)
    other_ids[:, 1] = 1
    summed, other_summed = (
        torch.where(each["labels"][:, 1:] != -100, each["reference_log_probs"][:, :-1], 0.0).sum(1)
        for each in (batch, other)
    )
    own = Tokens.from_logits(other["logits"], other["labels"])
    kl = (own.sum_by_sequence(own.log_probs) - other_summed).mean().clamp(min=0)
    batch["reference_kl"] = kl.expand(6)
    trainer = trainer_of(
        "KTO",
        beta=0.2,
        loss_type=loss,
        calculate_KL=loss == "kto",
        precompute_ref_logps=True,
        desirable_weight=1.0,
        undesirable_weight=0.6,
    )
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "completion_mask": answers,
        "KL_input_ids": other_ids,
        "KL_attention_mask": torch.ones_like(ids),
        "KL_completion_mask": other_answers,
        "label": batch["desirable"],
        "ref_logps": summed,
        "ref_KL_logps": other_summed,
    }

    def trl_mean(logits: Tensor) -> Tensor:
        return trainer._compute_loss(Says((ids, logits), (other_ids, other["logits"])), inputs, False)

    means = compare({"name": "kto", "loss": loss, "beta": 0.2, "undesirable_weight": 0.6}, batch, trl_mean)
    for name in ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"):
        of_side = means[name] / means[name.replace("rewards", "count").replace("logps", "count")]
        assert of_side == pytest.approx(trainer._metrics["train"][name][0], rel=1e-6), name


def pairs_of_trl(trainer: Any, batch: dict[str, Tensor]) -> Any:
    """For ORPO and CPO: the prompt has no attention, so that no loss is taken of it."""
    ids, answers = inputs_of(batch)
    labels = ids.masked_fill(answers == 0, -100)
    inputs = {}
    for side, rows in (("chosen", slice(0, None, 2)), ("rejected", slice(1, None, 2))):
        inputs |= {
            f"{side}_input_ids": ids[rows],
            f"{side}_attention_mask": answers[rows],
            f"{side}_labels": labels[rows],
        }

    class Model(Says):
        def __call__(self, ids: Tensor, **options: Any) -> SimpleNamespace:  # type: ignore[override]
            return super().__call__(input_ids=ids, **options)

    return lambda logits: trainer.get_batch_loss_metrics(Model((as_trl(ids), as_trl(logits))), inputs)[0]


@pytest.mark.parametrize("pair", range(3))
def test_orpo_is_that_of_trl(pair):
    batch = select_rows(build_microbatch(None, seed=5, rows=6), slice(2 * pair, 2 * pair + 2))
    trainer = trainer_of("ORPO", beta=0.3, padding_value=PADDING)
    compare({"name": "orpo", "beta": 0.3}, batch, pairs_of_trl(trainer, batch), tolerance=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_simpo_is_that_of_trl(smoothing):
    batch = build_microbatch(None, seed=6, rows=6)
    options = {"alpha": 0.0, "beta": 2.5, "label_smoothing": smoothing, "loss_type": "simpo", "simpo_gamma": 0.4}
    cell = {"name": "simpo", "beta": 2.5, "gamma": 0.4, "label_smoothing": smoothing}
    trainer = trainer_of("CPO", cpo_alpha=0.0, pad_token_id=PADDING, **options)
    compare(cell, batch, pairs_of_trl(trainer, batch))
    trainer = trainer_of("CPO", cpo_alpha=0.9, pad_token_id=PADDING, **options)
    for pair in range(3):
        part = select_rows(batch, slice(2 * pair, 2 * pair + 2))
        compare(cell | {"sft_weight": 0.9}, part, pairs_of_trl(trainer, part))


@pytest.mark.parametrize("center", [0.0, 0.01])
@pytest.mark.parametrize("margin", [True, False])
def test_reward_is_that_of_trl(center, margin):
    batch = build_microbatch(get_objective("reward"), seed=7, rows=6)
    if not margin:
        del batch["margin"]
    trainer = trainer_of("Reward", args=SimpleNamespace(center_rewards_coefficient=center or None))
    ids = as_trl(inputs_of(batch)[0])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs |= {"margin": batch["margin"][::2]} if margin else {}

    def trl_mean(logits: Tensor) -> Tensor:
        return trainer.compute_loss(Says((ids, as_trl(logits))), dict(inputs))

    means = compare({"name": "reward", "center_coefficient": center}, batch, trl_mean)
    metrics = trainer._metrics["train"]
    assert means["rewards/accuracies"] == pytest.approx(metrics["accuracy"][0])
    assert means["rewards/margins"] == pytest.approx(metrics["margin"][0])


# -- policies


def grpo_of_trl(batch: dict[str, Tensor], **attributes: Any) -> tuple[Any, Any]:
    """The loss as a function of logits, and the trainer."""
    ids, answers = inputs_of(batch)
    kept = slice(PROMPT - 1, -1)
    usual = {
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "loss_type": "grpo",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "use_vllm": "importance_sampling_ratio" in batch,
        "vllm_importance_sampling_correction": True,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": 7,
        "_entropy_bonus_enabled": bool(attributes.get("entropy_coef")),
        "use_adaptive_entropy": False,
    }
    arguments = {"delta": attributes.pop("delta", None), "use_bias_correction_kl": False, "steps_per_generation": 1}
    trainer = trainer_of("GRPO", args=SimpleNamespace(**arguments), **usual | attributes)
    inputs = {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": torch.ones_like(ids[:, :PROMPT]),
        "completion_ids": ids[:, PROMPT:],
        "completion_mask": answers[:, PROMPT:],
        "advantages": batch["advantages"] if batch["advantages"].dim() == 1 else batch["advantages"][:, kept],
        "ref_per_token_logps": batch["reference_log_probs"][:, kept],
        "num_items_in_batch": answers.sum(),
    }
    if "old_log_probs" in batch:
        inputs["old_per_token_logps"] = batch["old_log_probs"][:, kept]
    if "importance_sampling_ratio" in batch:
        inputs["importance_sampling_ratio"] = batch["importance_sampling_ratio"]
    return lambda logits: trainer._compute_loss(Says((ids, logits)), inputs), trainer


def same_metrics(means: dict[str, float], trainer: Any) -> None:
    for name, value in means.items():
        assert value == pytest.approx(trainer._metrics["train"][name][0], rel=1e-6, abs=1e-12), name


@pytest.mark.parametrize("importance", ["token", "sequence"])
@pytest.mark.parametrize("delta", [None, 1.4])
@pytest.mark.parametrize(("loss", "normalize"), [("grpo", "sequence"), ("dapo", "tokens"), ("dr_grpo", "constant")])
def test_grpo_is_that_of_trl(loss, normalize, importance, delta):
    for seed in range(3):
        batch = build_microbatch(None, seed=seed, rows=6)
        trl_mean, trainer = grpo_of_trl(
            batch,
            loss_type=loss,
            importance_sampling_level=importance,
            delta=delta,
            beta=0.05,
            epsilon_low=0.1,
            epsilon_high=0.15,
        )
        options = {"clip_low": 0.1, "clip_high": 0.15, "delta": delta, "beta": 0.05, "importance_level": importance}
        options |= {"max_tokens": 7} if normalize == "constant" else {}
        means = compare({"name": "grpo", "normalize": normalize, **options}, batch, trl_mean)
        assert set(means) == {"kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"}
        # trl's further numbers are means over tokens, but over sequences for ratios by sequence.
        of_ratios = {name: value for name, value in means.items() if name != "kl"}
        if normalize == "tokens" and importance == "token":
            same_metrics(means, trainer)
        elif normalize == "tokens":
            same_metrics({"kl": means["kl"]}, trainer)
        elif importance == "sequence":
            same_metrics(of_ratios, trainer)


def test_grpo_without_old_log_probabilities_and_with_an_entropy_bonus_is_that_of_trl():
    batch = build_microbatch(None, seed=3)
    del batch["old_log_probs"]
    trl_mean, trainer = grpo_of_trl(batch, loss_type="dapo", entropy_coef=0.05)
    same_metrics(compare({"name": "grpo", "normalize": "tokens", "entropy_coef": 0.05}, batch, trl_mean), trainer)


def test_grpo_with_advantages_of_tokens_is_that_of_trl():
    batch = build_microbatch(None, seed=4)
    batch["advantages"] = torch.randn(4, S, dtype=torch.float64)
    for importance in ("token", "sequence"):
        trl_mean, _ = grpo_of_trl(batch, importance_sampling_level=importance, epsilon_low=0.05, epsilon_high=0.05)
        options = {"importance_level": importance, "clip_low": 0.05, "clip_high": 0.05}
        compare({"name": "grpo", **options}, batch, trl_mean)


@pytest.mark.parametrize("by", ["token", "sequence"])
def test_the_correction_for_another_engine_takes_the_place_of_trls(by):
    batch = build_microbatch(None, seed=5)
    difference = (batch["old_log_probs"] - batch["sampling_log_probs"])[:, PROMPT - 1 : -1]
    difference = torch.where(batch["labels"][:, PROMPT:] != -100, difference, 0.0)
    factor = (difference if by == "token" else difference.sum(1, keepdim=True)).exp().clamp(0.8, 1.2)
    trl_mean, _ = grpo_of_trl(batch | {"importance_sampling_ratio": factor}, beta=0.1)
    options = {"correction": f"{by}_truncate", "correction_min": 0.8, "correction_max": 1.2, "beta": 0.1}
    compare({"name": "grpo", **options}, batch, trl_mean)


def test_ppo_is_trls_policy_loss_over_tokens():
    batch = build_microbatch(None, seed=6)
    trl_mean, trainer = grpo_of_trl(batch, loss_type="dapo", beta=0.02, entropy_coef=0.01)
    same_metrics(compare({"name": "ppo", "beta": 0.02, "entropy_coef": 0.01}, batch, trl_mean), trainer)


# -- distillation


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_distillation_over_the_whole_vocabulary_is_that_of_trl(beta, temperature):
    batch = build_microbatch(None, seed=7)
    teacher = torch.randn(*batch["logits"].shape, dtype=torch.float64)
    batch |= dict(zip(("teacher_log_probs", "teacher_ids"), teacher.log_softmax(-1).topk(V, dim=-1), strict=True))

    def trl_mean(logits: Tensor) -> Tensor:
        return trl_class("GKD").generalized_jsd_loss(
            logits[:, :-1], teacher[:, :-1], labels=batch["labels"][:, 1:], beta=beta, temperature=temperature
        )

    cell = {"name": "distill", "tail": "renormalize", "beta": beta, "temperature": temperature}
    compare(cell, batch, trl_mean)


@pytest.mark.parametrize("tail", [True, False])
def test_distillation_over_the_likeliest_entries_is_that_of_trl(tail):
    batch = build_microbatch(None, seed=8)
    batch["teacher_ids"] = torch.randint(V, (4, S, 1)) + torch.arange(3)
    batch["teacher_ids"] %= V
    trainer = trainer_of("ServerDistillation", loss_add_tail=tail)
    given = {f"topk_{ours}": batch[f"teacher_{theirs}"][:, :-1] for ours, theirs in NAMES.items()}

    def trl_mean(logits: Tensor) -> Tensor:
        return trainer._compute_server_forward_kl_loss(given, logits[:, :-1].log_softmax(-1), batch["labels"][:, 1:])

    compare({"name": "distill", "tail": "entry" if tail else "renormalize"}, batch, trl_mean)


NAMES = {"logprobs": "log_probs", "token_ids": "ids"}
