"""Checkpoints of an earlier format load, newer ones are refused, and no index of either can run anything."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import tarfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from meshwright import (
    CheckpointError,
    Mesh,
    MeshSizes,
    load_checkpoint,
    open_world,
    optimizer_factory,
    resolve,
    save_checkpoint,
)
from meshwright.checkpoint import export_checkpoint, read_manifest
from meshwright.checkpoint.index import INDEX
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.checkpoint.read_index import read_index
from meshwright.checkpoint.values import flat
from meshwright.cli import main as cli
from meshwright.strategy.contract import StrategyManager
from meshwright.testing import pool
from meshwright.train.run_file import OptimizerConfig, ScheduleConfig
from meshwright.train.schedules import build_scheduler

FORMAT_1 = Path(__file__).parent / "data" / "checkpoint-format-1.tar.gz"
"""Saved under fsdp2 on two ranks, after two steps of five, by a version that wrote format 1; see `_formula`."""


def _formula(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """What the checkpoint holds, by the name in it."""
    return ((torch.arange(shape.numel()) % 97 + zlib.crc32(name.encode()) % 89) / 8).view(shape).to(dtype)


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


def _load_format_1(directory: str, strategy: str) -> list[str]:
    manager = _manager(strategy)
    scheduler = build_scheduler(ScheduleConfig(warmup_steps=1), manager.optimizer, 5)
    manifest = load_checkpoint(manager, directory, scheduler=scheduler)
    assert (manifest.format, manifest.step, manifest.extra, manifest.has_optimizer) == (1, 2, {"tokens": 7}, True)
    assert scheduler.last_epoch == 2
    state = manager.sharded_state()
    assert state.optimizer is not None
    assert {each["lr"] for each in state.optimizer.groups} == {0.008535533905932738}
    assert sorted(each["weight_decay"] for each in state.optimizer.groups) == [0.0, 0.1]
    assert {float(each["step"]) for each in state.optimizer.values.values()} == {2.0}
    tensors = flat(state)
    for name, sharded in tensors.items():
        whole = _formula(name, sharded.shape, sharded.dtype)
        for piece in sharded.pieces:
            part = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))
            assert torch.equal(piece.tensor, whole[part]), name
    return sorted(tensors)


@pytest.fixture
def format_1(tmp_path: Path) -> Path:
    with tarfile.open(FORMAT_1) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "format-1"


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2)])
def test_a_checkpoint_of_format_1_loads_bit_for_bit(strategy: str, ranks: int, format_1: Path) -> None:
    names = pool(ranks).run(_load_format_1, str(format_1), strategy)[0]
    assert len(names) == 3 * 12


def test_a_checkpoint_of_format_1_is_shown_and_exported(format_1: Path, tmp_path: Path) -> None:
    shown = CliRunner().invoke(cli.app, ["checkpoint", "show", str(format_1)])
    assert shown.exit_code == 0, shown.output
    assert "whole" in shown.output
    export_checkpoint(format_1, tmp_path / "out")
    for name, value in AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict().items():
        assert torch.equal(value, _formula(f"model.{name}", value.shape, value.dtype))


def _reseal(directory: Path, **changes: Any) -> None:
    """Make a manifest that fits what the files hold now, as one who crafts a checkpoint would."""
    content = json.loads((directory / MANIFEST).read_text())
    version, _ = content.pop("format"), content.pop("sha256")
    for name, stored in content["files"].items():
        data = (directory / name).read_bytes() if (directory / name).is_file() else b""
        stored.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    content.update(changes)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    text = json.dumps({"format": version, "sha256": digest, **content}, indent=1)
    (directory / MANIFEST).write_text(text + "\n")


class _Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self._marker,)


def _tell(directory: Path, tmp_path: Path) -> list[str]:
    """What each way to read a checkpoint says of it."""
    told = []
    for arguments in (["checkpoint", "show", str(directory)], ["export", str(directory), str(tmp_path / "out")]):
        done = CliRunner().invoke(cli.app, arguments)
        assert done.exit_code in (1, 2)
        told.append(" ".join(done.output.split()))
    told += pool(1).run(_refused, str(directory))
    return told


def _refused(directory: str) -> str:
    try:
        load_checkpoint(_manager("single"), directory)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_crafted_pickle_of_format_1_does_not_run(name: str, format_1: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    if name == ".metadata":
        # What an index that is in order otherwise could carry, too.
        (format_1 / name).write_bytes(pickle.dumps({"state_dict_metadata": _Payload(marker)}))
    else:
        torch.save(_Payload(marker), format_1 / name)
    _reseal(format_1)
    # A payload is read by those alone who need its tensors.
    told = _tell(format_1, tmp_path) if name == ".metadata" else pool(1).run(_refused, str(format_1))
    assert not marker.exists()
    assert all("not whole" in each or "holds no tensor" in each for each in told), told
    if name == ".metadata":
        assert all("asks for pathlib.Path.touch" in each or "pathlib" in each for each in told), told


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


@pytest.mark.parametrize("version", [4, 0, "2", None, [2]])
def test_a_newer_format_is_refused_and_named(version: Any, saved: Path, tmp_path: Path) -> None:
    directory = tmp_path / "newer"
    shutil.copytree(saved, directory)
    content = json.loads((directory / MANIFEST).read_text())
    # A newer one may have no checksum where this one has it.
    content.pop("sha256")
    (directory / MANIFEST).write_text(json.dumps({**content, "format": version}, indent=1) + "\n")
    with pytest.raises(CheckpointError, match="reads those up to 3"):
        read_manifest(directory)


def test_files_that_the_manifest_does_not_name_are_not_exported(saved: Path, tmp_path: Path) -> None:
    directory = tmp_path / "more"
    shutil.copytree(saved, directory)
    (directory / "huggingface" / "modeling_llama.py").write_text("raise SystemExit")
    (directory / "huggingface" / "more").mkdir()
    export_checkpoint(directory, tmp_path / "out")
    assert not (tmp_path / "out" / "modeling_llama.py").exists()
