"""Build and check the configuration of a run's model, and run its code only if the user trusts it. Builds no model.

[Note: trust] A model on the Hub may need classes that transformers lacks, in files next to its weights. Running them
means running any code that their author wrote. So they run only if the run file names the version that the user has
read: a commit on the Hub, or the digest of a directory's files. The classes are then registered with transformers' auto
classes in this process. All other calls pass `trust_remote_code=False`, and find the registered classes.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock

from .._compat.transformers import list_model_types
from ..base.errors import ModelError, suggest_match
from ..files.parsing import explain_library_error, read_json_object, read_json_object_or_empty, read_regular_file

DTYPE_NAMES = ("float32", "bfloat16", "float64")
PARALLEL_INIT = "parallel"
INIT_METHODS = (PARALLEL_INIT, "transformers")
"""Ways to initialize new weights; see `meshwright.model.pretrained.init_model_on_meta`."""
SECTION_KEYS = (
    *("path", "revision", "model_type", "checkpoint", "dtype", "init", "allow_pickle", "trust_remote_code", "peft"),
)
"""Keys of the run file's section that are not fields of the configuration."""
MAX_LAYERS = 10_000


def build_model_config(
    section: Mapping[str, Any], *, tokenizer: Any, seq_len: int, directory: Path | None = None
) -> Any:
    """Build the configuration of a run file's section `model`; the model must support `seq_len` positions.

    A tokenizer gives the vocabulary size and the end-of-text id if the section omits them. Without one the model type's
    default vocabulary stays. Without a directory the section must have a `model_type`.
    """
    fields = {key: value for key, value in section.items() if key not in SECTION_KEYS}
    check_choice(DTYPE_NAMES, section.get("dtype", "float32"), "model.dtype")
    check_choice(INIT_METHODS, section.get("init", PARALLEL_INIT), "model.init")
    if directory is not None:
        config = config_from_directory(directory, fields, with_weights="path" in section)
    else:
        # The ids of a trained tokenizer replace those of a published model's defaults.
        ids = {"bos_token_id": None, "eos_token_id": getattr(tokenizer, "eos_token_id", None), "pad_token_id": None}
        size = {} if tokenizer is None else {"vocab_size": len(tokenizer)}
        config = config_from_mapping({"model_type": section["model_type"], **fields}, defaults=ids | size)
    text = config.get_text_config()
    vocab_size = getattr(text, "vocab_size", None)
    if tokenizer is not None and vocab_size is not None and vocab_size < len(tokenizer):
        key = "vocab_size" if text is config else "text_config.vocab_size"
        raise ModelError(
            f"the model's vocabulary has {vocab_size} entries, but the tokenizer has {len(tokenizer)}. "
            f"{_format_vocab_remedy(section, key, len(tokenizer))}, or use a tokenizer of at most {vocab_size} entries."
        )
    positions = getattr(text, "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions < seq_len:
        raise ModelError(
            f"the model holds {positions} positions, but data.seq_len is {seq_len}. "
            f"Set data.seq_len to at most {positions}, or model.max_position_embeddings to at least {seq_len}."
        )
    return config


def _format_vocab_remedy(section: Mapping[str, Any], key: str, entries: int) -> str:
    if key in section:
        return f"Leave model.{key} out"
    if directory_key := next((each for each in ("path", "checkpoint") if each in section), None):
        return (
            f"The weights of model.{directory_key} have no more: enlarge them beforehand, with transformers' "
            f"resize_token_embeddings({entries}) and save_pretrained"
        )
    return f"Set model.{key} to at least {entries}"


def check_choice(choices: tuple[str, ...], name: Any, where: str) -> str:
    if name not in choices:
        raise ModelError(f"{where}={name!r} is not one of {', '.join(choices)}.{suggest_match(str(name), choices)}")
    return str(name)


def check_model_type(model_type: str, *, where: str = "model") -> None:
    """Raise ModelError if transformers has no causal LM of this type; imports no model."""
    known = list_model_types()
    if model_type not in known:
        hint = suggest_match(model_type, known)
        raise ModelError(f"{where}.model_type={model_type!r} is not a model type of transformers.{hint}")


def config_from_mapping(
    fields: Mapping[str, Any], *, where: str = "model", defaults: Mapping[str, Any] | None = None
) -> Any:
    """Build the Hugging Face configuration of some fields, one of which is `model_type`.

    `defaults` replace the type's own defaults, for fields that the type has.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    model_type = str(fields.get("model_type"))
    overrides = {key: value for key, value in fields.items() if key != "model_type"}
    check_model_type(model_type, where=where)
    _check_causal_lm(CONFIG_MAPPING[model_type], model_type)
    default = _call_transformers(partial(AutoConfig.for_model, model_type), {})
    _check_fields(default, overrides, where)
    values = {key: value for key, value in (defaults or {}).items() if hasattr(default, key) and key not in overrides}
    return _call_transformers(partial(AutoConfig.for_model, model_type, **values), overrides)


def config_from_directory(
    path: Path, fields: Mapping[str, Any], *, where: str = "model", with_weights: bool = True
) -> Any:
    """Return the configuration of a directory with some fields changed; errors name the section as `where`."""
    from transformers import AutoConfig

    if not path.is_dir():
        raise ModelError(f"{where}.path={str(path)!r} is not a directory. Give a local Hugging Face model directory.")
    if with_weights and (path / "adapter_config.json").is_file():
        raise ModelError(
            f"{str(path)!r} holds an adapter, not a whole model. Give its base as {where}.path and resume from it "
            f"({where}.peft.adapter={path}); or merge it: meshwright export --merge {path} OUT."
        )
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(f"{str(path)!r} holds no config.json, so it is no Hugging Face model directory.")
    if with_weights and not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise ModelError(f"{str(path)!r} holds no weights: no .safetensors or .bin file.")
    try:
        _check_num_layers(read_json_object(file), str(file))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} is no model configuration: {error}. Write or copy it again.") from None
    check_no_hub_kernels(file, overridden=fields)
    check_no_custom_code(path)

    def load(**changes: Any) -> Any:
        # See [Note: trust]; by default transformers would ask on the terminal.
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False, **changes)

    config = _call_transformers(load, {})
    _check_causal_lm(type(config), config.model_type)
    _check_fields(config, fields, where)
    return _call_transformers(load, fields)


def _check_causal_lm(config_cls: type, model_type: str) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if config_cls not in MODEL_FOR_CAUSAL_LM_MAPPING:
        hint = (
            " It is multimodal, and its text part alone is no model there (that of others, such as gemma3 and "
            "llama4, is): load it with AutoModelForImageTextToText, and save its text model as one of its own type."
        ) * (config_cls in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
        raise ModelError(f"the model type {model_type!r} has no causal language model in transformers.{hint}")


def _check_fields(config: Any, fields: Mapping[str, Any], where: str = "model") -> None:
    from transformers import PreTrainedConfig

    # A configuration accepts any keyword, so a misspelled one would be stored and ignored.
    known = {key for key in config.to_dict() if not key.startswith("_")}
    known |= {*inspect.signature(type(config)).parameters, *config.attribute_map, "attn_implementation"} - {"kwargs"}
    _check_num_layers(fields, where)
    _check_kernel_names(fields, where, "name an implementation of transformers, such as 'sdpa'")
    if "rope_parameters" in known:
        # Older names, which transformers converts to rope_parameters.
        known |= {"rope_theta", "rope_scaling"}
    for key, value in fields.items():
        if key not in known:
            raise ModelError(
                f"{where}.{key} is not a field of the {config.model_type} configuration.{suggest_match(key, known)} "
                f"Fields: {', '.join(sorted(known))}."
            )
        # Not getattr: some configurations raise for fields that differ between layers.
        nested = vars(config).get(key)
        if isinstance(value, Mapping) and isinstance(nested, PreTrainedConfig):
            _check_fields(nested, value, f"{where}.{key}")
        # transformers does not check these types, and "no" would be true.
        if isinstance(getattr(PreTrainedConfig, key, None), bool) and not isinstance(value, bool):
            raise ModelError(f"{where}.{key}={value!r:.200} must be true or false.")


def _iter_leaves(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in fields.items():
        if isinstance(value, Mapping):
            yield from _iter_leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _check_num_layers(fields: Mapping[str, Any], where: str) -> None:
    """Raise ModelError for any number of layers that would take forever to build."""
    for key, value in _iter_leaves(fields):
        if key.endswith(("layer", "layers")) and isinstance(value, int) and value > MAX_LAYERS:
            raise ModelError(f"{where}.{key}={value} is more than {MAX_LAYERS:,} layers. Lower it.")


def _call_transformers(factory: Callable[..., Any], fields: Mapping[str, Any]) -> Any:
    try:
        # transformers modifies mappings that it is given, and a run is identified by those in its file.
        return factory(**copy.deepcopy(dict(fields)))
    except Exception as error:
        # Configuration classes validate with errors from several libraries.
        raise ModelError(
            f"transformers refuses the model configuration {dict(fields)}: {explain_library_error(error)}"
        ) from error


# -- code that comes with a model; see [Note: trust]

_MAX_CODE_BYTES = 1 << 26


def check_no_hub_kernels(path: Path, *, overridden: Iterable[str] = ()) -> None:
    """Raise ModelError for a `config.json` that names kernels of the Hub, which transformers would run.

    Fields in `overridden` are not checked.
    """
    skipped = set(overridden)
    # transformers reports a file that is not a JSON object.
    _check_kernel_names(
        {key: value for key, value in read_json_object_or_empty(path).items() if key not in skipped},
        str(path),
        f"set model.KEY in the run file, for instance to 'sdpa', or take it out of {path.name}",
    )


def _check_kernel_names(values: Mapping[str, Any], source: str, remedy: str) -> None:
    """Raise ModelError for a Hub kernel, "owner/name", as an implementation; KEY in `remedy` is replaced."""
    for key, value in _iter_leaves(values):
        if "implementation" in key and isinstance(value, str) and "/" in value:
            raise ModelError(
                f"{source} asks for code of the Hugging Face hub: {key}={value!r}. What a file names is not run: "
                f"{remedy.replace('KEY', key.split('.')[0])}."
            )


def is_commit(trusted: str | None) -> bool:
    """Return whether the trusted version is a Hub commit, and not the digest of a directory."""
    return trusted is not None and len(trusted) == 40


def register_trusted_code(
    directory: Path, trusted_version: str, *, commit: str | None, where: str = "model.trust_remote_code"
) -> None:
    """Run the code that comes with a model and register its classes. Raises ModelError for another version."""
    if is_commit(trusted_version) and commit is None:
        raise ModelError(
            f"{where}={trusted_version!r} is a commit, and {directory} is a local directory. "
            f"{_format_trust_hint(directory, where)}"
        )
    actual = commit if is_commit(trusted_version) else compute_code_digest(directory)
    if actual != trusted_version:
        raise ModelError(
            f"{where}={trusted_version!r} is not what is there: the code in {directory} is {actual}. Read it, and name "
            "that."
        )
    from transformers.utils import HF_MODULES_CACHE

    Path(HF_MODULES_CACHE).mkdir(parents=True, exist_ok=True)
    # Ranks copy the same files to one directory, and import them from there.
    with FileLock(Path(HF_MODULES_CACHE) / ".meshwright.lock"):
        try:
            _register_classes(directory)
        except ModelError:
            raise
        except Exception as error:
            # Arbitrary code may raise any error.
            raise ModelError(
                f"the code of the model in {directory} cannot be run: {explain_library_error(error)}"
            ) from error


def check_no_custom_code(directory: Path, *, where: str = "model.trust_remote_code") -> None:
    """Raise ModelError for a model whose type transformers does not know, which comes with its own code."""
    from transformers import CONFIG_MAPPING

    values = read_json_object_or_empty(directory / "config.json")
    if isinstance(values.get("auto_map"), Mapping) and values.get("model_type") not in CONFIG_MAPPING:
        file_names = ", ".join(sorted(path.name for path in directory.glob("*.py"))) or "no file of which is there"
        raise ModelError(
            f"{directory} needs code of its own ({file_names}): transformers has no model type "
            f"{values.get('model_type')!r}. What comes with a model is not run. {_format_trust_hint(directory, where)}"
        )


def compute_code_digest(directory: Path) -> str:
    """Return the SHA-256 of the names and contents of all Python files in a directory."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*.py")):
        try:
            content = read_regular_file(path, max_bytes=_MAX_CODE_BYTES)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}. Remove it, or use a whole copy.") from None
        digest.update(f"{path.relative_to(directory).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _format_trust_hint(directory: Path, where: str) -> str:
    return f"If you have read it and want it to run, say which version: {where}={compute_code_digest(directory)}."


def _register_classes(directory: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    def load(reference: str) -> Any:
        if "--" in reference:
            raise ModelError(
                f"{directory} takes code from another place, {reference!r}, of which no version is named. Use a copy "
                f"of the model that brings all of its code."
            )
        return get_class_from_dynamic_module(reference, str(directory))

    values = read_json_object_or_empty(directory / "config.json")
    refs = values.get("auto_map") or {}
    if not {"AutoConfig", "AutoModelForCausalLM"} <= refs.keys():
        raise ModelError(
            f"{directory / 'config.json'} names no code of a causal LM (auto_map: {', '.join(refs) or 'none'}). Take "
            f"trust_remote_code out, if transformers has the model itself."
        )
    config_cls, model_cls = load(refs["AutoConfig"]), load(refs["AutoModelForCausalLM"])
    AutoConfig.register(values.get("model_type"), config_cls, exist_ok=True)
    AutoModelForCausalLM.register(config_cls, model_cls, exist_ok=True)
    # So that `save_pretrained` also writes the code.
    config_cls.register_for_auto_class("AutoConfig")
    model_cls.register_for_auto_class("AutoModelForCausalLM")
    tokenizer = (read_json_object_or_empty(directory / "tokenizer_config.json").get("auto_map") or {}).get(
        "AutoTokenizer"
    )
    tokenizer_classes = [load(each) for each in (tokenizer if isinstance(tokenizer, list) else [tokenizer]) if each]
    for tokenizer_cls in tokenizer_classes[:1]:
        AutoTokenizer.register(config_cls, tokenizer_class=tokenizer_cls, exist_ok=True)
        tokenizer_cls.register_for_auto_class("AutoTokenizer")
