"""A training loop of your own over any strategy: torchrun --nproc-per-node 2 examples/training_loop.py"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import meshwright as mw

with mw.open_world() as world:  # the ranks that a launcher has started, or a world of one
    stack, degrees = mw.resolve("fsdp2", mw.MeshSizes(), world.size)
    mesh = mw.Mesh(degrees, world)
    manager = stack.build(mesh)
    torch.manual_seed(0)  # the same weights on any number of ranks
    config = AutoConfig.for_model("llama", vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    manager.parallelize(AutoModelForCausalLM.from_config(config))
    manager.build_optimizer(mw.optimizer_factory(mw.OptimizerConfig(lr=3e-3)))

    for step in range(10):
        first = torch.randint(0, 256, (8, 1), generator=torch.Generator().manual_seed(step))
        ids = ((first + torch.arange(64)) % 256)[mesh.data_rank :: mesh.data_size]  # this rank's rows of the batch
        batch = [{"input_ids": ids, "labels": ids}]  # its microbatches
        loss = manager.forward_backward(batch, num_tokens=manager.begin_step_sync(batch))
        norm = manager.clip_grad_norm(1.0)
        manager.optimizer_step()
        if world.rank == 0:
            print(f"step {step}  loss {loss.item():.4f}  norm {norm.item():.4f}")
