"""A loop by hand that knows no launcher: whoever starts it, it prints the losses of a small model, with all digits."""

from __future__ import annotations

import os

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import meshwright as mw

STEPS = 4
ROWS, TOKENS, VOCABULARY = 2, 16, 64


def train() -> list[float]:
    """The losses of STEPS steps of fsdp2 over all ranks there are, in float64."""
    torch.set_num_threads(1)
    with mw.open_world("cpu", timeout_s=120) as world:
        stack, degrees = mw.resolve("fsdp2", mw.MeshSizes(), world.size, config={"reduce_dtype": "float64"})
        mesh = mw.Mesh(degrees, world)
        manager = stack.build(mesh)
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = AutoConfig.for_model("llama", vocab_size=VOCABULARY, num_key_value_heads=1, **sizes)
        manager.parallelize(AutoModelForCausalLM.from_config(config, dtype=torch.float64))
        manager.build_optimizer(mw.optimizer_factory(mw.OptimizerConfig(lr=1e-2)))
        losses = []
        for step in range(STEPS):
            draw = torch.Generator().manual_seed(step * mesh.data_size + mesh.data_rank)
            ids_BS = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=draw)
            batch = [{"input_ids": ids_BS, "labels": ids_BS}]
            losses.append(manager.forward_backward(batch, num_tokens=manager.begin_step_sync(batch)).item())
            manager.clip_grad_norm(1.0)
            manager.optimizer_step()
        return losses


def report() -> None:
    found = " ".join(format(loss, ".17g") for loss in train())
    place = " ".join(os.environ.get(name, "-") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    os.write(1, f"ranks {place} losses {found}\n".encode())


if __name__ == "__main__":
    report()
