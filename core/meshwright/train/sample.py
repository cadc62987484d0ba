"""Let a trained model speak."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import Rows
from ..model.adapter_base import ADAPTER_CONFIG
from ..strategy.contract import IGNORED_LABEL
from .run_sections import SampleConfig

_BEGINNING = 16
"""So many tokens of a document are its beginning."""


def load_trained(directory: Path, base: Path | None) -> Any:
    """The model that a run has written, or its adapter over the base, which is where it was."""
    from transformers import AutoModelForCausalLM

    plain: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if not (directory / ADAPTER_CONFIG).is_file() or base is None:
        return AutoModelForCausalLM.from_pretrained(directory, **plain).eval()
    from peft import PeftModel

    with warnings.catch_warnings():
        # Between peft and transformers, of what a user can do nothing about.
        warnings.simplefilter("ignore", FutureWarning)
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, **plain), str(directory)).eval()


def generate_sample(model: Any, tokenizer: Any, config: SampleConfig, rows: Rows, *, seed: int) -> str:
    """The prompt and its continuation; at temperature 0 the likeliest one.

    Args:
        rows: that are held out; the first begins with the prompt, where `config` has none.
    """
    torch.manual_seed(seed)
    prompt = _ids(tokenizer, config.prompt) if config.prompt is not None else beginning(rows)
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


def beginning(rows: Rows) -> Tensor:
    """The first tokens of a document, or those before the first answer of a conversation: int64, (1, T)."""
    row = rows.take([0])
    (labelled,) = torch.nonzero(row["labels"][0] != IGNORED_LABEL, as_tuple=True)
    # The first token of a document may be masked by itself.
    before = int(labelled[0]) if len(labelled) else 0
    count: int = before if before > 1 else _BEGINNING
    return row["input_ids"][:, :count]
