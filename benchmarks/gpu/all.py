"""Measure what a GPU shows of meshwright, part by part, in eight minutes of one H100 or H200.

    python benchmarks/gpu/all.py --out gpu            # all parts, ordered by worth; gpu/gpu.json has the results
    python benchmarks/gpu/all.py --out gpu plan long  # some
    python benchmarks/gpu/all.py --list

Each part runs in processes of its own under a limit; `gpu.json` is written again after each, and lists the parts that
were not reached. `--device cpu` goes through every part with tiny sizes, where there is no GPU, and proves no claim.
docs/reference/proofs/gpu.md is made from the results (`python tools/generated_pages.py`).
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from runner import Part, Report, Runner

HERE = Path("benchmarks/gpu")
PYTHON = sys.executable
CLI = [PYTHON, "-m", "meshwright"]
BIG = str(HERE / "big.yaml")
BF16 = "strategy_config={mp_policy: {param_dtype: bfloat16, reduce_dtype: float32}}"
LAST_STEP = r"^step (\d+)/\1 .*held-out"
"""What a run prints with its last step."""
TINY = (
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "model.num_hidden_layers=2",
    "model.vocab_size=2048",
    "data.seq_len=128",
    "steps=3",
    "plan.device=cpu",
)
RECOMPUTE = "strategy_config.activation_checkpointing="
COMPILE = "strategy_config.enable_compile=true"
WHOLE_LOGITS = "strategy_config.loss_chunk_rows=0"
TWO_RANKS = [PYTHON, str(HERE / "ranks.py"), "--ranks", "2", "--"]


def parts(device: str) -> list[Part]:
    """All parts, ordered by worth."""
    on_cpu = device == "cpu"

    def train(file: str, *sets: str) -> list[str]:
        words = [f"device={device}", *sets, "output_dir={run}", "overwrite=true"]
        return [*CLI, "train", file, *(word for each in words for word in ("--set", each))]

    def small(*sets: str) -> list[str]:
        steps = ("steps=3", "schedule.warmup_steps=1", "batch_size=4", "plan.device=cpu") if on_cpu else ("steps=40",)
        return train("examples/stdlib.yaml", *steps, "eval.every=null", "sample=null", "nproc=1", *sets)

    def big(*sets: str) -> list[str]:
        return train(BIG, *sets, *(TINY if on_cpu else ()))

    def throughput(*words: str) -> list[str]:
        # Contestants by hand are compiled for long on a CPU, and show nothing there.
        size = ["--size", "tiny", *([] if "--contestants" in words else ["--contestants", "ours"])] if on_cpu else []
        command = [PYTHON, str(HERE / "throughput.py"), "--out", "{json}", "--device", device, "--rounds", "1"]
        return [*command, *size, *words]

    def cells(ranks: int, seconds: int) -> list[str]:
        command = [
            PYTHON,
            "tests/gpu/conformance_cells.py",
            "--ranks",
            str(ranks),
            "--out",
            "{json}",
            "--device",
            device,
        ]
        return [*command, "--seconds", str(8 if on_cpu else seconds), *(["--most", "3"] if on_cpu else [])]

    def calibrate(file: str) -> list[str]:
        if not on_cpu:
            return [*CLI, "plan", "--calibrate", file]
        budget = (
            "MeasurementBudget(window_seconds=0.005, num_windows=2, num_passes=1, matmul_sizes=(128,), max_width=256, "
            "attention_seq_len=64, stream_bytes=1 << 20, message_bytes=(1024,))"
        )
        code = "from meshwright_plan.calibration.calibrate import calibrate_to_file; import sys; "
        code += f"from meshwright_plan.calibration.measure import MeasurementBudget; budget = {budget}; "
        return [PYTHON, "-c", f"{code}sys.exit(calibrate_to_file(sys.argv[1], ranks=1, effort=effort))", file]

    device_file = "{out}/device.yaml"
    return [
        Part(
            "about",
            "`train` uses expandable segments; the GPU reaches its matmul throughput",
            "reference/plan.md",
            30,
            {"machine": [PYTHON, str(HERE / "about.py"), "--out", "{json}", "--device", device]},
        ),
        Part(
            "smoke",
            "every strategy trains in bfloat16",
            "guides/pretrain.md",
            100,
            {
                "fsdp2": small(BF16),
                "ddp": small("strategy=ddp", "strategy_config={}", "model.dtype=bfloat16"),
                "megatron_fsdp": small("strategy=megatron_fsdp", "strategy_config={}", "model.dtype=bfloat16"),
                "fsdp2 compiled": small(BF16, COMPILE),
            },
        ),
        Part(
            "plan",
            "planned memory and time match the GPU",
            "reference/plan.md",
            170,
            {
                "selective": big("model.num_hidden_layers=8", f"{RECOMPUTE}selective"),
                "none": big(f"{RECOMPUTE}false"),
                "full": big(f"{RECOMPUTE}full"),
                "budget": big(f"{RECOMPUTE}{{budget_gb: 2}}"),
                "whole logits": big(f"{RECOMPUTE}selective", WHOLE_LOGITS),
                "compiled": big(f"{RECOMPUTE}selective", COMPILE),
            },
            until=LAST_STEP,
        ),
        Part(
            "nccl",
            "two ranks over NCCL give the results of one",
            "reference/proofs/coverage.md",
            80,
            {"cells": cells(2, 50)},
        ),
        Part(
            "pipeline",
            "a pipeline trains over NCCL",
            "concepts/pipelines.md",
            60,
            {"1f1b": [*TWO_RANKS, *small("pp_size=2", BF16)]},
        ),
        Part(
            "long",
            "a model of 8B widths trains on 32k tokens",
            "reference/proofs/performance.md",
            60,
            {
                "32k": big(
                    f"{RECOMPUTE}full",
                    "data.seq_len=32768",
                    "data.eval_fraction=0.5",
                    "batch_size=1",
                    "micro_batch_size=1",
                )
            },
            until=LAST_STEP,
        ),
        Part(
            "calibrate",
            "`plan --calibrate` measures this card, and a plan by its file tells seconds",
            "reference/plan.md",
            100,
            {
                "measure": calibrate(device_file),
                "run": big(f"{RECOMPUTE}selective", f"plan.device={device_file}"),
            },
            until=LAST_STEP,
        ),
        Part(
            "host",
            "tiny steps take no more of the host than by hand",
            "reference/proofs/performance.md",
            90,
            {
                "eager": throughput(*([] if on_cpu else ["--size", "host"]), "--mode", "none"),
                "compiled": throughput(*([] if on_cpu else ["--size", "host"]), "--mode", "none", "--compiled"),
            },
        ),
        Part(
            "throughput",
            "ours is as fast as torch by hand",
            "reference/proofs/performance.md",
            200,
            {
                "4k selective": throughput("--mode", "selective"),
                "8k full, compiled": throughput("--mode", "full", "--compiled", "--seq", "8192"),
                "32k full": throughput("--mode", "full", "--seq", "32768"),
                "4k budget": throughput("--mode", "budget", "--contestants", "ours"),
            },
        ),
        Part(
            "offload",
            "shards, gradients and optimizer state in pinned host memory",
            "reference/proofs/performance.md",
            60,
            {
                "pinned": big(
                    f"strategy_config.offload_policy={{pin_memory: {'false' if on_cpu else 'true'}}}", "steps=3"
                )
            },
            until=LAST_STEP,
        ),
        Part(
            "profile",
            "a profile has the device's times, and a snapshot of its memory",
            "reference/profiles.md",
            60,
            {"profile": small(BF16, "profile={steps: [2, 3], memory: true}")},
        ),
        Part(
            "lora",
            "an adapter on an 8B base",
            "guides/fine-tune.md",
            70,
            {"lora": [PYTHON, str(HERE / "lora.py"), "--out", "{json}", "--device", device]},
        ),
        Part(
            "context",
            "context parallelism runs torch's fused kernels, with the losses of one rank",
            "guides/long-context.md",
            90,
            {
                "one rank": small(BF16, "data.seq_len=1024", "model.max_position_embeddings=1024"),
                "allgather": [
                    *TWO_RANKS,
                    *small(BF16, "cp_size=2", "data.seq_len=1024", "model.max_position_embeddings=1024"),
                ],
                "ulysses": [
                    *TWO_RANKS,
                    *small(
                        BF16,
                        "cp_size=2",
                        "strategy_config.cp_attention=ulysses",
                        "data.seq_len=1024",
                        "model.max_position_embeddings=1024",
                    ),
                ],
            },
        ),
        Part(
            "watchdog",
            "the watchdog and events.jsonl work beside CUDA",
            "reference/watchdog.md",
            40,
            {"watched": small(BF16, "watchdog_s=10")},
        ),
        Part(
            "cells",
            "one rank computes what `single` does",
            "reference/proofs/coverage.md",
            40 if on_cpu else 100,
            {"cells": cells(1, 80)},
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="directory of the results; default: %(default)s")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--budget-s", type=float, default=480, help="seconds for all parts; default: %(default)s")
    parser.add_argument("--list", action="store_true", help="name the parts, and end")
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all")
    options = parser.parse_args(arguments)
    every = {part.name: part for part in parts(options.device)}
    if options.list:
        print("\n".join(f"{part.name:<11} {part.limit_s:>4} s  {part.claim}" for part in every.values()))
        return 0
    unknown = [name for name in options.parts if name not in every]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; parts: {', '.join(every)}")
    chosen = [every[name] for name in options.parts or every]
    about: Report = {
        "command": f"python benchmarks/gpu/all.py --device {options.device}",
        "date": datetime.date.today().isoformat(),
        "device": options.device,
    }
    report = Runner(options.out.absolute(), options.budget_s, about).run(chosen)
    states = [each["status"] for each in report["parts"].values()]
    print(f"results: {options.out / 'gpu.json'}. Send it to us with a pull request or an issue.")
    return 1 if any(state.startswith("failed") for state in states) else 0


if __name__ == "__main__":
    sys.exit(main())
