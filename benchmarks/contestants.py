"""The loops that `step.py` compares: torch by hand, as a careful user writes it, and meshwright's.

All do the same work: equal weights and batches, the loss of [Note: the gradient rule] in `meshwright.contract`, the
same units, communication volume and resharding, one fused AdamW over all parameters, and loss and gradient norm on
the host at every step, because a user logs them.

Shapes: B sequences of a microbatch, S tokens each, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.contract import Batch
from meshwright.mesh import Mesh, World
from meshwright.optim import build_scheduler, optimizer_factory
from meshwright.runfile import OptimizerConfig, ScheduleConfig
from meshwright.sizes import MeshSizes
from meshwright.stack import resolve
from meshwright.train import Loop, train_step

VOCAB_SIZE = 2048
LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0
DIFFERENT_STEPS = 16
"""Steps until a batch comes again."""

Step = Callable[[int], tuple[float, float]]
"""Runs one optimizer step, counted from 0, and returns its loss and gradient norm."""


@dataclass(frozen=True)
class Work:
    """What every contestant does."""

    hidden: int
    layers: int
    seq: int
    batch: int
    """Sequences of a microbatch on each rank."""
    microbatches: int
    """Microbatches of a step on each rank."""
    dtype: str
    seed: int = 0

    def model(self) -> nn.Module:
        """A Llama with random weights, the same at every call."""
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=max(1, self.hidden // 64),
            max_position_embeddings=self.seq,
        )
        torch.manual_seed(self.seed)
        return LlamaForCausalLM(config).to(getattr(torch, self.dtype))

    def batches(self, rank: int) -> Callable[[int], Sequence[Batch]]:
        """This rank's microbatches by step; a tenth of the labels are masked, so ranks differ in tokens."""
        generator = torch.Generator().manual_seed(self.seed + 1 + rank)
        steps = [[self._batch(generator) for _ in range(self.microbatches)] for _ in range(DIFFERENT_STEPS)]
        return lambda step: steps[step % DIFFERENT_STEPS]

    def _batch(self, generator: torch.Generator) -> Batch:
        input_ids = torch.randint(VOCAB_SIZE, (self.batch, self.seq), generator=generator)
        masked = torch.rand(input_ids.shape, generator=generator) < 0.1
        return {"input_ids": input_ids, "labels": input_ids.masked_fill(masked, -100)}


def meshwright_step(strategy: str, work: Work, world: World) -> Step:
    """The loop under test: `meshwright.train.train_step` with what `meshwright train` would build for it."""
    stack, degrees = resolve(strategy, MeshSizes(), world.size)
    mesh = Mesh(degrees, world)
    manager = stack.build(mesh)
    manager.parallelize(work.model())
    config = OptimizerConfig(lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, no_decay=[], options={"fused": True})
    optimizer = manager.build_optimizer(optimizer_factory(config))
    scheduler = build_scheduler(ScheduleConfig(name="constant"), optimizer, steps=1)
    loop = Loop(steps=1, batches=work.batches(mesh.data_rank), max_grad_norm=MAX_GRAD_NORM)

    def step(index: int) -> tuple[float, float]:
        result = train_step(manager, scheduler, loop, index)
        return result.loss, result.grad_norm

    return step


def fsdp2_by_hand(work: Work, world: World) -> Step:
    model = work.model()
    mesh = init_device_mesh(world.device.type, (world.size,))
    blocks = model.model.layers
    for index, block in enumerate(blocks):
        # The last block's backward comes first: freeing it would only mean to gather it again.
        fully_shard(block, mesh=mesh, reshard_after_forward=index < len(blocks) - 1)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for unit in (*blocks, model):
        # Plain sums: the loss is already divided by the global count.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)

    def sync(is_last: bool) -> AbstractContextManager[None]:
        model.set_is_last_backward(is_last)
        model.set_requires_gradient_sync(is_last)
        return nullcontext()

    return _step_by_hand(model, sync, work, world, loss_scale=1.0)


def ddp_by_hand(work: Work, world: World) -> Step:
    device = world.device
    device_ids = None if device.type == "cpu" else [device.index]
    module = DistributedDataParallel(work.model().to(device), device_ids=device_ids)

    def sync(is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last else module.no_sync()

    # DDP divides gradients by the number of ranks.
    return _step_by_hand(module, sync, work, world, loss_scale=float(world.size))


BY_HAND = {"fsdp2": fsdp2_by_hand, "ddp": ddp_by_hand}


def _step_by_hand(
    module: nn.Module,
    sync: Callable[[bool], AbstractContextManager[None]],
    work: Work,
    world: World,
    *,
    loss_scale: float,
) -> Step:
    """The loop that the hand-written contestants share.

    Args:
        module: sharded or wrapped.
        sync: `sync(is_last)` goes around forward and backward of a microbatch and defers the reduction unless last.
        loss_scale: undoes what the reduction divides by.
    """
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    batches = work.batches(world.rank)
    module.train()

    def step(index: int) -> tuple[float, float]:
        inputs = []
        num_tokens = torch.zeros((), dtype=torch.int64, device=world.device)
        for batch in batches(index):
            ids_BS = batch["input_ids"].to(world.device, non_blocking=True)
            labels_BS = batch["labels"].to(world.device, non_blocking=True)
            targets_BS = F.pad(labels_BS[:, 1:], (0, 1), value=-100)
            num_tokens += (targets_BS != -100).sum()
            inputs.append((ids_BS, targets_BS))
        dist.all_reduce(num_tokens)
        losses = []
        for position, (ids_BS, targets_BS) in enumerate(inputs):
            with sync(position == len(inputs) - 1):
                logits_BSV = module(input_ids=ids_BS, use_cache=False).logits
                loss = token_loss(logits_BSV, targets_BS) / num_tokens
                (loss * loss_scale).backward()
            losses.append(loss.detach())
        mean_loss = torch.stack(losses).sum()
        dist.all_reduce(mean_loss)
        norm = nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM, foreach=True)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        loss_value, norm_value = torch.stack([mean_loss, norm.float()]).tolist()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        return loss_value, norm_value

    return step


def token_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    return F.cross_entropy(logits_BSV.float().flatten(0, 1), targets_BS.flatten(), reduction="sum")
