"""A parameter without elements has no gradient that could be sharded: it is refused alike, before anything is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaForCausalLM

import meshwright as mw
from meshwright import ModelError, load_run
from meshwright_fsdp2 import fsdp2_strategy_parallelize
from meshwright_run.preflight import plan_run
from meshwright_testing import pool
from meshwright_testing.models import tiny_model

TOLD = r"layers.0.mlp.gate_proj.weight is to be trained, but its shape \(0, \d+\) has no elements\. Change the size"


def _config() -> Any:
    config = tiny_model(layers=2).config
    config.intermediate_size = 0
    return config


def _refused(strategy: str, sizes: dict[str, int]) -> str:
    with pytest.raises(ModelError, match=TOLD) as caught:
        mw.from_config(_config(), strategy, device="cpu", **sizes)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize(
    ("strategy", "ranks", "sizes"),
    [
        ("fsdp2", 2, {"tp_size": 2}),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                *(("single", 1, {}), ("fsdp2", 2, {}), ("ddp", 2, {}), ("megatron_fsdp", 2, {})),
                ("fsdp2", 2, {"pp_size": 2}),
            )
        ),
    ],
)
def test_a_trained_parameter_without_elements_is_refused_on_all_ranks(strategy, ranks, sizes):
    assert len(set(pool(ranks).run(_refused, strategy, sizes))) == 1


def _by_hand(frozen: bool) -> float:
    model = LlamaForCausalLM(_config())
    if frozen:
        model.model.layers.requires_grad_(False)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data_parallel",))
    sharded = fsdp2_strategy_parallelize(model, mesh, param_dtype=torch.float32)
    loss = sharded(input_ids=torch.arange(8).view(1, 8), use_cache=False).logits.sum()
    loss.backward()
    return float(loss)


@pytest.mark.slow
def test_the_functions_refuse_it_too_and_take_one_that_is_frozen() -> None:
    with pytest.raises(mw.RankError, match=TOLD):
        pool(2).run(_by_hand, False)
    assert len(pool(2).run(_by_hand, True)) == 2


def test_a_run_file_is_refused_before_ranks_start(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "one two three four five six seven eight"}\n' * 40)
    sizes = {"hidden_size": 32, "intermediate_size": 0, "num_hidden_layers": 2, "num_attention_heads": 2}
    run = {
        "strategy": "fsdp2",
        "model": {"model_type": "llama", **sizes},
        "data": {"corpus": str(tmp_path / "texts.jsonl"), "vocab_size": 270, "seq_len": 8, "cache_dir": str(tmp_path)},
        "steps": 1,
        "batch_size": 2,
        "device": "cpu",
        "output_dir": str(tmp_path / "out"),
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    with pytest.raises(ModelError, match=TOLD):
        plan_run(load_run(tmp_path / "run.yaml"), 2)
