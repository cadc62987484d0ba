"""A pipeline by hand: torch.distributed.pipelining's stages and schedules around a model that was divided by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from contestants import MAX_GRAD_NORM, Step, Work, adamw, token_loss
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from meshwright.mesh.world import World

SCHEDULES: dict[str, tuple[Callable[..., Any], int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved1f1b": (ScheduleInterleaved1F1B, 2),
}
"""torch's schedule of each name, and its stages on a rank."""


def options(name: str, work: Work, ranks: int) -> dict[str, Any]:
    """Of our pipeline, for the same schedule, split and microbatches."""
    blocks = work.layers // (ranks * SCHEDULES[name][1])
    return {"pp_schedule": name, "pp_microbatch_size": work.batch, "layers_per_stage": blocks}


class Part(nn.Module):
    """A stage of the Llama of `Work`: consecutive blocks, with embedding or head at the ends."""

    def __init__(self, model: Any, blocks: range) -> None:
        super().__init__()
        self.embed = model.model.embed_tokens if blocks.start == 0 else None
        self.layers = nn.ModuleList(model.model.layers[index] for index in blocks)
        self.rotary = model.model.rotary_emb
        is_last = blocks.stop == len(model.model.layers)
        self.norm, self.head = (model.model.norm, model.lm_head) if is_last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        hidden_BSD = x if self.embed is None else self.embed(x)
        positions = torch.arange(hidden_BSD.shape[1], device=x.device)[None]
        tables = self.rotary(hidden_BSD, positions)
        for layer in self.layers:
            hidden_BSD = layer(hidden_BSD, attention_mask=None, position_ids=positions, position_embeddings=tables)
        return hidden_BSD if self.head is None else self.head(self.norm(hidden_BSD))


def pipeline_by_hand(name: str) -> Callable[[Work, World], Step]:
    """A contestant: one pipeline over all ranks, with equally many blocks in each stage."""
    schedule_cls, chunks = SCHEDULES[name]

    def contestant(work: Work, world: World) -> Step:
        stages = world.size * chunks
        size = work.layers // stages
        model = work.model().to(world.device)
        parts = {
            index: Part(model, range(index * size, (index + 1) * size))
            for index in range(world.rank, stages, world.size)
        }
        num_tokens = torch.ones((), device=world.device)

        def loss_of(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
            return token_loss(logits_BSV, targets_BS) / num_tokens

        made = [PipelineStage(part, index, stages, world.device) for index, part in parts.items()]
        # Gradients of the sum, not their mean over microbatches.
        schedule = schedule_cls(made if chunks > 1 else made[0], work.microbatches, loss_fn=loss_of, scale_grads=False)
        parameters = [parameter for part in parts.values() for parameter in part.parameters()]
        optimizer = adamw([{"params": parameters}])
        batches = work.batches(0)
        is_first, is_last = 0 in parts, stages - 1 in parts

        def step(index: int) -> tuple[float, float]:
            batch = batches(index)
            ids_BS = torch.cat([each["input_ids"] for each in batch]).to(world.device)
            labels_BS = torch.cat([each["labels"] for each in batch]).to(world.device)
            targets_BS = F.pad(labels_BS[:, 1:], (0, 1), value=-100)
            num_tokens.copy_((targets_BS != -100).sum())
            losses: list[Tensor] = []
            schedule.step(
                *((ids_BS,) if is_first else ()), **({"target": targets_BS, "losses": losses} if is_last else {})
            )
            mean_loss = torch.stack(losses).detach().sum() if losses else torch.zeros((), device=world.device)
            squares = get_total_norm([p.grad for p in parameters], foreach=True).square()
            reported = torch.stack([mean_loss.float(), squares.float()])
            dist.all_reduce(reported)
            loss, norm = float(reported[0]), float(reported[1].sqrt())
            clip_grads_with_norm_(parameters, MAX_GRAD_NORM, reported[1].sqrt(), foreach=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss, norm

        return step

    return contestant
