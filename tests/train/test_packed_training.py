"""Documents that share a row, or have padding behind them, train as on their own: 22 architectures, every axis."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from meshwright import count_tokens
from meshwright.base.types import Batch
from meshwright.testing import Case
from meshwright_run.data.documents import TokenizedDocuments
from meshwright_run.data.packing import build_row_dataset
from meshwright_run.data.train_sampler import DataShard, TrainSampler
from meshwright_run.run_file import OptimizerConfig
from meshwright_testing import pool
from meshwright_testing.case import TOLERANCE
from meshwright_testing.models import case_vocab_size
from meshwright_testing.parity import build_manager, full_weights

ARCHITECTURES = [
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "phi", "cohere2"),
    *("olmo2", "granite", "starcoder2", "stablelm", "nemotron", "smollm3", "mixtral", "qwen3_moe", "deepseek_v3"),
    *("granitemoe", "glm4"),
]
SEQ_LEN, STEPS = 32, 3
LENGTHS = (20, 18, 15, 12, 11, 11, 10, 9, 7, 5, 4, 3)
"""Best fit makes four rows of them, three of which have padding."""
SUPERVISED = 0.7
EXACT = 1e-12
INTERLEAVED = {"pipeline": {"pp_schedule": "interleaved1f1b"}}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "fsdp2": ({}, {}, {}),
    "tp_sp": ({"tp_size": 2}, {"sequence_parallel": True}, {}),
    "cp_ulysses": ({"cp_size": 2}, {"cp_attention": "ulysses"}, {}),
    "pp_interleaved": ({"pp_size": 2}, {}, INTERLEAVED),
}
"""Sizes and options of FSDP2 on two ranks, and of its wrapper."""


def documents(model_type: str, step: int) -> TokenizedDocuments:
    """The same lengths in each step, in another order, so that best fit fills as many rows."""
    draw = np.random.default_rng(step)
    lengths = draw.permutation(LENGTHS)
    tokens = draw.integers(0, case_vocab_size(model_type), lengths.sum()).astype(np.uint16)
    return TokenizedDocuments(tokens, np.cumsum(lengths), draw.random(len(tokens)) < SUPERVISED)


def batches_of(kind: str, model_type: str, step: int, place: DataShard) -> list[Batch]:
    """All documents of a step, in rows of a kind; "apart": each in a microbatch of its own, with nothing beside it."""
    held = documents(model_type, step)
    if kind == "apart":
        rows = build_row_dataset(held, "none", SEQ_LEN)
        return [rows.read_batch([number], length) for number, length in enumerate(held.lengths().tolist())]
    rows = build_row_dataset(held, kind, SEQ_LEN)  # type: ignore[arg-type]
    return TrainSampler([rows], place, batch_size=len(rows), seed=step).read_microbatches(0)


def train(layout: str | None, model_type: str, kind: str) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses and norms of each step, and the full weights after steps of AdamW, and after one of SGD.

    AdamW divides small gradients by their own size, and with them what rounding has left of them; SGD shows gradients
    as they are.
    """
    case = Case(model_type=model_type, tied=None, layers=4)
    values, by_adamw = train_with(layout, case, kind, STEPS)
    more, by_sgd = train_with(layout, replace(case, optimizer=OptimizerConfig(name="SGD", lr=1.0)), kind, 1)
    return values + more, by_adamw, by_sgd


def train_with(layout: str | None, case: Case, kind: str, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    sizes, config, wrapper = LAYOUTS[layout] if layout else ({}, {}, {})
    manager = build_manager("fsdp2" if layout else "single", config, sizes, case, wrapper_config=wrapper)
    mesh = manager.mesh
    multiple = (2 * mesh.degrees.cp if mesh.degrees.cp > 1 else 1) * mesh.degrees.tp
    size = 1 if kind == "apart" else 2
    place = DataShard(
        mesh.data_rank, mesh.data_size, size, length_multiple=multiple, uniform_length=mesh.degrees.pp > 1
    )
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
def apart(model_type: str) -> Any:
    return pool(1).run(train, None, model_type, "apart")[0]


def check(layout: str | None, model_type: str, kind: str) -> None:
    expected, adamw, sgd = apart(model_type)
    for values, by_adamw, by_sgd in pool(2 if layout else 1).run(train, layout, model_type, kind):
        assert values == pytest.approx(expected, rel=EXACT, abs=0)
        assert farthest(by_sgd, sgd) <= EXACT
        assert farthest(by_adamw, adamw) <= TOLERANCE


def farthest(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((weights[name] - weight).abs().max()) for name, weight in expected.items())


def test_best_fit_makes_four_rows_of_the_documents_of_a_step() -> None:
    for step in range(STEPS):
        (batch,) = batches_of("documents", "llama", step, DataShard(0, 1, 4))
        assert batch["input_ids"].shape == (4, SEQ_LEN)
        padding = (batch["position_ids"] == 0).sum() - len(LENGTHS)
        assert padding >= 1
        assert len(batches_of("apart", "llama", step, DataShard(0, 1, 1))) == len(LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["documents", "none"])
def test_rows_train_as_documents_on_their_own(layout: str, kind: str) -> None:
    check(layout, "llama", kind)


@pytest.mark.zoo
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_rows_of_every_architecture_train_as_documents_on_their_own(model_type: str, layout: str | None) -> None:
    for kind in ("documents", "none"):
        check(layout, model_type, kind)


def _losses() -> list[float]:
    """Of one batch: as it is, with other tokens and with a mask where there is padding, and without positions."""
    manager = build_manager("single", {}, {}, Case(tied=None))
    plain, masked = (
        dict(
            build_row_dataset(documents("llama", 0), "none", SEQ_LEN, mask_padding=masks).read_batch(range(4), SEQ_LEN)
        )
        for masks in (False, True)
    )
    other = {**plain, "input_ids": plain["input_ids"].masked_fill(masked["attention_mask"] == 0, 3)}
    (packed,) = batches_of("documents", "llama", 0, DataShard(0, 1, 4))
    alone = {name: packed[name] for name in ("input_ids", "labels")}
    batches = [plain, other, masked, dict(packed), alone]
    return [float(manager.eval_loss([each], num_tokens=count_tokens([each], manager.mesh))) for each in batches]


def test_padding_is_nothing_and_positions_alone_tell_documents_apart() -> None:
    plain, other, masked, packed, alone = pool(1).run(_losses)[0]
    assert [other, masked] == pytest.approx([plain] * 2, rel=EXACT)
    assert abs(packed - alone) > 1e-6
