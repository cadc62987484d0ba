"""Checkpoints that changed, are of another format, or are forged: every one is refused, and changes nothing."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import catch_error_text, flip_file_bit, restore_file, rewrite_manifest, step_directory
from support.commands import invoke_in_process

from meshwright import CheckpointError, load_checkpoint, save_checkpoint
from meshwright.base.errors import IncompleteCheckpointError
from meshwright.checkpoint import export_checkpoint, find_newest_checkpoint, read_manifest
from meshwright.checkpoint.index import INDEX_FILE, read_index
from meshwright.checkpoint.manifest import MANIFEST_FILE
from meshwright.strategy.contract import StrategyManager
from meshwright.testing import Case
from meshwright_run.data.tokenizer import train_tokenizer
from meshwright_run.inspect_checkpoints import describe_checkpoints
from meshwright_testing import pool
from meshwright_testing.parity import build_manager, full_weights, train_steps

FLIPS, TRUNCATIONS = 150, 40
CASE = Case(steps=1, layers=1, dtype="float32")
NAME = "model.lm_head.weight"


def _save(root: str) -> None:
    manager = build_manager("fsdp2", {}, {}, CASE)
    train_steps(manager, CASE, range(1))
    # Floats and text that can be written in several ways.
    extra = {"small": 1e-05, "large": 1e22, "text": "\u00e9 \n \\", "none": None, "nested": {"a": [True, -0.0]}}
    tokenizer = train_tokenizer(iter(["a few words of a text"] * 20), 270)
    for step in (1, 2):
        save_checkpoint(manager, step_directory(Path(root), step), step=step, extra=extra, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two steps."""
    root = tmp_path_factory.mktemp("damage")
    pool(2).run(_save, str(root))
    return root


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy of the newer one."""
    return Path(shutil.copytree(step_directory(saved, 2), tmp_path / "step-00000002"))


def _is_refused(manager: StrategyManager, directory: Path) -> list[bool]:
    """Return whether `checkpoint show` and loading refuse it."""
    try:
        by_show = any(each["state"] != "valid" for each in describe_checkpoints(directory))
    except CheckpointError:
        by_show = True
    return [by_show, bool(catch_error_text(lambda: load_checkpoint(manager, directory)))]


def _not_refused(path: str) -> tuple[list[str], bool]:
    """Change bits, and cut off files: half of the changes by size, half of them each file alike."""
    directory, manager = Path(path), build_manager("single", {}, {}, CASE, seed=5)
    before, missed = full_weights(manager), []
    assert _is_refused(manager, directory / "none") == [True, True]
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    sizes, draw = [path.stat().st_size for path in files], random.Random(16)
    for number in range(FLIPS):
        file = files[number % len(files)] if number % 2 else draw.choices(files, sizes)[0]
        bit = draw.randrange(8 * file.stat().st_size)
        with restore_file(file):
            flip_file_bit(file, bit)
            missed += [] if all(_is_refused(manager, directory)) else [f"bit {bit} of {file.name}"]
    for number in range(TRUNCATIONS):
        file = files[number % len(files)]
        content = file.read_bytes()
        # The last byte, all of it, or any part.
        length = {0: len(content) - 1, 1: 0}.get(number // len(files), draw.randrange(len(content)))
        with restore_file(file):
            file.write_bytes(content[:length])
            missed += [] if all(_is_refused(manager, directory)) else [f"{file.name} cut to {length}"]
    after = full_weights(manager)
    unchanged = all(torch.equal(after[name], before[name]) for name in before)
    assert _is_refused(manager, directory) == [False, False]
    return missed, unchanged


def test_every_flipped_bit_and_every_truncation_is_reported(copy: Path) -> None:
    assert {path.suffix for path in copy.rglob("*") if path.is_file()} >= {".json", ".bin"}
    assert pool(1).run(_not_refused, str(copy)) == [([], True)]


# -- an older one is taken


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _respaced(path: Path) -> None:
    path.write_text(path.read_text().replace('"step": 2', '"step":  2'))


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a file is cut off": ("tensors-00001.bin", _cut, "tensors-00001.bin has .* bytes instead of"),
    "a file is gone": ("tensors-00000.bin", Path.unlink, "tensors-00000.bin is missing"),
    "a bit is flipped": ("tensors-00001.bin", flip_file_bit, "the contents of tensors-00001.bin have changed"),
    "the manifest is written in another way": (MANIFEST_FILE, _respaced, f"{MANIFEST_FILE} was altered"),
    "the manifest is gone": (MANIFEST_FILE, Path.unlink, "was never completed"),
}


def _load_and_find(root: str) -> tuple[str, bool, str, list[str]]:
    manager = build_manager("fsdp2", {}, {}, CASE, seed=3)
    before = full_weights(manager)
    error = catch_error_text(lambda: load_checkpoint(manager, step_directory(Path(root), 2)))
    after = full_weights(manager)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = find_newest_checkpoint(root, manager.mesh.world)
    same = all(torch.equal(after[name], before[name]) for name in before)
    return error, same, str(found), [str(each.message) for each in caught]


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_whole_is_named_and_an_older_one_is_taken(damage: str, saved: Path, copy: Path) -> None:
    root = copy.parent
    shutil.copytree(step_directory(saved, 1), step_directory(root, 1))
    name, change, expected = DAMAGE[damage]
    change(copy / name)
    results = pool(2).run(_load_and_find, str(root))
    for error, same, found, _ in results:
        assert re.search(expected, error), error
        assert "Others there: step-00000001" in error
        assert same, "a checkpoint that is refused may change nothing"
        assert found == str(step_directory(root, 1))
    assert len([text for _, _, _, texts in results for text in texts if "An older one is tried" in text]) == 1
    code, table = invoke_in_process("checkpoint", "show", root)
    assert (code, "incomplete" in table, "valid" in table) == (1, True, True)


# -- forged indices and manifests, and other formats


# Rows 0 to 19 twice, and no others.
_OVERLAPPING = [0, 0, 0, 0, 20, 16, 0, 0, 0, 0, 20, 16]


def _same_bytes(index: dict[str, Any]) -> dict[str, Any]:
    return {f"{NAME}.{number}": index["tensors"][NAME] for number in range(1000)}


def _piece(position: int, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda index: index["tensors"][NAME]["pieces"].__setitem__(position, value)


def _tensor(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda index: index["tensors"][NAME].update(**values)


FORGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a file elsewhere": (lambda index: index["files"].__setitem__(0, "/etc/passwd"), "beyond the end of its file"),
    "no such file": (_piece(0, 7), "another file than"),
    "beyond the end": (_piece(1, 1 << 40), "beyond the end"),
    "a negative place": (_piece(1, -8), "beyond the end"),
    "rows outside": (_piece(2, 9999), "not within it"),
    "too few rows": (_piece(4, 9), r"of its \d+ elements"),
    "no dtype": (_tensor(dtype="load"), "'load' is no dtype of torch"),
    "no numbers": (_tensor(pieces=["a"]), "is no index"),
    "huge": (_tensor(shape=[1 << 40, 1 << 40]), "is said to have"),
    "overlapping": (_tensor(shape=[40, 16], pieces=_OVERLAPPING), "overlap"),
    "a negative shape": (_tensor(shape=[-40, -16]), "is said to have the shape"),
    "the same bytes": (lambda index: index["tensors"].update(_same_bytes(index)), "are said to have"),
    "no tensors": (lambda index: index.pop("tensors"), "is no index"),
}


@pytest.mark.parametrize("forged", FORGED)
def test_an_index_that_points_elsewhere_is_refused(forged: str, copy: Path) -> None:
    change, expected = FORGED[forged]
    content = json.loads((copy / INDEX_FILE).read_text())
    change(content)
    (copy / INDEX_FILE).write_text(json.dumps(content))
    rewrite_manifest(copy)
    with pytest.raises(CheckpointError, match=expected):
        read_index(copy, read_manifest(copy))


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "huggingface/../../outside", ""])
def test_a_manifest_names_files_of_the_checkpoint_alone(name: str, copy: Path) -> None:
    (copy.parent / "outside").write_bytes(b"")
    files = json.loads((copy / MANIFEST_FILE).read_text())["files"]
    rewrite_manifest(copy, files={**files, name: {"size": 0, "sha256": hashlib.sha256(b"").hexdigest()}})
    with pytest.raises(CheckpointError, match="which is not within it"):
        read_manifest(copy)


@pytest.mark.parametrize("version", [4, 0, 1, "2", None, [2]])
def test_another_format_is_refused_and_named(version: Any, copy: Path) -> None:
    content = json.loads((copy / MANIFEST_FILE).read_text())
    # A newer format may have its checksum elsewhere.
    content.pop("sha256")
    (copy / MANIFEST_FILE).write_text(json.dumps({**content, "format": version}, indent=1) + "\n")
    with pytest.raises(CheckpointError, match="reads 2 and 3") as caught:
        read_manifest(copy)
    assert not isinstance(caught.value, IncompleteCheckpointError)


def test_files_that_the_manifest_does_not_name_are_not_exported(copy: Path, tmp_path: Path) -> None:
    (copy / "huggingface" / "modeling_llama.py").write_text("raise SystemExit")
    (copy / "huggingface" / "more").mkdir()
    export_checkpoint(copy, tmp_path / "out")
    assert not (tmp_path / "out" / "modeling_llama.py").exists()
