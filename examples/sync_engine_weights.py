"""Feed an engine with the weights after each step: torchrun --nproc-per-node 2 examples/sync_engine_weights.py"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import meshwright as mw


def update_engine_weights(engine, manager):
    """Copy each parameter into its place, as `load_weights` of an engine does."""
    places = dict(engine.named_parameters())
    for name, tensor in manager.iter_parameters(bucket_bytes=64 << 20, dtype=torch.bfloat16):
        places[name].data.copy_(tensor)
        del tensor  # before the next one is made


torch.manual_seed(0)
with mw.open_world() as world:
    stack, degrees = mw.resolve("fsdp2", mw.MeshSizes(), world.size)
    manager = stack.build(mw.Mesh(degrees, world))
    config = AutoConfig.for_model("llama", vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    manager.parallelize(AutoModelForCausalLM.from_config(config))
    manager.build_optimizer(mw.optimizer_factory(mw.OptimizerConfig(lr=1e-2)))

    # Instead of an engine: a model in bfloat16 of its own on each rank.
    engine = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(world.device).eval()
    text = torch.arange(32, device=world.device).repeat(4, 1)  # to count upwards
    for step in range(20):
        batch = [{"input_ids": text, "labels": text}]
        manager.read_scalars(manager.forward_backward(batch, num_tokens=manager.begin_step_sync(batch)))
        manager.optimizer_step()
        if step % 5 == 4:
            update_engine_weights(engine, manager)
            continuation = engine.generate(text[:1, :8], max_new_tokens=8, do_sample=False, pad_token_id=0)[
                0, 8:
            ].tolist()
            if world.rank == 0:
                print(f"step {step}  continues 0 to 7 with {continuation}")
