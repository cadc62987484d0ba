"""Train twenty small models under all strategies and layouts, and compare losses, norms and weights bit for bit.

    python tests/golden/compare_golden.py [--only NAME ...] [--record]

`recorded.json` holds, for each run, the loss and gradient norm of every step as `float.hex()` and a SHA-256 of the full
weights after the last step. A change that reorders floating-point operations shows here, although every parity test
passes. The bits depend on the CPU and on the versions of torch and transformers: record them anew before a change on
another machine. Exits 1 on a difference.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

import meshwright as mw
from meshwright_testing import pool

RECORDED = Path(__file__).parent / "recorded.json"
IGNORED = -100
TEXT = (
    "the a one some each no old new small large red blue quick slow first last tree river stone road house door bird "
    "horse farmer child teacher sees finds takes opens follows paints builds and or but near under over with without"
)
WORDS = TEXT.split()
VOCAB, SEQ_LEN, ROWS = 96, 16, 12
_NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 44, "max_position_embeddings": 64}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"moe_intermediate_size": 20, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "num_hidden_layers": 4},
    "qwen3_moe": {**SIZES, **EXPERTS, "num_hidden_layers": 2},
    "gpt2": {"vocab_size": VOCAB, "n_embd": 30, "n_layer": 3, "n_head": 5, "n_positions": 64}
    | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        config: options of the strategy.
        sizes: fields of `meshwright.MeshSizes`.
        wrapper: options of the pipeline.
        microbatches: number of microbatches of each rank in a step.
        shares: rows of each data-parallel rank; None: equal shares.
        data: "words" (next words), "packed" (two documents in a row, with position ids) or "pairs" (for DPO).
    """

    strategy: str
    ranks: int = 2
    config: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    wrapper: Mapping[str, Any] | None = None
    model: str = "llama"
    dtype: str = "float32"
    steps: int = 4
    microbatches: int = 1
    shares: tuple[int, ...] | None = None
    data: str = "words"
    objective: Mapping[str, Any] | None = None
    adapter: bool = False
    frozen: str | None = None


ZERO1 = {"engine": "bucketed", "use_distributed_optimizer": True}
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}
RUNS: dict[str, Run | None] = {
    "single": Run("single", 1, microbatches=2, steps=6),
    "single-float64-gpt2": Run("single", 1, model="gpt2", dtype="float64", frozen="transformer.h.1."),
    "single-packed": Run("single", 1, data="packed"),
    "ddp-torch-accumulated": Run("ddp", microbatches=3, config={"gradient_as_bucket_view": True}),
    "ddp-bucketed-uneven": Run("ddp", 4, {"engine": "bucketed"}, shares=(4, 2, 1, 5), model="gpt2"),
    "ddp-distributed-optimizer": Run("ddp", 2, ZERO1 | OVERLAPPED, microbatches=3),
    "fsdp2-uneven": Run("fsdp2", 2, shares=(5, 7), microbatches=2, config={"reduce_dtype": "float64"}, steps=5),
    "fsdp2-bfloat16": Run("fsdp2", 2, {"reduce_dtype": "float32"}, dtype="bfloat16"),
    "fsdp2-hsdp-packed": Run("fsdp2", 4, sizes={"dp_replicate_size": 2}, data="packed"),
    "fsdp2-tp-adapter": Run("fsdp2", 2, sizes={"tp_size": 2}, adapter=True),
    "fsdp2-tp-sequence": Run("fsdp2", 2, {"sequence_parallel": True}, {"tp_size": 2}),
    "fsdp2-cp-float64": Run("fsdp2", 4, sizes={"cp_size": 2}, dtype="float64"),
    "fsdp2-ep": Run("fsdp2", 2, sizes={"ep_size": 2}, model="qwen3_moe", microbatches=2),
    "fsdp2-dpo": Run("fsdp2", 2, data="pairs", objective={"name": "dpo", "beta": 0.3, "rpo_alpha": 0.5}),
    "megatron-fsdp-zero3": Run("megatron_fsdp", 2, {"zero_dp_strategy": 3}, microbatches=2),
    "megatron-fsdp-zero1-adapter": Run("megatron_fsdp", 2, {"zero_dp_strategy": 1}, adapter=True),
    "pipeline-1f1b": Run("single", 2, sizes={"pp_size": 2}, wrapper={"pp_microbatch_size": 3}),
    "pipeline-interleaved-ddp": Run(
        "ddp", 4, ZERO1, {"pp_size": 2}, wrapper={"pp_schedule": "interleaved1f1b", "pp_microbatch_size": 2}
    ),
    "pipeline-zero-bubble-fsdp2": Run(
        "fsdp2", 4, {}, {"pp_size": 2}, wrapper={"pp_schedule": "zbvzerobubble", "pp_microbatch_size": 2}
    ),
    # `meshwright train`; see `train_file`.
    "run-file": None,
}


# -- data


def sentences(step: int, rows: int) -> Tensor:
    """Ids of words that follow from each other with some noise, (rows, SEQ_LEN)."""
    draw = torch.Generator().manual_seed(500 + step)
    start = torch.randint(len(WORDS), (rows, 1), generator=draw)
    stride = torch.randint(1, 4, (rows, 1), generator=draw)
    noise = torch.randint(0, 2, (rows, SEQ_LEN), generator=draw)
    return (start + stride * torch.arange(SEQ_LEN) + noise) % len(WORDS)


def global_batch(run: Run, step: int) -> dict[str, Tensor]:
    """Columns of one step, over all ranks."""
    ids = sentences(step, ROWS)
    labels = ids.clone()
    # Rows count different numbers of tokens.
    labels[torch.arange(SEQ_LEN) < torch.arange(ROWS)[:, None] % 7] = IGNORED
    batch = {"input_ids": ids, "labels": labels}
    if run.data == "packed":
        positions = torch.arange(SEQ_LEN).expand(ROWS, -1)
        second = 5 + torch.arange(ROWS)[:, None] % 6
        batch["position_ids"] = torch.where(positions < second, positions, positions - second)
    if run.data == "pairs":
        # Chosen and rejected share the first half.
        ids[1::2, : SEQ_LEN // 2] = ids[0::2, : SEQ_LEN // 2]
        batch["labels"] = ids.masked_fill(torch.arange(SEQ_LEN) < SEQ_LEN // 2, IGNORED)
        batch["reference_log_probs"] = -3.0 - ids.double() / 50
    return batch


def microbatches(run: Run, step: int, mesh: mw.Mesh) -> list[dict[str, Tensor]]:
    """The share of one data-parallel rank."""
    shares = run.shares or (ROWS // mesh.data_size,) * mesh.data_size
    start = sum(shares[: mesh.data_rank])
    batch = {name: each[start : start + shares[mesh.data_rank]] for name, each in global_batch(run, step).items()}
    parts = {name: each.tensor_split(run.microbatches) for name, each in batch.items()}
    return [{name: each[index] for name, each in parts.items()} for index in range(run.microbatches)]


# -- training


def build_model(run: Run) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(run.model, **MODELS[run.model], **_NO_TOKENS)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, run.dtype))
    if run.adapter:
        from peft import LoraConfig, get_peft_model

        options = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")
        model = get_peft_model(model, options)
    for name, parameter in model.named_parameters():
        if run.frozen is not None and run.frozen in name:
            parameter.requires_grad_(False)
    return model


def train(run: Run) -> dict[str, Any]:
    """The task of one rank."""
    with mw.open_world("cpu") as world:
        wrapper = None if run.wrapper is None else {"pipeline": run.wrapper}
        sizes = mw.MeshSizes(**run.sizes)
        stack, degrees = mw.resolve(run.strategy, sizes, world.size, config=run.config, wrapper_config=wrapper)
        mesh = mw.Mesh(degrees, world)
        manager = stack.build(mesh)
        manager.parallelize(build_model(run))
        manager.build_optimizer(mw.optimizer_factory(mw.OptimizerConfig(lr=1e-2, weight_decay=0.1)))
        objective = None if run.objective is None else mw.get_objective(run.objective)
        losses, norms = [], []
        for step in range(run.steps):
            batches = microbatches(run, step, mesh)
            count = mw.count_tokens(batches, mesh, objective)
            losses.append(float(manager.forward_backward(batches, num_tokens=count, objective=objective)).hex())
            norms.append(float(manager.clip_grad_norm(1.0)).hex())
            manager.optimizer_step()
        state = manager.state_dict(full=True)["model"]
        return {"losses": losses, "norms": norms, "weights": digest(state)}


def digest(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of names and bits."""
    found = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def train_file() -> dict[str, Any]:
    """`meshwright train` with a schedule, decay, an average of the weights, evaluations and a tokenizer of its own."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for part in range(3):
            lines = [" ".join(WORDS[i] for i in row) + "." for row in sentences(part, 24).tolist()]
            (folder / f"{part}.txt").write_text("\n".join(lines), encoding="utf-8")
        values: dict[str, Any] = {"strategy": "fsdp2", "strategy_config": {"reduce_dtype": "float64"}, "nproc": 2}
        values |= {"threads_per_rank": 1, "device": "cpu", "output_dir": str(folder / "out"), "sample": None}
        values["model"] = {"model_type": "llama"} | {k: v for k, v in MODELS["llama"].items() if k != "vocab_size"}
        values["data"] = {"corpus": str(folder / "*.txt"), "cache_dir": str(folder / "cache")}
        values["data"] |= {"vocab_size": 300, "seq_len": 16, "eval_fraction": 0.2}
        values |= {"steps": 6, "batch_size": 4, "micro_batch_size": 2, "eval": {"every": 3, "max_sequences": 4}}
        values["optimizer"] = {"lr": 1e-2, "weight_decay": 0.1, "no_decay": ["*norm.weight", "*.0.*"]}
        values |= {"schedule": {"name": "cosine", "warmup_steps": 2}, "ema": {"decay": 0.8}, "plan": {"enabled": False}}
        path = folder / "run.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        command = [sys.executable, "-m", "meshwright", "train", str(path)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        if result.returncode != 0:
            raise RuntimeError(f"meshwright train failed:\n{result.stdout}{result.stderr}")
        lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
        # The trained weights and their average.
        files = (folder / "out").glob("model*/*.safetensors")
        weights = {f"{file.parent.name}/{k}": v for file in files for k, v in load_file(file).items()}

        def column(key: str) -> list[str]:
            return [float(line[key]).hex() for line in lines if key in line]

        return {
            "losses": column("loss"),
            "norms": column("grad_norm"),
            "rates": column("learning_rate"),
            "evaluated": [v.hex() for line in lines for _, v in sorted(line.get("evaluations", {}).items())],
            "weights": digest(weights),
        }


def outcome(run: Run | None) -> dict[str, Any]:
    if run is None:
        return train_file()
    found = pool(run.ranks).run(train, run)
    for rank, other in enumerate(found):
        if other["losses"] != found[0]["losses"] or other["norms"] != found[0]["norms"]:
            raise RuntimeError(f"rank {rank} reports other losses or norms than rank 0")
    return found[0]


def differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """What differs, one line each."""
    lines = []
    for key in (key for key in expected if found[key] != expected[key]):
        pairs = zip(found[key], expected[key], strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), 0) if isinstance(found[key], list) else None
        lines.append(key if first is None else f"{key}, step {first}: {found[key][first]}, not {expected[key][first]}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=RUNS, metavar="NAME", help="a run; may be given repeatedly")
    parser.add_argument("--record", action="store_true", help="write what is found to recorded.json")
    given = parser.parse_args()
    os.environ["PYTHONWARNINGS"] = "ignore"
    torch.set_num_threads(1)
    recorded: dict[str, Any] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    failed = False
    for name in given.only or RUNS:
        found = outcome(RUNS[name])
        if given.record:
            recorded[name] = found
            kept = {each: recorded[each] for each in RUNS if each in recorded}
            RECORDED.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            print(f"{name}: recorded", flush=True)
            continue
        lines = differences(found, recorded[name]) if name in recorded else ["not recorded"]
        failed = failed or bool(lines)
        print(f"{name}: {'different: ' + '; '.join(lines) if lines else 'same'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
