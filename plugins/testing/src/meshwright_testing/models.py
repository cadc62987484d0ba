"""Tiny random models for tests, in float64 by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from meshwright.plugin import ConfigError, suggest_match

from .zoo import build_zoo_model, zoo_types, zoo_unsupported_reason, zoo_vocab_size

# Sizes that are divisible by few numbers of ranks. head_dim and numbers of heads are as attention needs them.
TINY: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 36, "intermediate_size": 52, "num_hidden_layers": 3, "vocab_size": 131}
    | {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64},
    "gpt2": {"n_embd": 36, "n_layer": 3, "n_head": 6, "vocab_size": 131, "n_positions": 64}
    | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
ROUTED_VOCAB = 131


class RoutedModel(nn.Module):
    """Causal LM whose second block has branches for sequences with an even and an odd first token, and an unused one.

    Depending on the data, a parameter may have no gradient in a microbatch, in a step, on a rank, or at all.
    """

    def __init__(self, dtype: torch.dtype, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROUTED_VOCAB, 12, dtype=dtype)
        self.blocks = nn.ModuleList(_RoutedBlock(dtype) for _ in range(layers))
        self.head = nn.Linear(12, ROUTED_VOCAB, dtype=dtype)

    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        hidden_BSD = self.embed(input_ids)
        for index, block in enumerate(self.blocks):
            hidden_BSD = block(hidden_BSD, input_ids[:, 0] % 2 == 0 if index == 1 else None)
        return CausalLMOutput(logits=self.head(hidden_BSD))


class _RoutedBlock(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.always = nn.Linear(12, 12, dtype=dtype)
        # Equal shapes, so that a reduction that confuses their gradients raises no error.
        self.even = nn.Linear(12, 12, dtype=dtype)
        self.odd = nn.Linear(12, 12, dtype=dtype)
        self.never = nn.Linear(12, 5, dtype=dtype)

    def forward(self, hidden_BSD: Tensor, is_even_B: Tensor | None) -> Tensor:
        out_BSD = hidden_BSD + self.always(hidden_BSD).tanh()
        if is_even_B is None:
            return out_BSD + self.even(hidden_BSD) + self.odd(hidden_BSD)
        for branch, chosen_B in ((self.even, is_even_B), (self.odd, ~is_even_B)):
            if chosen_B.any():
                out_BSD = out_BSD.index_put((chosen_B.nonzero()[:, 0],), branch(hidden_BSD[chosen_B]), accumulate=True)
        return out_BSD


def parse_model_types(text: str) -> list[str]:
    """Return the model names of a comma-separated list, or every type of the zoo for "all". ConfigError if unknown."""
    known = zoo_types()
    if text == "all":
        return known
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known and name not in TINY and name != "routed":
            raise ConfigError(f"model {name!r} is not a causal LM of transformers.{suggest_match(name, known)}")
    return names


def find_unsupported_reason(model_type: str) -> str | None:
    """Return why a model cannot train as a text-only causal LM; None if it can."""
    return None if model_type == "routed" or model_type in TINY else zoo_unsupported_reason(model_type)


def case_vocab_size(model_type: str) -> int:
    """Return the number of token ids of `build_case_model`."""
    if model_type == "routed":
        return ROUTED_VOCAB
    return int(TINY[model_type]["vocab_size"]) if model_type in TINY else zoo_vocab_size(model_type)


def build_case_model(
    model_type: str, *, tied: bool | None, seed: int, dtype: torch.dtype, layers: int | None = None
) -> nn.Module:
    """Return a tiny model: a key of TINY, "routed", or a model type of the zoo, which ignores `layers`."""
    if model_type == "routed":
        torch.manual_seed(seed)
        return RoutedModel(dtype, layers or 3)
    if model_type in TINY:
        return build_tiny_model(model_type, tied=bool(tied), seed=seed, dtype=dtype, layers=layers)
    return build_zoo_model(model_type, seed=seed, dtype=dtype, tied=tied)


def build_tiny_model(
    model_type: str = "llama",
    *,
    tied: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    layers: int | None = None,
) -> nn.Module:
    """Return a random causal LM of transformers with about 50,000 parameters. It depends only on the arguments."""
    from transformers import AutoConfig, AutoModelForCausalLM

    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = AutoConfig.for_model(model_type, **TINY[model_type], tie_word_embeddings=tied, **ids)
    if layers is not None:
        config.num_hidden_layers = layers
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def attach_adapter(model: nn.Module, options: Mapping[str, Any], *, seed: int) -> nn.Module:
    """Add an adapter of peft with random weights; `options` are fields of its `LoraConfig`.

    The option `adapters` names several adapters, of which only the first is trained. Weights that peft initializes with
    zeros are random too, so that the adapter changes the outputs.
    """
    from peft import LoraConfig, get_peft_model

    fields = dict(options)
    names = fields.pop("adapters", ("default",))
    torch.manual_seed(seed)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **fields), adapter_name=names[0])
    for name in names[1:]:
        adapted.add_adapter(name, LoraConfig(task_type="CAUSAL_LM", **fields))
    if len(names) > 1:
        adapted.base_model.set_adapter(list(names))
        for name, parameter in adapted.named_parameters():
            if any(f".{each}." in f"{name}." for each in names[1:]):
                parameter.requires_grad_(False)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            nn.init.normal_(parameter, std=0.1)
    return adapted
