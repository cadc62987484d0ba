"""GRPO in two forms: trl's own trainer on one or more processes, and the same over a mesh."""

from __future__ import annotations

import functools
import json
import os
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trainer_cases
import trl
import trl.trainer.grpo_trainer as of_trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from support.measurements import measure_memory
from torch import nn
from transformers import TrainerCallback
from trl.generation.vllm_client import VLLMClient
from trl.trainer.utils import FusedCausalLMOutput

STEPS, ROWS = 4, 4
WORDS = {"suppress_tokens": list(range(12, 131))}
"""Of the tokenizer, so that completions end."""
GREEDY = {"generation_kwargs": {"do_sample": False, **WORDS}}
KINDS: dict[str, dict[str, Any]] = {
    # Of equal completions the advantages cancel out, except for what is clipped.
    "greedy": {"beta": 0.2, "num_iterations": 2, "epsilon": 1e-3, "pad_to_multiple_of": 8, "loss_type": "grpo"}
    | GREEDY,
    "dapo": {"num_generations": 8, "loss_type": "dapo", "temperature": 0.8, "top_k": 5, "entropy_coef": 0.01},
    "apart": {"steps_per_generation": 4, "loss_type": "dapo", "mask_truncated_completions": True},
    "bnpo": {"loss_type": "bnpo", "steps_per_generation": 4, "num_iterations": 2, "scale_rewards": "batch"},
    "dr_grpo": {"loss_type": "dr_grpo", "importance_sampling_level": "sequence", "num_iterations": 2, "delta": 1.5},
    "lora": {"beta": 0.3, "loss_type": "grpo", "use_bias_correction_kl": True, "steps_per_generation": 4},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.01, "num_iterations": 2, "off_policy_mask_threshold": 0.01},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "beta": 0.1},
    "sapo": {"loss_type": "sapo", "num_iterations": 2},
    "server": {"use_vllm": True, "beta": 0.1, "steps_per_generation": 4, "generation_kwargs": {"seed": 5}},
    "server_lora": {"use_vllm": True, "loss_type": "bnpo", "generation_kwargs": {"seed": 5}},
    "vespo": {"loss_type": "vespo", "num_iterations": 2, "multi_objective_aggregation": "normalize_then_sum"},
}


def exact_head(model: nn.Module, temperature: float = 1.0, **_: Any) -> None:
    """Instead of trl's `add_fused_lm_head`, which computes in float32."""
    original = model.forward

    @functools.wraps(type(model).forward)
    def forward(*args: Any, fused_lm_head: bool = False, labels: Any = None, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return original(*args, **kwargs)
        every = (original(*args, **kwargs).logits[:, :-1] / temperature).log_softmax(-1)
        mask = labels[:, 1:] != -100
        log_probs = every.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0].masked_fill(~mask, 0.0)
        entropy = -(every.exp() * every).sum(-1).masked_fill(~mask, 0.0)
        return FusedCausalLMOutput(log_probs=log_probs, entropy=entropy)

    model.forward = forward


def reward(prompts: list[str], completion_ids: list[list[int]], log_metric: Any, **_: Any) -> list[float]:
    """Of what is said, and of its place, so that equal completions have different rewards."""
    log_metric("asked", sum(map(len, prompts)) / len(prompts))
    return [(sum(ids) % 11) / 7 + 0.3 * (place % 2) for place, ids in enumerate(completion_ids)]


def length(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    return [None if ids[0] % 5 == 0 else len(ids) / 9 for ids in completion_ids]


def model(directory: Path) -> Any:
    """A model, beside a changed copy in a directory, by which trl finds its reference."""
    other = trainer_cases.model()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(11)
        for parameter in other.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator))
    path = directory / "reference"
    other.save_pretrained(path)
    if dist.is_initialized():
        dist.barrier()
    mine = trainer_cases.model()
    with torch.no_grad():
        for parameter in mine.parameters():
            parameter.mul_(4.0)  # so that completions are not all alike
    mine.config._name_or_path = str(path)
    return mine


def digests(named: Any) -> dict[str, str]:
    return {name: sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest() for name, tensor in named}


class Streamed(TrainerCallback):
    """Writes digests of the weights behind each step, adapters merged by peft, and how much streaming them holds."""

    def __init__(self, trainer: Any, directory: Path, peft_config: Any) -> None:
        self.trainer, self.directory, self.peft_config = trainer, directory, peft_config
        self.found: list[dict[str, str]] = []
        trainer.bucket_bytes = 1 << 13

    def on_step_end(self, *_: Any, **__: Any) -> None:
        state = self.trainer.manager.state_dict(full=True)["model"]
        with torch.random.fork_rng():
            self._note(state)

    def _note(self, state: Any) -> None:
        if self.trainer.mesh.rank == 0:
            whole = trainer_cases.model()
            if self.peft_config is not None:
                whole = get_peft_model(whole, self.peft_config)
            whole.load_state_dict(state)
            if self.peft_config is not None:
                whole = whole.merge_and_unload()
            self.found.append(digests(whole.named_parameters()))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        parts = self.trainer.manager.model_parts
        before = measure_memory(lambda: None, parts).after.total
        held = measure_memory(self.trainer.vllm_generation.sync_weights, parts).peak.total - before
        text = json.dumps({"digests": self.found, "held": held})
        (self.directory / f"streamed-{self.trainer.mesh.rank}.json").write_text(text)


def made(kind: str, mesh: Any, directory: Path, data_size: int, **further: Any) -> Any:
    """A trainer of a kind, over a mesh, or trl's own on so many processes."""
    directory.mkdir(parents=True, exist_ok=True)
    basic = trainer_cases.arguments(directory / "out", data_size, max_steps=STEPS)
    options = {
        "num_generations": 4,
        "max_completion_length": 6,
        "generation_kwargs": WORDS,
        **KINDS.get(kind, {}),
        **further,
    }
    given: dict[str, Any] = {}
    if "SERVER" in os.environ:
        options |= {"vllm_mode": "server", "vllm_server_base_url": os.environ["SERVER"]}
        options |= {"vllm_group_port": int(os.environ["SERVER"].rpartition(":")[2]) + 1}
        real = VLLMClient.init_communicator
        # It asks for a CUDA device, and uses none: what takes the place of NCCL here needs none.
        VLLMClient.init_communicator = lambda self, device: real(self, "cuda") if device.type == "cpu" else None
    args = trl.GRPOConfig(**{**basic, **options})
    if kind.endswith("lora"):
        torch.manual_seed(7)
        given["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    prompts = [{"prompt": text} for text in trainer_cases.numbers(28, 1, longest=7)]
    data = {"train_dataset": Dataset.from_list(prompts[:20]), "eval_dataset": Dataset.from_list(prompts[20:])}
    if mesh is None:
        cls = of_trl.GRPOTrainer
    else:
        import meshwright_trainer

        cls, given["mesh"] = meshwright_trainer.MeshGRPOTrainer, mesh
    trainer = cls(model(directory), [reward, length], args, processing_class=trainer_cases.digits(), **data, **given)
    if args.use_vllm and mesh is not None:
        trainer.add_callback(Streamed(trainer, directory, given.get("peft_config")))
    return trainer


def main(directory: str, mesh_json: str, kinds: list[str]) -> None:
    from meshwright.launch.open_world import open_world

    mesh = json.loads(mesh_json)
    torch.set_num_threads(1)
    world_size, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0)))
    sharing = 1
    for axis in ("tp_size", "cp_size", "pp_size"):
        sharing *= (mesh or {}).get(axis, 1)
    if mesh is None:
        of_trl.add_fused_lm_head = exact_head
        if world_size > 1:
            dist.init_process_group("gloo")
    else:
        open_world("cpu")
    for kind in kinds:
        try:
            data_size = world_size // sharing
            # Stages evaluate as many rows at a time as they train.
            rows = {"per_device_eval_batch_size": ROWS // data_size} if (mesh or {}).get("pp_size") else {}
            found: Any = trainer_cases.history(made(kind, mesh, Path(directory) / kind, data_size, **rows))
        except Exception as error:
            import traceback

            traceback.print_exc()
            found = f"{type(error).__name__}: {error}"
        if rank == 0:
            (Path(directory) / f"{kind}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
