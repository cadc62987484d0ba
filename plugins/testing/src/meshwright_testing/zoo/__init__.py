"""Tiny random instances of every causal LM in transformers' mapping.

Rules on the names and defaults of fields reduce the sizes of configurations. Fields that a type derives from others (a
default of None) stay derived, and equal defaults (as many key heads as heads) stay equal. zoo.yaml has the exceptions,
with reasons. A float64 model computes in float64 throughout, even if its code casts to float32.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from importlib import resources
from types import MethodType
from typing import Any

import torch
import yaml
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig

from meshwright.plugin import ModelError, suggest_match

PARAMETER_NOISE_STD = 0.02
"""Standard deviation of the noise added to each parameter, since zeros and equal rows would hide errors."""


def zoo_types() -> list[str]:
    """Return every model type in transformers' causal-LM mapping."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def zoo_unsupported_reason(model_type: str) -> str | None:
    """Return why the type cannot train as a text-only causal LM; None if it can."""
    return load_zoo_data()["refused"].get(model_type)


def build_zoo_config(model_type: str, *, tied: bool | None = None) -> Any:
    """Return the tiny configuration of a type, tied or not (None: its default); ModelError if it cannot train."""
    from transformers import CONFIG_MAPPING

    if model_type not in zoo_types():
        raise ModelError(f"the zoo has no model type {model_type!r}.{suggest_match(model_type, zoo_types())}")
    reason = zoo_unsupported_reason(model_type)
    if reason is not None:
        raise ModelError(f"the model type {model_type!r} cannot train as a text-only causal LM: {reason}")
    given = {name: value for name, value in load_zoo_data()["values"].get(model_type, {}).items() if name != "reason"}
    if tied is not None:
        given["tie_word_embeddings"] = tied
    return build_tiny_config(CONFIG_MAPPING[model_type], given)


def zoo_vocab_size(model_type: str) -> int:
    """Return the number of token ids that the type embeds."""
    return int(build_zoo_config(model_type).get_text_config().vocab_size)


def build_zoo_model(
    model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, tied: bool | None = None
) -> nn.Module:
    """Return a random instance in train mode, which depends only on the arguments. Keeps the global random state."""
    from transformers import AutoModelForCausalLM

    config = build_zoo_config(model_type, tied=tied)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # Fused experts have no float64 kernel on the CPU.
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.add_(torch.randn_like(parameter), alpha=PARAMETER_NOISE_STD)
    if dtype is torch.float64:
        compute_in_float64(model)
    return model.train()


@functools.cache
def load_zoo_data() -> dict[str, dict[str, Any]]:
    """Return the content of zoo.yaml: `values` of fields by type, and `refused` types with reasons."""
    text = resources.files(__package__).joinpath("zoo.yaml").read_text(encoding="utf-8")
    data: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return data


def compute_in_float64(model: nn.Module) -> None:
    """Convert all parameters to float64, and make all forwards compute in float64.

    Many architectures cast norms, routers or states to float32, under any dtype of the model. A gradient that is summed
    over tokens in float32 changes by 1e-9 with the split into microbatches, which is as much as some real bugs.

    The forward of every module is wrapped, not only the model's, because activation checkpointing calls the forwards of
    blocks again in the backward, without their hooks.
    """
    mode = _Float64Mode()
    for module in model.modules():
        # A bound method, so that a copy of the module gets its own.
        module.forward = MethodType(_wrap_in_float64(mode, type(module).forward), module)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float64)


class _Float64Mode(TorchFunctionMode):
    """Replace float32 with float64 in the arguments of torch functions, within the outermost forward of a model."""

    is_running = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(_to_float64, args), **{name: _to_float64(value) for name, value in (kwargs or {}).items()})


def _to_float64(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _wrap_in_float64(mode: _Float64Mode, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wide(*args: Any, **kwargs: Any) -> Any:
        if mode.is_running:
            return forward(*args, **kwargs)
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        mode.is_running = True
        try:
            with mode:
                return forward(*args, **kwargs)
        finally:
            mode.is_running = False
            torch.set_default_dtype(default_dtype)

    return wide


# -- tiny configurations

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 4, 4, 2, 16
VOCAB, POSITIONS, WINDOW = 160, 64, 8

SizeTable = tuple[tuple[str, int], ...]

# Both tables map patterns of full names of integer fields to sizes. The first match counts.
# These sizes replace any default. Two experts per token, since the weight of a single one is 1 after normalization, and
# its router would not train.
EXACT_SIZES: SizeTable = (
    (r".*(experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|top_k_experts)", 2),
    (r".*(num|n)_(routed_|local_)?experts", 4),
)
# These sizes apply unless the default is smaller.
MAX_SIZES: SizeTable = (
    # Vocabulary, positions, windows. Windows are shorter than the sequences of tests, so that they matter.
    (r".*vocab(_size)?(_per_layer_input)?", VOCAB),
    (r".*position_embeddings|n_positions|n_ctx|max_seq_len|context_length|model_max_length", POSITIONS),
    (r"max_(source|target)_positions", POSITIONS),
    (r".*sliding_window(_size)?|.*window_(size|len)|.*chunk(_size|_length)|local_attention|index_topk", WINDOW),
    # Counts.
    (r"(num|n)_layers_per_stack|depth|num_kv_shared_layers", 2),
    (r"(num_|n_)?(hidden_|decoder_|encoder_)?layers?|num_blocks|.*_num_hidden_layers", LAYERS),
    # A head of indexed attention has a part without positions and one with them, together as wide as other heads.
    (r"qk_(nope|rope)_head_dim", HEAD_DIM // 2),
    (r".*(_d_head|head_?dim|kv_channels)|(d|dim)_(head|kv)|attention_head_size", HEAD_DIM),
    (r".*(key_value|kv|key|kv_n)_heads|num_query_groups", KV_HEADS),
    (r"(.*_)?heads?", HEADS),
    (r"(n|num)_(expert_)?groups?|(mamba_)?n_?groups", 2),
    (r"topk_group|first_k_dense_replace|num_dense_layers|.*shared_experts|zero_expert_num", 1),
    # Widths.
    (r"(.*_)?state(_size)?|.*rank|d_rel|rotary_dim", 8),
    (r".*expand", 1),
    (r"(.*_)?(intermediate|ffn_hidden|feed_forward|ffn)_(size|dim).*|d_ff|dff|dim_ff|d_inner|mlp_dim", 96),
    (r".*(_dim|_size|_size_global|_embd|_width|_model|_ssm)", HIDDEN),
)
# Fields that some types need but have no default for.
REQUIRED_FIELDS = {
    *("head_dim", "num_key_value_heads", "num_experts_per_tok"),
    *("n_group", "topk_group", "n_routed_experts", "n_shared_experts"),
}
# Fields that define the purpose of the model.
PURPOSE_FIELDS = {"is_decoder": True, "is_encoder_decoder": False, "add_cross_attention": False, "causal": True}
# Fields that make training random.
RANDOM_FIELDS = re.compile(r".*(dropout|pdrop|layerdrop|drop_path|jitter).*")
TOKEN_ID_FIELDS = re.compile(r"(bos|eos|pad|sep|cls|mask|decoder_start)_token_id")


def build_tiny_config(config_cls: Any, overrides: Mapping[str, Any]) -> Any:
    """Return an instance of a configuration class of transformers with tiny sizes.

    `overrides` are values of fields, which take precedence over the rules; mappings for nested configurations.
    """
    values = _compute_tiny_values(config_cls, overrides)
    config = config_cls(**values)
    # Some types have different sizes in different layers, with separate defaults.
    varied = config.to_dict().get("per_layer_config")
    if not varied:
        return config
    layers = {
        int(index): {
            name: _compute_tiny_value(name, value, layer.get("num_attention_heads")) for name, value in layer.items()
        }
        for index, layer in varied.items()
    }
    return config_cls(**values, per_layer_config=layers)


def _compute_tiny_values(config_cls: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that differ from the default."""
    renamed = config_cls.attribute_map
    # Not getattr, which raises an error for sizes that differ between layers.
    old = vars(config_cls())
    heads = old.get(renamed.get("num_attention_heads", "num_attention_heads"))
    values: dict[str, Any] = {}
    fields = inspect.signature(config_cls).parameters
    for name in fields:
        value = old.get(renamed.get(name, name))
        if isinstance(value, PreTrainedConfig):
            values[name] = build_tiny_config(type(value), given.get(name) or {})
        elif value is None and name in REQUIRED_FIELDS and renamed.get(name, name) in old:
            values[name] = _match_size(name, EXACT_SIZES + MAX_SIZES)
        elif fields[name].default is not None:
            values[name] = _compute_tiny_value(name, value, heads)
    lists = {name: old[name] for name in fields if isinstance(old.get(name), (list, tuple))}
    values |= _cut_layer_lists(lists, old.get(renamed.get("num_hidden_layers", "num_hidden_layers")))
    values |= {name: value for name, value in given.items() if not isinstance(old.get(name), PreTrainedConfig)}
    return {name: value for name, value in values.items() if name not in old or value is not old[name]}


def _compute_tiny_value(name: str, value: Any, heads: int | None = None) -> Any:
    """Return the value of a field by its name, its default, and the default number of heads."""
    if name in PURPOSE_FIELDS:
        return PURPOSE_FIELDS[name]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and RANDOM_FIELDS.fullmatch(name):
        return type(value)(0)
    if not is_number or not isinstance(value, int):
        return value
    if TOKEN_ID_FIELDS.fullmatch(name):
        return min(value, VOCAB - 1)
    if name.endswith("heads") and value == heads:
        return min(value, HEADS)
    return _match_size(name, EXACT_SIZES) or min(value, _match_size(name, MAX_SIZES) or value)


def _match_size(name: str, table: SizeTable) -> int | None:
    return next((size for pattern, size in table if re.fullmatch(pattern, name)), None)


def _cut_layer_lists(lists: Mapping[str, Any], layers: int | None) -> dict[str, Any]:
    """Shorten the lists with one entry per layer, so that the kinds of layers alternate.

    The entries of all lists for a layer define its kind. If there are more kinds than layers, keep those with the most
    new values.
    """
    lists = {name: value for name, value in lists.items() if layers and len(value) == layers > LAYERS}
    kinds = {repr(layer): layer for layer in zip(*lists.values(), strict=True)}
    order = list(kinds)
    seen: set[tuple[int, str]] = set()
    kept: list[str] = []

    def unseen(kind: str) -> set[tuple[int, str]]:
        return {(column, repr(value)) for column, value in enumerate(kinds[kind])} - seen

    while len(kept) < min(LAYERS, len(order)):
        best = max((kind for kind in order if kind not in kept), key=lambda kind: len(unseen(kind)))
        seen |= unseen(best)
        kept.append(best)
    turn = [kinds[kind] for kind in order if kind in kept]
    return {
        name: type(value)(_compute_tiny_value(name, turn[index % len(turn)][column]) for index in range(LAYERS))
        for column, (name, value) in enumerate(lists.items())
    }
