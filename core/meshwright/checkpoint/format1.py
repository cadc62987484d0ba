"""Read checkpoints of format 1, which torch.distributed.checkpoint has written, without running what is in them.

Their index, `.metadata`, is a pickle. Here it makes records without behaviour, whatever it asks for: names that are not
on a list of a dozen are refused, and those on the list are not torch's classes. A piece is a tensor as `torch.save`
writes it, which `torch.load(weights_only=True)` reads.
Source: torch.distributed.checkpoint.metadata and .filesystem, whose attributes these are.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from ..base.errors import CheckpointError
from .index import Index, StoredPiece, StoredTensor, check_tensors, dtype_named
from .manifest import Manifest, broken, read_verified
from .places import Where

METADATA = ".metadata"
_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),
}


class _Record:
    """Stands for an object of torch's: keeps what the pickle gives it, and does nothing."""

    def __init__(self, *values: Any) -> None:
        self.values: Any = values

    def __setstate__(self, values: Any) -> None:
        self.values = values

    def __getitem__(self, key: Any) -> Any:
        return self.values[key]


@dataclass(frozen=True)
class PickledIndex(Index):
    """The index of a checkpoint of format 1.

    Attributes:
        lengths: bytes of each piece, by the number of its file and its first byte.
    """

    lengths: dict[tuple[int, int], int]

    def whole_piece(self, file: BinaryIO, stored: StoredPiece) -> Tensor:
        file.seek(stored.begin)
        content = io.BytesIO(file.read(self.lengths[stored.file, stored.begin]))
        try:
            tensor = torch.load(content, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{file.name} holds no tensor at byte {stored.begin}: {error}") from None
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != stored.sizes:
            raise CheckpointError(f"{file.name} holds another tensor at byte {stored.begin} than its index says.")
        return tensor


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            return _Record
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch":
            return dtype_named(name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no index needs")


def read_metadata(directory: Where, manifest: Manifest) -> Index:
    """The index of a checkpoint of format 1.

    Raises:
        CheckpointError: it was altered, or asks for what no index needs.
    """
    try:
        content = _Unpickler(io.BytesIO(read_verified(directory, manifest, METADATA))).load()
        index = _index(content, manifest)
    except CheckpointError:
        raise
    except Exception as error:
        # A pickle that is none fails in any way.
        raise broken(directory, f"{METADATA} is no index ({type(error).__name__}: {error})") from None
    check_tensors(directory, index.tensors, None)
    return index


def _index(content: _Record, manifest: Manifest) -> PickledIndex:
    lengths: dict[tuple[int, int], int] = {}
    rows: dict[str, list[list[int]]] = {}
    files = tuple(manifest.files)
    numbers = {name: number for number, name in enumerate(files)}
    tensors = {
        name: (tuple(each["size"]), each["properties"][0], {tuple(chunk["offsets"]): chunk for chunk in each["chunks"]})
        for name, each in content["state_dict_metadata"].items()
    }
    for key, place in content["storage_data"].items():
        if place.values.get("transform_descriptors"):
            raise ValueError(f"{key['fqn']} is stored in a way that meshwright has never used")
        _, _, chunks = tensors[key["fqn"]]
        offsets = tuple(key["offset"])
        number, begin = numbers[place["relative_path"]], place["offset"]
        lengths[number, begin] = place["length"]
        row = [number, begin, *offsets, *chunks[offsets]["sizes"]]
        rows.setdefault(key["fqn"], []).append(row)
    stored = {
        name: StoredTensor(torch.Size(shape), dtype, np.array(rows[name], np.int64).reshape(-1, 2 + 2 * len(shape)))
        for name, (shape, dtype, _) in tensors.items()
    }
    return PickledIndex(files, stored, lengths)
