"""No bit of a checkpoint can change, and no byte of its end be lost, without being told."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from meshwright import CheckpointError, load_checkpoint, save_checkpoint
from meshwright.checkpoint.show import shown
from meshwright.data.tokenizer import train_tokenizer
from meshwright.strategy.contract import StrategyManager
from meshwright.testing import Case, pool
from meshwright.testing.parity import build_manager, full_weights, train_steps

FLIPS, TRUNCATIONS = 400, 100
CASE = Case(steps=1, layers=1, dtype="float32")


def _save(path: str) -> None:
    manager = build_manager("fsdp2", {}, {}, CASE)
    train_steps(manager, CASE, range(1))
    # Floats and text that can be written in several ways.
    extra = {"small": 1e-05, "large": 1e22, "text": "\u00e9 \n \\", "none": None, "nested": {"a": [True, -0.0]}}
    tokenizer = train_tokenizer(iter(["a few words of a text"] * 20), 270)
    save_checkpoint(manager, path, step=1, extra=extra, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("damage") / "saved"
    pool(2).run(_save, str(path))
    return path


@contextmanager
def _changed(path: Path, content: bytes) -> Iterator[None]:
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)


def _flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _changes(directory: Path) -> Iterator[tuple[str, Path, bytes]]:
    """What is done to which file; half of it by size, half to each file alike."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in files]
    draw = random.Random(16)
    for number in range(FLIPS):
        path = files[number % len(files)] if number % 2 else draw.choices(files, sizes)[0]
        content = path.read_bytes()
        bit = draw.randrange(8 * len(content))
        yield f"bit {bit} of {path.name}", path, _flipped(content, bit)
    for number in range(TRUNCATIONS):
        path = files[number % len(files)]
        content = path.read_bytes()
        # The last byte, all of it, or any part.
        length = {0: len(content) - 1, 1: 0}.get(number // len(files), draw.randrange(len(content)))
        yield f"{path.name} cut to {length} of {len(content)} bytes", path, content[:length]


def _is_told(manager: StrategyManager, directory: Path) -> list[bool]:
    """Whether `checkpoint show` tells that it is torn, and loading refuses it."""
    try:
        by_show = not shown(directory)[1]
    except CheckpointError:
        by_show = True
    try:
        load_checkpoint(manager, directory)
    except CheckpointError:
        return [by_show, True]
    return [by_show, False]


def _not_told(path: str) -> tuple[int, list[str], bool]:
    directory, case = Path(path), CASE
    manager = build_manager("single", {}, {}, case, seed=5)
    before = full_weights(manager)
    assert _is_told(manager, directory / "none") == [True, True]
    count, missed = 0, []
    for what, file, content in _changes(directory):
        count += 1
        with _changed(file, content):
            if not all(_is_told(manager, directory)):
                missed.append(what)
    after = full_weights(manager)
    unchanged = all(torch.equal(after[name], before[name]) for name in before)
    # What is whole again loads.
    assert _is_told(manager, directory) == [False, False]
    return count, missed, unchanged


def test_every_flipped_bit_and_every_truncation_is_told(saved: Path) -> None:
    assert {path.suffix for path in saved.rglob("*") if path.is_file()} >= {".json", ".bin"}
    ((count, missed, unchanged),) = pool(1).run(_not_told, str(saved))
    assert count == FLIPS + TRUNCATIONS
    assert missed == []
    assert unchanged, "nothing may be changed by a checkpoint that is refused"


@pytest.mark.zoo
def test_every_bit_of_the_files_of_text_is_told(saved: Path) -> None:
    assert pool(1).run(_every_bit, str(saved)) == [[]]


def _every_bit(path: str) -> list[str]:
    directory, missed = Path(path), []
    for name in ("checkpoint.json", "optimizer-00000.json", "index.json"):
        content = (directory / name).read_bytes()
        for bit in range(8 * len(content)):
            with _changed(directory / name, _flipped(content, bit)):
                try:
                    whole = shown(directory)[1]
                except CheckpointError:
                    whole = False
                if whole:
                    missed.append(f"bit {bit} of {name}")
    return missed
