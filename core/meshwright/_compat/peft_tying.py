"""Adapters of peft on two tied layers (`ensure_weight_tying`), held as one.

peft ties an embedding and a head that both have low-rank factors by memory: the head's factors are parameters of their
own, which are views of the embedding's factors, transposed. The tie ends where a model is sharded, moved or read, and
an optimizer has state for both. Here the head holds the embedding's parameters themselves and transposes them as it
computes, so that they are tied as an embedding and a head without adapters are.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..base.errors import ModelError
from .peft import base_name, inject, is_adapted, wrappers


class TransposedFactor(nn.Module):
    """A low-rank factor of a head: the transposed factor of the embedding that it is tied to."""

    bias = None

    def __init__(self, factor: nn.Parameter) -> None:
        super().__init__()
        # Named `FACTOR`.
        self.factor = factor

    @property
    def weight(self) -> Tensor:
        """As of the linear layer of peft in its place."""
        return self.factor.t()

    def forward(self, x: Tensor) -> Tensor:
        """As the linear layer of peft in its place."""
        return F.linear(x, self.weight)


def tie_adapters(model: nn.Module) -> nn.Module:
    """Let the heads of an adapted model hold the factors that they are tied to; in place, at any time before training.

    Trained copies of tied heads are one parameter already; they get the sizes and need the bias of what they replace.

    Returns:
        The model.

    Raises:
        ModelError: the factors of a head have other values than those that they are tied to; or its copy has no bias.
    """
    for path, copied, original in _copied_layers(model):
        copied.out_features, copied.in_features = copied.weight.shape
        if copied.bias is None and original.bias is not None:
            raise ModelError(
                f"ensure_weight_tying=True ties a trained copy of {path} to that of the embedding, and peft leaves its "
                f"bias out, so that the model computes something else. Set ensure_weight_tying=False, or leave the "
                f"embedding and the head out of modules_to_save."
            )
    for path, name, head in _tied_heads(model):
        # Tied already, or on another stage of a pipeline.
        if type(head.lora_A[name]) is not nn.Linear:
            continue
        # A reference to the factors as they were drawn.
        head.kwargs.pop("tied_adapter", None)
        embedding = _embedding_of(model)
        for factors, other in ((head.lora_A, embedding.lora_embedding_B), (head.lora_B, embedding.lora_embedding_A)):
            own = factors[name].weight
            if not own.is_meta and not torch.equal(own, other[name].t()):
                raise ModelError(
                    f"the adapter {name!r} has ensure_weight_tying=True, but its factors of {path} are not those of "
                    f"the embedding: they were trained, moved or loaded apart. Make the adapter anew, or load it with "
                    f"PeftModel.from_pretrained, on the device where it is trained."
                )
            factors[name] = TransposedFactor(other[name])
    return model


def adapted_on_meta(base: nn.Module, configs: Mapping[str, Any]) -> nn.Module:
    """A model of peft over a base that is on the meta device, with adapters that are there too; changes the base.

    peft's `low_cpu_mem_usage` would do the same, but makes a parameter of its own for each name of a tied one.
    """
    model: Any = None
    with warnings.catch_warnings(), torch.device("meta"):
        # What the configurations bring about, the training of the adapters has told.
        warnings.simplefilter("ignore")
        for name, config in configs.items():
            if model is None:
                model = inject(base, config, adapter=name)
            else:
                model.add_adapter(name, config)
    return tie_adapters(model)


def merged_alike(model: nn.Module) -> dict[str, str]:
    """Heads that become, when merged, the same weight as the embeddings that they are tied to: the embedding's name by
    the head's."""
    found: dict[str, str] = {}
    paths = {id(layer): path for path, layer in wrappers(model)}
    for path, name, head in _tied_heads(model):
        embedding = _embedding_of(model)
        has_variant = name in head.lora_variant or name in embedding.lora_variant
        if head.active_adapters == [name] and head.scaling[name] == embedding.scaling[name] and not has_variant:
            found[path] = paths[id(embedding)]
    return found


def _copied_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear, nn.Linear]]:
    """The trained copies of linear layers, each with the name of its wrapper and its original."""
    if not is_adapted(model):
        return
    from peft.utils.other import ModulesToSaveWrapper

    for path, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            original = module.original_module
            for copied in module.modules_to_save.values():
                if type(copied) is nn.Linear and isinstance(original, nn.Linear):
                    yield base_name(path), copied, original


def _tied_heads(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """The wrappers of heads whose factors peft ties to the embedding's: the name, that of the adapter, the wrapper."""
    if not is_adapted(model):
        return
    adapted: Any = model
    for name, config in adapted.peft_config.items():
        heads = getattr(config, "target_modules_to_tie", None) or ()
        for path, layer in wrappers(model):
            # As peft decides it, which compares the last part of the name.
            if path.rpartition(".")[2] in heads and name in getattr(layer, "lora_A", ()):
                yield path, name, layer


def _embedding_of(model: nn.Module) -> Any:
    adapted: Any = model
    return adapted.get_input_embeddings()
