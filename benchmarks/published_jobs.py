"""The jobs of published runs, as far as this project can do the same: torchtitan's and Megatron-LM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from published_automodel import automodel_job, is_automodel, left_out_of_automodel, shape_of
from published_code import as_megatron, as_theirs, code_of
from torch import nn

from meshwright.mesh.sizes import MeshSizes
from meshwright.optim.build import optimizer_factory
from meshwright.optim.config import OptimizerConfig
from meshwright.strategy.stack import resolve
from meshwright_plan.trace import TrainingJob

LLAMA = {"llama3-8b": (4096, 14336, 32, 32, 8, 128256), "llama3-70b": (8192, 28672, 80, 64, 8, 128256)}
LLAMA |= {"llama3.1-8b": LLAMA["llama3-8b"], "llama3.1-70b": LLAMA["llama3-70b"]}
LLAMA |= {"llama3.1-405b": (16384, 53248, 126, 128, 8, 128256)}
LLAMA |= {"llama2-13b": (5120, 13824, 40, 40, 40, 32000), "llama2-70b": (8192, 28672, 80, 64, 8, 32000)}
"""Hidden and intermediate size, blocks, heads, heads of keys, vocabulary: from the models' cards."""

DEVICES = {"H100 SXM HBM2e": "h100-96gb", "H100 94GB": "h100-96gb", "H200": "h200", "A100 80GB": "a100-80gb"}
DEVICES |= {"dev_dgx_h100": "h100-80gb", "dev_dgx_a100": "a100-80gb", "dev_dgx_gb200": "b200"}
DEVICES |= {"lts_dgx_a100": "a100-80gb", "lts_dgx_h100": "h100-80gb", "DGX-H100": "h100-80gb"}
CHECKPOINTING = {"none": False, "full": "full", "selective_op": "selective", "selective_layer": False}
VOCABULARIES = {"GPTSentencePieceTokenizer": 256000, "Llama2Tokenizer": 32000}
"""Of Megatron rows that name a tokenizer alone: the first's file, nemotron_2_256k.model, tells in its name."""
GPT2_VOCABULARY = 50304
"""Where a Megatron row names none: GPT-2's, a multiple of 128; chosen by what the one such row holds."""
BATCH_AT_FIRST = 384
"""Of Megatron's gpt3_15b: the first of its step-batch-size-schedule, in the run's file."""
GPUS = {"gpt3_15b_8t_release": 256, "gpt3_15b_8t_release_sm": 256}
"""Not published: of the numbers that divide the batch the nearest to both the time of a step and what is held between
steps: 128 would need 790 TFLOP/s of an H100, and 384 would hold still less than is reported."""


def is_megatron(row: Mapping[str, Any]) -> bool:
    return "args" in row


def left_out(row: Mapping[str, Any]) -> str | None:
    """Why a row is not planned."""
    if is_megatron(row):
        if "num-experts" in row["args"]:
            return "experts: no strategy here divides experts and holds all else whole, as their optimizer does"
        if row["layout"]["tp"] > 1 and row["layout"]["pp"] > 1:
            return "tp and pp: no strategy here has both and holds weights whole, as their optimizer does"
        return None if gpus(row) else "number of GPUs not published"
    return left_out_of_automodel(row) if is_automodel(row) else None


def depth(row: Mapping[str, Any]) -> int:
    """Blocks of the model of a row."""
    if is_automodel(row):
        return int(shape_of(row)["num_hidden_layers"])
    return int(row["args"]["num-layers"]) if is_megatron(row) else LLAMA[row["model"]][2]


def blocks(row: Mapping[str, Any]) -> int:
    """As many as if all stages of a pipeline had what the largest has."""
    stages = row["layout"]["pp"]
    return -(-depth(row) // stages) * stages


def traced_depths(row: Mapping[str, Any]) -> tuple[int, ...]:
    """Blocks of the models that are traced: all where they are not many, else two numbers to resume from."""
    stages = row["layout"]["pp"]
    chunks = depth(row) if "num-layers-per-virtual-pipeline-stage" in row.get("args", {}) else stages
    few = 2 * chunks if stages > 1 else 8 if is_megatron(row) or is_automodel(row) else 40
    if depth(row) <= few:
        return (depth(row),)
    if is_automodel(row) and stages == 1:
        return (2, 4)
    return (4, 8) if stages == 1 else (stages, 2 * stages)


def gpus(row: Mapping[str, Any]) -> int | None:
    """Of a row, or as it is inferred."""
    return row.get("gpus") or GPUS.get(row["model"])


def vocabulary(row: Mapping[str, Any]) -> int:
    if is_automodel(row):
        return int(shape_of(row)["vocab_size"])
    if not is_megatron(row):
        return LLAMA[row["model"]][-1]
    # Megatron pads to a multiple of 128 on each rank.
    unit, args = 128 * row["layout"]["tp"], row["args"]
    named = VOCABULARIES.get(args.get("tokenizer-type"), GPT2_VOCABULARY)
    return -(-int(args.get("vocab-size", named)) // unit) * unit


def job_of(row: Mapping[str, Any], layers: int) -> TrainingJob:
    """The job of a row, for a model with so many blocks."""
    if is_automodel(row):
        return automodel_job(row, layers)
    return _megatron(row, layers) if is_megatron(row) else _torchtitan(row, layers)


def _torchtitan(row: Mapping[str, Any], layers: int) -> TrainingJob:
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
        model = model_of("llama", torch.float32, hidden, inner, layers, heads, key_heads, entries)
        return as_theirs(model, row)

    optimizer = adamw(fused=True) if code.fused_optimizer else adamw(foreach=True)
    return TrainingJob(stack, degrees, make, optimizer, micro_batch_size=row["local_batch"], seq_len=row["seq"])


def _megatron(row: Mapping[str, Any], layers: int) -> TrainingJob:
    """Their distributed optimizer shards its state alone, over bfloat16 weights and float32 gradients.

    `ddp` has it, too, and runs in pipelines; with tensor parallelism, ZeRO 1 of `megatron_fsdp` does.
    """
    args, layout = row["args"], row["layout"]
    rows, length, tp = args["micro-batch-size"], row["seq"], layout["tp"]
    batch = args.get("global-batch-size", BATCH_AT_FIRST)
    # As many ranks as there are batches, where there are fewer of these.
    world = min(gpus(row) or 0, batch // rows * tp * layout["pp"])
    config: dict[str, Any] = {"grad_reduce_in_fp32": True, "loss_chunk_rows": rows * length if tp > 1 else 0}
    if tp > 1:
        sequence = bool(args.get("sequence-parallel"))
        config |= {"zero_dp_strategy": 1, "preserve_fp32_weights": True, "sequence_parallel": sequence}
    else:
        config |= {"engine": "bucketed", "use_distributed_optimizer": True}
        config |= {"overlap_grad_reduce": True, "overlap_param_gather": True}
    wrapper = None
    if layout["pp"] > 1:
        each = args.get("num-layers-per-virtual-pipeline-stage")
        schedule = "interleaved1f1b" if each else "1f1b"
        wrapper = {"pipeline": {"pp_schedule": schedule, "layers_per_stage": each, "pp_microbatch_size": rows}}
    sizes = MeshSizes(tp_size=tp, pp_size=layout["pp"])
    name = "megatron_fsdp" if tp > 1 else "ddp"
    stack, degrees = resolve(name, sizes, world, config=config, wrapper_config=wrapper)
    kind = "llama" if args.get("swiglu") else "starcoder2"
    inner = args.get("ffn-hidden-size", 4 * args["hidden-size"])
    shape = (args["hidden-size"], inner, layers, args["num-attention-heads"], args["num-query-groups"])
    more = {"head_dim": args["kv-channels"]} if "kv-channels" in args else {}

    def make() -> nn.Module:
        return as_megatron(model_of(kind, torch.bfloat16, *shape, vocabulary(row), **more), row)

    microbatches = batch // rows // degrees.dp
    if layout["pp"] > 1:
        rows, microbatches = rows * microbatches, 1
    return TrainingJob(
        stack, degrees, make, adamw(fused=True), num_microbatches=microbatches, micro_batch_size=rows, seq_len=length
    )


def adamw(**options: Any) -> Any:
    return optimizer_factory(OptimizerConfig(lr=1e-4, options=options))


def model_of(
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
