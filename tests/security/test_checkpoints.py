"""Checkpoints of others: what is read is what was signed, each element is somewhere, and links lead nowhere."""

from __future__ import annotations

import copy
import itertools
import math
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from operator import getitem
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import catch_error_text, flip_file_bit, rewrite_manifest
from support.commands import invoke_in_process

from meshwright import CheckpointError, load_checkpoint, save_checkpoint
from meshwright.checkpoint import export_checkpoint, loading, stored_model
from meshwright.checkpoint import manifest as manifest_module
from meshwright.checkpoint.index import StoredTensor
from meshwright.checkpoint.lifecycle import find_best_checkpoints
from meshwright.checkpoint.manifest import MANIFEST_FILE, BlockHasher, StoredFile, open_verified, read_manifest
from meshwright.checkpoint.storage import LocalStorage, SigningKey, StorageOptions
from meshwright.testing import Case
from meshwright.training.loop.monitors import (
    BAD_STEPS_KEY,
    BadStepConfig,
    BadStepDetector,
    EarlyStopping,
    MetricMonitor,
)
from meshwright_run.resume import ResumePoint
from meshwright_testing import pool
from meshwright_testing.parity import build_manager, train_steps

CASE = Case(steps=1, layers=1, dtype="float32")
SECRET = b"a secret of 32 bytes and a few more"
PAYLOAD = "tensors-00000.bin"


# -- each element once


def _divided(shape: tuple[int, ...], draw: random.Random) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A whole, cut into rectangles at random."""
    found = [((0,) * len(shape), shape)]
    for _ in range(draw.randint(0, 12)):
        offsets, sizes = found.pop(draw.randrange(len(found)))
        dim = draw.randrange(len(shape))
        if sizes[dim] < 2:
            found.append((offsets, sizes))
            continue
        at = draw.randint(1, sizes[dim] - 1)
        behind = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
        found.append((offsets, (*sizes[:dim], at, *sizes[dim + 1 :])))
        found.append((behind, (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :])))
    return found


def _problem(shape: tuple[int, ...], rectangles: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> str | None:
    pieces = np.array([(0, 0, *offsets, *sizes) for offsets, sizes in rectangles], np.int64)
    return StoredTensor(torch.Size(shape), torch.int8, pieces).find_error([10**6])


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_pieces_have_each_element_once_or_are_refused(dims: int) -> None:
    draw = random.Random(dims)
    refused = 0
    for _ in range(300):
        shape = tuple(draw.randint(1, 6) for _ in range(dims))
        rectangles = _divided(shape, draw)
        assert _problem(shape, rectangles) is None
        # Moved, doubled or exchanged, often with as many elements as before.
        number = draw.randrange(len(rectangles))
        offsets, sizes = rectangles[number]
        dim = draw.randrange(dims)
        moved = (*offsets[:dim], draw.randint(0, shape[dim] - sizes[dim]), *offsets[dim + 1 :])
        changed = [*rectangles[:number], (moved, sizes), *rectangles[number + 1 :]]
        if draw.random() < 0.3:
            changed[draw.randrange(len(changed))] = draw.choice(changed)
        # By counting.
        counts = np.zeros(shape, np.int64)
        for first, lengths in changed:
            counts[tuple(slice(o, o + n) for o, n in zip(first, lengths, strict=True))] += 1
        is_exact = bool((counts == 1).all())
        refused += not is_exact
        assert (_problem(shape, changed) is None) == is_exact, (shape, changed)
    assert refused > 20


def test_odd_and_many_pieces_are_refused_at_once() -> None:
    # Corners at which an odd number of rectangles meet cancel out, and the number of elements does not tell either.
    assert _problem((4, 1), [((0, 0), (1, 1))] * 3 + [((1, 0), (1, 1))]) is not None
    assert "elements" in str(_problem((2,) * 30, [((0,) * 30, (1,) * 30), ((1,) * 30, (1,) * 30)]))
    pieces = list(itertools.product((0, 1), repeat=9))
    assert "at most 8" in str(_problem((2,) * 9, [(each, (1,) * 9) for each in pieces]))


# -- what is read is what was signed


def _save(root: str) -> None:
    manager = build_manager("single", {}, {}, CASE)
    train_steps(manager, CASE, range(1))
    access = StorageOptions(SigningKey(SECRET))
    for step in (1, 2):
        save_checkpoint(manager, LocalStorage(Path(root) / f"step-{step:08d}", access), step=step)
        train_steps(manager, CASE, range(step, step + 1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("signed")
    pool(1).run(_save, str(root))
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "root"))


@contextmanager
def _swapped_after(module: object, name: str, path: Path) -> Iterator[None]:
    """Have a file exchanged when a function, which comes after verification, is called."""
    original = getattr(module, name)

    def swapping(*arguments: object, **options: object) -> object:
        flip_file_bit(path)
        return original(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, swapping)
        yield


def _load(checkpoint: str, name: str) -> str:
    place = LocalStorage(Path(checkpoint), StorageOptions(SigningKey(SECRET)))
    manager = build_manager("single", {}, {}, CASE, seed=4)
    with _swapped_after(loading, "read_index" if name == PAYLOAD else "_check_base", place.path / name):
        return catch_error_text(lambda: load_checkpoint(manager, place))


@pytest.mark.parametrize("name", [PAYLOAD, "optimizer-00000.json"])
def test_a_file_that_is_exchanged_after_it_was_verified_is_not_loaded(root: Path, name: str) -> None:
    (reported,) = pool(1).run(_load, str(root / "step-00000001"), name)
    assert f"the contents of {name} have changed" in reported


@pytest.mark.parametrize("name", [PAYLOAD, "huggingface/config.json"])
def test_a_file_that_is_exchanged_after_it_was_verified_is_not_exported(root: Path, name: str, tmp_path: Path) -> None:
    place = LocalStorage(root / "step-00000001", StorageOptions(SigningKey(SECRET)))
    owner, after = (stored_model, "read_index") if name == PAYLOAD else (stored_model.StoredModel, "_localize_files")
    with (
        _swapped_after(owner, after, place.path / name),
        pytest.raises(CheckpointError, match=f"the contents of {name} have changed"),
    ):
        export_checkpoint(place, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("secret", [None, SECRET])
def test_an_older_checkpoint_instead_of_a_newer_one_is_refused(root: Path, secret: bytes | None) -> None:
    shutil.rmtree(root / "step-00000002")
    shutil.copytree(root / "step-00000001", root / "step-00000002")
    place = LocalStorage(root / "step-00000002", StorageOptions(SigningKey(secret) if secret else None))
    with pytest.raises(CheckpointError, match="is of step 1, and not of the step that it is called by"):
        read_manifest(place)
    # Under a name that tells no step, it is what it says.
    (root / "step-00000002").rename(root / "best")
    assert read_manifest(LocalStorage(root / "best", place.options)).step == 1
    with (root / "best" / MANIFEST_FILE).open("r+b") as file:
        # Without a byte on the disk.
        file.truncate(1 << 33)
    with pytest.raises(CheckpointError, match="no manifest has more than"):
        read_manifest(root / "best")


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_parts_are_read_as_they_lie_in_the_file(root: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "BLOCK_BYTES", chunk)
    place = LocalStorage(root, StorageOptions(SigningKey(SECRET)))
    content = random.Random(chunk).randbytes(1000)
    (root / "file").write_bytes(content)
    chunks = BlockHasher()
    for begin in range(0, 1000, 300):
        chunks.update(content[begin : begin + 300])
    manifest = read_manifest(root / "step-00000001")
    manifest.files["file"] = StoredFile(1000, "", chunks.digests())
    draw = random.Random(1)
    with open_verified(place, manifest, "file") as file:
        for _ in range(50):
            begin, size = draw.randrange(1000), draw.randrange(400)
            file.seek(begin)
            assert file.read(size) == content[begin : begin + size]


# -- links


def test_links_that_lead_in_a_circle_hang_nobody(root: Path) -> None:
    checkpoint = root / "step-00000001"
    names = LocalStorage(checkpoint).list_file_sizes()
    for number in range(8):
        (checkpoint / f"circle-{number}").symlink_to(checkpoint)
        (checkpoint / "huggingface" / f"circle-{number}").symlink_to("..")
    assert LocalStorage(checkpoint).list_file_sizes() == names
    for command, place in itertools.product(("show", "verify"), (checkpoint, root)):
        assert invoke_in_process("checkpoint", command, place)[0] == 0


ODD = (None, "x", math.inf, -math.inf, math.nan, -1, 1.5, True, {}, [], [[]], [None], 10**400, {"x": "x"})


def _paths(value: Any) -> list[tuple[Any, ...]]:
    """Of all values within one."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, each in pairs for path in [(key,), *((key, *below) for below in _paths(each))]]


def test_what_a_run_remembers_is_taken_or_the_checkpoint_is_refused(root: Path) -> None:
    stopping = EarlyStopping()
    loop = {"best": {"set": "held_out", "values": [[2.5, 1]]}, **MetricMonitor(stopping, None, None).state_dict()}
    loop |= BadStepDetector(BadStepConfig(action="skip"), {"losses": [1.5], "norms": [0.5]}).state_dict()
    whole = {
        "identity": {"batch_size": 2, "order": 2, "ema": {"decay": 0.5}, "model": {}, "data": {"seq_len": 16}},
        "run": {"output_dir": "out"},
        "named": None,
        "position": 4,
        "streams": [{"block": 1}],
        "evaluations": {"held_out": 2.5},
        "loop": loop,
    }
    place = root / "step-00000001"
    rewrite_manifest(place, extra=whole)
    assert read_manifest(place).extra == whole
    best = SimpleNamespace(keep_best=1, best_eval_set="held_out")
    outcomes = Counter[bool]()
    for path, odd in itertools.product(_paths(whole), ODD):
        extra = copy.deepcopy(whole)
        reduce(getitem, path[:-1], extra)[path[-1]] = odd
        rewrite_manifest(place, extra=extra)
        try:
            manifest = read_manifest(place)
        except CheckpointError:
            outcomes[False] += 1
            continue
        source = ResumePoint(
            LocalStorage(place),
            manifest,
            resumed_from=None,
            changed_settings=(),
            keep_until_step=-1,
            metrics_storage=None,
        )
        reported = source.has_ema, source.num_skipped_batches, source.compute_data_position()
        assert [type(each) for each in reported] == [bool, int, int], (path, odd)
        MetricMonitor(stopping, best, source.loop_state).state_dict()  # type: ignore[arg-type]
        BadStepDetector(BadStepConfig(action="skip"), (source.loop_state or {}).get(BAD_STEPS_KEY)).state_dict()
        find_best_checkpoints([LocalStorage(place)], "held_out", 1)
        outcomes[True] += 1
    assert min(outcomes[False], outcomes[True]) > 50
