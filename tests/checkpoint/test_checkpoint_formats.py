"""Other formats are refused, and so are indices and manifests that do not fit their files."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from meshwright import (
    CheckpointError,
    Mesh,
    MeshSizes,
    open_world,
    optimizer_factory,
    resolve,
    save_checkpoint,
)
from meshwright.checkpoint import export_checkpoint, read_manifest
from meshwright.checkpoint.index import INDEX
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.checkpoint.read_index import read_index
from meshwright.strategy.contract import StrategyManager
from meshwright.testing import pool
from meshwright.train.run_file import OptimizerConfig


def _manager(strategy: str) -> StrategyManager:
    world = open_world("cpu")
    stack, degrees = resolve(strategy, MeshSizes(), world.size)
    manager = stack.build(Mesh(degrees, world))
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=40
    )
    manager.parallelize(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    manager.build_optimizer(optimizer_factory(OptimizerConfig(lr=0.5, weight_decay=0.1)))
    return manager


def _reseal(directory: Path, **changes: Any) -> None:
    """Make a manifest that fits what the files hold now, as one who crafts a checkpoint would."""
    content = json.loads((directory / MANIFEST).read_text())
    version, _, _ = content.pop("format"), content.pop("sha256"), content.pop("hmac_sha256", None)
    for name, stored in content["files"].items():
        data = (directory / name).read_bytes() if (directory / name).is_file() else b""
        stored.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    content.update(changes)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    text = json.dumps({"format": version, "sha256": digest, **content}, indent=1)
    (directory / MANIFEST).write_text(text + "\n")


def _save(path: str) -> None:
    manager = _manager("single")
    save_checkpoint(manager, path, step=3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("formats") / "saved"
    pool(1).run(_save, str(path))
    return path


def _change_index(directory: Path, change: Any) -> None:
    content = json.loads((directory / INDEX).read_text())
    change(content)
    (directory / INDEX).write_text(json.dumps(content))


NAME = "model.lm_head.weight"
# Rows 0 to 19 twice, and no others.
_OVERLAPPING = [0, 0, 0, 0, 20, 16, 0, 0, 0, 0, 20, 16]


def _same_bytes(index: dict[str, Any]) -> dict[str, Any]:
    """More tensors, all of which lie where one does."""
    return {f"{NAME}.{number}": index["tensors"][NAME] for number in range(1000)}


CRAFTED = {
    "a file elsewhere": (lambda index: index["files"].__setitem__(0, "/etc/passwd"), "beyond the end of its file"),
    "no such file": (lambda index: index["tensors"][NAME]["pieces"].__setitem__(0, 7), "another file than"),
    "beyond the end": (lambda index: index["tensors"][NAME]["pieces"].__setitem__(1, 1 << 40), "beyond the end"),
    "a negative place": (lambda index: index["tensors"][NAME]["pieces"].__setitem__(1, -8), "beyond the end"),
    "rows outside": (lambda index: index["tensors"][NAME]["pieces"].__setitem__(2, 9), "not within it"),
    "too few rows": (lambda index: index["tensors"][NAME]["pieces"].__setitem__(4, 9), "of its 640 elements"),
    "no dtype": (lambda index: index["tensors"][NAME].update(dtype="load"), "'load' is no dtype of torch"),
    "no numbers": (lambda index: index["tensors"][NAME].update(pieces=["a"]), "is no index"),
    "huge": (lambda index: index["tensors"][NAME].update(shape=[1 << 40, 1 << 40]), "is said to have"),
    "overlapping": (lambda index: index["tensors"][NAME]["pieces"].__setitem__(slice(None), _OVERLAPPING), "overlap"),
    "a negative shape": (lambda index: index["tensors"][NAME].update(shape=[-40, -16]), "is said to have the shape"),
    "the same bytes": (lambda index: index["tensors"].update(_same_bytes(index)), "are said to have"),
    "no tensors": (lambda index: index.pop("tensors"), "is no index"),
}


@pytest.mark.parametrize("crafted", CRAFTED)
def test_an_index_that_points_elsewhere_is_refused(crafted: str, saved: Path, tmp_path: Path) -> None:
    directory = tmp_path / "crafted"
    shutil.copytree(saved, directory)
    change, expected = CRAFTED[crafted]
    _change_index(directory, change)
    _reseal(directory)
    with pytest.raises(CheckpointError, match=expected):
        read_index(directory, read_manifest(directory))


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "huggingface/../../outside", ""])
def test_a_manifest_names_files_of_the_checkpoint_alone(name: str, saved: Path, tmp_path: Path) -> None:
    directory = tmp_path / "crafted"
    shutil.copytree(saved, directory)
    (tmp_path / "outside").write_bytes(b"")
    files = json.loads((directory / MANIFEST).read_text())["files"]
    empty = {"size": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    _reseal(directory, files={**files, name: empty})
    with pytest.raises(CheckpointError, match="which is not within it"):
        read_manifest(directory)


@pytest.mark.parametrize("version", [4, 0, 1, "2", None, [2]])
def test_another_format_is_refused_and_named(version: Any, saved: Path, tmp_path: Path) -> None:
    directory = tmp_path / "newer"
    shutil.copytree(saved, directory)
    content = json.loads((directory / MANIFEST).read_text())
    # A newer one may have no checksum where this one has it.
    content.pop("sha256")
    (directory / MANIFEST).write_text(json.dumps({**content, "format": version}, indent=1) + "\n")
    with pytest.raises(CheckpointError, match="reads 2 and 3"):
        read_manifest(directory)


def test_files_that_the_manifest_does_not_name_are_not_exported(saved: Path, tmp_path: Path) -> None:
    directory = tmp_path / "more"
    shutil.copytree(saved, directory)
    (directory / "huggingface" / "modeling_llama.py").write_text("raise SystemExit")
    (directory / "huggingface" / "more").mkdir()
    export_checkpoint(directory, tmp_path / "out")
    assert not (tmp_path / "out" / "modeling_llama.py").exists()
