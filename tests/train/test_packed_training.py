"""Documents that share a row, or have padding behind them, train as by themselves: 22 architectures, every axis."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from meshwright import count_tokens
from meshwright.base.types import Batch
from meshwright.testing import Case
from meshwright_run.data.documents import Documents
from meshwright_run.data.feed import Feed, Place
from meshwright_run.data.rows import make_rows
from meshwright_run.run_file import OptimizerConfig
from meshwright_testing import pool
from meshwright_testing.case import TOLERANCE
from meshwright_testing.models import case_vocab
from meshwright_testing.parity import build_manager, full_weights

ARCHITECTURES = [
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "phi", "cohere2"),
    *("olmo2", "granite", "starcoder2", "stablelm", "nemotron", "smollm3", "mixtral", "qwen3_moe", "deepseek_v3"),
    *("granitemoe", "glm4"),
]
SEQ_LEN, STEPS = 32, 3
LENGTHS = (20, 18, 15, 12, 11, 11, 10, 9, 7, 5, 4, 3)
"""Best fit makes four rows of them, three of which have padding."""
LEARNT = 0.7
EXACT = 1e-12


@dataclass(frozen=True)
class Layout:
    name: str
    strategy: str
    sizes: dict[str, int] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    wrapper: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def ranks(self) -> int:
        return 1 if self.strategy == "single" else 2


LAYOUTS = [
    Layout("single", "single"),
    Layout("fsdp2", "fsdp2"),
    Layout("ddp", "ddp"),
    Layout("tp", "fsdp2", {"tp_size": 2}),
    Layout("tp_sp", "fsdp2", {"tp_size": 2}, {"sequence_parallel": True}),
    Layout("cp_allgather", "fsdp2", {"cp_size": 2}),
    Layout("cp_ulysses", "fsdp2", {"cp_size": 2}, {"cp_attention": "ulysses"}),
    Layout("pp", "fsdp2", {"pp_size": 2}),
    Layout("pp_interleaved", "fsdp2", {"pp_size": 2}, {}, {"pipeline": {"pp_schedule": "interleaved1f1b"}}),
]
FIRST = ["fsdp2", "cp_ulysses", "pp_interleaved", "tp_sp"]


def documents(model_type: str, step: int) -> Documents:
    """The same lengths in each step, in another order, so that best fit fills as many rows."""
    draw = np.random.default_rng(step)
    lengths = draw.permutation(LENGTHS)
    tokens = draw.integers(0, case_vocab(model_type), lengths.sum()).astype(np.uint16)
    return Documents(tokens, np.cumsum(lengths), draw.random(len(tokens)) < LEARNT)


def batches_of(kind: str, model_type: str, step: int, place: Place) -> list[Batch]:
    """All documents of a step, in rows of a kind; "apart": each in a microbatch of its own, with nothing beside it."""
    held = documents(model_type, step)
    if kind == "apart":
        rows = make_rows(held, "none", SEQ_LEN)
        return [rows.take([number], length) for number, length in enumerate(held.lengths().tolist())]
    rows = make_rows(held, kind, SEQ_LEN)  # type: ignore[arg-type]
    return Feed([rows], place, batch_size=len(rows), seed=step).microbatches(0)


@dataclass(frozen=True)
class Found:
    """What a rank saw: losses and norms of each step, and the full weights after steps of AdamW, and after one of SGD.

    AdamW divides small gradients by their own size, and with them what rounding has left of them; SGD shows gradients
    as they are.
    """

    values: list[float]
    by_adamw: dict[str, torch.Tensor]
    by_sgd: dict[str, torch.Tensor]


SGD = OptimizerConfig(name="SGD", lr=1.0)


def train(layout: Layout, model_type: str, kind: str, micro_batch_size: int) -> Found:
    """The task of one rank."""
    case = Case(model_type=model_type, tied=None, layers=4)
    values, by_adamw = train_with(layout, case, kind, micro_batch_size, STEPS)
    more, by_sgd = train_with(layout, replace(case, optimizer=SGD), kind, micro_batch_size, 1)
    return Found(values + more, by_adamw, by_sgd)


def train_with(layout: Layout, case: Case, kind: str, micro_batch_size: int, steps: int) -> Any:
    manager = build_manager(layout.strategy, layout.config, layout.sizes, case, wrapper_config=layout.wrapper)
    mesh = manager.mesh
    multiple = (2 * mesh.degrees.cp if mesh.degrees.cp > 1 else 1) * mesh.degrees.tp
    place = Place(mesh.data_rank, mesh.data_size, micro_batch_size, multiple=multiple, one_shape=mesh.degrees.pp > 1)
    found = []
    for step in range(steps):
        mine = batches_of(kind, case.model_type, step, place)
        num_tokens = count_tokens(mine, mesh)
        found.append(float(manager.eval_loss(mine, num_tokens=num_tokens)))
        found.append(float(manager.forward_backward(mine, num_tokens=num_tokens)))
        found.append(float(manager.clip_grad_norm(0.5)))
        manager.optimizer_step()
    return found, full_weights(manager)


@functools.cache
def apart(model_type: str) -> Found:
    return pool(1).run(train, LAYOUTS[0], model_type, "apart", 1)[0]


def check(layout: Layout, model_type: str, kind: str, micro_batch_size: int = 2) -> None:
    expected = apart(model_type)
    for found in pool(layout.ranks).run(train, layout, model_type, kind, micro_batch_size):
        assert found.values == pytest.approx(expected.values, rel=EXACT, abs=0)
        assert farthest(found.by_sgd, expected.by_sgd) <= EXACT
        assert farthest(found.by_adamw, expected.by_adamw) <= TOLERANCE


def farthest(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(float((weights[name] - weight).abs().max()) for name, weight in expected.items())


def test_best_fit_makes_four_rows_of_the_documents_of_a_step() -> None:
    for step in range(STEPS):
        (batch,) = batches_of("documents", "llama", step, Place(0, 1, 4))
        assert batch["input_ids"].shape == (4, SEQ_LEN)
        padding = (batch["position_ids"] == 0).sum() - len(LENGTHS)
        assert padding >= 1
        assert len(batches_of("apart", "llama", step, Place(0, 1, 1))) == len(LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [each for each in LAYOUTS if each.name in FIRST], ids=str)
@pytest.mark.parametrize("kind", ["documents", "none"])
def test_rows_train_as_documents_by_themselves(layout: Layout, kind: str) -> None:
    check(layout, "llama", kind)


@pytest.mark.zoo
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_rows_of_every_architecture_train_as_documents_by_themselves(model_type: str, layout: Layout) -> None:
    for kind in ("documents", "none"):
        check(layout, model_type, kind)


def test_positions_alone_tell_documents_apart() -> None:
    """What the proofs above would miss, if it made no difference: the same rows without positions are others."""
    (batch,) = batches_of("documents", "llama", 0, Place(0, 1, 4))
    losses = pool(1).run(_losses, [dict(batch), {name: batch[name] for name in ("input_ids", "labels")}])[0]
    assert abs(losses[0] - losses[1]) > 1e-6


def _losses(batches: list[Batch]) -> list[float]:
    manager = build_manager("single", {}, {}, Case(tied=None))
    return [float(manager.eval_loss([b], num_tokens=count_tokens([b], manager.mesh))) for b in batches]


def test_padding_is_nothing_to_the_rows_before_it() -> None:
    """Other tokens there, or an attention mask, change neither loss nor gradient."""
    found = pool(1).run(_gradients)[0]
    (loss, gradients), *others = found
    for other_loss, other_gradients in others:
        assert other_loss == pytest.approx(loss, rel=EXACT)
        for one, other in zip(gradients, other_gradients, strict=True):
            assert float((one - other).abs().max()) <= EXACT


def _gradients() -> list[tuple[float, list[torch.Tensor]]]:
    held = documents("llama", 0)
    plain, masked = (
        dict(make_rows(held, "none", SEQ_LEN, masks=masks).take(range(4), SEQ_LEN)) for masks in (False, True)
    )
    padding = masked["attention_mask"] == 0
    other = {**plain, "input_ids": plain["input_ids"].masked_fill(padding, 3)}
    found = []
    for batch in (plain, masked, other):
        manager = build_manager("single", {}, {}, Case(tied=None))
        loss = float(manager.forward_backward([batch], num_tokens=count_tokens([batch], manager.mesh)))
        found.append((loss, [p.grad.clone() for part in manager.model_parts for p in part.parameters()]))
    return found
