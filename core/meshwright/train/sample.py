"""Let a trained model speak."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..data import PreparedData
from .run_sections import SampleConfig

_BEGINNING = 16
"""At most so many tokens of a held-out document are the beginning that is to be continued."""


def generate_sample(model: Any, tokenizer: Any, config: SampleConfig, data: PreparedData, *, seed: int) -> str:
    """The prompt and its continuation; at temperature 0 the likeliest one.

    Args:
        data: of which a held-out document gives the prompt, where `config` has none.
    """
    torch.manual_seed(seed)
    prompt = _ids(tokenizer, config.prompt) if config.prompt is not None else beginning(data)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    room = positions - prompt.shape[1] if positions else config.max_new_tokens
    if room < 1:
        return f"(the prompt fills all {positions} positions of the model)"
    sampling = {"do_sample": True, "temperature": config.temperature} if config.temperature else {"do_sample": False}
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=min(config.max_new_tokens, room),
        pad_token_id=tokenizer.eos_token_id,
        **sampling,
    )
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


def _ids(tokenizer: Any, text: str) -> Tensor:
    ids: Tensor = tokenizer(text, return_tensors="pt")["input_ids"]
    return ids


def beginning(data: PreparedData) -> Tensor:
    """The first tokens of a held-out document: int64, (1, T)."""
    return data.held_out.take([0])[:, :_BEGINNING]
