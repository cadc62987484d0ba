"""Private and version-dependent names of transformers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import ModelError


def load_state_dict_as_pretrained(config: Any, state_dict: dict[str, Tensor], dtype: Any) -> tuple[nn.Module, Any]:
    """The causal LM of a configuration with the values of a state dict, loaded as transformers loads a directory.

    All names here are public. But that tensors are passed on as they are, so that those of a subclass without values
    end up as parameters of the model, and that nothing else is allocated, is how transformers happens to do it.
    Gives the model and what is missing, unexpected and mismatched.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    classes = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if isinstance(classes, (list, tuple)):
        named = {each.__name__: each for each in classes}
        classes = next((named[name] for name in config.architectures or () if name in named), classes[0])
    # As the auto class does it, which asks for a directory.
    text_config_cls = config.sub_configs.get("text_config")
    if text_config_cls is not None and classes.config_class == text_config_cls:
        config = config.get_text_config()
    model, found = classes.from_pretrained(
        None, config=config, state_dict=state_dict, dtype=dtype, ignore_mismatched_sizes=True, output_loading_info=True
    )
    return model, found


def to_saved_format(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a model's modules, in the names and shapes of published checkpoints; views of them where it can be.

    Models of transformers may hold in one parameter what their checkpoints hold in several (experts). The function is
    what `save_pretrained` calls, but has no public name.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, tensors))


def saved_together(model: nn.Module, names: Sequence[str]) -> list[list[str]]:
    """The names of a model's tensors, together where `to_saved_format` makes something of several of them.

    Private like it; what it does with names is repeated here.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    conversions = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False)
    converters = [each.reverse_transform() for each in reversed(conversions) if isinstance(each, WeightConverter)]
    groups: dict[Any, list[str]] = {}
    for name in names:
        key: Any = name
        for number, converter in enumerate(converters):
            renamed, pattern = converter.rename_source_key(name)
            if pattern is not None:
                key = (number, renamed)
                break
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def nested_configs(model: nn.Module) -> list[Any]:
    """The configurations of transformers that a model's modules hold, with those nested in them; each once.

    Private because the setting below is.
    """
    found: dict[int, Any] = {}

    def visit(config: Any) -> None:
        if config is None or id(config) in found or not hasattr(config, "_attn_implementation_internal"):
            return
        found[id(config)] = config
        for name in getattr(config, "sub_configs", {}):
            visit(getattr(config, name, None))

    for module in model.modules():
        visit(getattr(module, "config", None))
    return list(found.values())


def attention_setting(config: Any) -> str | None:
    """The name of the attention that a configuration chooses, of itself alone.

    `set_attn_implementation` of a model is public, but checks and changes more.
    """
    setting: str | None = config._attn_implementation_internal
    return setting


def set_attention(config: Any, name: str | None) -> None:
    """What `attention_setting` reads."""
    config._attn_implementation_internal = name


def attention_of(module: nn.Module, implementation: str) -> Callable[..., tuple[Tensor, Any]]:
    """The function that an attention layer of transformers calls for an implementation.

    Eager attention has no name but in the file of the layer, by a convention that all files keep (transformers 5.23).

    Raises:
        ModelError: the layer does not keep it.
    """
    names = inspect.unwrap(type(module).forward).__globals__
    eager, interface = names.get("eager_attention_forward"), names.get("ALL_ATTENTION_FUNCTIONS")
    if interface is None or (eager is None and implementation == "eager"):
        raise ModelError(
            f"{type(module).__name__} does not say which function its attention is (attn_implementation="
            f"{implementation!r}). Build the model with attn_implementation='sdpa', or set cp_size=1."
        )
    function: Callable[..., tuple[Tensor, Any]] = interface.get_interface(implementation, eager)
    return function


def register_attention(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Let transformers find an attention function, and the function that makes its masks, by a name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def mask_maker(implementation: str) -> Callable[..., Tensor]:
    """The function of transformers that makes masks for an implementation."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    function: Callable[..., Tensor] = ALL_MASK_ATTENTION_FUNCTIONS[implementation]
    return function


def for_documents(function: Callable[..., Tensor], positions_BS: Tensor) -> tuple[Callable[..., Tensor], bool]:
    """A mask function that keeps documents apart, whose positions restart; and whether there are several.

    As transformers itself does it for sequences without an attention mask; the functions are not documented. Up to 5.22
    mask functions see the places of tokens in the row, from 5.23 on those in the document: it matters to attention in
    chunks.
    """
    from transformers import masking_utils

    documents = masking_utils.find_packed_sequence_indices(positions_BS)
    if documents is None:
        return function, False
    remapping = getattr(masking_utils, "packed_sequence_compatibility_function", None)
    if remapping is not None:
        return remapping(function, positions_BS, documents), True
    return masking_utils.and_masks(function, masking_utils.packed_sequence_mask_function(documents)), True


def is_left_out_of_files(model: nn.Module, name: str) -> bool:
    """Whether `save_pretrained` leaves a tensor of a model out, since the model makes it anew.

    The patterns have no public name.
    """
    patterns = getattr(model, "_keys_to_ignore_on_save", None) or []
    return any(re.search(pattern, name) for pattern in patterns)


def save_code(model: nn.Module, directory: Path) -> None:
    """Write the files of a model's class, if they came with it, and note them in its configuration.

    As `save_pretrained` does it for a whole model; which classes are such is told by a private name.
    """
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(base, "_auto_class", None) is not None:
        from transformers.dynamic_module_utils import custom_object_save

        directory.mkdir(exist_ok=True)
        custom_object_save(base, directory, config=base.config)


def never_ask() -> None:
    """From now on, transformers does not ask whether to run the code that comes with files, and runs none.

    It asks where `trust_remote_code` was not passed on, as its auto class for tokenizers does not. With no time to
    answer it refuses at once.
    """
    from transformers import dynamic_module_utils

    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0


LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Types of rotary embeddings whose frequencies depend on the largest position of a forward."""


def length_dependent_ropes(model: nn.Module) -> list[nn.Module]:
    """The rotary embeddings of a model that look at how long a forward is; of `modeling_rope_utils` in 5.17 to 5.23."""

    def kinds(module: nn.Module) -> list[Any]:
        kind = getattr(module, "rope_type", None)
        return list(kind.values()) if isinstance(kind, dict) else [kind]

    return [module for module in model.modules() if not {*LENGTH_DEPENDENT}.isdisjoint(map(str, kinds(module)))]


def forget_length(rope: nn.Module, hidden: Tensor, layer_type: str | None = None) -> None:
    """Give a `dynamic` rotary embedding its first frequencies again, as a short forward does."""
    kind = rope.rope_type[layer_type] if isinstance(rope.rope_type, dict) else rope.rope_type
    if kind != "dynamic":
        return
    known = getattr(rope, f"{layer_type}_max_seq_len_cached", rope.max_seq_len_cached)
    if known > rope.original_max_seq_len:
        positions = torch.zeros(1, 1, dtype=torch.int64, device=hidden.device)
        rope.forward(hidden, positions, *([] if layer_type is None else [layer_type]))
