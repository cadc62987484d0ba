"""Names of peft, and how it wraps a model's modules. peft is imported only within functions.

A peft model contains the base model under `PEFT_PREFIX`. Each adapted module is replaced by a wrapper, which holds the
original as `base_layer` (tuners) or `original_module` (modules to save), and the trained parameters.

[Note: tied adapters] With `ensure_weight_tying`, peft ties the low-rank factors of an embedding and a head by memory:
the head's factors are separate parameters that are transposed views of the embedding's. Sharding, moving or loading the
model breaks that tie, and an optimizer keeps state for both. Here the head holds the embedding's own parameters
instead, and transposes them in its forward.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..base.errors import ModelError
from ..files.parsing import explain_library_error, time_limit

PEFT_PREFIX = "base_model.model."
_WRAPPER_ATTRIBUTES = ("base_layer", "original_module", "token_adapter")
"""Attributes in which wrappers hold the wrapped module; `token_adapter` is an embedding's, and is nested."""
PATTERN_TIMEOUT_S = 30.0
"""Time limit for matching patterns with module names, in seconds."""


def import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ModelError(
            f"adapters need the package peft, which cannot be imported ({error}). Install it: pip install -e '.[peft]'"
        ) from error
    return peft


# -- names and wrappers


def is_peft_model(model: nn.Module) -> bool:
    """Return whether a model is a peft model with its base model under `PEFT_PREFIX`."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel) and hasattr(model.base_model, "model")


def to_base_name(name: str) -> str:
    """Return the base model's name for a parameter or module of an adapted model; for a wrapper or copy, its
    original's.

    For tensors that only the adapter has, the result is not a name of the base model.
    """
    parts = name.removeprefix(PEFT_PREFIX).split(".")
    copied = {at + each for at, part in enumerate(parts) if part == "modules_to_save" for each in (0, 1)}
    return ".".join(part for at, part in enumerate(parts) if at not in copied and part not in _WRAPPER_ATTRIBUTES)


def unwrap_base_layer(module: nn.Module) -> nn.Module:
    while isinstance(getattr(module, "base_layer", None), nn.Module):
        module = module.base_layer
    return module


def _iter_instances(model: nn.Module, module: str, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the names and modules of a model that are instances of a peft class."""
    if "peft" in sys.modules:
        cls = getattr(importlib.import_module(module), name)
        yield from ((path, each) for path, each in model.named_modules() if isinstance(each, cls))


def iter_tuner_layers(model: nn.Module, *, outermost: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the names and wrappers of a tuner, outer wrappers before nested ones; or only the outermost ones."""
    nested: set[nn.Module] = set()
    for path, layer in _iter_instances(model, "peft.tuners.tuners_utils", "BaseTunerLayer"):
        if layer not in nested:
            yield path, layer
            nested.update(layer.modules() if outermost else ())


def _iter_saved_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return _iter_instances(model, "peft.utils.other", "ModulesToSaveWrapper")


def list_copies(model: nn.Module, name: str) -> list[str]:
    """Return the names of a module's original and trained copies; without copies, the module's own name."""
    wrapper = next((each for path, each in _iter_saved_modules(model.get_submodule(name)) if not path), None)
    copies = () if wrapper is None else (f"{name}.modules_to_save.{each}" for each in wrapper.modules_to_save)
    return [name] if wrapper is None else [f"{name}.original_module", *copies]


def find_active_copies(model: nn.Module) -> dict[str, bool]:
    """Return by name, for tensors of modules with trained copies, whether merging keeps the tensor."""
    is_active: dict[str, bool] = {}
    for path, module in _iter_saved_modules(model):
        active_prefix = (
            f"modules_to_save.{module.active_adapters[0]}." if module.active_adapters else "original_module."
        )
        is_active |= {f"{path}.{name}": name.startswith(active_prefix) for name in module.state_dict()}
    return is_active


def merge_layer(layer: Any, name: str) -> nn.Module:
    """Merge a wrapper's active adapters into the wrapped module, in place, and return that module."""
    try:
        if hasattr(layer, "unload_and_optionally_merge_module"):
            merged: nn.Module = layer.unload_and_optionally_merge_module(True, safe_merge=False, adapter_names=None)
        else:
            layer.merge(safe_merge=False)
            merged = layer.get_base_layer()
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"peft cannot merge the adapter of {name}: {explain_library_error(error)}") from error
    return merged


# -- LoRA and DoRA


@dataclass(frozen=True)
class LoraLayer:
    """A LoRA wrapper around a linear layer, an embedding or a parameter, with peft's own forward."""

    parameter_name: str | None
    """Name of the parameter that it wraps; None: the weight of a layer."""
    output_params: tuple[str, ...]
    """Names, relative to the wrapper, of parameters with the weight's output features first: B and DoRA magnitudes."""
    input_params: tuple[str, ...]
    """Names of parameters with the weight's input features last: A."""
    in_features: int
    is_transposed: bool
    """Whether the weight has its input features in dim -2."""
    biases: tuple[nn.Module, ...]
    """The modules of B that have a bias."""
    dropouts: tuple[nn.Module, ...]
    magnitudes: tuple[Any, ...]


def describe_lora_layer(module: nn.Module) -> LoraLayer | None:
    """Describe a wrapper of plain LoRA or DoRA with peft's own forward; return None for anything else."""
    if "peft" not in sys.modules:
        return None
    from peft.tuners.lora import layer as layers
    from peft.tuners.lora import variants

    supported_variants = (variants.DoraLinearVariant, variants.DoraEmbeddingVariant)
    if type(module) not in (layers.Linear, layers.Embedding, layers.ParamWrapper):
        return None
    if any(type(each) not in supported_variants for each in module.lora_variant.values()):
        return None
    output_params = [f"lora_B.{each}.{name}" for each, b in module.lora_B.items() for name, _ in b.named_parameters()]
    output_params += [f"lora_embedding_B.{each}" for each in module.lora_embedding_B]
    output_params += [f"lora_magnitude_vector.{each}.weight" for each in module.lora_magnitude_vector]
    input_params = [f"lora_A.{each}.{name}" for each, a in module.lora_A.items() for name, _ in a.named_parameters()]
    input_params += [f"lora_embedding_A.{each}" for each in module.lora_embedding_A]
    # On a pipeline stage, some parameters of a wrapper may be on another stage.
    present = dict(module.named_parameters(remove_duplicate=False))
    return LoraLayer(
        parameter_name=getattr(module, "parameter_name", None),
        output_params=tuple(filter(present.__contains__, output_params)),
        input_params=tuple(filter(present.__contains__, input_params)),
        in_features=module.in_features,
        is_transposed=getattr(module, "num_experts", 1) > 1 and not module._did_swap_in_out_features,
        biases=tuple(each for each in module.lora_B.values() if each.bias is not None),
        dropouts=tuple(each for each in module.lora_dropout.values() if isinstance(each, nn.Dropout)),
        magnitudes=tuple(module.lora_magnitude_vector.values()),
    )


def find_parameter_wrappers(model: nn.Module, inner: nn.Module) -> list[Any]:
    """Return the nested LoRA wrappers around parameters of one module, outermost first."""
    layers = (layer for _, layer in iter_tuner_layers(model))
    return [
        each
        for each in layers
        if getattr(each, "parameter_name", None) is not None and unwrap_base_layer(each) is inner
    ]


def add_lora_delta(layer: Any, weight: Tensor, first_expert: int) -> Tensor:
    """Add a wrapper's delta to the stacked weights of the experts that start at `first_expert`."""
    adapters = [] if layer.disable_adapters else [each for each in layer.active_adapters if each in layer.lora_A]
    with torch.autocast(device_type=weight.device.type, enabled=False):
        for each in adapters:
            left, right, scaling = layer.get_delta_factors(each)
            mine = slice(first_expert, first_expert + weight.shape[0])
            weight = torch.baddbmm(weight, left[mine], right[mine], alpha=scaling)
    return weight


def patch_dora_norms(magnitude: Any, all_reduce_sum: Callable[[Tensor], Tensor], is_active: Callable[[], bool]) -> None:
    """Let DoRA compute the norms of a weight with sharded input features while `is_active()`.

    `all_reduce_sum` sums over the ranks.
    """
    shard_norm = magnitude.get_weight_norm

    def reduced_norm(*args: Any, **kwargs: Any) -> Tensor:
        norm: Tensor = shard_norm(*args, **kwargs)
        return all_reduce_sum(norm.detach().square()).sqrt() if is_active() else norm

    magnitude.get_weight_norm = reduced_norm


@dataclass(frozen=True)
class DoraFactors:
    """Inputs, besides the weight, of the norms of one DoRA magnitude. `dtype` is the weight's dtype."""

    compute_norm: Callable[..., Tensor]
    """peft's own function, before `patch_dora_norms` replaces it."""
    left: Tensor
    right: Tensor
    scaling: float
    dtype: torch.dtype
    is_transposed: bool
    """Whether norms are those of the weight's columns."""

    def compute_norms(self, part: Tensor, first_row: int, row_range: slice) -> Tensor:
        """Return the norms of `part`, the weight's rows from `first_row`; all ranks compute `row_range`'s delta."""
        delta = self.left[row_range].to(self.dtype) @ self.right.to(self.dtype)
        delta = delta[first_row - row_range.start :][: part.shape[1 if self.is_transposed else 0]]
        return self.compute_norm(part, delta, self.scaling)


def iter_dora_magnitudes(model: nn.Module) -> Iterator[tuple[str, str, DoraFactors]]:
    """Yield the parameter name, the layer's name in the base model, and the factors, for each DoRA magnitude."""
    for path, layer in iter_tuner_layers(model):
        for adapter, module in getattr(layer, "lora_magnitude_vector", {}).items():
            if adapter in layer.lora_embedding_A:
                left, right = layer.lora_embedding_B[adapter], layer.lora_embedding_A[adapter]
            else:
                left, right = layer.lora_B[adapter].weight, layer.lora_A[adapter].weight
            dtype, is_transposed_layer = layer.get_base_layer().weight.dtype, bool(module.fan_in_fan_out)
            compute_norm, scaling = module.get_weight_norm, layer.scaling[adapter]
            factors = DoraFactors(compute_norm, left.detach(), right.detach(), scaling, dtype, is_transposed_layer)
            yield f"{path}.lora_magnitude_vector.{adapter}.weight", to_base_name(path), factors


def map_file_names(model: nn.Module, adapter: str = "default") -> dict[str, str]:
    """Map the tensor names in an adapter's file, determined by peft's own function, to the names in the model."""
    from peft import get_peft_model_state_dict

    placeholders: dict[str, Any] = {name: SimpleNamespace(name=name) for name in model.state_dict(keep_vars=True)}
    file_tensors: Mapping[str, Any] = get_peft_model_state_dict(
        model, state_dict=placeholders, adapter_name=adapter, save_embedding_layers=False
    )
    return {re.sub(r"\.factor$", ".weight", key): placeholder.name for key, placeholder in file_tensors.items()}


def is_transposed(name: str) -> bool:
    return name.endswith(".factor")


def apply_peft(model: nn.Module, config: Any, *, adapter: str = "default", hint: str = "") -> nn.Module:
    """Call `peft.get_peft_model`; raise ModelError with peft's reason and `hint` if it fails."""
    peft = import_peft()
    try:
        _check_patterns(model, config)
        with warnings.catch_warnings():
            # Caused by peft and transformers; a user cannot fix it.
            warnings.simplefilter("ignore", FutureWarning)
            adapted: nn.Module = peft.get_peft_model(model, config, adapter_name=adapter)
    except (ValueError, TypeError, IndexError, RuntimeError, ImportError, TimeoutError, re.error) as error:
        why = explain_library_error(error).strip().rstrip(".")
        raise ModelError(f"peft cannot adapt {type(model).__name__}: {why}.{hint}") from error
    return adapted


def _check_patterns(model: nn.Module, config: Any) -> None:
    fields = [getattr(config, name, None) for name in ("target_modules", "exclude_modules", "layers_pattern")]
    keys = [key for name in ("rank_pattern", "alpha_pattern") for key in getattr(config, name, None) or ()]
    with time_limit(PATTERN_TIMEOUT_S, "matching its patterns with the names of modules"):
        for pattern in [*(each for each in fields if isinstance(each, str)), *(rf"(.*\.)?({key})$" for key in keys)]:
            compiled = re.compile(pattern)
            for name, _ in model.named_modules():
                compiled.fullmatch(name)


class _NanPlaceholder(nn.Parameter):
    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        return create_nan_placeholder(self)


def create_nan_placeholder(parameter: nn.Parameter) -> nn.Parameter:
    """Return a CPU parameter that is NaN everywhere and takes no memory, so that any use of it shows."""
    value = torch.full((1,) * max(1, parameter.dim()), float("nan"), dtype=parameter.dtype)
    return _NanPlaceholder(value.expand(parameter.shape), requires_grad=False)


def add_adapters_on_meta(base: nn.Module, configs: Mapping[str, Any]) -> nn.Module:
    """Add adapters on the meta device to a base model, in place; peft's `low_cpu_mem_usage` would untie parameters."""
    (first, config), *others = configs.items()
    with warnings.catch_warnings(), torch.device("meta"):
        # Training the adapters has already issued these warnings.
        warnings.simplefilter("ignore")
        model: Any = apply_peft(base, config, adapter=first)
        for name, each in others:
            model.add_adapter(name, each)
    return tie_adapters(model)


# -- ties; see [Note: tied adapters]


class TransposedFactor(nn.Module):
    """A low-rank factor of a head: the transpose of the embedding's factor that it is tied to."""

    bias = None

    def __init__(self, factor: nn.Parameter) -> None:
        super().__init__()
        self.factor = factor

    @property
    def weight(self) -> Tensor:
        return self.factor.t()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def tie_adapters(model: Any) -> nn.Module:
    """Make the heads of an adapted model hold the factors that they are tied to; in place, before training.

    Trained copies of tied heads already share a parameter. They get its sizes, and are rejected if they lack the
    original's bias.
    """
    for path, module in _iter_saved_modules(model) if is_peft_model(model) else ():
        for copied in module.modules_to_save.values():
            if type(copied) is not nn.Linear or not isinstance(module.original_module, nn.Linear):
                continue
            copied.out_features, copied.in_features = copied.weight.shape
            if copied.bias is None and module.original_module.bias is not None:
                raise ModelError(
                    f"ensure_weight_tying=True ties a trained copy of {to_base_name(path)} to that of the embedding, "
                    "and peft leaves its bias out, so that the model computes something else. Set "
                    "ensure_weight_tying=False, or leave the embedding and the head out of modules_to_save."
                )
    for path, name, head in _iter_tied_heads(model):
        # Already tied, or on another pipeline stage.
        if type(head.lora_A[name]) is not nn.Linear:
            continue
        # A reference to the factors' initial values.
        head.kwargs.pop("tied_adapter", None)
        embedding = model.get_input_embeddings()
        for factors, other in ((head.lora_A, embedding.lora_embedding_B), (head.lora_B, embedding.lora_embedding_A)):
            own = factors[name].weight
            if not own.is_meta and not torch.equal(own, other[name].t()):
                raise ModelError(
                    f"the adapter {name!r} has ensure_weight_tying=True, but its factors of {path} are not those of "
                    f"the embedding: they were trained, moved or loaded apart. Make the adapter again, or load it with "
                    f"PeftModel.from_pretrained, on the device where it is trained."
                )
            factors[name] = TransposedFactor(other[name])
    return cast("nn.Module", model)


def find_tied_after_merge(model: Any) -> dict[str, str]:
    """Map heads to the embeddings they are tied to, by name, if merging leaves their weights equal."""
    tied: dict[str, str] = {}
    paths = {id(layer): path for path, layer in iter_tuner_layers(model)}
    for path, name, head in _iter_tied_heads(model):
        embedding = model.get_input_embeddings()
        has_variant = name in head.lora_variant or name in embedding.lora_variant
        if head.active_adapters == [name] and head.scaling[name] == embedding.scaling[name] and not has_variant:
            tied[path] = paths[id(embedding)]
    return tied


def _iter_tied_heads(model: Any) -> Iterator[tuple[str, str, Any]]:
    if not is_peft_model(model):
        return
    for name, config in model.peft_config.items():
        heads = getattr(config, "target_modules_to_tie", None) or ()
        for path, layer in iter_tuner_layers(model):
            # Like peft, compare the last part of the name.
            if path.rpartition(".")[2] in heads and name in getattr(layer, "lora_A", ()):
                yield path, name, layer
