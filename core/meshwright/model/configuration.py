"""The configuration of the model of a run file, made and checked without what builds models."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..base.errors import ModelError, nearest
from ..files.parsing import read_json_object, reason
from .model_types import check_model_type
from .remote_code import check_needs_no_code

DTYPE_NAMES = ("float32", "bfloat16", "float64")
PARALLEL = "parallel"
INITS = (PARALLEL, "as_transformers")
"""How new weights are drawn; see `meshwright.model.build.new_model_on_meta`."""
OWN_KEYS = (
    "path",
    "revision",
    "model_type",
    "checkpoint",
    "dtype",
    "init",
    "allow_pickle",
    "trust_remote_code",
    "peft",
)
"""Keys of the run file's section that are no fields of the configuration."""
MAX_LAYERS = 10_000


def model_config(section: Mapping[str, Any], *, tokenizer: Any, seq_len: int, directory: Path | None = None) -> Any:
    """Make the Hugging Face configuration of the run's model.

    Args:
        section: the run file's `model`.
        tokenizer: gives vocabulary and end-of-text id where the section leaves them out; None: not known, and the
            model type's own vocabulary stands for it.
        seq_len: tokens per sequence, which the model's positions must hold.
        directory: of Hugging Face, with the configuration; None: the section has a `model_type`.

    Raises:
        ModelError: unknown type or field, a directory without a configuration, or a vocabulary or context too small.
    """
    fields = {key: value for key, value in section.items() if key not in OWN_KEYS}
    checked_dtype_name(section.get("dtype", "float32"), "model.dtype")
    check_init(section.get("init", PARALLEL), "model.init")
    if directory is not None:
        config = config_from_directory(directory, fields, with_weights="path" in section)
    else:
        config = _config_with_tokenizer(str(section["model_type"]), fields, tokenizer)
    text = config.get_text_config()
    vocab_size = getattr(text, "vocab_size", None)
    if tokenizer is not None and vocab_size is not None and vocab_size < len(tokenizer):
        key = "vocab_size" if text is config else "text_config.vocab_size"
        raise ModelError(
            f"the model's vocabulary has {vocab_size} entries, but the tokenizer has {len(tokenizer)}. "
            f"{_larger_vocabulary(section, key, len(tokenizer))}, or use a tokenizer of at most {vocab_size} entries."
        )
    positions = getattr(text, "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions < seq_len:
        raise ModelError(
            f"the model holds {positions} positions, but data.seq_len is {seq_len}. "
            f"Set data.seq_len to at most {positions}, or model.max_position_embeddings to at least {seq_len}."
        )
    return config


def _larger_vocabulary(section: Mapping[str, Any], key: str, entries: int) -> str:
    """How a model gets a vocabulary of so many entries; `key` is where its configuration has the number."""
    if key in section:
        return f"Leave model.{key} out"
    if directory_key := next((each for each in ("path", "checkpoint") if each in section), None):
        return (
            f"The weights of model.{directory_key} have no more: enlarge them beforehand, with transformers' "
            f"resize_token_embeddings({entries}) and save_pretrained"
        )
    return f"Set model.{key} to at least {entries}"


def checked_dtype_name(name: Any, where: str) -> str:
    """The name of a dtype of parameters.

    Args:
        where: what has it, for the error.

    Raises:
        ModelError: none in which models are trained.
    """
    if name not in DTYPE_NAMES:
        raise ModelError(f"{where}={name!r} is not one of {', '.join(DTYPE_NAMES)}.{nearest(str(name), DTYPE_NAMES)}")
    return str(name)


def check_init(name: Any, where: str) -> None:
    """Refuse a way of drawing new weights that there is not.

    Raises:
        ModelError: none of `INITS`.
    """
    if name not in INITS:
        raise ModelError(f"{where}={name!r} is not one of {', '.join(INITS)}.{nearest(str(name), INITS)}")


def config_from_mapping(fields: Mapping[str, Any], *, where: str = "model") -> Any:
    """The Hugging Face configuration of fields, one of which is `model_type`.

    Raises:
        ModelError: unknown type or field, or transformers refuses it.
    """
    from transformers import AutoConfig

    model_type = str(fields.get("model_type"))
    given = {key: value for key, value in fields.items() if key != "model_type"}
    _check_fields(_default_config(model_type, where), given, where)
    return _made(partial(AutoConfig.for_model, model_type), given)


def _config_with_tokenizer(model_type: str, fields: dict[str, Any], tokenizer: Any) -> Any:
    from transformers import AutoConfig

    default = _default_config(model_type, "model")
    _check_fields(default, fields)
    # The ids of a trained tokenizer replace those that the defaults of a published model name.
    values = {"bos_token_id": None, "eos_token_id": getattr(tokenizer, "eos_token_id", None), "pad_token_id": None}
    if tokenizer is not None:
        values["vocab_size"] = len(tokenizer)
    values = {key: value for key, value in values.items() if hasattr(default, key) and key not in fields}
    return _made(partial(AutoConfig.for_model, model_type, **values), fields)


def _default_config(model_type: str, where: str) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    check_model_type(model_type, where=where)
    _check_causal_lm(CONFIG_MAPPING[model_type], model_type)
    return _made(partial(AutoConfig.for_model, model_type), {})


def config_from_directory(
    path: Path, fields: Mapping[str, Any], *, where: str = "model", with_weights: bool = True
) -> Any:
    """The Hugging Face configuration of a directory, with some of its fields changed.

    Args:
        path: the directory.
        fields: to be changed.
        where: how to name the source of `fields` in errors.
        with_weights: whether the directory must hold weights, too.

    Raises:
        ModelError: no such directory, no causal LM, an unknown field, or transformers refuses it.
    """
    from transformers import AutoConfig

    if not path.is_dir():
        raise ModelError(f"{where}.path={str(path)!r} is not a directory. Give a local Hugging Face model directory.")
    if with_weights and (path / "adapter_config.json").is_file():
        raise ModelError(
            f"{str(path)!r} holds an adapter, not a whole model. Give its base as {where}.path and go on from it "
            f"({where}.peft.adapter={path}); or merge it: meshwright export --merge {path} OUT."
        )
    if not (path / "config.json").is_file():
        raise ModelError(f"{str(path)!r} holds no config.json, so it is no Hugging Face model directory.")
    if with_weights and not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise ModelError(f"{str(path)!r} holds no weights: no .safetensors or .bin file.")

    try:
        _check_depth(read_json_object(path / "config.json"), str(path / "config.json"))
    except (OSError, ValueError) as error:
        wrong = f"{path / 'config.json'} is no model configuration: {error}"
        raise ModelError(f"{wrong}. Write or copy it again.") from None
    check_brings_no_code(path / "config.json", set_anew=fields)
    check_needs_no_code(path)

    def load(**changes: Any) -> Any:
        # See [Note: trust]; transformers would ask on the terminal.
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False, **changes)

    config = _made(load, {})
    _check_causal_lm(type(config), config.model_type)
    _check_fields(config, fields, where)
    return _made(load, fields)


def check_brings_no_code(path: Path, *, set_anew: Iterable[str] = ()) -> None:
    """Refuse a `config.json` that names kernels of the Hugging Face hub, which transformers would fetch and run.

    Args:
        path: of the file.
        set_anew: fields that the user gives, whatever the file has.

    Raises:
        ModelError: names the field and the kernels.
    """
    try:
        values = read_json_object(path)
    except (OSError, ValueError):
        # transformers tells what is wrong with it.
        return
    given = set(set_anew)
    _check_names_no_kernels(
        {key: value for key, value in values.items() if key not in given},
        str(path),
        f"set model.KEY in the run file, for instance to 'sdpa', or take it out of {path.name}",
    )


def _check_names_no_kernels(values: Mapping[str, Any], source: str, remedy: str) -> None:
    """Refuse names of kernels of the Hugging Face hub, "owner/name", as an implementation, of which `remedy` has
    KEY."""
    waiting = list(values.items())
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += [(f"{key}.{each}", below) for each, below in value.items()]
        elif "implementation" in key and isinstance(value, str) and "/" in value:
            raise ModelError(
                f"{source} asks for code of the Hugging Face hub: {key}={value!r}. What a file names is not run: "
                f"{remedy.replace('KEY', key.split('.')[0])}."
            )


def _check_causal_lm(config_cls: type, model_type: str) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if config_cls not in MODEL_FOR_CAUSAL_LM_MAPPING:
        hint = ""
        if config_cls in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            hint = (
                " It is multimodal, and its text part alone is no model there (that of others, such as gemma3 and "
                "llama4, is): load it with AutoModelForImageTextToText, and save its text model as one of its own type."
            )
        raise ModelError(f"the model type {model_type!r} has no causal language model in transformers.{hint}")


def _check_fields(config: Any, fields: Mapping[str, Any], where: str = "model") -> None:
    from transformers import PreTrainedConfig

    # A configuration takes any keyword, so a misspelt one would be kept and ignored.
    known = {key for key in config.to_dict() if not key.startswith("_")}
    known |= {*inspect.signature(type(config)).parameters, *config.attribute_map, "attn_implementation"} - {"kwargs"}
    _check_depth(fields, where)
    _check_names_no_kernels(fields, where, "name an implementation of transformers, such as 'sdpa'")
    if "rope_parameters" in known:
        # Older names, which transformers reads into rope_parameters.
        known |= {"rope_theta", "rope_scaling"}
    for key, value in fields.items():
        if key not in known:
            raise ModelError(
                f"{where}.{key} is not a field of the {config.model_type} configuration.{nearest(key, known)} "
                f"Fields: {', '.join(sorted(known))}."
            )
        # Not by getattr: of fields that differ between layers, some configurations refuse to tell one value.
        nested = vars(config).get(key)
        if isinstance(value, Mapping) and isinstance(nested, PreTrainedConfig):
            _check_fields(nested, value, f"{where}.{key}")
        # Of these, transformers checks no types, and "no" would be true.
        if isinstance(getattr(PreTrainedConfig, key, None), bool) and not isinstance(value, bool):
            raise ModelError(f"{where}.{key}={value!r:.200} must be true or false.")


def _check_depth(fields: Mapping[str, Any], where: str) -> None:
    """Refuse numbers of layers that would be made for ever, whatever they are called in the configuration."""
    for key, value in fields.items():
        if isinstance(value, Mapping):
            _check_depth(value, f"{where}.{key}")
        elif str(key).endswith(("layer", "layers")) and isinstance(value, int) and value > MAX_LAYERS:
            raise ModelError(f"{where}.{key}={value} is more than {MAX_LAYERS:,} layers. Lower it.")


def _made(make: Callable[..., Any], fields: Mapping[str, Any]) -> Any:
    try:
        # transformers adds to mappings that it is given, and a run is known by those that its file holds.
        return make(**copy.deepcopy(dict(fields)))
    except Exception as error:
        # Each configuration class validates in its own way, with errors of several libraries.
        raise ModelError(f"transformers refuses the model configuration {dict(fields)}: {reason(error)}") from error
