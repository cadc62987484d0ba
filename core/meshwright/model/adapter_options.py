"""Read the adapter options of a run file: `model.peft`, and the directory of a saved adapter to resume from.

Options are the fields of peft's configuration, and peft checks their values. Initializations that change the base
(PiSSA, OLoRA, ...) are rejected, because such an adapter would be useless with the published base. Names that match
nothing in the model, which peft ignores, are rejected too.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._compat.peft import create_nan_placeholder, import_peft, tie_adapters
from ..base.errors import ConfigError, ModelError, suggest_match
from ..files.parsing import explain_library_error
from .adapter import (
    ADAPTER_CONFIG,
    BaseModelRef,
    add_adapter,
    attach_base,
    collect_adapter_weights,
    get_adapter_configs,
    read_adapter_config,
    read_base,
)
from .configuration import DTYPE_NAMES, check_choice
from .pretrained import DTYPES
from .weights import Weights, replace_parameters

_QUANTIZED_DTYPES = ("nf4", "fp4", "int4", "4bit", "int8", "8bit")
ADAPTER_KEYS = ("type", "adapter", "base_dtype")
_EXCLUDED_FIELDS = {"peft_type", "auto_mapping", "peft_version", "inference_mode", "runtime_config"}


@dataclass(frozen=True)
class AdapterOptions:
    """Adapter options of a run: peft's configuration, a saved adapter to resume from, dtype of the base."""

    config: Any
    directory: Path | None = None
    base_dtype: torch.dtype | None = None


def parse_adapter_options(section: Any, *, where: str = "model.peft") -> AdapterOptions:
    """Read `{type: lora, r: 16, adapter: ..., base_dtype: ...}` or a peft configuration; errors name it `where`."""
    import_peft()
    if not isinstance(section, Mapping):
        from peft import PeftConfig

        if not isinstance(section, PeftConfig):
            raise ConfigError(f"{where} must be a mapping of options or a configuration of peft, not {section!r:.200}.")
        _find_config_class(_get_peft_type(section), where)
        return AdapterOptions(_check_config(copy.deepcopy(section), where))
    fields = {str(key): value for key, value in section.items()}
    own_options = {key: fields.pop(key) for key in ADAPTER_KEYS if key in fields}
    directory = None
    if own_options.get("adapter") is None:
        config = _build_config(_find_config_class(own_options.get("type"), where), fields, where)
    else:
        directory = Path(str(own_options["adapter"])).expanduser()
        config = _merge_options(read_adapter_config(directory), own_options.get("type"), fields, directory, where)
    return AdapterOptions(
        _check_config(config, where), directory, _parse_base_dtype(own_options.get("base_dtype"), where)
    )


def apply_adapter(
    model: nn.Module,
    weights: Weights | None,
    options: AdapterOptions,
    base: BaseModelRef | None,
    *,
    seed: int,
    where: str,
) -> tuple[nn.Module, Weights | None]:
    """Add the adapter of a run to a model; see `add_adapter`. Without a known base the model is saved in full."""
    base_names, config = _prepare_config(options, model, base, where)
    adapted, values = add_adapter(model, weights, config, seed=seed, adapter_dir=options.directory)
    _record_base(adapted, base, base_names)
    return adapted, values


class ExternalAdapterInjection:
    """An adapter that other code injects into a base on the meta device, with placeholders as parameters until then."""

    def __init__(
        self, model: nn.Module, weights: Weights, options: AdapterOptions, base: BaseModelRef | None, *, where: str
    ) -> None:
        self._weights, self._base = weights, base
        self._base_names, self.config = _prepare_config(options, model, base, where)
        replace_parameters(model, create_nan_placeholder)

    def finish(self, adapted: nn.Module) -> Weights:
        """Return the values of the adapted model, and move it to the meta device."""
        values = collect_adapter_weights(tie_adapters(adapted), self._weights, {})
        _record_base(adapted, self._base, self._base_names)
        return values


def _prepare_config(
    options: AdapterOptions, model: nn.Module, base: BaseModelRef | None, where: str
) -> tuple[list[str], Any]:
    """Return the names of a base's parameters, and a copy of the configuration, which peft may modify."""
    check_target_names(options.config, model, where=where)
    if base is not None:
        check_adapter_base(options, base, where=where)
    config = copy.deepcopy(options.config)
    config.base_model_name_or_path = None
    return [name for name, _ in model.named_parameters(remove_duplicate=False)], config


def _record_base(adapted: nn.Module, base: BaseModelRef | None, base_names: list[str]) -> None:
    if base is not None:
        # peft set it to the name of the model.
        for config in get_adapter_configs(adapted).values():
            config.base_model_name_or_path, config.revision = base.path, base.revision
        attach_base(adapted, base, base_names)


def check_target_names(config: Any, model: nn.Module, *, where: str) -> None:
    """Raise ModelError for target names that match nothing in the base; peft ignores them if another one matches."""
    modules = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for key, known in (("target_modules", modules), ("modules_to_save", modules), ("target_parameters", parameters)):
        targets = getattr(config, key, None)
        for each in sorted(map(str, targets)) if isinstance(targets, list | tuple | set) else ():
            if not any(name == each or name.endswith(f".{each}") for name in known):
                leaves = {name.rpartition(".")[2] for name in known} - {""}
                raise ModelError(
                    f"{where}.{key}: nothing in {type(model).__name__} is called "
                    f"{each!r}.{suggest_match(each, leaves)} "
                    f"There are: {', '.join(sorted(each for each in leaves if not each.isdecimal()))}."
                )


def check_adapter_base(options: AdapterOptions, base: BaseModelRef, *, where: str = "model.peft") -> None:
    """Raise ModelError for an adapter of another base.

    An adapter of a run records the fingerprint of its base. Other adapters name their base. With
    `base_model_name_or_path` the user declares that a copy is the same base.
    """
    if options.directory is None:
        return
    given, known = f"{where}.adapter={str(options.directory)!r}", read_base(options.directory)
    if known is not None and known.fingerprint != base.fingerprint:
        raise ModelError(
            f"{given} is an adapter of another base: {known}, and the model is {base}. Set model.path to the base that "
            f"it was trained on."
        )
    named, is_same = options.config.base_model_name_or_path, options.config.__dict__.get("_same_base")
    if known is None and named and not is_same and not _is_same_path(str(named), base.path):
        raise ModelError(
            f"{given} is an adapter of the base {named!r}, and model.path is {base.path!r}. Set model.path to that "
            f"base; or, if it is a copy of it, say so: {where}.base_model_name_or_path={named}."
        )


def _is_same_path(named: str, path: str) -> bool:
    one, other = Path(named).expanduser(), Path(path).expanduser()
    return named == path or (one.exists() and other.exists() and one.samefile(other))


def _get_peft_type(config: Any) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type)).lower()


def _find_config_class(kind: Any, where: str) -> type:
    from peft import LoraConfig

    if kind is None:
        raise ConfigError(f"{where} has no type. Give type: lora, or adapter: a directory to resume from.")
    lowered = str(kind).lower()
    if lowered != "lora":
        hint = suggest_match(str(kind), ["lora", "dora", "rslora"])
        if lowered in ("dora", "rslora"):
            hint = f" It is type: lora with use_{lowered}: true."
        raise ConfigError(f"{where}.type={kind!r} is not one of lora.{hint}")
    return LoraConfig


def _build_config(config_cls: type, options: Mapping[str, Any], where: str) -> Any:
    fields: Any = dataclasses.fields(config_cls)
    known = sorted(each.name for each in fields if each.init and each.name not in _EXCLUDED_FIELDS)
    for key in options:
        if key not in known:
            raise ConfigError(
                f"{where}.{key} is no option of {config_cls.__name__}.{suggest_match(key, [*known, *ADAPTER_KEYS])} "
                f"Options: {', '.join([*ADAPTER_KEYS, *known])}."
            )
    try:
        return config_cls(**copy.deepcopy(dict(options)))
    except Exception as error:
        # peft's configurations check their fields with errors of several types.
        raise ConfigError(f"{where}: peft refuses {dict(options)}: {explain_library_error(error)}") from None


def _merge_options(saved: Any, kind: Any, options: Mapping[str, Any], directory: Path, where: str) -> Any:
    _find_config_class(_get_peft_type(saved), f"{where}.adapter={str(directory)!r}:")
    if kind is not None and str(kind).lower() != _get_peft_type(saved):
        raise ConfigError(
            f"{where}.type={kind!r}, but {str(directory)!r} holds an adapter of type {_get_peft_type(saved)!r}."
        )
    new = _build_config(type(saved), options, where)
    for key in options:
        before, now = _to_comparable(getattr(saved, key)), _to_comparable(getattr(new, key))
        if before != now:
            raise ConfigError(
                f"{where}.{key}={options[key]!r} is in conflict with the adapter {str(directory)!r}, which was made "
                f"with {before!r}. Leave it out: what a saved adapter is, its own {ADAPTER_CONFIG} says."
            )
    if "base_model_name_or_path" in options:
        saved.__dict__["_same_base"] = True
    return saved


def _to_comparable(value: Any) -> Any:
    if isinstance(value, set | frozenset | list | tuple):
        return sorted(map(str, value))
    return getattr(value, "value", value)


def _check_config(config: Any, where: str) -> Any:
    """Return the configuration if it trains a causal LM on an unchanged base; else raise ConfigError."""
    task = getattr(config.task_type, "value", config.task_type)
    if task not in (None, "CAUSAL_LM"):
        raise ConfigError(f"{where}.task_type={task!r} is not CAUSAL_LM, which is what is trained. Leave it out.")
    config.task_type = "CAUSAL_LM"
    init = config.init_lora_weights
    # Initializations that leave the base unchanged.
    if not isinstance(init, bool) and init not in ("gaussian", "orthogonal"):
        raise ConfigError(
            f"{where}.init_lora_weights={init!r} is none of true, false, gaussian and orthogonal: it would change the "
            f"base or needs data, and the adapter would be of no use with the base that everybody has. Make the "
            f"adapter with peft, save it converted to the base, and resume from it: {where}.adapter."
        )
    return config


def _parse_base_dtype(name: Any, where: str) -> torch.dtype | None:
    if name in _QUANTIZED_DTYPES:
        raise ConfigError(
            f"{where}.base_dtype={name!r}: a quantized base cannot be sharded or exported here yet. Use "
            f"base_dtype=bfloat16, which halves a float32 base, and shard it over more ranks (fsdp2, tp_size, pp_size)."
        )
    return None if name is None else DTYPES[check_choice(DTYPE_NAMES, name, f"{where}.base_dtype")]
