"""Damage and forge checkpoints, and draw layouts of tensors on ranks."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from meshwright.base.errors import MeshwrightError
from meshwright.checkpoint.manifest import MANIFEST_FILE, format_step_name
from meshwright.tensors.chunks import Rectangle


def rewrite_manifest(directory: Path, **changes: Any) -> None:
    """Write a manifest that fits what the files hold now, as somebody does who forges a checkpoint."""
    content = json.loads((directory / MANIFEST_FILE).read_text())
    version, _, _ = content.pop("format"), content.pop("sha256"), content.pop("hmac_sha256", None)
    for name, stored in content["files"].items():
        data = (directory / name).read_bytes() if (directory / name).is_file() else b""
        stored.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    content.update(changes)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    text = json.dumps({"format": version, "sha256": digest, **content}, indent=1)
    (directory / MANIFEST_FILE).write_text(text + "\n")


def flip_file_bit(path: Path, bit: int | None = None) -> None:
    """Flip one bit of a file; by default in its middle."""
    content = bytearray(path.read_bytes())
    bit = 8 * (len(content) // 2) if bit is None else bit
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@contextmanager
def restore_file(path: Path) -> Iterator[None]:
    """Give a file its content back when the context is left."""
    before = path.read_bytes()
    try:
        yield
    finally:
        path.write_bytes(before)


def catch_error_text(call: Any) -> str:
    """Return the text of the error that `call` raises; "" if none."""
    try:
        call()
    except MeshwrightError as error:
        return str(error)
    return ""


@st.composite
def rank_layouts(draw: st.DrawFn) -> list[list[Rectangle]]:
    """Draw what each rank holds: tensors cut into rows at random, each part on some of the ranks."""
    ranks = draw(st.integers(1, 5))
    held: list[list[Rectangle]] = [[] for _ in range(ranks)]
    for number in range(draw(st.integers(1, 6))):
        shape = draw(st.lists(st.integers(1, 40), min_size=0, max_size=3))
        size = shape[0] if shape else 1
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
        itemsize = draw(st.sampled_from([1, 2, 8, 1000]))
        for start, end in itertools.pairwise(cuts):
            offsets, sizes = ((start, *[0] * (len(shape) - 1)), (end - start, *shape[1:])) if shape else ((), ())
            for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                # A rank may have the same part twice.
                held[rank] += [Rectangle(f"t{number}", offsets, sizes, itemsize)] * draw(st.integers(1, 2))
    return held


def step_directory(root: Path, step: int) -> Path:
    return root / format_step_name(step)
