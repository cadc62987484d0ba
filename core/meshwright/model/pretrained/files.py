"""The weight files of a Hugging Face directory: which tensors they hold, and any rectangle of one.

Opening reads headers alone. Files are safetensors, mapped into memory, so that a rank reads what it asks for; pickles
(`.bin`) are opened only on request, and only what `torch.load(weights_only=True)` takes.
Source: https://huggingface.co/docs/safetensors (format); transformers' order of preference of file names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...base.errors import ModelError
from ...files.parsing import read_json_object

SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


class Source(Protocol):
    """Values that can be read in part."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The rectangle of `sizes` at `offsets`, on the CPU; not to be written to."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file."""

    file: Any
    path: Path
    key: str
    shape: torch.Size
    dtype: torch.dtype

    def read(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        try:
            if not self.shape:
                return self.file.get_tensor(self.key)
            return self.file.get_slice(self.key)[rectangle(offsets, sizes)]
        except SafetensorError as error:
            raise ModelError(f"{self.path}: {self.key} cannot be read: {error}") from error


@dataclass(frozen=True)
class Held:
    """A tensor in memory, or in a mapped pickle."""

    value: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    def read(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        return self.value[rectangle(offsets, sizes)]


def rectangle(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """As an index of a tensor."""
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def open_directory(directory: Path, *, also: Iterable[str] = (), allow_pickle: bool = False) -> dict[str, Source]:
    """What the weight files of a directory hold, by the keys in the files.

    Args:
        directory: of a model, as `save_pretrained` writes it.
        also: names of further safetensors files to look into, where they exist.
        allow_pickle: open `.bin` files where there are no safetensors.

    Raises:
        ModelError: no weights, or files that are missing, malformed or truncated; names the file.
    """
    extra = [directory / name for name in also if (directory / name).is_file()]
    if (directory / SAFETENSORS).is_file():
        return _open_all([directory / SAFETENSORS, *extra])
    if (directory / SAFETENSORS_INDEX).is_file():
        index = _read_index(directory / SAFETENSORS_INDEX)
        found = _open_all([*_files_of(index, directory, SAFETENSORS_INDEX), *extra])
        _check_complete(index, found, directory / SAFETENSORS_INDEX)
        return found
    pickles = _pickles(directory)
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


def _open_all(paths: Sequence[Path]) -> dict[str, Source]:
    return {key: value for path in paths for key, value in open_safetensors(path).items()}


def open_safetensors(path: Path) -> dict[str, Source]:
    """What one safetensors file holds.

    Raises:
        ModelError: it is none, or not whole.
    """
    try:
        file = safe_open(path, framework="pt", device="cpu")
        found: dict[str, Source] = {}
        for key in file.keys():  # noqa: SIM118 - the file is no mapping
            part = file.get_slice(key)
            dtype = _DTYPES.get(part.get_dtype())
            if dtype is None:
                raise ModelError(f"{path}: {key} has the dtype {part.get_dtype()}, which torch does not know.")
            found[key] = Stored(file, path, key, torch.Size(part.get_shape()), dtype)
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is not a whole safetensors file ({error}; {_size(path)}). Write or download it again."
        ) from error
    return found


def _size(path: Path) -> str:
    return f"{path.stat().st_size:,} bytes" if path.is_file() else "not a file"


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        index = read_json_object(path)["weight_map"]
        if not all(isinstance(each, str) for pair in index.items() for each in pair):
            raise TypeError("weight_map maps names to file names")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{path} is no index of weight files ({type(error).__name__}: {error}). Write or download it again."
        ) from error
    return dict(index)


def _files_of(index: Mapping[str, str], directory: Path, index_name: str) -> list[Path]:
    names = sorted(set(index.values()))
    outside = [name for name in names if PurePath(name).is_absolute() or ".." in PurePath(name).parts]
    if outside:
        raise ModelError(
            f"{directory / index_name} names {outside[0]!r}, which is not in its own directory. Name files beside it, "
            f"or write the directory again."
        )
    paths = [directory / name for name in names]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ModelError(
            f"{directory} lacks {len(missing)} of the {len(paths)} weight files that {index_name} names: {some}. "
            f"Copy or download them too."
        )
    return paths


def _check_complete(index: Mapping[str, str], found: Mapping[str, Source], path: Path) -> None:
    lost = sorted(index.keys() - found.keys())
    if lost:
        raise ModelError(
            f"{path} names {len(lost)} tensors that its files do not hold: {', '.join(lost[:3])} should be in "
            f"{index[lost[0]]}. Write or download the directory again."
        )


def _pickles(directory: Path) -> list[Path]:
    if (directory / PICKLE).is_file():
        return [directory / PICKLE]
    if (directory / PICKLE_INDEX).is_file():
        return _files_of(_read_index(directory / PICKLE_INDEX), directory, PICKLE_INDEX)
    return []


def _open_pickle(path: Path) -> dict[str, Source]:
    try:
        try:
            values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:
            # Files of torch before 1.6 cannot be mapped.
            values = torch.load(path, map_location="cpu", weights_only=True)
        values = {str(key): Held(value) for key, value in values.items() if isinstance(value, Tensor)}
    except Exception as error:
        # The unpickler fails in many ways on what is no pickle, or on one that holds more than tensors.
        raise ModelError(f"{path} holds no plain weights: {type(error).__name__}: {error}") from error
    return values
