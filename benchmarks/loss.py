"""Head and loss of a large vocabulary: whole logits, by rows, and torch's own function, in turns in one process.

Each contestant makes the loss of random hidden states and a weight, and both gradients. The first round measures the
peak of memory by tensors, beyond hidden states and weight; those after it the time, in a changing order. Losses and
gradients must agree, or the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import origin
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.step.chunked_loss import HiddenRows, compute_token_loss
from meshwright.step.tokens import sum_target_loss

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.measurements import measure_memory

Contestant = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def whole(hidden: Tensor, weight: Tensor, targets: Tensor, tokens: Tensor) -> Tensor:
    return sum_target_loss(F.linear(hidden, weight)[None], targets[None]) / tokens


def by_rows(chunk_rows: int) -> Contestant:
    def loss(hidden: Tensor, weight: Tensor, targets: Tensor, tokens: Tensor) -> Tensor:
        return compute_token_loss(HiddenRows.from_linear(hidden, weight), targets, tokens, chunk_rows=chunk_rows)

    return loss


def torchs(**options: Any) -> Contestant:
    def loss(hidden: Tensor, weight: Tensor, targets: Tensor, tokens: Tensor) -> Tensor:
        chosen = torch.nn.LinearCrossEntropyOptions(**options)
        total = F.linear_cross_entropy(hidden, weight, targets, reduction="sum", ignore_index=-100, options=chosen)
        return total / tokens

    return loss


class Inputs(nn.Module):
    def __init__(self, rows: int, features: int, vocab: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Parameter(torch.randn(rows, features).to(dtype))
        self.weight = nn.Parameter((torch.randn(vocab, features) * 0.02).to(dtype))
        self.targets = torch.randint(vocab, (rows,))
        self.targets[::7] = -100
        self.tokens = (self.targets >= 0).sum()

    def run(self, contestant: Contestant) -> float:
        self.zero_grad()
        loss = contestant(self.hidden, self.weight, self.targets, self.tokens)
        loss.backward()
        return float(loss.detach())

    def gradients(self) -> list[Tensor]:
        return [each.grad.detach().clone() for each in (self.hidden, self.weight) if each.grad is not None]


def contestants(rows: int, features: int) -> dict[str, Contestant]:
    chunk = min(rows, max(512, features // 2))
    found = {"whole logits": whole, f"by rows of {chunk}": by_rows(chunk)}
    if hasattr(F, "linear_cross_entropy"):
        found["torch, default"] = torchs()
        found[f"torch, rows of {chunk}"] = torchs(batch_chunk_size=chunk)
    return found


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    inputs = Inputs(arguments.rows, arguments.features, arguments.vocab, getattr(torch, arguments.dtype))
    every = contestants(arguments.rows, arguments.features)
    if arguments.only:
        every = {name: each for name, each in every.items() if name.startswith(tuple(arguments.only.split(",")))}
    found: dict[str, dict[str, float]] = {}
    expected: tuple[float, list[Tensor]] | None = None
    for name, contestant in every.items():
        inputs.zero_grad()
        losses: list[float] = []
        held = measure_memory(lambda: losses.append(inputs.run(contestant)), [inputs]).peak  # noqa: B023
        gradients = inputs.gradients()
        expected = expected or (losses[0], gradients)
        pairs = zip(gradients, expected[1], strict=True)
        worst = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
        found[name] = {
            "peak_mib": (held.total - held.parameters) / 2**20,
            "loss_difference": abs(losses[0] - expected[0]),
            "gradient_difference": worst,
        }
        del gradients
    expected = None
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in every}
    for index in range(arguments.rounds):
        for name, contestant in list(every.items())[:: 1 if index % 2 == 0 else -1]:
            wall, cpu = time.perf_counter(), time.process_time()
            inputs.run(contestant)
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    first = times["whole logits"]
    for name, seconds in times.items():
        if seconds:
            for index, kind in enumerate(("time", "cpu_time")):
                ratios = [one[index] / other[index] for one, other in zip(seconds, first, strict=True)]
                found[name] |= {f"{kind}_ratio": statistics.median(ratios)}
            found[name] |= {"seconds": statistics.median(wall for wall, _ in seconds)}
        found[name]["peak_ratio"] = found["whole logits"]["peak_mib"] / found[name]["peak_mib"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="how the names of the contestants begin")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments)
    for name, values in found.items():
        print(f"{name:22s} " + "  ".join(f"{key} {value:.4g}" for key, value in values.items()))
    if arguments.json is not None:
        sizes = {key: getattr(arguments, key) for key in ("rows", "features", "vocab", "dtype", "rounds")}
        report = {**origin(), "threads": torch.get_num_threads(), **sizes, "contestants": found}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    limit = {"float32": 1e-4, "bfloat16": 3e-2}[arguments.dtype]
    return int(any(max(each["loss_difference"], each["gradient_difference"]) > limit for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
