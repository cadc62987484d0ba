"""Build or load the model of a run file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .errors import ModelError, nearest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def model_config(section: Mapping[str, Any], *, tokenizer: Any, seq_len: int) -> Any:
    """Make the Hugging Face configuration of the run's model.

    Args:
        section: the run file's `model`.
        tokenizer: gives vocabulary and end-of-text id where the section leaves them out.
        seq_len: tokens per sequence, which the model's positions must hold.

    Raises:
        ModelError: unknown type or field, a directory without a configuration, or a vocabulary or context too small.
    """
    fields = {key: value for key, value in section.items() if key not in ("path", "model_type", "dtype")}
    dtype_of(section)
    if "path" in section:
        config = _config_from_directory(Path(section["path"]).expanduser(), fields)
    else:
        config = _config_from_fields(str(section["model_type"]), fields, tokenizer)
    text = config.get_text_config()
    vocab_size = getattr(text, "vocab_size", None)
    if vocab_size is not None and vocab_size < len(tokenizer):
        raise ModelError(
            f"the model's vocabulary has {vocab_size} entries, but the tokenizer has {len(tokenizer)}. "
            f"Leave model.vocab_size out, or use a tokenizer of at most {vocab_size} entries."
        )
    positions = getattr(text, "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions < seq_len:
        raise ModelError(
            f"the model holds {positions} positions, but data.seq_len is {seq_len}. "
            f"Set data.seq_len to at most {positions}, or model.max_position_embeddings to at least {seq_len}."
        )
    return config


def build_model(section: Mapping[str, Any], config: Any, *, seed: int) -> nn.Module:
    """Make the model on the CPU, the same on every rank: new weights from `seed`, or those of `path`.

    Raises:
        ModelError: transformers cannot build or load it.
    """
    from transformers import AutoModelForCausalLM

    dtype = dtype_of(section)
    torch.manual_seed(seed)
    try:
        if "path" not in section:
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
        model, report = AutoModelForCausalLM.from_pretrained(
            Path(section["path"]).expanduser(),
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:
        # Each model class checks its configuration in its own way, with errors of all kinds.
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(f"transformers cannot build the model {dict(section)}: {reason}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"model.path={section['path']!r} lacks {len(missing)} weights of the model, which would start at random: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}. "
            f"Remove the fields that make the model larger than the saved one, or use a complete directory."
        )
    return model


def dtype_of(section: Mapping[str, Any]) -> torch.dtype:
    """Dtype of the parameters; float32 unless the section says otherwise."""
    name = section.get("dtype", "float32")
    if name not in DTYPES:
        raise ModelError(f"model.dtype={name!r} is not one of {', '.join(DTYPES)}.{nearest(str(name), DTYPES)}")
    return DTYPES[name]


def _config_from_fields(model_type: str, fields: dict[str, Any], tokenizer: Any) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    if model_type not in CONFIG_MAPPING:
        hint = nearest(model_type, CONFIG_MAPPING.keys())
        raise ModelError(f"model.model_type={model_type!r} is not a model type of transformers.{hint}")
    _check_causal_lm(CONFIG_MAPPING[model_type], model_type)
    default = AutoConfig.for_model(model_type)
    _check_fields(default, fields)
    # The ids of a trained tokenizer replace those that the defaults of a published model name.
    values = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    values["vocab_size"] = len(tokenizer)
    values = {key: value for key, value in values.items() if hasattr(default, key)}
    return _made(lambda: AutoConfig.for_model(model_type, **{**values, **fields}), fields)


def _config_from_directory(path: Path, fields: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    if not path.is_dir():
        raise ModelError(f"model.path={str(path)!r} is not a directory. Give a local Hugging Face model directory.")
    if not (path / "config.json").is_file():
        raise ModelError(f"model.path={str(path)!r} holds no config.json, so it is no Hugging Face model directory.")
    if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise ModelError(f"model.path={str(path)!r} holds no weights: no .safetensors or .bin file.")

    def load(**changes: Any) -> Any:
        # Code that comes with a model is never run: transformers would ask on the terminal.
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False, **changes)

    config = _made(load, {})
    _check_causal_lm(type(config), config.model_type)
    _check_fields(config, fields)
    return _made(lambda: load(**fields), fields)


def _check_causal_lm(config_cls: type, model_type: str) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if config_cls not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"the model type {model_type!r} has no causal language model in transformers.")


def _check_fields(config: Any, fields: Mapping[str, Any], where: str = "model") -> None:
    from transformers import PreTrainedConfig

    # A configuration takes any keyword, so a misspelt one would be kept and ignored.
    known = {key for key in config.to_dict() if not key.startswith("_")}
    known |= {*inspect.signature(type(config)).parameters, *config.attribute_map, "attn_implementation"} - {"kwargs"}
    if "rope_parameters" in known:
        # Older names, which transformers reads into rope_parameters.
        known |= {"rope_theta", "rope_scaling"}
    for key, value in fields.items():
        if key not in known:
            raise ModelError(
                f"{where}.{key} is not a field of the {config.model_type} configuration.{nearest(key, known)} "
                f"Fields: {', '.join(sorted(known))}."
            )
        nested = getattr(config, key, None)
        if isinstance(value, Mapping) and isinstance(nested, PreTrainedConfig):
            _check_fields(nested, value, f"{where}.{key}")


def _made(make: Any, fields: Mapping[str, Any]) -> Any:
    try:
        return make()
    except Exception as error:
        # Each configuration class validates in its own way, with errors of several libraries.
        raise ModelError(f"transformers refuses the model configuration {dict(fields)}: {error}") from error
