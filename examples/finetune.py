"""Fine-tune with a DataLoader of your own: torchrun --nproc-per-node 2 examples/finetune.py --out runs/finetune

A tiny model learns to answer sums ("7+5=" with "12"), of which it sees two thirds. What is supervised are the answers.
It is evaluated on the others, stops when it no longer gets better, and keeps its best checkpoint. Killed? The same
command continues with the batches that come next. Any strategy and layout: --strategy ddp, or --tp-size 2.
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoConfig, AutoModelForCausalLM

import meshwright as mw
from meshwright.plugin import find_newest_checkpoint

PAD, IGNORE_INDEX = 0, -100


def build_addition_examples(*, is_held_out):
    """Bytes of each sum, and how many of them are the question."""
    pairs = [(a, b) for a in range(24) for b in range(24) if ((a + b) % 3 == 0) == is_held_out]
    return [(f"{a}+{b}=".encode(), f"{a + b}\n".encode()) for a, b in pairs]


def collate(examples):
    """A microbatch: the question masked, padding behind the answer."""
    length = max(len(question) + len(answer) for question, answer in examples)
    ids = torch.full((len(examples), length), PAD)
    labels = torch.full_like(ids, IGNORE_INDEX)
    for row, (question, answer) in enumerate(examples):
        whole = torch.tensor(list(question + answer))
        ids[row, : len(whole)] = whole
        labels[row, len(question) : len(whole)] = whole[len(question) :]
    return {"input_ids": ids, "labels": labels}


def build_dataloader(examples, mesh, *, shuffle):
    """Each data rank has a share of its own; ranks that share a batch (tp, cp, pp) have the same."""
    sampler = DistributedSampler(examples, num_replicas=mesh.data_size, rank=mesh.data_rank, shuffle=shuffle)
    return DataLoader(examples, batch_size=16 // mesh.data_size, sampler=sampler, collate_fn=collate)


def print_progress(result):
    """A callback: called on each rank after each step; who returns True stops all."""
    if result.rank == 0 and result.evaluations:
        print(f"step {result.step:4d}  loss {result.loss:.4f}  others {result.evaluations['others']:.4f}", flush=True)


def main(args):
    with mw.open_world("cpu") as world:
        stack, degrees = mw.resolve(args.strategy, mw.MeshSizes(tp_size=args.tp_size), world.size)
        mesh = mw.Mesh(degrees, world)
        manager = stack.build(mesh)
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            "llama", vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
        )
        manager.parallelize(AutoModelForCausalLM.from_config(config))
        optimizer = manager.build_optimizer(mw.optimizer_factory(mw.OptimizerConfig(lr=3e-3)))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))

        training, others = build_addition_examples(is_held_out=False), build_addition_examples(is_held_out=True)
        with mw.Checkpointer(manager, args.out, keep_last=1, keep_best=1, best_eval_set="others") as checkpointer:
            loop = mw.Loop(
                batches=build_dataloader(training, mesh, shuffle=True),
                epochs=args.epochs,
                gradient_accumulation_steps=2,  # microbatches of a step: 32 sums on any number of ranks
                scheduler=scheduler,
                eval_sets={"others": build_dataloader(others, mesh, shuffle=False)},
                eval_every=12,
                early_stopping=mw.EarlyStopping("others", patience=3),
                callbacks=[print_progress],
                checkpointer=checkpointer,
                save_every=12,
                seed=0,
            )
            last = find_newest_checkpoint(Path(args.out), world)
            if last is not None:
                loop = loop.resume_from(mw.load_checkpoint(manager, last, scheduler=scheduler))
            results = mw.fit(manager, loop)
        if world.rank == 0:
            print(f"trained {len(results)} steps, of {loop.num_steps}; checkpoints are in {args.out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="fsdp2")
    parser.add_argument("--tp-size", type=int, default=1, help="ranks that share each layer, and each batch")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--out", default="runs/finetune", help="where checkpoints go")
    main(parser.parse_args())
