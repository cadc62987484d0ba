"""Reinforcement learning from nothing: a tiny model learns to copy digits, because copies are rewarded.

    torchrun --nproc-per-node 2 examples/grpo.py
    torchrun --nproc-per-node 2 examples/grpo.py --strategy ddp

Each rank asks its prompts, several times each, of the model that all of them train: `manager.unshard()` holds its
whole weights for transformers' `generate`. A program compares answer and prompt; an answer's advantage is how much
better it is than the mean of those to the same prompt (arXiv:2503.20783). Then the objective `grpo` takes a few steps
for these answers, with their log-probabilities of before the first in `old_log_probs`. No weights are loaded, and
nothing is shown before: at the start a tenth of the digits is right, by chance.

Prints the mean reward as it rises, and exits with 1 if it does not come from below 0.2 to above 0.9.
"""

import argparse
import sys
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import meshwright as mw
from meshwright.objectives import get_objective

DIGITS, EQUALS, PAD = 10, 10, 11
NUM_PROMPTS, SAMPLES_PER_PROMPT, UPDATES_PER_ROLLOUT = 16, 8, 2
"""Prompts of each rank at a time, answers to each, and optimizer steps for these."""


def build_tiny_model() -> torch.nn.Module:
    torch.manual_seed(0)  # on all ranks the same
    config = AutoConfig.for_model(
        "llama",
        vocab_size=12,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=PAD,
    )
    return AutoModelForCausalLM.from_config(config)


def generate_answers(manager: mw.StrategyManager, prompts: torch.Tensor, num_digits: int) -> torch.Tensor:
    """Prompts (B, length + 1) with sampled answers behind them; int64, (B, 2 length + 1)."""
    with manager.unshard() as parts, torch.no_grad():
        (model,) = parts
        model.eval()
        found = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=num_digits,
            min_new_tokens=num_digits,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
        model.train()
    return found


def compute_rewards(ids: torch.Tensor, length: int) -> torch.Tensor:
    """How much of an answer is a copy of its prompt, (B,)."""
    return (ids[:, :length] == ids[:, length + 1 :]).float().mean(1)


def train(world: mw.World, strategy: str, length: int, rollouts: int) -> bool:
    """Whether the mean reward has risen as it should."""
    stack, degrees = mw.resolve(strategy, mw.MeshSizes(), world.size)
    mesh = mw.Mesh(degrees, world)
    manager = stack.build(mesh)
    manager.parallelize(build_tiny_model())
    manager.build_optimizer(mw.optimizer_factory(mw.OptimizerConfig(lr=1e-3)))
    objective = get_objective({"name": "grpo", "normalize": "tokens", "entropy_coef": 0.01})

    torch.manual_seed(1 + mesh.data_rank)  # each rank asks and samples on its own
    means, start = [], time.monotonic()
    for rollout in range(rollouts):
        digits = torch.randint(DIGITS, (NUM_PROMPTS, length)).repeat_interleave(SAMPLES_PER_PROMPT, 0)
        prompts = torch.cat([digits, torch.full((len(digits), 1), EQUALS)], 1).to(world.device)
        ids = generate_answers(manager, prompts, length)
        reward = compute_rewards(ids, length)
        of_group = reward.view(NUM_PROMPTS, SAMPLES_PER_PROMPT)
        labels = ids.masked_fill(torch.arange(ids.shape[1], device=ids.device) <= length, -100)
        batch = {"input_ids": ids, "labels": labels}
        batch["advantages"] = (of_group - of_group.mean(1, keepdim=True)).flatten()
        batch["old_log_probs"] = manager.token_stats([batch], ["log_probs"])[0]["log_probs"]
        microbatches = [batch]
        for _ in range(UPDATES_PER_ROLLOUT):
            count = manager.begin_step_sync(microbatches, objective=objective)
            manager.forward_backward(microbatches, num_tokens=count, objective=objective)
            manager.clip_grad_norm(1.0)
            manager.optimizer_step()

        right, asked = world.reduce_ints([round(float(reward.sum()) * length), reward.numel() * length])
        means.append(right / asked)
        is_done = len(means) >= 5 and min(means[-5:]) > 0.9
        if world.rank == 0 and (rollout % 10 == 0 or is_done):
            kind = {name: float(value / count) for name, value in manager.last_sums.items()}
            print(
                f"rollout {rollout:4d}  reward {means[-1]:.3f}  entropy {kind['entropy']:.3f}  "
                f"clipped {kind['clip_ratio/region_mean']:.3f}  {time.monotonic() - start:5.1f} s",
                flush=True,
            )
        if is_done:
            break
    if world.rank == 0:
        last = min(means[-5:])
        print(f"mean reward {means[0]:.3f} at first, {last:.3f} or more in the last five rollouts", flush=True)
    return means[0] < 0.2 and is_done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="fsdp2", help="one that holds the whole model by unshard()")
    parser.add_argument("--digits", type=int, default=3, help="of a prompt")
    parser.add_argument("--rollouts", type=int, default=400, help="after so many it is given up")
    given = parser.parse_args()
    with mw.open_world() as world:
        return 0 if train(world, given.strategy, given.digits, given.rollouts) else 1


if __name__ == "__main__":
    sys.exit(main())
