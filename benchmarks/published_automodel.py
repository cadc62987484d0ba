"""The jobs of NeMo Automodel's published runs, after the files that its table names.

Weights, and so the optimizer's state, are bfloat16 there, and gradients are reduced in float32; adapters as well.
Choices of experts are even in those runs ("fake balanced gate"), as they are in plans. What its table leaves out
(recomputation, sequence parallelism) is from the files.

Source: NVIDIA-NeMo/Automodel@36044ad, docs/performance-summary.mdx and examples/llm_benchmark.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from meshwright._compat.peft import add_adapters_on_meta
from meshwright.mesh.sizes import MeshSizes
from meshwright.optim.build import optimizer_factory
from meshwright.optim.config import OptimizerConfig
from meshwright.strategy.stack import resolve
from meshwright_plan.trace import TrainingJob

_LLAMA = {"kind": "llama", "vocab_size": 128256, "num_key_value_heads": 8}
_QWEN = {"kind": "qwen2", "vocab_size": 152064}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "Llama3 8B": _LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "Llama3 70B": _LLAMA
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "Qwen2.5 7B": _QWEN
    | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4},
    "Qwen2.5 32B": _QWEN
    | {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40}
    | {"num_key_value_heads": 8},
    "Qwen3 MoE 30B": {"kind": "qwen3_moe", "vocab_size": 151936, "num_hidden_layers": 48, "head_dim": 128},
    "DeepSeek V3 671B": {"kind": "deepseek_v3", "vocab_size": 129280, "num_hidden_layers": 61},
}
"""Sizes from the models' configurations; what is left out is transformers' default for the type."""
TRACED_MICROBATCHES = 4
"""At most so many of a step: its time grows with each alike, except for the optimizer's few milliseconds."""
RECOMPUTES = ("Llama3 70B", "Qwen2.5 32B", "Qwen3 MoE", "DeepSeek V3")


def is_automodel(row: Mapping[str, Any]) -> bool:
    return "Automodel" in str(row.get("source", ""))


def left_out_of_automodel(row: Mapping[str, Any]) -> str | None:
    """Why a row is not planned."""
    if "Nemotron" in row["model"]:
        return "its Mamba layers have no kernels here, and its sizes are in no package"
    if "GPT-OSS" in row["model"]:
        return "attention with sinks runs operator by operator here, and as one kernel there (FlexAttention)"
    return None if _named(row) else "model not yet made here"


def fuses(row: Mapping[str, Any]) -> bool:
    """Whether kernels do what several operators do: norms, rotations and adapters of Transformer Engine and Triton."""
    return "TE" in str(row.get("kernels", ""))


def shape_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return SHAPES[_named(row)]


def _named(row: Mapping[str, Any]) -> str:
    return next((name for name in SHAPES if str(row["model"]).startswith(name)), "")


def automodel_job(row: Mapping[str, Any], layers: int) -> TrainingJob:
    """The job of a row, for a model with so many blocks."""
    name, layout = _named(row), row["layout"]
    sizes = {f"{axis}_size": layout.get(axis, 1) for axis in ("tp", "pp", "cp", "ep")}
    has_experts = sizes["ep_size"] > 1
    rows = row["local_batch"]
    more = 1 if layout["pp"] > 1 else min(row["grad_accum"], TRACED_MICROBATCHES)
    config: dict[str, Any] = {
        "mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
        "activation_checkpointing": "full" if name.startswith(RECOMPUTES) else False,
        "sequence_parallel": layout["tp"] > 1,
        "loss_chunk_rows": rows * row["seq"] if layout["tp"] > 1 else 0,
        "reshard_after_forward": not has_experts,
        "defer_fsdp_grad_sync": has_experts,
    }
    wrapper = None
    if layout["pp"] > 1:
        rows = row.get("micro_batch", 1)
        each = -(-shape_of(row)["num_hidden_layers"] // (layout["pp"] * layout["vp"]))
        wrapper = {"pipeline": {"pp_schedule": "interleaved1f1b", "pp_microbatch_size": rows, "layers_per_stage": each}}
        rows = row["local_batch"]
    stack, degrees = resolve("fsdp2", MeshSizes(**sizes), row["gpus"], config=config, wrapper_config=wrapper)
    lora = bool(row.get("lora"))
    optimizer = optimizer_factory(OptimizerConfig(name="Adam", lr=1e-4, options={"foreach": True}))
    return TrainingJob(
        stack,
        degrees,
        lambda: _model(shape_of(row), layers, lora),
        optimizer,
        num_microbatches=more,
        micro_batch_size=rows,
        seq_len=row["seq"],
        max_grad_norm=None,
    )


def _model(shape: Mapping[str, Any], layers: int, lora: bool) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {**shape, "num_hidden_layers": layers, "tie_word_embeddings": False}
    config = AutoConfig.for_model(given.pop("kind"), **given)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if not lora:
        return model
    from peft import LoraConfig

    modules = sorted({name.rpartition(".")[2] for name, _ in model.named_modules() if name.endswith("_proj")})
    adapter = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=modules)
    return add_adapters_on_meta(model, {"default": copy.deepcopy(adapter)})
