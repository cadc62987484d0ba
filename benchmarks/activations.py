"""Count what a budget of activations buys: bytes held, and operations computed again. One process, no times.

For each budget between the least that can be met and all, a step of a Llama is run twice: for what its blocks hold when
the forward is done, by their tensors (`tests/support/measurements.py`), and for its operations, by torch's counter.

    python benchmarks/activations.py --json results.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.model.activation_budget import SINGLE_STAGE, ActivationPlan, BudgetedBlocks
from meshwright.model.activation_options import ActivationCheckpointing, ActivationOptions
from meshwright.model.layout import infer_layout
from meshwright.model.recompute import checkpoint_blocks
from meshwright.step.tokens import sum_token_loss

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.measurements import measure_memory

SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Budgets, from the least to everything."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = [counted(name, mode, given) for name, mode in modes(given)]
    report(rows)
    if given.json:
        given.json.write_text(
            json.dumps({**vars(given), "json": None, "rows": rows}, indent=1) + "\n", encoding="utf-8"
        )
    return 0


def modes(given: argparse.Namespace) -> list[tuple[str, ActivationCheckpointing]]:
    """What to run, by name: the modes, and budgets between their ends."""
    model, ids = made(given)
    blocks = checkpoint_blocks(model, infer_layout(model), ActivationOptions(budget_gb=1e6))
    choices = measured(model, blocks, ids)
    least = choices.peak_bytes
    choices.fill_budget(2**62)
    budgets = [(f"{share:.0%}", (least + share * (choices.peak_bytes - least)) / 1e9) for share in SHARES]
    return [
        ("false", False),
        ("selective", "selective"),
        ("full", "full"),
        *((name, ActivationOptions(budget_gb=(int(size * 1e9) + 1) / 1e9)) for name, size in budgets),
    ]


def counted(name: str, mode: ActivationCheckpointing, given: argparse.Namespace) -> dict[str, float | str]:
    """Bytes and operations of one step."""
    model, ids = made(given)
    blocks = checkpoint_blocks(model, infer_layout(model), mode)
    budget = peak = 0
    if isinstance(blocks, BudgetedBlocks):
        choices, budget = measured(model, blocks, ids), int(blocks.budget_gb * 1e9)
        choices.fill_budget(budget)
        peak = choices.peak_bytes
        blocks.set_saved(choices.saved[0])
    losses: list[Tensor] = []
    with FlopCounterMode(display=False) as counter:
        held = measure_memory(lambda: losses.append(loss(model, ids)), [model]).after.other
        losses[0].backward()
    return {"name": name, "budget": budget, "foreseen": peak, "held": held, "operations": counter.get_total_flops()}


def made(given: argparse.Namespace) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=given.width,
        intermediate_size=given.width * 11 // 4,
        num_hidden_layers=given.layers,
        num_attention_heads=given.width // 64,
        num_key_value_heads=given.width // 64,
        vocab_size=256,
    )
    return LlamaForCausalLM(config).train(), torch.randint(0, 256, (1, given.tokens))


def measured(model: nn.Module, blocks: object, ids: Tensor) -> ActivationPlan:
    if not isinstance(blocks, BudgetedBlocks):
        raise TypeError("no budget")
    with torch.no_grad(), blocks.measure():
        model(input_ids=ids, use_cache=False)
    return ActivationPlan([blocks.profiles], SINGLE_STAGE)


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return sum_token_loss(model(input_ids=ids, use_cache=False).logits, ids)


def report(rows: Sequence[dict[str, float | str]]) -> None:
    table = Table("activations", "budget [MB]", "foreseen [MB]", "held after forward [MB]", "operations / false")
    for row in rows:
        sizes = [f"{float(row[key]) / 1e6:.2f}" for key in ("budget", "foreseen", "held")]
        table.add_row(str(row["name"]), *sizes, f"{float(row['operations']) / float(rows[0]['operations']):.3f}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
