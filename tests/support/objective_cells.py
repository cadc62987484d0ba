"""Microbatches of random logits with every column that an objective can ask for, and the objectives to try on them.

Shapes: B rows, S positions, V entries of the vocabulary, K entries of a position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.objectives import get_objective, list_objectives
from meshwright.step.tokens import Outputs, Tokens, shift_labels
from meshwright_objectives import previous_tokens

B, S, V, K = 4, 9, 13, 3
PROMPT = 3
CELLS: list[dict[str, Any]] = [
    *({"name": name} for name in list_objectives()),
    {"name": "cross_entropy", "label_smoothing": 0.1, "z_loss": 1e-2, "extra_sums": ["correct", "entropy"]},
    *({"name": "dpo", "loss": loss} for loss in ("hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard")),
    *({"name": "dpo", "loss": loss} for loss in ("apo_zero", "apo_down", "sigmoid_norm")),
    *({"name": "dpo", "loss": loss, "label_smoothing": 0.2} for loss in ("sigmoid", "robust", "exo_pair")),
    {"name": "dpo", "reference_free": True, "rpo_alpha": 0.5},
    {"name": "kto", "loss": "apo_zero_unpaired", "undesirable_weight": 0.7},
    {"name": "simpo", "sft_weight": 0.3, "label_smoothing": 0.1},
    {"name": "grpo", "normalize": "tokens", "beta": 0.04, "entropy_coef": 0.01},
    {"name": "grpo", "normalize": "constant", "max_tokens": 7, "importance_level": "sequence", "beta": 0.1},
    {
        "name": "grpo",
        "importance_level": "sequence",
        "clip_low": 3e-2,
        "clip_high": 4e-2,
        "entropy_coef": 0.01,
        "beta": 0.1,
    },
    {
        "name": "grpo",
        "packed": True,
        "importance_level": "sequence",
        "correction": "sequence_mask",
        "report_entropy": True,
    },
    {"name": "grpo", "packed": True, "delta": 1.5, "correction": "token_truncate", "correction_max": 1.1},
    {"name": "ppo", "entropy_coef": 0.01, "clip_high": 0.28, "beta": 0.1, "correction": "token_mask"},
    {"name": "distill", "tail": "renormalize", "beta": 0.3, "temperature": 2.0, "weight": 0.5},
    {"name": "distill", "beta": 0.6},
    {"name": "distill", "beta": 1.0},
    {"name": "unlikelihood", "alpha": 0.5},
    {"name": "value", "clip": None},
    {"name": "reward", "center_coefficient": 0.01},
]


def format_cell_id(cell: dict[str, Any]) -> str:
    return "-".join(str(value) for key, value in cell.items())


def build_microbatch(
    objective: Any, *, seed: int = 0, rows: int = B, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Logits, as `logits`, labels and all columns; ragged answers after a prompt of three tokens."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

    ids = torch.randint(V, (rows, S), generator=draw)
    labels = ids.clone()
    labels[:, :PROMPT] = -100
    packed = getattr(objective, "packed", False)
    for row, length in enumerate(torch.randint(2, S - PROMPT + 1, (rows,), generator=draw).tolist()):
        labels[row, PROMPT + length :] = -100
    positions = torch.arange(S).repeat(rows, 1)
    if packed:
        positions = torch.cat([torch.arange(5), torch.arange(S - 5)]).repeat(rows, 1)
        labels[:, 5] = -100
    of_tokens = normal(rows, S, V).log_softmax(-1)
    near = of_tokens.gather(-1, shift_labels(labels).clamp(min=0)[..., None])[..., 0]
    teacher = normal(rows, S, V).log_softmax(-1).topk(K, dim=-1)
    heads = {"value": (rows, S, 1), "reward": (rows, 1)}
    ids_of_teacher = teacher.indices.clone()
    ids_of_teacher[:, ::4, -1] = -100
    name = getattr(objective, "name", "")
    return {
        "logits": normal(*heads[name]) if name in heads else of_tokens + normal(rows, S, 1),
        "labels": labels,
        "position_ids": positions,
        "weights": torch.rand(rows, S, generator=draw).to(dtype).round(decimals=1),
        "reference_log_probs": near + 0.3 * normal(rows, S),
        "old_log_probs": near + 0.2 * normal(rows, S),
        "sampling_log_probs": near + 0.2 * normal(rows, S),
        "advantages": normal(rows, S) if packed else normal(rows),
        "desirable": torch.rand(rows, generator=draw) < 0.5,
        "reference_kl": torch.full((rows,), 0.3, dtype=dtype),
        "negatives": previous_tokens(ids, K),
        "teacher_ids": ids_of_teacher,
        "teacher_log_probs": teacher.values,
        "returns": normal(rows, S),
        "old_values": 0.3 * normal(rows, S),
        "margin": torch.rand(rows, generator=draw).to(dtype),
    }


def evaluate_objective(value: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Sum, further sums, and the gradient of the sum with respect to the logits."""
    objective = get_objective(value)
    logits = batch["logits"].detach().clone().requires_grad_()
    columns = {name: each for name, each in batch.items() if name not in ("logits", "labels", "position_ids")}
    positions = batch.get("position_ids")
    if getattr(objective, "input_kind", "tokens") == "outputs":
        given: Any = Outputs(shift_labels(batch["labels"]), logits, positions_BS=positions)
    else:
        given = Tokens.from_logits(logits, batch["labels"], position_ids=positions)
    found = objective(given, columns)
    loss, sums = found if isinstance(found, tuple) else (found, {})
    (gradient,) = torch.autograd.grad(loss, logits)
    return loss.detach(), sums, gradient


def select_rows(batch: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    return {name: each[rows] for name, each in batch.items()}
