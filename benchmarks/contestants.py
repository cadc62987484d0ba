"""The loops that `step.py` compares: torch by hand, as a careful user writes it, and meshwright's.

All do the same work: equal weights and batches, the loss of [Note: the gradient rule] in
`meshwright.strategy.contract`, the same units, communication volume and resharding, one fused AdamW over all
parameters, and loss and gradient norm on the host at every step, because a user logs them. With tensor
parallelism, vocabulary and loss are parallel too.

Shapes: B sequences of a microbatch, S tokens each, V entries of the vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.base.types import Batch
from meshwright.mesh.mesh import Mesh
from meshwright.mesh.sizes import MeshSizes
from meshwright.mesh.world import World
from meshwright.optim.build import build_scheduler, optimizer_factory
from meshwright.strategy.contract import StrategyManager
from meshwright.strategy.stack import resolve
from meshwright.training.loop.options import Loop
from meshwright.training.loop.step import train_step
from meshwright_run.run_file import OptimizerConfig, ScheduleConfig

VOCAB_SIZE = 2048
LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0
DIFFERENT_STEPS = 16
"""Steps until a batch comes again."""

Step = Callable[[int], tuple[float, float]]
"""Runs one optimizer step, counted from 0, and returns its loss and gradient norm."""

OptimizerOf = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
ADAMW = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "fused": True}


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, **ADAMW)


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
    tp: int = 1
    """Ranks that compute a microbatch together, by tensor parallelism."""
    seed: int = 0
    loss_chunk_rows: int | None = None
    """Rows of which the loop by hand computes logits at a time; None: all."""

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

    def batches(self, data_rank: int) -> Callable[[int], Sequence[Batch]]:
        """A data rank's microbatches by step; a tenth of the labels are masked, so ranks differ in tokens."""
        generator = torch.Generator().manual_seed(self.seed + 1 + data_rank)
        steps = [[self._batch(generator) for _ in range(self.microbatches)] for _ in range(DIFFERENT_STEPS)]
        return lambda step: steps[step % DIFFERENT_STEPS]

    def _batch(self, generator: torch.Generator) -> Batch:
        input_ids = torch.randint(VOCAB_SIZE, (self.batch, self.seq), generator=generator)
        masked = torch.rand(input_ids.shape, generator=generator) < 0.1
        return {"input_ids": input_ids, "labels": input_ids.masked_fill(masked, -100)}


def built(
    strategy: str, work: Work, world: World, config: Mapping[str, Any] | None = None
) -> tuple[StrategyManager, Loop]:
    """What `meshwright train` would build for the work."""
    sizes = MeshSizes(pp_size=world.size) if strategy == "pipeline" else MeshSizes(tp_size=work.tp)
    stack, degrees = resolve(strategy, sizes, world.size, config=config or {})
    mesh = Mesh(degrees, world)
    manager = stack.build(mesh)
    manager.parallelize(work.model())
    options = OptimizerConfig(lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, no_decay=[], options={"fused": True})
    optimizer = manager.build_optimizer(optimizer_factory(options))
    scheduler = build_scheduler(ScheduleConfig(name="constant"), optimizer, num_steps=1)
    batches = work.batches(mesh.data_rank)
    return manager, Loop(scheduler=scheduler, steps=1, batches=batches, max_grad_norm=MAX_GRAD_NORM)


def meshwright_step(strategy: str, work: Work, world: World, config: Mapping[str, Any] | None = None) -> Step:
    """`meshwright.training.loop.step.train_step` with what `meshwright train` would build for it."""
    manager, loop = built(strategy, work, world, config)

    def step(index: int) -> tuple[float, float]:
        result = train_step(manager, loop, index)
        return result.loss, result.grad_norm

    return step


def fsdp2_by_hand(
    work: Work,
    world: World,
    change: Callable[[nn.Module], None] = lambda block: None,
    policy: MixedPrecisionPolicy | None = None,
) -> Step:
    """FSDP2, with tensor parallelism where the work says so.

    Args:
        change: what is done to each block before it is sharded, such as compile.
        policy: mixed precision.
    """
    model = work.model()
    mesh = init_device_mesh(world.device.type, (world.size // work.tp, work.tp), mesh_dim_names=("dp", "tp"))
    if work.tp > 1:
        _tensor_parallel(model, mesh["tp"])
    fsdp2_units(model, mesh["dp"], change, policy)

    def sync(is_last: bool) -> AbstractContextManager[None]:
        model.set_is_last_backward(is_last)
        model.set_requires_gradient_sync(is_last)
        return nullcontext()

    return _step_by_hand(model, sync, work, world, data_group=mesh.get_group("dp"), loss_scale=1.0)


def fsdp2_units(
    model: nn.Module,
    mesh: DeviceMesh,
    change: Callable[[nn.Module], None] = lambda block: None,
    policy: MixedPrecisionPolicy | None = None,
) -> None:
    """Shard the Llama of `Work` over `mesh`, in units of a block."""
    policy = policy or MixedPrecisionPolicy()
    blocks: Any = model.model.layers
    for index, block in enumerate(blocks):
        change(block)
        # The last block's backward comes first: freeing it would only mean to gather it again.
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=index < len(blocks) - 1)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for unit in (*blocks, model):
        # Plain sums: the loss is already divided by the global count.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    columns, rows = ColwiseParallel(), RowwiseParallel()
    attention = {f"self_attn.{name}_proj": columns for name in "qkv"} | {"self_attn.o_proj": rows}
    mlp = {"mlp.gate_proj": columns, "mlp.up_proj": columns, "mlp.down_proj": rows}
    for block in model.model.layers:
        parallelize_module(block, mesh, attention | mlp)
    vocabulary = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, vocabulary)


def ddp_by_hand(work: Work, world: World, make_optimizer: OptimizerOf = adamw) -> Step:
    device = world.device
    device_ids = None if device.type == "cpu" else [device.index]
    module = DistributedDataParallel(work.model().to(device), device_ids=device_ids)

    def sync(is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last else module.no_sync()

    # DDP divides gradients by the number of ranks.
    group, scale = dist.group.WORLD, float(world.size)
    return _step_by_hand(module, sync, work, world, make_optimizer, data_group=group, loss_scale=scale)


def zero1_by_hand(work: Work, world: World) -> Step:
    """DDP, whose optimizer state is divided by torch's ZeroRedundancyOptimizer."""

    def optimizer(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        parameters = groups[0]["params"]
        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, **ADAMW)

    return ddp_by_hand(work, world, optimizer)


@dataclass(frozen=True)
class Contest:
    """A loop by hand, and the strategy and its options that do the same."""

    by_hand: Callable[[Work, World], Step]
    strategy: str
    config: Mapping[str, Any]

    def ours(self, work: Work, world: World) -> Step:
        return meshwright_step(self.strategy, work, world, self.config)


# torch's buckets hold 25 MiB, which are so many float32 elements.
_BUCKETED = {"engine": "bucketed", "overlap_grad_reduce": True, "bucket_size": 25 * 2**18}
_ZERO1 = {**_BUCKETED, "use_distributed_optimizer": True, "overlap_param_gather": True}

CONTESTS = {
    "fsdp2": Contest(fsdp2_by_hand, "fsdp2", {}),
    "ddp": Contest(ddp_by_hand, "ddp", {}),
    "ddp-bucketed": Contest(ddp_by_hand, "ddp", _BUCKETED),
    "ddp-zero1": Contest(zero1_by_hand, "ddp", _ZERO1),
}


def _step_by_hand(
    module: nn.Module,
    sync: Callable[[bool], AbstractContextManager[None]],
    work: Work,
    world: World,
    make_optimizer: OptimizerOf = adamw,
    *,
    data_group: dist.ProcessGroup,
    loss_scale: float,
) -> Step:
    """The loop by hand with torch's own optimizer, backward and clipping; see `loop_by_hand`."""
    # Fused and foreach code takes DTensors of one mesh at a time.
    meshes = _by_mesh(module)
    optimizer = make_optimizer([{"params": parameters} for parameters in meshes])
    ways = Ways(sync, clip=lambda: clip(meshes), loss_scale=loss_scale)
    return loop_by_hand(module, optimizer, ways, work, world, data_group=data_group)


@dataclass(frozen=True)
class Ways:
    """How one library does what loops do in the same order.

    Args:
        sync: `sync(is_last)` goes around forward and backward of a microbatch and defers the reduction unless last.
        clip: gradients to MAX_GRAD_NORM; returns the norm before.
        backward: of a loss.
        loss_scale: undoes what the reduction divides by.
    """

    sync: Callable[[bool], AbstractContextManager[None]]
    clip: Callable[[], Tensor]
    backward: Callable[[Tensor], None] = Tensor.backward
    loss_scale: float = 1.0


def loop_by_hand(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    ways: Ways,
    work: Work,
    world: World,
    *,
    data_group: dist.ProcessGroup,
) -> Step:
    """The loop that the hand-written contestants share.

    Args:
        module: sharded or wrapped.
        data_group: of the ranks that see different batches.
    """
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    batches = work.batches(dist.get_rank(data_group))
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
        dist.all_reduce(num_tokens, group=data_group)
        losses = []
        for position, (ids_BS, targets_BS) in enumerate(inputs):
            with ways.sync(position == len(inputs) - 1), loss_parallel() if work.tp > 1 else nullcontext():
                loss = _loss_by_hand(module, ids_BS, targets_BS, work.loss_chunk_rows) / num_tokens
                ways.backward(loss * ways.loss_scale)
            losses.append(whole(loss.detach()))
        mean_loss = torch.stack(losses).sum()
        dist.all_reduce(mean_loss, group=data_group)
        norm = whole(ways.clip())
        loss_value, norm_value = torch.stack([mean_loss, norm.float()]).tolist()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        return loss_value, norm_value

    return step


def _loss_by_hand(module: nn.Module, ids_BS: Tensor, targets_BS: Tensor, chunk_rows: int | None) -> Tensor:
    """The token loss, from whole logits, or from those of some rows at a time, computed again in backward."""
    if chunk_rows is None:
        return token_loss(module(input_ids=ids_BS, use_cache=False).logits, targets_BS)
    head: Any = module.lm_head
    module.lm_head = nn.Identity()
    try:
        hidden_RD = module(input_ids=ids_BS, use_cache=False).logits.flatten(0, 1)
    finally:
        module.lm_head = head
    targets_R = targets_BS.flatten()
    chunks = zip(hidden_RD.split(chunk_rows), targets_R.split(chunk_rows), strict=True)
    return torch.stack(
        [checkpoint(lambda h, t: token_loss(head(h)[None], t[None]), h, t, use_reentrant=False) for h, t in chunks]
    ).sum()


def _by_mesh(module: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters, those of one mesh together: norms, which tensor parallelism leaves alone, have their own."""
    found = defaultdict(list)
    for parameter in module.parameters():
        found[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
    return list(found.values())


def clip(meshes: Sequence[Sequence[nn.Parameter]]) -> Tensor:
    """Clip the norm of all gradients together, and return what it was."""
    if len(meshes) == 1:
        return whole(clip_grad_norm_(meshes[0], MAX_GRAD_NORM, foreach=True))
    norms = [whole(get_total_norm([p.grad for p in parameters], foreach=True)) for parameters in meshes]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for parameters in meshes:
        clip_grads_with_norm_(parameters, MAX_GRAD_NORM, norm, foreach=True)
    return norm


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def token_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    return F.cross_entropy(logits_BSV.float().flatten(0, 1), targets_BS.flatten(), reduction="sum")
