"""Models that do not keep the documents of a row apart, or see padding, are refused before the first step."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.told import told
from torch import Tensor

from meshwright.base.types import Batch
from meshwright.testing import Case
from meshwright_run.model_trial import check_kept_apart, try_rows
from meshwright_testing import pool
from meshwright_testing.parity import build_manager
from meshwright_testing.zoo import zoo_config, zoo_model, zoo_reason, zoo_types, zoo_vocab

SLOW = pytest.mark.slow
TRAINABLE = [model_type for model_type in zoo_types() if zoo_reason(model_type) is None]


def refusal(model_type: str, kind: Any, dtype: torch.dtype = torch.float32, **options: Any) -> str:
    return told(try_rows, zoo_config(model_type), dtype, kind, **{"seq_len": 32, "masks": False, **options})


@pytest.mark.parametrize(
    "model_type",
    ["llama", *(pytest.param(each, marks=SLOW) for each in ("gemma3_text", "gpt2", "qwen3_moe", "granitemoe"))],
)
def test_models_that_keep_documents_apart_are_taken(model_type: str) -> None:
    before = torch.get_rng_state()
    for kind in ("documents", "none", "stream"):
        assert not refusal(model_type, kind)
    assert torch.equal(before, torch.get_rng_state())


# A state goes on; some layers attend and others do not; no positions where masks are made; none in the forward.
@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [
        ("mamba2", torch.float32),
        pytest.param("falcon_h1", torch.bfloat16, marks=SLOW),
        pytest.param("gpt_oss", torch.float32, marks=SLOW),
        pytest.param("bloom", torch.bfloat16, marks=SLOW),
    ],
)
def test_models_whose_documents_see_each_other_are_refused(model_type: str, dtype: torch.dtype) -> None:
    text = refusal(model_type, "documents", dtype)
    assert re.search(rf"model '{model_type}' (lets documents|cannot run).*Set data\.packing=none.*or stream", text)
    assert not refusal(model_type, "none", dtype) + refusal(model_type, "stream", dtype)


def test_a_model_that_is_not_causal_is_refused_padding() -> None:
    text = refusal("cpmant", "none")
    assert re.search(r"model 'cpmant' sees the padding behind a document.*Set data\.packing=stream", text)


def _told(model_type: str, strategy: str, sizes: dict[str, int]) -> list[str]:
    """The task of a rank: what is told of documents and of padding in a model as it runs."""
    manager = build_manager(strategy, {}, sizes, Case(model_type=model_type, tied=None))

    def statistics(batches: list[Batch]) -> list[Tensor]:
        return [found["log_probs"] for found in manager.token_stats(batches, ["log_probs"])]

    multiple = 2 * manager.mesh.degrees.cp * manager.mesh.degrees.tp
    options = {"seq_len": 64, "vocab_size": 64, "multiple": multiple, "rows": 2, "microbatches": 2}
    config, dtype = zoo_config(model_type), torch.float64
    return [told(check_kept_apart, config, kind, statistics, dtype=dtype, **options) for kind in ("documents", "none")]


@SLOW
@pytest.mark.parametrize("sizes", [{}, {"tp_size": 2}, {"cp_size": 2}, {"pp_size": 2}], ids=str)
def test_a_model_is_tried_as_it_runs_on_any_axis(sizes: dict[str, int]) -> None:
    assert pool(2).run(_told, "llama", "fsdp2", sizes) == [["", ""]] * 2


def test_all_ranks_refuse_a_model_as_it_runs() -> None:
    one, other = pool(2).run(_told, "mamba2", "fsdp2", {})
    assert one == other
    assert "the model 'mamba2' lets documents that share a row see those before them" in one[0]


@pytest.mark.zoo
@pytest.mark.parametrize("model_type", TRAINABLE)
def test_the_trial_says_of_every_type_what_a_comparison_in_float64_does(model_type: str) -> None:
    """In float32 and bfloat16, against the documents by themselves."""
    model = zoo_model(model_type).eval()
    generator = torch.Generator().manual_seed(5)
    first, second = (torch.randint(1, zoo_vocab(model_type), (1, length), generator=generator) for length in (8, 12))
    options = {"use_cache": False}
    with torch.no_grad():
        try:
            alone = model(input_ids=second, **options).logits
            positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
            packed = model(input_ids=torch.cat([first, second], 1), position_ids=positions, **options).logits[:, 8:]
            apart = float((packed - alone).abs().max())
        except (TypeError, ValueError, RuntimeError):
            # Its forward takes no positions, or not these lengths.
            apart = 1.0
    for dtype in (torch.float32, torch.bfloat16):
        assert (not refusal(model_type, "documents", dtype)) == (apart < 1e-9), apart
