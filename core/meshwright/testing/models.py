"""Tiny random models for tests, in float64 unless told otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# Sizes that few numbers of ranks divide; head_dim and counts of heads stay what attention needs.
TINY: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 36,
        "intermediate_size": 52,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 131,
        "max_position_embeddings": 64,
    },
    "gpt2": {"n_embd": 36, "n_layer": 3, "n_head": 6, "vocab_size": 131, "n_positions": 64}
    | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


def tiny_model(
    model_type: str = "llama", *, tied: bool = False, seed: int = 0, dtype: torch.dtype = torch.float64
) -> nn.Module:
    """A random causal LM of transformers with about 50,000 parameters, the same for equal arguments."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        model_type,
        **TINY[model_type],
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)
