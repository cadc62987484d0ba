"""Names of peft: how it wraps a model's modules, which is told nowhere. peft is imported within functions alone.

A model of peft has the base model within it, under `PREFIX`; each module that is adapted is replaced by a wrapper,
which holds the original as `base_layer` (tuners) or `original_module` (modules to save) beside what is trained.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import ModelError
from ..files.parsing import reason, time_limit

PREFIX = "base_model.model."
_WRAPPED = ("base_layer", "original_module", "token_adapter")
"""What wrappers call what they are around; a tuner of single tokens is around an embedding, within another wrapper."""

FACTOR = "factor"
"""Name of a head's low-rank factor where it is the embedding's, which lies the other way around; see `peft_tying`."""

AT_MOST_S = 30.0
"""For matching patterns with the names of modules."""


def require_peft() -> Any:
    """The package.

    Raises:
        ModelError: it is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise ModelError(
            f"adapters need the package peft, which cannot be imported ({error}). Install it: pip install -e '.[peft]'"
        ) from error
    return peft


def is_adapted(model: nn.Module) -> bool:
    """Whether a model is one of peft's, whose base model is under `PREFIX`."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel) and hasattr(model.base_model, "model")


def base_name(name: str) -> str:
    """The name in the base model of a parameter or module of an adapted one; of a wrapper, that of what it wraps.

    A trained copy of a whole module (`modules_to_save`) has the name of its original. For what only the adapter has,
    its matrices, this is no name of the base model.
    """
    parts = name.removeprefix(PREFIX).split(".")
    copied = {at + each for at, part in enumerate(parts) if part == "modules_to_save" for each in (0, 1)}
    return ".".join(part for at, part in enumerate(parts) if at not in copied and part not in _WRAPPED)


def wrapped(module: nn.Module) -> nn.Module:
    """What a tuner's wrapper is around, innermost; any other module itself."""
    while isinstance(getattr(module, "base_layer", None), nn.Module):
        module = module.base_layer
    return module


def saved_copies(model: nn.Module, name: str) -> list[str]:
    """Where a module is wrapped for a trained copy of it: the names of the original and its copies; else its own."""
    module = model.get_submodule(name)
    if "peft" not in sys.modules:
        return [name]
    from peft.utils.other import ModulesToSaveWrapper

    if not isinstance(module, ModulesToSaveWrapper):
        return [name]
    return [f"{name}.original_module", *(f"{name}.modules_to_save.{each}" for each in module.modules_to_save)]


def wrappers(model: nn.Module, *, outermost: bool = False) -> Iterator[tuple[str, Any]]:
    """The wrappers of a tuner and their names, those that hold others first; or those alone that no other holds."""
    if "peft" not in sys.modules:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    held: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and module not in held:
            layer: Any = module
            yield name, layer
            held.update(layer.modules() if outermost else ())


@dataclass(frozen=True)
class Factors:
    """What the norms of one magnitude of DoRA are taken of, beside the weight.

    Attributes:
        taken: peft's own function, before `sum_norms` changes it.
        shape: of the weight, turned so that each norm is one row's.
        transposed: the weight itself lies the other way around.
        dtype: of the weight.
    """

    module: Any
    taken: Callable[..., Tensor]
    left: Tensor
    right: Tensor
    scaling: float
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def transposed(self) -> bool:
        return bool(self.module.fan_in_fan_out)

    def norms(self, part: Tensor, first: int, within: slice) -> Tensor:
        """Of the rows from `first` on, of which `part` is what the weight has, as it lies.

        Args:
            within: rows that are multiplied together, whoever wants which of them, so that all get the same bits.
        """
        count = part.shape[1 if self.transposed else 0]
        delta = self.left[within].to(self.dtype) @ self.right.to(self.dtype)
        delta = delta[first - within.start :][:count]
        norms: Tensor = self.taken(part, delta, self.scaling)
        return norms


def active_copies(model: nn.Module) -> dict[str, bool]:
    """Of tensors of modules that have trained copies, by name: whether it is what takes their place when merged."""
    from peft.utils.other import ModulesToSaveWrapper

    found: dict[str, bool] = {}
    for path, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            chosen = f"modules_to_save.{module.active_adapters[0]}." if module.active_adapters else "original_module."
            found |= {f"{path}.{name}": name.startswith(chosen) for name in module.state_dict()}
    return found


def merge_layer(layer: Any, name: str) -> nn.Module:
    """Merge a wrapper's active adapters into what it is around, and give that; in place.

    Raises:
        ModelError: peft cannot.
    """
    try:
        if hasattr(layer, "unload_and_optionally_merge_module"):
            base = layer.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        else:
            layer.merge(safe_merge=False)
            base = layer.get_base_layer()
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"peft cannot merge the adapter of {name}: {reason(error)}") from error
    merged: nn.Module = base
    return merged


@dataclass(frozen=True)
class LowRank:
    """A wrapper of LoRA around a linear layer, an embedding or a parameter, as peft computes it.

    Attributes:
        parameter: name of what a wrapper of a parameter is around; None: the weight of a layer.
        outer: names, within the wrapper, of what has the weight's output along its first dim, B and DoRA's magnitudes.
        inner: of what has its input along the last dim, A.
        in_features: of the whole input.
        is_transposed: the weight has its input along the last dim but one.
        biases: the modules of B that add one.
        dropouts: modules before A.
        magnitudes: modules of DoRA.
    """

    parameter: str | None
    outer: tuple[str, ...]
    inner: tuple[str, ...]
    in_features: int
    is_transposed: bool
    biases: tuple[nn.Module, ...]
    dropouts: tuple[nn.Module, ...]
    magnitudes: tuple[Any, ...]


def low_rank(module: nn.Module) -> LowRank | None:
    """What a wrapper is, if it is one of plain LoRA or DoRA that computes as peft's own layers do; None: something
    else."""
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
    return LowRank(
        parameter=getattr(module, "parameter_name", None),
        outer=tuple(each for each in outer if each in here),
        inner=tuple(each for each in inner if each in here),
        in_features=module.in_features,
        is_transposed=getattr(module, "num_experts", 1) > 1 and not module._did_swap_in_out_features,
        biases=tuple(each for each in module.lora_B.values() if each.bias is not None),
        dropouts=tuple(each for each in module.lora_dropout.values() if isinstance(each, nn.Dropout)),
        magnitudes=tuple(module.lora_magnitude_vector.values()),
    )


def wrappers_of_parameters(model: nn.Module, inner: nn.Module) -> list[Any]:
    """The wrappers of LoRA around parameters of one module, which are nested; the outermost first."""
    layers = (layer for _, layer in wrappers(model))
    return [each for each in layers if getattr(each, "parameter_name", None) is not None and wrapped(each) is inner]


def with_low_rank(layer: Any, weight: Tensor, first: int) -> Tensor:
    """Stacked weights of some experts, from `first` on, with what a wrapper of the whole parameter adds to them."""
    adapters = [] if layer.disable_adapters else [each for each in layer.active_adapters if each in layer.lora_A]
    with torch.autocast(device_type=weight.device.type, enabled=False):
        for each in adapters:
            left, right, scaling = layer.get_delta_factors(each)
            mine = slice(first, first + weight.shape[0])
            weight = torch.baddbmm(weight, left[mine], right[mine], alpha=scaling)
    return weight


def sum_norms(magnitude: Any, summed: Callable[[Tensor], Tensor], is_active: Callable[[], bool]) -> None:
    """Let DoRA take the norms of a weight whose rows are divided; in place.

    Args:
        summed: the sum over the ranks.
        is_active: whether they are divided at the moment.
    """
    of_part = magnitude.get_weight_norm

    def norms(*args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = of_part(*args, **kwargs)
        return summed(found.detach().square()).sqrt() if is_active() else found

    magnitude.get_weight_norm = norms


def magnitudes(model: nn.Module) -> Iterator[tuple[str, str, Factors]]:
    """DoRA's magnitudes: the parameter's name, that of the layer in the base model, and what they are made of."""
    for path, layer in wrappers(model):
        for adapter, module in getattr(layer, "lora_magnitude_vector", {}).items():
            if adapter in layer.lora_embedding_A:
                left, right = layer.lora_embedding_B[adapter], layer.lora_embedding_A[adapter]
            else:
                left, right = layer.lora_B[adapter].weight, layer.lora_A[adapter].weight
            shape, dtype = (left.shape[0], right.shape[1]), layer.get_base_layer().weight.dtype
            made = Factors(
                module, module.get_weight_norm, left.detach(), right.detach(), layer.scaling[adapter], shape, dtype
            )
            yield f"{path}.lora_magnitude_vector.{adapter}.weight", base_name(path), made


def file_names(model: nn.Module, adapter: str = "default") -> dict[str, str]:
    """The names that the tensors of an adapter have in its file, each with its name in the model.

    Where `is_transposed` says so, a tensor of the file is the transposed one of the model. The function that peft saves
    with tells them; it passes on what it is given, whatever that is.
    """
    from peft import get_peft_model_state_dict

    marks: dict[str, Any] = {name: _Mark(name) for name in model.state_dict(keep_vars=True)}
    found: Mapping[str, Any] = get_peft_model_state_dict(
        model, state_dict=marks, adapter_name=adapter, save_embedding_layers=False
    )
    return {re.sub(rf"\.{FACTOR}$", ".weight", key): mark.name for key, mark in found.items()}


def is_transposed(name: str) -> bool:
    """Whether a parameter is a low-rank factor that peft has the other way around, as the weight of a layer."""
    return name.endswith(f".{FACTOR}")


class _Mark:
    def __init__(self, name: str) -> None:
        self.name = name


def inject(model: nn.Module, config: Any, *, adapter: str = "default", hint: str = "") -> nn.Module:
    """`peft.get_peft_model`, with peft's own reasons, and a hint, in an error of ours.

    Raises:
        ModelError: peft refuses the model or the configuration.
    """
    peft = require_peft()
    try:
        _check_patterns(model, config)
        with warnings.catch_warnings():
            # Between peft and transformers, of what a user can do nothing about.
            warnings.simplefilter("ignore", FutureWarning)
            adapted: nn.Module = peft.get_peft_model(model, config, adapter_name=adapter)
    except (ValueError, TypeError, IndexError, RuntimeError, ImportError, TimeoutError, re.error) as error:
        told = reason(error).strip().rstrip(".")
        raise ModelError(f"peft cannot adapt {type(model).__name__}: {told}.{hint}") from error
    return adapted


def _check_patterns(model: nn.Module, config: Any) -> None:
    """Match the regular expressions of a configuration as peft does, within a time.

    Raises:
        TimeoutError: it takes longer.
    """
    fields = [getattr(config, name, None) for name in ("target_modules", "exclude_modules", "layers_pattern")]
    keys = [key for name in ("rank_pattern", "alpha_pattern") for key in getattr(config, name, None) or ()]
    with time_limit(AT_MOST_S, "matching its patterns with the names of modules"):
        for pattern in [*(each for each in fields if isinstance(each, str)), *(rf"(.*\.)?({key})$" for key in keys)]:
            found = re.compile(pattern)
            for name, _ in model.named_modules():
                found.fullmatch(name)


class _StandIn(nn.Parameter):
    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        return stand_in(self)


def stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """Not a number everywhere, without memory, on the CPU: what is made of it shows that it was."""
    value = torch.full((1,) * max(1, parameter.dim()), float("nan"), dtype=parameter.dtype)
    return _StandIn(value.expand(parameter.shape), requires_grad=False)
