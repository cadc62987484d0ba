"""Read the index of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .index import INDEX, Index, StoredTensor, check_tensors, dtype_named
from .manifest import Manifest, StoredFile, broken, read_verified
from .places import Where


def read_index(directory: Where, manifest: Manifest) -> Index:
    """Read the index of a checkpoint. Nothing in it is run.

    Raises:
        CheckpointError: it was altered, or is none.
    """
    try:
        content = json.loads(read_verified(directory, manifest, INDEX))
        files = tuple(str(name) for name in content["files"])
        tensors = {name: _tensor(each) for name, each in content["tensors"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise broken(directory, f"{INDEX} is no index ({type(error).__name__}: {error})") from None
    absent = StoredFile(0, "")
    check_tensors(directory, tensors, [manifest.files.get(name, absent).size for name in files])
    return Index(files, tensors)


def _tensor(content: Mapping[str, Any]) -> StoredTensor:
    shape = torch.Size(content["shape"])
    pieces = np.array(content["pieces"], np.int64).reshape(-1, 2 + 2 * len(shape))
    return StoredTensor(shape, dtype_named(content["dtype"]), pieces)
