"""`meshwright checkpoint verify`, and signatures: what is not what was written, or not of whom it is to be, is told."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from support.commands import write_run
from typer.testing import CliRunner

from meshwright import Checkpointer, CheckpointError, load_checkpoint, save_checkpoint
from meshwright.base.errors import ConfigError
from meshwright.checkpoint import newest_checkpoint, read_manifest
from meshwright.checkpoint.directory import remove_leftovers, retain
from meshwright.checkpoint.keys import ForeignCheckpointError, Key, read_key
from meshwright.checkpoint.manifest import MANIFEST, SIGNATURE, step_directory, steps_in
from meshwright.checkpoint.places import Access, LocalFolder
from meshwright.cli import main as cli
from meshwright.testing import Case, pool
from meshwright.testing.parity import build_manager, train_steps
from meshwright.train.checkpoint_section import CheckpointConfig
from meshwright.train.run_file import load_run
from meshwright.train.saved import check_same_key

CASE = Case(steps=1, layers=1, dtype="float32")
OURS, THEIRS = b"a secret of ours, of 32 bytes or so", b"a secret of theirs, of 32 bytes also"


def _save(root: str) -> None:
    manager = build_manager("fsdp2", {}, {}, CASE)
    train_steps(manager, CASE, range(1))
    for step, secret in ((1, OURS), (2, THEIRS), (3, None)):
        key = None if secret is None else Key(secret)
        save_checkpoint(manager, LocalFolder(step_directory(Path(root), step), Access(key)), step=step)
    save_checkpoint(manager, LocalFolder(Path(root) / "later" / "step-00000009", Access(Key(THEIRS))), step=9)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints: of our key, of theirs, and of none."""
    root = tmp_path_factory.mktemp("saved")
    pool(2).run(_save, str(root))
    (root / "ours").write_bytes(OURS)
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "root")
    return tmp_path / "root"


def _verify(path: Path, *more: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["checkpoint", "verify", str(path), *more])
    return result.exit_code, result.output


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_what_is_whole_is_read_to_its_last_byte(root: Path) -> None:
    code, output = _verify(root)
    assert code == 0, output
    for step in (1, 2, 3):
        manifest = read_manifest(step_directory(root, step))
        nbytes = sum(each.size for each in manifest.files.values())
        how = "not signed" if step == 3 else "signed, not checked"
        line = f"{step_directory(root, step)}: whole, {len(manifest.files)} files, {nbytes:,} bytes read, {how}"
        assert line in output.splitlines()
    assert _verify(step_directory(root, 3))[0] == 0


def test_each_file_that_is_wrong_is_named_with_its_checkpoint(root: Path) -> None:
    two, three = step_directory(root, 2), step_directory(root, 3)
    _flip(two / "tensors-00001.bin", -1)
    (two / "optimizer-00000.json").unlink()
    (three / MANIFEST).unlink()
    code, output = _verify(root)
    assert code == 1
    lines = output.splitlines()
    torn = lines.index(next(line for line in lines if line.startswith(f"{two}: torn")))
    assert sorted(lines[torn + 1 : torn + 3]) == [
        "  optimizer-00000.json is missing",
        "  the contents of tensors-00001.bin have changed since it was written",
    ]
    assert f"{three}: torn" in lines
    assert any("was never completed" in line for line in lines)
    assert any(line.startswith(f"{step_directory(root, 1)}: whole") for line in lines)


def test_bad_input_is_told_with_exit_code_2(root: Path, tmp_path: Path) -> None:
    for path, more, told in (
        (root / "none", (), "is no directory"),
        (tmp_path, (), "was never completed"),
        (root, ("--key-file", str(root / "nokey")), "cannot be read"),
        (Path("nonsense:/") / "x", (), "no directory"),
    ):
        code, output = _verify(path, *more)
        assert (code, told in output) == (2, True), output
    result = CliRunner().invoke(cli.app, ["checkpoint", "verify", "s33://bucket/x"])
    assert result.exit_code == 2
    assert "not opened: 's33'. Did you mean 's3'?" in result.output


def test_a_key_refuses_what_is_signed_with_another_or_not_at_all(root: Path, tmp_path: Path) -> None:
    ours = ("--key-file", str(root / "ours"))
    code, output = _verify(step_directory(root, 1), *ours)
    assert code == 0
    assert "signed with this key" in output
    for step, told in ((2, "is signed with another key"), (3, "is not signed")):
        for command in ("show", "verify"):
            result = CliRunner().invoke(cli.app, ["checkpoint", command, str(step_directory(root, step)), *ours])
            assert (result.exit_code, told in result.output) == (2, True), result.output
        result = CliRunner().invoke(cli.app, ["export", str(step_directory(root, step)), str(tmp_path / "out"), *ours])
        assert (result.exit_code, told in result.output) == (2, True), result.output
    assert not (tmp_path / "out").exists()
    # A signature that was made up, and one of another checkpoint of the same key.
    signature = read_signature(step_directory(root, 1))
    forged = step_directory(root, 2) / MANIFEST
    forged.write_text(forged.read_text().replace(read_signature(step_directory(root, 2)), signature))
    assert _verify(step_directory(root, 2))[0] == 0
    assert _verify(step_directory(root, 2), *ours)[0] == 2


def read_signature(checkpoint: Path) -> str:
    import json

    found: str = json.loads((checkpoint / MANIFEST).read_text())[SIGNATURE]
    return found


def _load(root: str, step: int, secret: bytes | None) -> str:
    manager = build_manager("fsdp2", {}, {}, CASE, seed=4)
    place = LocalFolder(step_directory(Path(root), step), Access(None if secret is None else Key(secret)))
    try:
        load_checkpoint(manager, place)
    except CheckpointError as error:
        return f"{type(error).__name__} {error.exit_code}"
    return "loaded"


def test_loading_refuses_what_is_foreign_on_all_ranks(root: Path) -> None:
    for step, secret, expected in (
        (1, OURS, "loaded"),
        (1, None, "loaded"),
        (2, OURS, "ForeignCheckpointError 2"),
        (3, OURS, "ForeignCheckpointError 2"),
        (3, None, "loaded"),
    ):
        assert pool(2).run(_load, str(root), step, secret) == [expected] * 2


def _newest(root: str) -> str:
    manager = build_manager("fsdp2", {}, {}, CASE)
    try:
        return str(newest_checkpoint(LocalFolder(Path(root), Access(Key(OURS))), manager.mesh.world))
    except ForeignCheckpointError as error:
        return str(error)


def test_a_foreign_one_is_not_passed_over_as_a_torn_one_is(root: Path) -> None:
    for told in pool(2).run(_newest, str(root)):
        assert "step-00000003 is not signed" in told


def test_what_is_foreign_is_never_removed_nor_replaced(root: Path) -> None:
    ours = Access(Key(OURS))
    before = {path.name: read_manifest(path) for _, path in steps_in(root)}
    for kind in ("writing", "deleting", "replaced"):
        shutil.copytree(root / "later" / "step-00000009", root / f"step-00000009.{kind}")
    retain(LocalFolder(root, ours), newest=9, keep_last=1)
    for _ in range(2):
        remove_leftovers(root, ours)
    assert {path.name: read_manifest(path) for _, path in steps_in(root)}.items() >= before.items()
    kept = {path.name for path in root.iterdir()}
    # What was replaced got its name back, as ever.
    assert kept >= {"step-00000009.replaced", "step-00000009.deleting", "step-00000009"}
    for told in pool(2).run(_save_over, str(root)):
        assert "step-00000002 is in the way" in told
    assert read_manifest(step_directory(root, 2)) == before["step-00000002"]
    # Without a key they are what any others are.
    retain(root, newest=9, keep_last=1)
    assert [step for step, _ in steps_in(root)] == [9]


def _save_over(root: str) -> str:
    manager = build_manager("fsdp2", {}, {}, CASE)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        saver = Checkpointer(manager, LocalFolder(Path(root), Access(Key(OURS))), keep_last=None, on_error="continue")
        saver.save(2)
        saver.close()
    error = ""
    try:
        save_checkpoint(manager, LocalFolder(step_directory(Path(root), 2), Access(Key(OURS))), step=2)
    except CheckpointError as caught:
        error = str(caught)
    assert manager.mesh.rank or any("is in the way" in str(each.message) for each in told)
    return error


def test_a_key_is_a_file_of_enough_bytes_and_is_shown_and_sent_nowhere(tmp_path: Path) -> None:
    import pickle

    path = tmp_path / "key"
    path.write_bytes(OURS)
    key: Any = read_key(path, where="checkpoint.key_file")
    assert key == Key(OURS) != Key(THEIRS)
    assert "secret" not in repr(key)
    with pytest.raises(TypeError, match="sent to nobody"):
        pickle.dumps(key)
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="holds 5 bytes, which are too few"):
        read_key(path, where="checkpoint.key_file")
    with pytest.raises(ConfigError, match=r"checkpoint\.key_file=.*No such file"):
        read_key(tmp_path / "none", where="checkpoint.key_file")


def _with_keys_of(root: str, files: list[str | None]) -> str:
    world = build_manager("fsdp2", {}, {}, CASE).mesh.world
    file = files[world.rank]
    section = {"every": 1, "key_file": None if file is None else str(Path(root, file))}
    config = load_run(Path(root, "run.yaml")).model_copy(update={"checkpoint": CheckpointConfig(**section)})
    try:
        check_same_key(config, world)
    except ConfigError as error:
        return str(error)
    return "the same"


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (["ours", "ours", "ours"], "the same"),
        ([None, None, None], "the same"),
        (["ours", "theirs", "ours"], "holds another key on some nodes than on others. Give all of them the same file"),
        (["ours", "ours", None], "holds another key on some nodes than on others"),
        (["ours", "none", "ours"], "cannot be read: No such file or directory"),
    ],
)
def test_ranks_with_different_keys_are_refused_on_all(files: list[str | None], told: str, tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "ours").write_bytes(OURS)
    (tmp_path / "theirs").write_bytes(THEIRS)
    found = pool(3).run(_with_keys_of, str(tmp_path), files)
    assert all(told in each for each in found), found
