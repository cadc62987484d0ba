"""Files of a Hugging Face directory: weight files, of which any rectangle of a tensor can be read, and all others.

Opening weights reads only headers. safetensors files are memory-mapped, so a rank reads only what it requests. Pickles
(`.bin`) are opened only on request, with `torch.load(weights_only=True)`. Source:
https://huggingface.co/docs/safetensors (format); transformers' order of preference of file names.

[Note: other files] License, chat template, processors, tokenizer and code are read once, with the model. Checkpoints
store them, and an export writes them again. Training replaces some of them: the configuration, the generation
configuration and, if a run gives one, the tokenizer. Files that describe the weights are not copied: model card,
evaluations.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..base.errors import ModelError
from ..files.parsing import explain_library_error, read_json_object, read_regular_file
from ..tensors.chunks import to_slices

SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "BOOL": torch.bool,
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
}


class TensorReader(Protocol):
    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return the rectangle of shape `sizes` at `offsets`, on the CPU. Callers must not modify it."""


class SafetensorsReader(NamedTuple):
    file: Any
    path: Path
    key: str
    shape: torch.Size
    dtype: torch.dtype

    def read(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        try:
            if not self.shape:
                return self.file.get_tensor(self.key)
            return self.file.get_slice(self.key)[to_slices(offsets, sizes)]
        except SafetensorError as error:
            raise ModelError(f"{self.path}: {self.key} cannot be read: {error}") from error


class InMemoryReader:
    def __init__(self, value: Tensor) -> None:
        self.value, self.shape, self.dtype = value, value.shape, value.dtype

    def read(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        return self.value[to_slices(offsets, sizes)]


def open_weights(
    directory: Path, *, extra_files: Iterable[str] = (), allow_pickle: bool = False
) -> dict[str, TensorReader]:
    """Return readers of the tensors in a directory's weight files and, if they exist, in `extra_files`, by key."""
    extra = [directory / name for name in extra_files if (directory / name).is_file()]
    is_single_file, is_indexed = (directory / SAFETENSORS).is_file(), (directory / SAFETENSORS_INDEX).is_file()
    if is_single_file or is_indexed:
        index = {} if is_single_file else _read_index(directory / SAFETENSORS_INDEX)
        files = [directory / SAFETENSORS] if is_single_file else _list_weight_files(index, directory, SAFETENSORS_INDEX)
        tensors = {key: each for path in [*files, *extra] for key, each in open_safetensors(path).items()}
        missing = sorted(index.keys() - tensors.keys())
        if missing:
            raise ModelError(
                f"{directory / SAFETENSORS_INDEX} names {len(missing)} tensors that its files do not hold: "
                f"{', '.join(missing[:3])} should be in {index[missing[0]]}. Write or download the directory again."
            )
        return tensors
    pickles = [directory / PICKLE] if (directory / PICKLE).is_file() else []
    if not pickles and (directory / PICKLE_INDEX).is_file():
        pickles = _list_weight_files(_read_index(directory / PICKLE_INDEX), directory, PICKLE_INDEX)
    if not pickles:
        raise ModelError(
            f"{directory} holds no weights: no {SAFETENSORS} and no {SAFETENSORS_INDEX}. Give a directory that "
            f"`save_pretrained` has written."
        )
    if not allow_pickle:
        raise ModelError(
            f"{directory} holds its weights in pickles alone ({pickles[0].name}), which are not opened unless you ask "
            f"for it. Convert them with `model.save_pretrained(...)`, or set allow_pickle=True if you trust the files."
        )
    return {key: value for path in pickles for key, value in _open_pickle(path).items()}


def open_safetensors(path: Path) -> dict[str, TensorReader]:
    try:
        file = safe_open(path, framework="pt", device="cpu")
        tensors: dict[str, TensorReader] = {}
        for key in file.keys():  # noqa: SIM118 - the file is no mapping
            part = file.get_slice(key)
            dtype = _DTYPES.get(part.get_dtype())
            if dtype is None:
                raise ModelError(f"{path}: {key} has the dtype {part.get_dtype()}, which torch does not know.")
            tensors[key] = SafetensorsReader(file, path, key, torch.Size(part.get_shape()), dtype)
    except (SafetensorError, OSError) as error:
        size = f"{path.stat().st_size:,} bytes" if path.is_file() else "not a file"
        raise ModelError(
            f"{path} is not a whole safetensors file ({error}; {size}). Write or download it again."
        ) from error
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = read_json_object(path)["weight_map"]
        if not all(isinstance(each, str) for pair in index.items() for each in pair):
            raise TypeError("weight_map maps names to file names")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{path} is no index of weight files ({type(error).__name__}: {error}). Write or download it again."
        ) from error
    return dict(index)


def _list_weight_files(index: Mapping[str, str], directory: Path, index_name: str) -> list[Path]:
    names = sorted(set(index.values()))
    outside = [name for name in names if PurePath(name).is_absolute() or ".." in PurePath(name).parts]
    if outside:
        raise ModelError(
            f"{directory / index_name} names {outside[0]!r}, which is not in this directory. Name files in the same "
            f"directory, or write the directory again."
        )
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        some = ", ".join(Path(each).name for each in missing[:3])
        some += f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelError(
            f"{directory} lacks {len(missing)} of the {len(names)} weight files that {index_name} names: {some}. "
            f"Copy or download them too."
        )
    return [directory / name for name in names]


def _open_pickle(path: Path) -> dict[str, TensorReader]:
    try:
        try:
            values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:
            # Files written by torch before 1.6 cannot be memory-mapped.
            values = torch.load(path, map_location="cpu", weights_only=True)
        return {str(key): InMemoryReader(value) for key, value in values.items() if isinstance(value, Tensor)}
    except Exception as error:
        # The unpickler raises many types of errors for invalid pickles and for objects other than tensors.
        raise ModelError(f"{path} holds no plain weights: {type(error).__name__}: {error}") from error


# -- files besides the weights; see [Note: other files]

GENERATION_CONFIG = "generation_config.json"
MAX_FILE_BYTES = 1 << 28

_COPIED_PATTERNS = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.vocab", "*.bpe", "*.py"]
_COPIED_PATTERNS += ["additional_chat_templates/*.jinja", "license*", "licence*", "copying*", "copyright*", "notice*"]
_COPIED_PATTERNS += ["use_policy*"]
_EXCLUDED_PATTERNS = ["config.json", GENERATION_CONFIG, "adapter_config.json", "meshwright_base.json", "*.index.json"]
_EXCLUDED_PATTERNS += ["*_results.json", "trainer_state.json", "requirements*.txt"]
_VOCABULARY_PATTERNS = ["tokenizer.json", "vocab.json", "vocab.txt", "tekken.json"]
_VOCABULARY_PATTERNS += ["*.model", "*.tiktoken", "*.vocab", "*.bpe"]
_SAME_VOCABULARY_PATTERNS = [*_VOCABULARY_PATTERNS, "merges.txt"]
_TOKENIZER_PATTERNS = [
    *_SAME_VOCABULARY_PATTERNS,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
]
_TOKENIZER_PATTERNS += ["chat_template.jinja", "additional_chat_templates/*"]


def attach_extra_files(model: nn.Module, directory: Path) -> tuple[str, ...]:
    """Read the files besides the weights, attach them to the model, and return warnings about skipped ones."""
    generation = directory / GENERATION_CONFIG
    if generation.is_file() and hasattr(model, "generation_config"):
        from transformers import GenerationConfig

        try:
            read_json_object(generation)
            model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
        except Exception as error:
            # transformers raises errors of any type for invalid values.
            raise ModelError(
                f"{generation} is no generation configuration: {explain_library_error(error)}. Mend it, or remove it: "
                "it is not needed."
            ) from error
    # If the configuration is a link, other files may be links to the same directory: the Hub's cache, mounted volumes.
    allowed = {directory.resolve(), (directory / "config.json").resolve().parent}
    warnings: list[str] = []
    files: dict[str, bytes] = {}
    for path, name in _iter_files(directory):
        if not _matches(name, _COPIED_PATTERNS) or _matches(name, _EXCLUDED_PATTERNS):
            continue
        if not any(path.resolve().is_relative_to(each) for each in allowed):
            warnings.append(f"{path} is a link to another directory, and is left out of checkpoints and exports.")
            continue
        try:
            files[name] = read_regular_file(path, max_bytes=MAX_FILE_BYTES)
        except OSError as error:
            warnings.append(f"{path} is left out of checkpoints and exports, since it cannot be read: {error.strerror}")
    model.meshwright_files = files
    return tuple(warnings)


def get_extra_files(model: nn.Module) -> dict[str, bytes]:
    """Return the files that `attach_extra_files` read, by name; empty if the model is not from a directory."""
    files: dict[str, bytes] = getattr(model, "meshwright_files", {})
    return files


def drop_replaced_files(files: Mapping[str, bytes], new: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files of a base that stay valid next to new ones, such as a tokenizer's of the same vocabulary."""
    kept = {name: content for name, content in files.items() if name not in new}
    if not any(_matches(name, _VOCABULARY_PATTERNS) for name in new):
        return kept
    common = sorted(files.keys() & new.keys(), key=lambda each: (each != "tokenizer.json", each))
    vocabulary = next((each for each in common if _matches(each, _VOCABULARY_PATTERNS)), None)
    kept_patterns = (
        _SAME_VOCABULARY_PATTERNS
        if vocabulary is not None and _read_vocabulary(files[vocabulary]) == _read_vocabulary(new[vocabulary])
        else ()
    )
    return {
        name: each
        for name, each in kept.items()
        if _matches(name, kept_patterns) or not _matches(name, _TOKENIZER_PATTERNS)
    }


def _iter_files(directory: Path) -> Iterator[tuple[Path, str]]:
    """Yield path and name of each file of a model's directory, including additional chat templates."""
    paths = sorted([*directory.iterdir(), *directory.glob("additional_chat_templates/*")])
    return ((path, path.relative_to(directory).as_posix()) for path in paths if path.is_file())


def list_tokenizer_files(directory: Path) -> list[tuple[Path, str]]:
    """List path and name of the files that transformers' tokenizers write now, or wrote in earlier versions."""
    return [(path, name) for path, name in _iter_files(directory) if _matches(name, _TOKENIZER_PATTERNS)]


def format_generation_config(config: Any) -> bytes:
    """Return a generation configuration as JSON. `save_pretrained` rejects some that it can read."""
    return (config.to_json_string() + "\n").encode()


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a name matches any pattern, ignoring case; `*` does not match `/`."""
    folded = name.casefold()
    return any(fnmatchcase(folded, pattern) and folded.count("/") == pattern.count("/") for pattern in patterns)


def _read_vocabulary(content: bytes) -> object:
    try:
        return json.loads(content)["model"]["vocab"]
    except (ValueError, KeyError, TypeError):
        return content
