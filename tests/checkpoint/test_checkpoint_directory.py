"""The names of checkpoints: whatever happens when, what was valid is there, or is again at the next start. No ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import step_directory

from meshwright.base.errors import CheckpointError, IncompleteCheckpointError
from meshwright.checkpoint import storage
from meshwright.checkpoint.lifecycle import LocalCheckpointWriter, apply_retention, archive_after, cleanup
from meshwright.checkpoint.manifest import MANIFEST_FILE, Manifest, list_steps, read_manifest
from meshwright.checkpoint.storage import STEP_PATTERN, LocalStorage, StorageOptions


def _write(final: Path, content: str) -> None:
    draft = LocalCheckpointWriter(LocalStorage(final))
    draft.prepare()
    files = {"data": draft.write_file("data", lambda: [content.encode()])}
    named = STEP_PATTERN.fullmatch(final.name)
    step = int(named[1]) if named else 1
    draft.commit(Manifest(step, "single", {}, 1, {}, extra={"content": content}, files=files))


def _content(final: Path) -> str:
    assert read_manifest(final).extra["content"] == (final / "data").read_text()
    return (final / "data").read_text()


class _PowerCut(BaseException):
    """No handler of the code under test catches it."""


def _interrupted(work: Callable[[], None], error: BaseException, after: int, *, made: bool) -> bool:
    """Let so many changes of the file system happen, and raise before or after the next; return whether that was."""
    left = after

    def failing(change: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0 and made:
                change(*args, **kwargs)
            if left < 0:
                raise error
            return change(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "rmdir", "unlink", "mkdir", "fsync", "replace"):
            patch.setattr(os, name, failing(getattr(os, name)))
        try:
            work()
        except (type(error), CheckpointError):
            return True
    return left < 0


@pytest.mark.parametrize("made", [False, True], ids=["before", "after"])
def test_a_crash_at_any_instant_of_a_save_leaves_the_old_or_the_new_checkpoint(made: bool, tmp_path: Path) -> None:
    found, after = [], 0
    while True:
        root = tmp_path / str(after)
        final = step_directory(root, 5)
        _write(final, "old")
        if not _interrupted(lambda final=final: _write(final, "new"), _PowerCut(), after, made=made):
            break
        # Under its name, or next to it until the next start.
        assert final.exists() or (root / f"{final.name}.replaced").is_dir()
        if not final.exists():
            with pytest.raises(CheckpointError, match=r"its former contents are step-00000005\.replaced"):
                read_manifest(final)
        cleanup(LocalStorage(root))
        assert [path.name for path in root.iterdir()] == [final.name]
        found.append(_content(final))
        after += 1
    assert _content(final) == "new"
    # The old one before the manifest was written, the new one after the swap.
    assert found == sorted(found, reverse=True)
    assert {"old", "new"} == set(found)


def test_a_failed_rename_leaves_the_old_checkpoint_under_its_name(tmp_path: Path) -> None:
    after = 0
    while True:
        final = tmp_path / str(after) / "named"
        _write(final, "old")
        error = OSError(28, "No space left on device")
        if not _interrupted(lambda final=final: _write(final, "new"), error, after, made=False):
            break
        if final.exists():
            assert _content(final) in ("old", "new")
        _write(final, "newer")
        assert _content(final) == "newer"
        assert [path.name for path in final.parent.iterdir()] == ["named"]
        after += 1
    assert after > 3


def _saved(root: Path, *steps: int) -> None:
    for step in steps:
        _write(step_directory(root, step), f"of step {step}")


def _steps(root: Path) -> list[int]:
    return [step for step, _ in list_steps(root)]


def test_retention_never_removes_what_was_just_saved_nor_what_is_of_later_steps(tmp_path: Path) -> None:
    _saved(tmp_path, 3, 6, 9, 12)
    # The run went back to step 3.
    for step in (4, 5, 7):
        _saved(tmp_path, step)
        apply_retention(tmp_path, newest_step=step, keep_last=1, keep_every=None)
        assert step in _steps(tmp_path)
    assert _steps(tmp_path) == [12, 9, 7]


def test_retention_counts_whole_checkpoints_alone_and_removes_no_other(tmp_path: Path) -> None:
    _saved(tmp_path, 1, 2, 3, 4, 5)
    (step_directory(tmp_path, 5) / "data").unlink()
    (step_directory(tmp_path, 2) / MANIFEST_FILE).unlink()
    for keep_last in (2, None):
        apply_retention(tmp_path, newest_step=5, keep_last=keep_last, keep_every=None)
        assert _steps(tmp_path) == [5, 4, 3, 2]


def test_what_is_set_aside_is_moved_with_copies_and_numbered(tmp_path: Path) -> None:
    root, metrics = tmp_path / "checkpoints", tmp_path / "metrics.jsonl"
    metrics.write_text("lines")
    for number, after in ((1, 3), (2, 3), (3, -1)):
        _saved(root, 3, 6, 9)
        assert (
            archive_after(LocalStorage(root), after_step=after, files_to_copy=[metrics, tmp_path / "none"]) is not None
        )
        aside = root / f"abandoned-{number}"
        assert _steps(aside) == [step for step in (9, 6, 3) if step > after]
        assert _content(step_directory(aside, 9)) == "of step 9"
        assert (aside / "metrics.jsonl").read_text() == "lines"
        assert _steps(root) == [step for step in (3,) if step <= after]
    assert archive_after(LocalStorage(root), after_step=-1) is None


def test_a_checkpoint_that_cannot_be_read_is_not_taken_for_a_incomplete_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _saved(tmp_path, 1)
    path = step_directory(tmp_path, 1)

    def fail(path: Path, *_: Any, **__: Any) -> Any:
        raise OSError(5, "Input/output error", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(storage, "open_regular_file", fail)
        with pytest.raises(CheckpointError, match=r"cannot be read.*Input/output error") as caught:
            read_manifest(LocalStorage(path, StorageOptions(max_retries=0)))
        assert not isinstance(caught.value, IncompleteCheckpointError)
        assert caught.value.exit_code == 2
    shutil.rmtree(path)
    path.mkdir()
    with pytest.raises(IncompleteCheckpointError, match="was never completed"):
        read_manifest(path)
