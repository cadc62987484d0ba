"""`meshwright checkpoint verify`, and signatures: what has changed, or is not signed as it must be, is reported."""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import catch_error_text, flip_file_bit, step_directory
from support.commands import invoke_in_process, write_run

from meshwright import Checkpointer, CheckpointError, load_checkpoint, save_checkpoint
from meshwright.base.errors import ConfigError
from meshwright.checkpoint import find_newest_checkpoint, read_manifest
from meshwright.checkpoint.lifecycle import apply_retention, cleanup
from meshwright.checkpoint.manifest import MANIFEST_FILE, SIGNATURE_KEY, list_steps
from meshwright.checkpoint.storage import LocalStorage, SigningKey, StorageOptions, read_signing_key
from meshwright.testing import Case
from meshwright_run.run_directory import RunDirectory
from meshwright_run.run_file import load_run
from meshwright_run.run_sections import CheckpointConfig
from meshwright_testing import pool
from meshwright_testing.parity import build_manager, train_steps

CASE = Case(steps=1, layers=1, dtype="float32")
OURS, THEIRS = b"a secret of ours, of 32 bytes or so", b"a secret of theirs, of 32 bytes also"


def _save(root: str) -> None:
    manager = build_manager("fsdp2", {}, {}, CASE)
    train_steps(manager, CASE, range(1))
    for step, secret in ((1, OURS), (2, THEIRS), (3, None)):
        key = None if secret is None else SigningKey(secret)
        save_checkpoint(manager, LocalStorage(step_directory(Path(root), step), StorageOptions(key)), step=step)
    save_checkpoint(
        manager, LocalStorage(Path(root) / "later" / "step-00000009", StorageOptions(SigningKey(THEIRS))), step=9
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints: signed with our key, with theirs, and not at all."""
    root = tmp_path_factory.mktemp("saved")
    pool(2).run(_save, str(root))
    (root / "ours").write_bytes(OURS)
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "root"))


def _verify(*arguments: object) -> tuple[int, str]:
    return invoke_in_process("checkpoint", "verify", *arguments)


def test_all_is_read_to_its_last_byte_and_each_file_that_is_wrong_is_named_with_its_checkpoint(root: Path) -> None:
    one, two, three = (step_directory(root, step) for step in (1, 2, 3))
    code, output = _verify(root)
    assert (code, output.count(": valid, ")) == (0, 3), output
    assert f"{sum(each.size for each in read_manifest(three).files.values()):,} bytes read, not signed" in output
    flip_file_bit(two / "tensors-00001.bin")
    (two / "optimizer-00000.json").unlink()
    (three / MANIFEST_FILE).unlink()
    code, output = _verify(root)
    assert code == 1
    wrong = ("optimizer-00000.json is missing", "the contents of tensors-00001.bin have changed", "was never completed")
    for text in (f"{one}: valid", f"{two}: incomplete", f"{three}: incomplete", *wrong):
        assert text in output


def test_bad_input_is_reported_with_exit_code_2(root: Path, tmp_path: Path) -> None:
    for arguments, reported in (
        ((root / "none",), "is no directory"),
        ((tmp_path,), "was never completed"),
        ((root, "--key-file", root / "nokey"), "cannot be read"),
        (("s33://bucket/x",), "not opened: 's33'. Did you mean 's3'?"),
    ):
        code, output = _verify(*arguments)
        assert (code, reported in output) == (2, True), output


def test_a_key_refuses_what_is_signed_with_another_or_not_at_all(root: Path, tmp_path: Path) -> None:
    ours = ("--key-file", root / "ours")
    code, output = _verify(step_directory(root, 1), *ours)
    assert (code, "signed with this key" in output) == (0, True)
    for step, reported in ((2, "is signed with another key"), (3, "is not signed")):
        place = step_directory(root, step)
        for command in (
            ("checkpoint", "show", place),
            ("checkpoint", "verify", place),
            ("export", place, tmp_path / "o"),
        ):
            code, output = invoke_in_process(*command, *ours)
            assert (code, reported in output) == (2, True), output
    assert not (tmp_path / "o").exists()
    # A signature of another checkpoint with the same key.
    forged = step_directory(root, 2) / MANIFEST_FILE
    signatures = [
        json.loads((step_directory(root, step) / MANIFEST_FILE).read_text())[SIGNATURE_KEY] for step in (1, 2)
    ]
    forged.write_text(forged.read_text().replace(signatures[1], signatures[0]))
    assert _verify(step_directory(root, 2))[0] == 0
    assert _verify(step_directory(root, 2), *ours)[0] == 2


def _load(root: str) -> list[str]:
    manager = build_manager("fsdp2", {}, {}, CASE, seed=4)
    found = []
    for step, secret in ((1, OURS), (1, None), (2, OURS), (3, OURS), (3, None)):
        place = LocalStorage(
            step_directory(Path(root), step), StorageOptions(None if secret is None else SigningKey(secret))
        )
        try:
            load_checkpoint(manager, place)
            found.append("loaded")
        except CheckpointError as error:
            found.append(f"{type(error).__name__} {error.exit_code}")
    ours = LocalStorage(Path(root), StorageOptions(SigningKey(OURS)))
    return [*found, catch_error_text(lambda: find_newest_checkpoint(ours, manager.mesh.world))]


def test_loading_refuses_what_is_foreign_on_all_ranks(root: Path) -> None:
    foreign = "CheckpointSignatureError 2"
    for *found, newest in pool(2).run(_load, str(root)):
        assert found == ["loaded", "loaded", foreign, foreign, "loaded"]
        # It is not passed over, as an incomplete one is.
        assert "step-00000003 is not signed" in newest


def test_what_is_foreign_is_never_removed_nor_replaced(root: Path) -> None:
    ours = LocalStorage(root, StorageOptions(SigningKey(OURS)))
    before = {path.name: read_manifest(path) for _, path in list_steps(root)}
    for kind in ("writing", "deleting", "replaced"):
        shutil.copytree(root / "later" / "step-00000009", root / f"step-00000009.{kind}")
    apply_retention(ours, newest_step=9, keep_last=1)
    for _ in range(2):
        cleanup(ours)
    assert {path.name: read_manifest(path) for _, path in list_steps(root)}.items() >= before.items()
    # What was replaced got its name back.
    kept = {path.name for path in root.iterdir()}
    assert kept >= {"step-00000009.replaced", "step-00000009.deleting", "step-00000009"}
    for reported in pool(2).run(_save_over, str(root)):
        assert "step-00000002 is in the way" in reported
    assert read_manifest(step_directory(root, 2)) == before["step-00000002"]
    # Without a key they are like any others.
    apply_retention(root, newest_step=9, keep_last=1)
    assert [step for step, _ in list_steps(root)] == [9]


def _save_over(root: str) -> str:
    manager = build_manager("fsdp2", {}, {}, CASE)
    ours = LocalStorage(Path(root), StorageOptions(SigningKey(OURS)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saver = Checkpointer(manager, ours, keep_last=None, on_error="continue")
        saver.save(2)
        saver.close()
    assert manager.mesh.rank or any("is in the way" in str(each.message) for each in caught)
    return catch_error_text(lambda: save_checkpoint(manager, ours.child("step-00000002"), step=2))


def test_a_key_is_a_file_of_enough_bytes_and_is_shown_and_sent_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(OURS)
    key: Any = read_signing_key(path, where="checkpoint.key_file")
    assert key == SigningKey(OURS) != SigningKey(THEIRS)
    assert "secret" not in repr(key)
    with pytest.raises(TypeError, match="sent to nobody"):
        pickle.dumps(key)
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="holds 5 bytes, which are too few"):
        read_signing_key(path, where="checkpoint.key_file")
    with pytest.raises(ConfigError, match=r"checkpoint\.key_file=.*No such file"):
        read_signing_key(tmp_path / "none", where="checkpoint.key_file")


def _with_keys_of(root: str, files: list[str | None]) -> str:
    world = build_manager("fsdp2", {}, {}, CASE).mesh.world
    file = files[world.rank]
    section = {"every": 1, "key_file": None if file is None else str(Path(root, file))}
    config = load_run(Path(root, "run.yaml")).model_copy(update={"checkpoint": CheckpointConfig(**section)})
    return catch_error_text(lambda: RunDirectory.from_config(config).check_same_key(world)) or "the same"


@pytest.mark.parametrize(
    ("files", "reported"),
    [
        (["ours", "ours"], "the same"),
        (["ours", "theirs"], "differs between nodes. Give all of them the same file"),
        (["ours", None], "differs between nodes"),
        (["none", "ours"], "cannot be read: No such file or directory"),
    ],
)
def test_ranks_with_different_keys_are_refused_on_all(files: list[str | None], reported: str, tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "ours").write_bytes(OURS)
    (tmp_path / "theirs").write_bytes(THEIRS)
    found = pool(2).run(_with_keys_of, str(tmp_path), files)
    assert all(reported in each for each in found), found
