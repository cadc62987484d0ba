"""Names of peft: how it wraps a model's modules. peft is imported within functions alone.

A model of peft has the base model within it, under `PREFIX`; each adapted module is replaced by a wrapper, which holds
the original as `base_layer` (tuners) or `original_module` (modules to save) besides what is trained.

[Note: tied adapters] With `ensure_weight_tying`, peft ties an embedding and a head that both have low-rank factors by
memory: the head's factors are parameters of their own, transposed views of the embedding's. The tie ends where a model
is sharded, moved or read, and an optimizer has state for both. Here the head holds the embedding's parameters
themselves and transposes them as it computes.
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
"""Attributes of wrappers that hold what they wrap; a tuner of single tokens wraps an embedding, within another."""
PATTERN_TIMEOUT_S = 30.0
"""For matching patterns with the names of modules."""


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
    """Return whether a model is one of peft's, whose base model is under `PREFIX`."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel) and hasattr(model.base_model, "model")


def to_base_name(name: str) -> str:
    """Return the base model's name of a parameter or module of an adapted one; of a wrapper or copy, of its original.
    For what only the adapter has, its matrices, this is no name of the base model."""
    parts = name.removeprefix(PEFT_PREFIX).split(".")
    copied = {at + each for at, part in enumerate(parts) if part == "modules_to_save" for each in (0, 1)}
    return ".".join(part for at, part in enumerate(parts) if at not in copied and part not in _WRAPPER_ATTRIBUTES)


def unwrap_base_layer(module: nn.Module) -> nn.Module:
    while isinstance(getattr(module, "base_layer", None), nn.Module):
        module = module.base_layer
    return module


def _iter_instances(model: nn.Module, module: str, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the modules of a model that are of a class of peft, with their names."""
    if "peft" in sys.modules:
        cls = getattr(importlib.import_module(module), name)
        yield from ((path, each) for path, each in model.named_modules() if isinstance(each, cls))


def iter_tuner_layers(model: nn.Module, *, outermost: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the wrappers of a tuner and their names, those that hold others first; or only those that none holds."""
    held: set[nn.Module] = set()
    for path, layer in _iter_instances(model, "peft.tuners.tuners_utils", "BaseTunerLayer"):
        if layer not in held:
            yield path, layer
            held.update(layer.modules() if outermost else ())


def _iter_saved_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return _iter_instances(model, "peft.utils.other", "ModulesToSaveWrapper")


def list_copies(model: nn.Module, name: str) -> list[str]:
    """Return the names of a module's original and trained copies; without copies, its own."""
    wrapper = next((each for path, each in _iter_saved_modules(model.get_submodule(name)) if not path), None)
    copies = () if wrapper is None else (f"{name}.modules_to_save.{each}" for each in wrapper.modules_to_save)
    return [name] if wrapper is None else [f"{name}.original_module", *copies]


def find_active_copies(model: nn.Module) -> dict[str, bool]:
    """Return, for tensors of modules that have trained copies, by name: whether it is the one that merging keeps."""
    found: dict[str, bool] = {}
    for path, module in _iter_saved_modules(model):
        chosen = f"modules_to_save.{module.active_adapters[0]}." if module.active_adapters else "original_module."
        found |= {f"{path}.{name}": name.startswith(chosen) for name in module.state_dict()}
    return found


def merge_layer(layer: Any, name: str) -> nn.Module:
    """Merge a wrapper's active adapters into what it wraps, in place, and return that."""
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
    """A wrapper of LoRA around a linear layer, an embedding or a parameter, as peft computes it."""

    parameter_name: str | None
    """Name of the parameter that it wraps; None: the weight of a layer."""
    output_params: tuple[str, ...]
    """Names, within the wrapper, of what has the weight's output along its first dim: B and DoRA's magnitudes."""
    input_params: tuple[str, ...]
    """Names of what has its input along the last dim: A."""
    in_features: int
    is_transposed: bool
    """The weight has its input along the last dim but one."""
    biases: tuple[nn.Module, ...]
    """The modules of B that add one."""
    dropouts: tuple[nn.Module, ...]
    magnitudes: tuple[Any, ...]


def describe_lora_layer(module: nn.Module) -> LoraLayer | None:
    """Describe a wrapper of plain LoRA or DoRA that computes as peft's own layers do; None: something else."""
    if "peft" not in sys.modules:
        return None
    from peft.tuners.lora import layer as layers
    from peft.tuners.lora import variants

    plain = (variants.DoraLinearVariant, variants.DoraEmbeddingVariant)
    if type(module) not in (layers.Linear, layers.Embedding, layers.ParamWrapper):
        return None
    if any(type(each) not in plain for each in module.lora_variant.values()):
        return None
    outer = [f"lora_B.{each}.{name}" for each, b in module.lora_B.items() for name, _ in b.named_parameters()]
    outer += [f"lora_embedding_B.{each}" for each in module.lora_embedding_B]
    outer += [f"lora_magnitude_vector.{each}.weight" for each in module.lora_magnitude_vector]
    inner = [f"lora_A.{each}.{name}" for each, a in module.lora_A.items() for name, _ in a.named_parameters()]
    inner += [f"lora_embedding_A.{each}" for each in module.lora_embedding_A]
    # In a stage of a pipeline, parts of a wrapper may be on another stage.
    here = dict(module.named_parameters(remove_duplicate=False))
    return LoraLayer(
        parameter_name=getattr(module, "parameter_name", None),
        output_params=tuple(filter(here.__contains__, outer)),
        input_params=tuple(filter(here.__contains__, inner)),
        in_features=module.in_features,
        is_transposed=getattr(module, "num_experts", 1) > 1 and not module._did_swap_in_out_features,
        biases=tuple(each for each in module.lora_B.values() if each.bias is not None),
        dropouts=tuple(each for each in module.lora_dropout.values() if isinstance(each, nn.Dropout)),
        magnitudes=tuple(module.lora_magnitude_vector.values()),
    )


def find_parameter_wrappers(model: nn.Module, inner: nn.Module) -> list[Any]:
    """Return the wrappers of LoRA around parameters of one module, which are nested; the outermost first."""
    layers = (layer for _, layer in iter_tuner_layers(model))
    return [
        each
        for each in layers
        if getattr(each, "parameter_name", None) is not None and unwrap_base_layer(each) is inner
    ]


def add_lora_delta(layer: Any, weight: Tensor, first_expert: int) -> Tensor:
    """Add to the stacked weights of some experts, from `first_expert` on, what a wrapper of the whole parameter adds."""
    adapters = [] if layer.disable_adapters else [each for each in layer.active_adapters if each in layer.lora_A]
    with torch.autocast(device_type=weight.device.type, enabled=False):
        for each in adapters:
            left, right, scaling = layer.get_delta_factors(each)
            mine = slice(first_expert, first_expert + weight.shape[0])
            weight = torch.baddbmm(weight, left[mine], right[mine], alpha=scaling)
    return weight


def patch_dora_norms(magnitude: Any, all_reduce_sum: Callable[[Tensor], Tensor], is_active: Callable[[], bool]) -> None:
    """Let DoRA take the norms of a weight whose rows are sharded while `is_active`; `all_reduce_sum` sums over the ranks."""
    of_part = magnitude.get_weight_norm

    def norms(*args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = of_part(*args, **kwargs)
        return all_reduce_sum(found.detach().square()).sqrt() if is_active() else found

    magnitude.get_weight_norm = norms


@dataclass(frozen=True)
class DoraFactors:
    """What the norms of one magnitude of DoRA are taken of, besides the weight, which has this `dtype`."""

    compute_norm: Callable[..., Tensor]
    """peft's own function, before `patch_dora_norms` changes it."""
    left: Tensor
    right: Tensor
    scaling: float
    dtype: torch.dtype
    is_transposed: bool
    """Whether norms are of the weight's columns."""

    def compute_norms(self, part: Tensor, first_row: int, row_range: slice) -> Tensor:
        """Return norms of rows from `first_row` on, `part` of the weight; all ranks multiply the rows `row_range` together."""
        delta = self.left[row_range].to(self.dtype) @ self.right.to(self.dtype)
        delta = delta[first_row - row_range.start :][: part.shape[1 if self.is_transposed else 0]]
        return self.compute_norm(part, delta, self.scaling)


def iter_dora_magnitudes(model: nn.Module) -> Iterator[tuple[str, str, DoraFactors]]:
    """Yield, for DoRA's magnitudes, the name of the parameter, that of the layer in the base model, and factors."""
    for path, layer in iter_tuner_layers(model):
        for adapter, module in getattr(layer, "lora_magnitude_vector", {}).items():
            if adapter in layer.lora_embedding_A:
                left, right = layer.lora_embedding_B[adapter], layer.lora_embedding_A[adapter]
            else:
                left, right = layer.lora_B[adapter].weight, layer.lora_A[adapter].weight
            dtype, is_turned = layer.get_base_layer().weight.dtype, bool(module.fan_in_fan_out)
            taken, scaling = module.get_weight_norm, layer.scaling[adapter]
            made = DoraFactors(taken, left.detach(), right.detach(), scaling, dtype, is_turned)
            yield f"{path}.lora_magnitude_vector.{adapter}.weight", to_base_name(path), made


def map_file_names(model: nn.Module, adapter: str = "default") -> dict[str, str]:
    """Return the names of an adapter's tensors in its file, by peft's own function, each with its name in the model."""
    from peft import get_peft_model_state_dict

    marks: dict[str, Any] = {name: SimpleNamespace(name=name) for name in model.state_dict(keep_vars=True)}
    found: Mapping[str, Any] = get_peft_model_state_dict(
        model, state_dict=marks, adapter_name=adapter, save_embedding_layers=False
    )
    return {re.sub(r"\.factor$", ".weight", key): mark.name for key, mark in found.items()}


def is_transposed(name: str) -> bool:
    return name.endswith(".factor")


def apply_peft(model: nn.Module, config: Any, *, adapter: str = "default", hint: str = "") -> nn.Module:
    """Call `peft.get_peft_model`; an error of ours has peft's own reasons, and a hint."""
    peft = import_peft()
    try:
        _check_patterns(model, config)
        with warnings.catch_warnings():
            # Between peft and transformers, of what a user can do nothing about.
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
            found = re.compile(pattern)
            for name, _ in model.named_modules():
                found.fullmatch(name)


class _NanPlaceholder(nn.Parameter):
    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        return create_nan_placeholder(self)


def create_nan_placeholder(parameter: nn.Parameter) -> nn.Parameter:
    """Return NaN everywhere, without memory, on the CPU: it shows in whatever is made of it."""
    value = torch.full((1,) * max(1, parameter.dim()), float("nan"), dtype=parameter.dtype)
    return _NanPlaceholder(value.expand(parameter.shape), requires_grad=False)


def add_adapters_on_meta(base: nn.Module, configs: Mapping[str, Any]) -> nn.Module:
    """Put adapters on the meta device over a base that is there, in place; `low_cpu_mem_usage` unties parameters."""
    (first, config), *others = configs.items()
    with warnings.catch_warnings(), torch.device("meta"):
        # The training of the adapters has warned of what the configurations bring about.
        warnings.simplefilter("ignore")
        model: Any = apply_peft(base, config, adapter=first)
        for name, each in others:
            model.add_adapter(name, each)
    return tie_adapters(model)


# -- ties; see [Note: tied adapters]


class TransposedFactor(nn.Module):
    """A low-rank factor of a head: the transposed factor of the embedding that it is tied to."""

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
    """Let the heads of an adapted model hold the factors that they are tied to; in place, at any time before training.

    Trained copies of tied heads are one parameter already; they get the sizes and need the bias of what they replace.
    """
    for path, module in _iter_saved_modules(model) if is_peft_model(model) else ():
        for copied in module.modules_to_save.values():
            if type(copied) is not nn.Linear or not isinstance(module.original_module, nn.Linear):
                continue
            copied.out_features, copied.in_features = copied.weight.shape
            if copied.bias is None and module.original_module.bias is not None:
                raise ModelError(
                    f"ensure_weight_tying=True ties a trained copy of {to_base_name(path)} to that of the embedding, and "
                    f"peft leaves its bias out, so that the model computes something else. Set "
                    f"ensure_weight_tying=False, or leave the embedding and the head out of modules_to_save."
                )
    for path, name, head in _iter_tied_heads(model):
        # Tied already, or on another stage of a pipeline.
        if type(head.lora_A[name]) is not nn.Linear:
            continue
        # A reference to the factors as they were drawn.
        head.kwargs.pop("tied_adapter", None)
        embedding = model.get_input_embeddings()
        for factors, other in ((head.lora_A, embedding.lora_embedding_B), (head.lora_B, embedding.lora_embedding_A)):
            own = factors[name].weight
            if not own.is_meta and not torch.equal(own, other[name].t()):
                raise ModelError(
                    f"the adapter {name!r} has ensure_weight_tying=True, but its factors of {path} are not those of "
                    f"the embedding: they were trained, moved or loaded apart. Make the adapter anew, or load it with "
                    f"PeftModel.from_pretrained, on the device where it is trained."
                )
            factors[name] = TransposedFactor(other[name])
    return cast("nn.Module", model)


def find_tied_after_merge(model: Any) -> dict[str, str]:
    """Return the names of heads that merging leaves equal to the embeddings they are tied to, with the embedding's."""
    found: dict[str, str] = {}
    paths = {id(layer): path for path, layer in iter_tuner_layers(model)}
    for path, name, head in _iter_tied_heads(model):
        embedding = model.get_input_embeddings()
        has_variant = name in head.lora_variant or name in embedding.lora_variant
        if head.active_adapters == [name] and head.scaling[name] == embedding.scaling[name] and not has_variant:
            found[path] = paths[id(embedding)]
    return found


def _iter_tied_heads(model: Any) -> Iterator[tuple[str, str, Any]]:
    if not is_peft_model(model):
        return
    for name, config in model.peft_config.items():
        heads = getattr(config, "target_modules_to_tie", None) or ()
        for path, layer in iter_tuner_layers(model):
            # As peft decides it, which compares the last part of the name.
            if path.rpartition(".")[2] in heads and name in getattr(layer, "lora_A", ()):
                yield path, name, layer
