"""FLOPs of a model as they are counted on its trace: those of a real run, for what acts alone, and MFU of them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from meshwright import Loop, MeshSizes, StepResult, fit
from meshwright.objectives import get_objective
from meshwright.optim.build import optimizer_factory
from meshwright.strategy.stack import resolve
from meshwright.testing import Case
from meshwright.training.loop.extension import FlopsReporter
from meshwright_plan.model_flops import ModelFlops, count_model_flops
from meshwright_plan.trace import TrainingJob
from meshwright_run.run_file import OptimizerConfig
from meshwright_run.step_text import format_step
from meshwright_testing import pool
from meshwright_testing.case import rank_microbatches
from meshwright_testing.parity import build_manager

S = 48  # Tokens of a row
WIDTH, LAYERS, VOCAB = 64, 3, 320


def _llama(layers: int = LAYERS, attention: str = "sdpa", **changes: Any) -> nn.Module:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "vocab_size": VOCAB, "num_hidden_layers": layers}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, **changes)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def _experts(layers: int = 2, *, experts: int = 8) -> nn.Module:
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "moe_intermediate_size": 2 * WIDTH, "vocab_size": VOCAB}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    config = Qwen3MoeConfig(**sizes, num_hidden_layers=layers, num_experts=experts, num_experts_per_tok=2)
    return AutoModelForCausalLM.from_config(config)


def _job(make: Any, *, layers: int = 0, with_layers: Any = None) -> TrainingJob:
    def on_meta(*given: int) -> nn.Module:
        with torch.device("meta"):
            return (with_layers if given else make)(*given)

    # Another layout than one rank: what the model needs does not depend on it.
    stack, degrees = resolve("fsdp2", MeshSizes(tp_size=2), 8, config={"activation_checkpointing": "full"})
    further = on_meta if with_layers is not None else None
    optimizer = optimizer_factory(OptimizerConfig(lr=1e-3))
    return TrainingJob(stack, degrees, on_meta, optimizer, 4, 2, S, num_layers=layers, build_with_layers=further)


def _of_row(make: Any, **options: Any) -> float:
    found = count_model_flops(_job(make, **options))
    assert found.per_token is not None, found.unavailable_reason
    return found.per_token * (S - 1)


def _really(model: nn.Module) -> int:
    ids = torch.arange(S)[None] % VOCAB
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=ids, use_cache=False).logits
        functional.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
    return counter.get_total_flops()


def _adapted(**options: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(_llama(attention="eager"), peft.LoraConfig(task_type="CAUSAL_LM", r=4, **options))


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(_llama, attention="eager"),
        functools.partial(_llama, attention="eager", tie_word_embeddings=True),
        functools.partial(_adapted, target_modules="all-linear"),
        functools.partial(_adapted, target_modules=["q_proj"], layers_to_transform=[2]),
    ],
    ids=["llama", "tied", "adapter", "adapter of the last block"],
)
def test_flops_are_those_that_torch_counts_in_a_real_run(make: Any) -> None:
    torch.manual_seed(0)
    assert _of_row(make) == _really(make())


def test_attention_counts_pairs_that_act_and_no_scores_twice() -> None:
    fused, written = _of_row(_llama), _of_row(functools.partial(_llama, attention="eager"))
    product = 2 * WIDTH * LAYERS
    # Two products of each pair in forward, four in backward; all pairs, or those of a query and what is before it.
    assert written - fused == 6 * product * (S * S - S * (S + 1) // 2)


def test_of_experts_those_that_are_chosen_count() -> None:
    few, many = (_of_row(functools.partial(_experts, experts=count)) for count in (8, 16))
    # Three products of the router's further columns, in two layers.
    assert many - few == 2 * 3 * 2 * S * WIDTH * 8
    # Of three matrices in each of two experts: forward, and both gradients.
    experts = 2 * 3 * 2 * S * (2 * 3 * WIDTH * 2 * WIDTH)
    assert experts < few < 3 * experts


def test_many_blocks_are_reported_by_few() -> None:
    make = functools.partial(_llama, 13)
    assert _of_row(make, layers=13, with_layers=_llama) == _of_row(make)


@pytest.mark.slow
def test_blocks_that_differ_are_not_reported_by_few() -> None:
    def make(layers: int = 24) -> nn.Module:
        model = _llama(layers)
        for index, block in enumerate(model.model.layers):
            width = 3 * WIDTH + (index**2 % 5)
            block.mlp.gate_proj, block.mlp.up_proj = (nn.Linear(WIDTH, width, bias=False) for _ in range(2))
            block.mlp.down_proj = nn.Linear(width, WIDTH, bias=False)
        return model

    assert _of_row(make, layers=24, with_layers=make) == _of_row(make)


class _Unseen(nn.Embedding):
    """Looks at values in a way that a trace cannot follow."""

    def forward(self, input_ids: torch.Tensor) -> Any:
        raise RuntimeError(f"{super().forward(input_ids).detach().numpy()}")


def test_what_cannot_be_counted_says_why() -> None:
    found = count_model_flops(_job(functools.partial(_Unseen, VOCAB, 8)))
    assert found.per_token is None
    assert "it reads values that exist only on real ranks" in found.unavailable_reason
    found = count_model_flops(_job(_llama), get_objective("dpo"))
    assert found == ModelFlops(None, "the objective 'dpo' does not count tokens")
    counted = count_model_flops(_job(_llama), get_objective({"name": "cross_entropy", "label_smoothing": 0.1}))
    assert counted == count_model_flops(_job(_llama))


def _fitted(peak: float | None) -> list[StepResult]:
    case = Case()
    manager = build_manager("ddp", {}, {}, case)
    mesh = manager.mesh
    flops = FlopsReporter(600.0, peak)
    return fit(
        manager, Loop(lambda step: rank_microbatches(case, step, mesh.data_rank, mesh.data_size), 2, extensions=[flops])
    )


def test_mfu_is_the_part_of_what_all_devices_could_have_done() -> None:
    for results in pool(2).run(_fitted, 1e6):
        for each in results:
            mfu = 600.0 * each.num_tokens / (each.seconds * 1e6 * 2)
            assert (each.flops, each.mfu) == (600.0 * each.num_tokens, pytest.approx(mfu))
            assert f"  MFU {mfu:.1%}" in format_step(each)
    assert [results[0].mfu for results in pool(2).run(_fitted, None)] == [None, None]
