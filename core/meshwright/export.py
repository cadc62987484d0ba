"""Write a trained model as a Hugging Face directory, and let it speak."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .runfile import SampleConfig


def plain_model(config: Any, state: Mapping[str, Tensor]) -> Any:
    """A plain Hugging Face model on the CPU with the given weights.

    Args:
        config: its Hugging Face configuration.
        state: full tensors under the names of the unwrapped model.
    """
    from transformers import AutoModelForCausalLM

    dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(state)
    return model.eval()


def save_directory(model: Any, tokenizer: Any, directory: Path) -> None:
    """Write weights, configuration and tokenizer, as `AutoModelForCausalLM.from_pretrained` reads them."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def generate_sample(model: Any, tokenizer: Any, config: SampleConfig, *, seed: int) -> str:
    """The prompt and its continuation; at temperature 0 the likeliest one."""
    torch.manual_seed(seed)
    inputs = tokenizer(config.prompt, return_tensors="pt", return_token_type_ids=False)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    room = positions - inputs["input_ids"].shape[1] if positions else config.max_new_tokens
    if room < 1:
        return f"(the prompt fills all {positions} positions of the model)"
    sampling = {"do_sample": True, "temperature": config.temperature} if config.temperature else {"do_sample": False}
    output = model.generate(
        **inputs,
        max_new_tokens=min(config.max_new_tokens, room),
        pad_token_id=tokenizer.eos_token_id,
        **sampling,
    )
    return str(tokenizer.decode(output[0], skip_special_tokens=True))
