"""The jobs of published runs, as far as this project can do the same: torchtitan's and Megatron-LM's."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from published_code import as_theirs, code_of

from meshwright.mesh.sizes import MeshSizes
from meshwright.plan.trace import Job
from meshwright.strategy.stack import resolve
from meshwright.train.optim import optimizer_factory
from meshwright.train.optimizer_config import OptimizerConfig

LLAMA = {"llama3-8b": (4096, 14336, 32, 32, 8, 128256), "llama3-70b": (8192, 28672, 80, 64, 8, 128256)}
LLAMA |= {"llama3.1-8b": LLAMA["llama3-8b"], "llama3.1-70b": LLAMA["llama3-70b"]}
LLAMA |= {"llama3.1-405b": (16384, 53248, 126, 128, 8, 128256)}
LLAMA |= {"llama2-13b": (5120, 13824, 40, 40, 40, 32000), "llama2-70b": (8192, 28672, 80, 64, 8, 32000)}
"""Hidden and intermediate size, blocks, heads, heads of keys, vocabulary: from the models' cards."""

DEVICES = {"H100 SXM HBM2e": "h100-96gb", "H100 94GB": "h100-96gb", "H200": "h200", "A100 80GB": "a100-80gb"}
DEVICES |= {"dev_dgx_h100": "h100-80gb", "dev_dgx_a100": "a100-80gb", "dev_dgx_gb200": "b200"}
CHECKPOINTING = {"none": False, "full": "full", "selective_op": "selective", "selective_layer": False}
GPT2_VOCABULARY = 50304
"""Where a Megatron row names none: GPT-2's, a multiple of 128; chosen by what the one such row holds."""


def is_megatron(row: Mapping[str, Any]) -> bool:
    return "args" in row


def left_out(row: Mapping[str, Any]) -> str | None:
    """Why a row is not planned."""
    if is_megatron(row):
        if "num-experts" in row["args"]:
            return "experts: not yet"
        return None if row.get("gpus") else "number of GPUs not published"
    if row["model"] not in LLAMA:
        return "model not yet made here"
    return "pipeline of 8 stages: not yet" if row["layout"]["pp"] > 1 else None


def depth(row: Mapping[str, Any]) -> int:
    """Blocks of the model of a row."""
    return int(row["args"]["num-layers"]) if is_megatron(row) else LLAMA[row["model"]][2]


def vocabulary(row: Mapping[str, Any]) -> int:
    if not is_megatron(row):
        return LLAMA[row["model"]][-1]
    # Megatron pads to a multiple of 128 on each rank.
    unit = 128 * row["layout"]["tp"]
    return -(-int(row["args"].get("vocab-size", GPT2_VOCABULARY)) // unit) * unit


def job_of(row: Mapping[str, Any], layers: int) -> Job:
    """The job of a row, for a model with so many blocks."""
    return _megatron(row, layers) if is_megatron(row) else _torchtitan(row, layers)


def _torchtitan(row: Mapping[str, Any], layers: int) -> Job:
    layout, code = row["layout"], code_of(row)
    sizes = {f"{axis}_size": layout.get(axis, 1) for axis in ("tp", "pp", "cp")} | {"dp_size": layout["dp_shard"]}
    config = {
        "mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
        # They compute all logits at once, where ranks share the vocabulary each its part.
        "loss_chunk_rows": row["local_batch"] * row["seq"] if layout["tp"] > 1 else 0,
        "activation_checkpointing": CHECKPOINTING[row["activation_checkpointing"].split(" ")[0]],
        "sequence_parallel": layout.get("sequence_parallel", layout["tp"] > 1),
        **({"reshard_after_forward": False} if layout["pp"] > 1 else {}),
    }
    wrapper, rows = None, row["local_batch"]
    if layout["pp"] > 1:
        # As many microbatches as there are ranks in a pipeline: their default.
        rows = max(1, row["local_batch"] // layout["pp"])
        schedule = "".join(filter(str.isalnum, str(row.get("pp_schedule") or "1f1b").lower()))
        wrapper = {"pipeline": {"pp_schedule": schedule, "pp_microbatch_size": rows}}
    stack, degrees = resolve("fsdp2", MeshSizes(**sizes), row["gpus"], config=config, wrapper_config=wrapper)
    hidden, inner, _, heads, key_heads, entries = LLAMA[row["model"]]

    def make() -> nn.Module:
        model = _model("llama", torch.float32, hidden, inner, layers, heads, key_heads, entries)
        return as_theirs(model, row)

    optimizer = _adamw(fused=True) if code.fused_optimizer else _adamw(foreach=True)
    return Job(stack, degrees, make, optimizer, rows=row["local_batch"], length=row["seq"])


def _megatron(row: Mapping[str, Any], layers: int) -> Job:
    """Their distributed optimizer shards its state alone, over bfloat16 weights and float32 gradients."""
    args, layout = row["args"], row["layout"]
    rows, length = args["micro-batch-size"], row["seq"]
    # As many ranks as there are batches, where there are fewer of these.
    world = min(row["gpus"], args["global-batch-size"] // rows * layout["tp"] * layout["pp"])
    config = {
        "zero_dp_strategy": 1,
        "grad_reduce_in_fp32": True,
        "preserve_fp32_weights": True,
        "loss_chunk_rows": rows * length if layout["tp"] > 1 else 0,
        "sequence_parallel": bool(args.get("sequence-parallel")) and layout["tp"] > 1,
    }
    sizes = MeshSizes(tp_size=layout["tp"], pp_size=layout["pp"])
    wrapper = None
    if layout["pp"] > 1:
        each = args.get("num-layers-per-virtual-pipeline-stage")
        schedule = "interleaved1f1b" if each else "1f1b"
        wrapper = {"pipeline": {"pp_schedule": schedule, "layers_per_stage": each, "pp_microbatch_size": rows}}
    stack, degrees = resolve("megatron_fsdp", sizes, world, config=config, wrapper_config=wrapper)
    hidden = args["hidden-size"]
    # Both have rotary positions here; Megatron's first has learned ones, of 0.03e9 parameters.
    kind = "llama" if args.get("swiglu") else "starcoder2"
    inner = args.get("ffn-hidden-size", 4 * hidden)
    heads = (args["num-attention-heads"], args["num-query-groups"])
    make = functools.partial(_model, kind, torch.bfloat16, hidden, inner, layers, *heads, vocabulary(row))
    if "kv-channels" in args:
        make.keywords["head_dim"] = args["kv-channels"]
    microbatches = args["global-batch-size"] // rows // degrees.dp
    return Job(stack, degrees, make, _adamw(), microbatches=microbatches, rows=rows, length=length)


def _adamw(**options: Any) -> Any:
    return optimizer_factory(OptimizerConfig(lr=1e-4, options=options))


def _model(
    kind: str,
    dtype: torch.dtype,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    key_heads: int,
    entries: int,
    **more: Any,
) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=entries,
        max_position_embeddings=1 << 19,
        tie_word_embeddings=False,
        **({"sliding_window": None} if kind == "starcoder2" else {}),
        **more,
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
