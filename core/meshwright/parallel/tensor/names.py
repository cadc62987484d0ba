"""What a tensor-parallel plan may call the modules and parameters of a model."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..._compat.peft import base_name


def spellings(name: str) -> Iterator[str]:
    """What a plan may call a module or parameter: by its own name, or in the base model of an adapted one."""
    yield from (name, wildcards(name))
    # A wrapper has the name of what it wraps, which is a part of it, and so have what holds copies and these.
    if not name.endswith((".base_layer", ".modules_to_save")):
        yield from (base_name(name), wildcards(base_name(name)))


def wildcards(name: str) -> str:
    """A name with `*` for each number."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
