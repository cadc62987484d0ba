"""Let a trained model speak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..model.adapted import ADAPTER_CONFIG
from .run_file import SampleConfig


def load_trained(directory: Path, base: Path | None) -> Any:
    """The model that a run has written, or its adapter over the base, which is where it was."""
    from transformers import AutoModelForCausalLM

    plain: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if not (directory / ADAPTER_CONFIG).is_file() or base is None:
        return AutoModelForCausalLM.from_pretrained(directory, **plain).eval()
    from peft import PeftModel

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, **plain), str(directory)).eval()


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
