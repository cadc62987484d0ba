"""The base below adapters: which one it is, and which tensors of an adapted model come from its files.

[Note: the base] An adapter is of use with the base alone that it was trained on. A base is known by where its files
are, and by a fingerprint of what they hold, so that it may be moved. What comes from it and does not train is in no
checkpoint. A model whose base nobody knows (one that was made by a script, with weights of its own) is saved whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._compat.peft import base_name
from ..base.errors import ModelError
from ..files.parsing import read_json_object
from .pretrained.files import Source, open_directory

BASE_FILE = "meshwright_base.json"
"""The file of an adapter's directory that names its base; peft passes over it."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Names of peft."""
_ROWS, _ELEMENTS = 4, 512
"""Of each tensor, so many rows go into a fingerprint, and of each so many elements."""


@dataclass(frozen=True)
class Base:
    """What lies below adapters.

    Attributes:
        path: the absolute directory, or the hub id; `base_model_name_or_path` of peft.
        revision: on the hub.
        fingerprint: see `fingerprint_of`.
    """

    path: str
    revision: str | None
    fingerprint: str

    def told(self) -> dict[str, Any]:
        """As values of JSON."""
        return asdict(self)

    def __str__(self) -> str:
        revision = f" at {self.revision}" if self.revision else ""
        return f"{self.path}{revision} (fingerprint {self.fingerprint[:12]})"


@dataclass(frozen=True)
class FromBase:
    """What an adapted model remembers.

    Attributes:
        base: below it.
        names: for each parameter that has its values from the base's files, its name there.
    """

    base: Base
    names: Mapping[str, str]


def remember_base(model: nn.Module, base: Base, names: Iterable[str]) -> None:
    """Let an adapted model know its base, and which of its parameters come from there.

    Args:
        names: of the base's own parameters, in the base.
    """
    known = set(names)
    named = ((name, base_name(name)) for name, _ in model.named_parameters(remove_duplicate=False))
    model.meshwright_base = FromBase(base, {name: below for name, below in named if below in known})


def base_of(parts: Sequence[nn.Module]) -> FromBase | None:
    """What `remember_base` has told the model that these are parts of; None for others."""
    found: FromBase | None = getattr(parts[0], "meshwright_base", None) if parts else None
    return found


def left_out(parts: Sequence[nn.Module]) -> frozenset[str]:
    """Names of the parameters that a checkpoint need not hold: those of the base, but for what trains of it."""
    found = base_of(parts)
    if found is None:
        return frozenset()
    trained = {name for part in parts for name, value in part.named_parameters() if value.requires_grad}
    return frozenset(found.names.keys() - trained)


def adapter_configs(model: nn.Module) -> dict[str, Any]:
    """peft's configuration of each adapter of a model, by the adapter's name; empty where it has none."""
    found = getattr(model, "peft_config", None)
    return dict(found) if isinstance(found, dict) else {}


def adapter_folder(name: str) -> str:
    """Where the files of an adapter lie below those of all: peft has the one called "default" beside them."""
    return "." if name == "default" else name


# -- which base it is


def fingerprint_of(directory: Path, *, allow_pickle: bool = False) -> str:
    """A digest of what the weight files of a directory hold: each tensor's name, shape, dtype, and some of its values.

    It is the same for other files, of other sizes, that hold the same. Whole models are not read: of each tensor four
    rows are, so that training changes it, and a change of a few single values may not.

    Raises:
        ModelError: the files cannot be read.
    """
    digest = hashlib.sha256()
    for name, source in sorted(open_directory(directory, allow_pickle=allow_pickle).items()):
        digest.update(json.dumps([name, list(source.shape), str(source.dtype)]).encode())
        for value in _sampled(source):
            digest.update(value)
    return digest.hexdigest()


def _sampled(source: Source) -> Iterator[bytes]:
    shape = list(source.shape)
    if 0 in shape:
        return
    # A vector is one row.
    outer, inner = (shape[0], shape[1:]) if len(shape) > 1 else (1, shape)
    sizes, left = list(inner), _ELEMENTS
    for dim in reversed(range(len(inner))):
        sizes[dim], left = min(inner[dim], left), max(1, left // inner[dim])
    for row in sorted({(outer - 1) * i // (_ROWS - 1) for i in range(_ROWS)}):
        first = [row] if len(shape) > 1 else []
        value = source.read([*first, *[0] * len(inner)], [*[1 for _ in first], *sizes])
        yield value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def read_base(directory: Path) -> Base | None:
    """The base that a run has noted beside an adapter; None where nothing was.

    Raises:
        ModelError: the note cannot be read.
    """
    path = directory / BASE_FILE
    if not path.is_file():
        return None
    try:
        return Base(**read_json_object(path))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{path} names no base ({error}). Write the adapter again, or remove the file.") from None
