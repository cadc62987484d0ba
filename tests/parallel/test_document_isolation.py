"""Models that do not keep the documents of a row apart, or see padding, are refused before the first step."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.caught_errors import catch_error
from support.tiers import mark_mostly_slow
from torch import Tensor

from meshwright.base.types import Batch
from meshwright.testing import Case
from meshwright_run.model_probe import check_document_isolation, probe_isolation
from meshwright_testing import pool
from meshwright_testing.parity import build_manager
from meshwright_testing.zoo import build_zoo_config

SLOW = pytest.mark.slow


def refusal(model_type: str, kind: Any, dtype: torch.dtype = torch.float32, **options: Any) -> str:
    return catch_error(
        probe_isolation, build_zoo_config(model_type), dtype, kind, **{"seq_len": 32, "mask_padding": False, **options}
    )


@pytest.mark.parametrize(
    "model_type",
    ["llama", *(pytest.param(each, marks=SLOW) for each in ("gemma3_text", "gpt2", "qwen3_moe", "granitemoe"))],
)
def test_models_that_keep_documents_apart_are_taken(model_type: str) -> None:
    before = torch.get_rng_state()
    for kind in ("documents", "none", "stream"):
        assert not refusal(model_type, kind)
    assert torch.equal(before, torch.get_rng_state())


# A state continues; some layers attend and others do not; no positions where masks are made; none in the forward.
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
    assert re.search(r"model 'cpmant' attends to the padding after a document.*Set data\.packing=stream", text)


def _reported(model_type: str, strategy: str, sizes: dict[str, int]) -> list[str]:
    """The task of a rank: what is reported about documents and padding in a model as it runs."""
    manager = build_manager(strategy, {}, sizes, Case(model_type=model_type, tied=None))

    def statistics(batches: list[Batch]) -> list[Tensor]:
        return [found["log_probs"] for found in manager.token_stats(batches, ["log_probs"])]

    multiple = 2 * manager.mesh.degrees.cp * manager.mesh.degrees.tp
    options = {"seq_len": 64, "vocab_size": 64, "length_multiple": multiple, "num_rows": 2, "num_microbatches": 2}
    config, dtype = build_zoo_config(model_type), torch.float64
    return [
        catch_error(check_document_isolation, config, kind, statistics, dtype=dtype, **options)
        for kind in ("documents", "none")
    ]


@pytest.mark.parametrize(
    ("model_type", "sizes", "start"),
    mark_mostly_slow(
        [
            ("mamba2", {}, "ModelError: the model 'mamba2' lets documents attend to earlier documents in the same row"),
            *(("llama", sizes, "") for sizes in ({}, {"tp_size": 2}, {"cp_size": 2}, {"pp_size": 2})),
        ]
    ),
    ids=str,
)
def test_all_ranks_try_a_model_as_it_runs(model_type: str, sizes: dict[str, int], start: str) -> None:
    one, other = pool(2).run(_reported, model_type, "fsdp2", sizes)
    assert one == other
    assert one[0].startswith(start)
    assert bool(one[0]) is bool(start)
