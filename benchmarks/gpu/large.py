"""The model of the throughput benchmark, and what a careful user does to its blocks by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from contestants import Work
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import LlamaConfig, LlamaForCausalLM

ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)


@dataclass(frozen=True, kw_only=True)
class LargeWork(Work):
    """A Llama of any shape, made on the device itself: on the host, billions of random numbers take minutes."""

    config: LlamaConfig
    device: torch.device

    @classmethod
    def of(cls, size: Any, device: torch.device) -> LargeWork:
        config = LlamaConfig(
            vocab_size=size.vocab,
            hidden_size=size.hidden,
            intermediate_size=size.intermediate,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
            max_position_embeddings=size.seq,
        )
        return cls(
            hidden=size.hidden,
            layers=size.layers,
            seq=size.seq,
            batch=size.batch,
            microbatches=1,
            dtype="float32",
            config=config,
            device=device,
        )

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        with self.device:
            return LlamaForCausalLM(self.config)

    @cached_property
    def parameters(self) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in LlamaForCausalLM(self.config).parameters())

    @property
    def flops_per_token(self) -> int:
        """Of the model, forward and backward; see [Note: MFU] in run.py."""
        multiplying = self.parameters - self.config.vocab_size * self.config.hidden_size
        return 6 * multiplying + 12 * self.layers * self.hidden * self.seq


def by_hand_change(mode: str, compiled: bool) -> Callable[[nn.Module], None]:
    """What is done to each block: activation checkpointing, then compile; sharding comes after."""

    def change(block: nn.Module) -> None:
        if mode != "none":
            options = {"context_fn": _selective_contexts} if mode == "selective" else {}
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
        if compiled:
            block.forward = torch.compile(block.forward)

    return change


def _selective_contexts() -> Any:
    """Keep attention and every second matrix product, as torchtitan's selective mode does."""
    counts: Counter[bool] = Counter()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if op is torch.ops.aten.mm.default:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
