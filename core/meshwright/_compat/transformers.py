"""Private and version-dependent names of transformers. Importing this module does not import transformers or torch."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor, nn

# -- model types and chat templates, for processes without torch

_TYPE_FILES = ("auto_mappings.py", "configuration_auto.py")
_TYPE_ENTRY = re.compile(r"""["']([\w.-]+)["']\s*[,:]\s*["']\w+Config["']""")


def list_model_types() -> list[str]:
    """Return the keys of transformers' `CONFIG_MAPPING`, from its sources, since its import would import torch."""
    loaded = "transformers.models.auto.configuration_auto" in sys.modules
    if not loaded and (model_types := _read_types()):
        return model_types
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return list(CONFIG_MAPPING.keys())


def _read_types() -> list[str]:
    package = find_spec("transformers")
    if package is None or package.origin is None:
        return []
    files = [Path(package.origin).parent / "models" / "auto" / name for name in _TYPE_FILES]
    if not all(file.is_file() for file in files):
        return []
    texts = [file.read_text(encoding="utf-8").partition("\n__all__")[0] for file in files]
    return list(dict.fromkeys(name for text in texts for name in _TYPE_ENTRY.findall(text)))


def render_with_generation_spans(
    template: str, messages: Sequence[Any], tools: Sequence[Any] | None, variables: Mapping[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    """Return a chat template's output, and the character spans that it writes within `{% generation %}`."""
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, spans = render_jinja_template(
        conversations=[list(messages)],
        tools=None if tools is None else list(tools),
        chat_template=template,
        return_assistant_tokens_mask=True,
        **variables,
    )
    return texts[0], list(spans[0])


# -- loading and saving


def load_state_dict_as_pretrained(config: Any, state_dict: dict[str, Tensor], dtype: Any) -> tuple[nn.Module, Any]:
    """Load a causal LM from a state dict, keeping its tensors, and return it with transformers' loading info."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    classes = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if isinstance(classes, (list, tuple)):
        named = {each.__name__: each for each in classes}
        classes = next((named[name] for name in config.architectures or () if name in named), classes[0])
    # Like the auto class, which requires a directory.
    text_config_cls = config.sub_configs.get("text_config")
    if text_config_cls is not None and classes.config_class == text_config_cls:
        config = config.get_text_config()
    model, loading_info = classes.from_pretrained(
        None, config=config, state_dict=state_dict, dtype=dtype, ignore_mismatched_sizes=True, output_loading_info=True
    )
    return model, loading_info


def to_saved_format(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert a model's tensors to the names and shapes of published checkpoints, as views where possible."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, tensors))


def group_for_saving(model: nn.Module, names: Sequence[str]) -> list[list[str]]:
    """Group the names of a model's tensors that `to_saved_format` combines; this repeats its name matching."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    conversions = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False)
    converters = [each.reverse_transform() for each in reversed(conversions) if isinstance(each, WeightConverter)]
    groups: dict[Any, list[str]] = {}
    for name in names:
        renamed = ((number, *converter.rename_source_key(name)) for number, converter in enumerate(converters))
        key = next(((number, new) for number, new, pattern in renamed if pattern is not None), name)
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def collect_nested_configs(model: nn.Module) -> list[Any]:
    """Return the distinct transformers configurations of a model's modules, including nested ones."""
    collected: dict[int, Any] = {}
    pending = [getattr(module, "config", None) for module in reversed(list(model.modules()))]
    while pending:
        config = pending.pop()
        if hasattr(config, "_attn_implementation_internal") and id(config) not in collected:
            collected[id(config)] = config
            pending += [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return list(collected.values())


def get_attention_setting(config: Any) -> str | None:
    """Return a configuration's own attention implementation; a model's `set_attn_implementation` changes more."""
    setting: str | None = config._attn_implementation_internal
    return setting


def set_attention_setting(config: Any, name: str | None) -> None:
    config._attn_implementation_internal = name


def get_attention_function(module: nn.Module, implementation: str) -> Callable[..., tuple[Tensor, Any]]:
    """Return the attention function of a layer. The eager one is found by a naming convention of all files (5.23)."""
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
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def get_mask_function(implementation: str) -> Callable[..., Tensor]:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    function: Callable[..., Tensor] = ALL_MASK_ATTENTION_FUNCTIONS[implementation]
    return function


def isolate_documents(function: Callable[..., Tensor], positions_BS: Tensor) -> tuple[Callable[..., Tensor], bool]:
    """Return a mask function that isolates documents, whose positions restart, and whether there are several."""
    from transformers import masking_utils

    documents = masking_utils.find_packed_sequence_indices(positions_BS)
    if documents is None:
        return function, False
    remapping = getattr(masking_utils, "packed_sequence_compatibility_function", None)
    if remapping is not None:
        return remapping(function, positions_BS, documents), True
    return masking_utils.and_masks(function, masking_utils.packed_sequence_mask_function(documents)), True


def is_ignored_on_save(model: nn.Module, name: str) -> bool:
    """Return whether `save_pretrained` omits a tensor; the model's patterns have no public name."""
    patterns = getattr(model, "_keys_to_ignore_on_save", None) or []
    return any(re.search(pattern, name) for pattern in patterns)


def save_model_code(model: nn.Module, directory: Path) -> None:
    """Write the source code of a model's class, if it is remote code, and reference it in the configuration."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(base, "_auto_class", None) is not None:
        from transformers.dynamic_module_utils import custom_object_save

        directory.mkdir(exist_ok=True)
        custom_object_save(base, directory, config=base.config)


def disable_remote_code_prompt() -> None:
    """Make transformers reject remote code at once, instead of prompting, if `trust_remote_code` was not passed on."""
    from transformers import dynamic_module_utils

    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0


LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary embedding types whose frequencies depend on the largest position of a forward."""


def find_length_dependent_ropes(model: nn.Module) -> list[nn.Module]:
    """Return the rotary embeddings that depend on a forward's length (`modeling_rope_utils`, 5.17 to 5.23)."""

    kinds = ((module, getattr(module, "rope_type", None)) for module in model.modules())
    listed = ((module, kind.values() if isinstance(kind, dict) else [kind]) for module, kind in kinds)
    return [module for module, values in listed if not {*LENGTH_DEPENDENT}.isdisjoint(map(str, values))]


def reset_dynamic_rope(rope: nn.Module, hidden: Tensor, layer_type: str | None = None) -> None:
    """Reset a `dynamic` rotary embedding to its initial frequencies, as a short forward does."""
    import torch

    kind = rope.rope_type[layer_type] if isinstance(rope.rope_type, dict) else rope.rope_type
    if kind != "dynamic":
        return
    cached_length = getattr(rope, f"{layer_type}_max_seq_len_cached", rope.max_seq_len_cached)
    if cached_length > rope.original_max_seq_len:
        positions = torch.zeros(1, 1, dtype=torch.int64, device=hidden.device)
        rope.forward(hidden, positions, *([] if layer_type is None else [layer_type]))
