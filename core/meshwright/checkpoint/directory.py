"""Directories of checkpoints: complete ones under their names, with a manifest that tells whether they still are.

[Note: complete or absent] A checkpoint is written into `NAME.writing`. When all files are on disk, the manifest, with
the size and checksum of each, is added and the directory is renamed to NAME. So what bears a checkpoint's name was
complete once; a directory that lost or changed something since is found by its manifest, and never loaded. Of the
manifest every byte counts, too: it holds its own checksum, and is what `json.dumps` makes of its contents. Files that
it does not name are never read.

[Note: swap, then remove] What is to be replaced is renamed to `NAME.replaced`, the new one is given its name, and only
then is the old one removed. After a crash in between, one of both lies beside the name whole, and `recover` gives it
the name. Readers do not: the writer may be alive.

This module imports no torch.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from ..base.errors import CheckpointError, CheckpointWriteError
from .keys import ForeignCheckpointError
from .manifest import BESIDE, MANIFEST, Manifest, beside, read_manifest, sealed, steps_in, unreadable
from .opening import place_of
from .places import DEFAULT, Access, Folder, LocalFolder, Where, retried, steps_of

Checkpoint = TypeVar("Checkpoint", bound=Where)

HUGGING_FACE = "huggingface"
"""Where a checkpoint has the model's configuration and the tokenizer."""
EVALUATIONS = "evaluations"
"""Where `extra` of a checkpoint has the losses of its state, by set."""
ABANDONED = re.compile(r"abandoned-(\d+)")
"""Where checkpoints are that a run has gone back behind."""


def begin(final: Path, access: Access = DEFAULT) -> Path:
    """Make the empty directory that a checkpoint is written into.

    Args:
        access: what is not signed with its key is not replaced.

    Raises:
        CheckpointError: it cannot be made, or something foreign is in the way.
    """
    for path in (final, beside(final, "replaced"), beside(final, "writing")):
        refuse_foreign(LocalFolder(path, access))
    writing = beside(final, "writing")
    try:
        recover(final)
        shutil.rmtree(writing, ignore_errors=True)
        if writing.is_symlink():
            raise CheckpointError(f"{writing} is a link, through which no checkpoint is written. Remove it.")
        retried(lambda: writing.mkdir(parents=True, exist_ok=True), access, f"making {writing}")
    except OSError as error:
        raise CheckpointWriteError(f"the checkpoint {final} cannot be written: {error}.") from error
    return writing


def commit(writing: Path, final: Path, manifest: Manifest, access: Access = DEFAULT) -> None:
    """Give a complete checkpoint its manifest and its name; see [Note: complete or absent].

    One of that name is replaced. OSError: nothing has changed, or `recover` mends what has.
    """

    def write() -> None:
        with (writing / MANIFEST).open("w", encoding="utf-8") as file:
            file.write(sealed(manifest, access.key))
            file.flush()
            os.fsync(file.fileno())

    retried(write, access, f"writing {writing / MANIFEST}")
    for directory in {(writing / name).parent for name in (MANIFEST, *manifest.files)}:
        _sync(directory)
    put_in_place(writing, final)


def put_in_place(new: Path, final: Path) -> None:
    """Give a complete directory its name; one that bears it is replaced, see [Note: swap, then remove]."""
    old = beside(final, "replaced")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    try:
        new.rename(final)
    except OSError:
        if old.exists():
            old.rename(final)
        raise
    _sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover(final: Path) -> None:
    """Complete what a crash has interrupted in `put_in_place`: the new checkpoint gets the name, or the old one back.

    Only for who writes it, and nobody else does.
    """
    old, new = beside(final, "replaced"), beside(final, "writing")
    if old.exists() and not final.exists():
        (new if _is_whole(new) else old).rename(final)


def discard(writing: Path) -> None:
    """Remove what could not be completed."""
    shutil.rmtree(writing, ignore_errors=True)


def remove_leftovers(root: Path, access: Access = DEFAULT) -> None:
    """Remove what interrupted runs have left half written or half removed, but for what `recover` can mend.

    Args:
        access: what is whole and not signed with its key stays.

    Raises:
        CheckpointWriteError: what can be mended cannot be renamed.
    """
    for path in root.glob("step-*.replaced"):
        try:
            recover(path.with_suffix(""))
        except OSError as error:
            raise CheckpointWriteError(f"{path} cannot be given its name back: {error}.") from error
    for kind in BESIDE:
        for path in root.glob(f"step-*{kind}"):
            if not is_foreign(LocalFolder(path, access)):
                shutil.rmtree(path, ignore_errors=True)


def retain(
    root: str | Path | Folder,
    *,
    newest: int,
    keep_last: int | None,
    keep_every: int | None = None,
    keep_best: int | None = None,
    of_set: str = "",
) -> None:
    """Remove older checkpoints.

    Args:
        root: directory of the checkpoints.
        newest: the step that was saved last. What is of later steps is of another course of the run: it neither counts
            nor is removed.
        keep_last: how many to keep; None keeps all. Only whole ones count, and only whole ones are removed.
        keep_every: those of steps that are multiples of it are kept, too.
        keep_best: so many are kept, too, of those with the lowest loss.
        of_set: name of the set that the loss is of.
    """
    if keep_last is None:
        return
    folder = place_of(root)
    try:
        found = steps_of(folder)
    except OSError as error:
        raise unreadable(folder, error) from None
    whole = [(step, path) for step, path in found if step <= newest and _is_whole(path)]
    best = {step for _, step, _ in best_of([path for _, path in whole], of_set, keep_best or 0)}
    kept = 0
    for step, path in whole:
        if kept >= keep_last and (step in best or (keep_every is not None and step % keep_every == 0)):
            continue
        kept += 1
        if kept > keep_last:
            path.remove()


def best_of(checkpoints: Sequence[Checkpoint], name: str, count: int) -> list[tuple[float, int, Checkpoint]]:
    """Loss, step and place of so many checkpoints with the lowest losses of a set, by what they themselves tell;
    the best first, of equal ones the earlier. Those that have no such loss, or a loss that is not finite, are none."""
    found = []
    for path in checkpoints if count else ():
        manifest = _manifest_of(path)
        told = None if manifest is None else manifest.extra.get(EVALUATIONS)
        loss = told.get(name) if isinstance(told, dict) else None
        if manifest is not None and isinstance(loss, int | float) and math.isfinite(loss):
            found.append((float(loss), manifest.step, path))
    found.sort(key=lambda each: each[:2])
    return found[:count]


def set_aside(root: Path, *, after: int, copies: Sequence[Path] = ()) -> Path | None:
    """Move the checkpoints of later steps than `after` to `root`/abandoned-N, where a run goes on without them.

    Args:
        root: directory of the checkpoints.
        after: the step that the run goes on from; -1 moves all.
        copies: files that are copied there, if they exist.

    Returns:
        The new directory; None where nothing was to be moved.

    Raises:
        CheckpointWriteError: they cannot be moved; those that could be are there.
    """
    later = [path for step, path in steps_in(root) if step > after]
    if not later:
        return None
    numbers = [int(match[1]) for path in root.iterdir() if (match := ABANDONED.fullmatch(path.name))]
    aside = root / f"abandoned-{max(numbers, default=0) + 1}"
    try:
        aside.mkdir()
        for file in copies:
            if file.is_file():
                shutil.copy2(file, aside / file.name)
        for path in later:
            path.rename(aside / path.name)
    except OSError as error:
        raise CheckpointWriteError(f"checkpoints of later steps cannot be moved to {aside}: {error}.") from error
    _sync(root)
    return aside


def is_foreign(place: Where) -> bool:
    """Whether there is a checkpoint that is not signed with the key of its place."""
    try:
        read_manifest(place)
    except ForeignCheckpointError:
        return True
    except CheckpointError:
        return False
    return False


def refuse_foreign(place: Where) -> None:
    """Raises CheckpointWriteError where there is one, which is in the way."""
    if is_foreign(place):
        raise CheckpointWriteError(
            f"{place} is in the way, and it is not signed with the key of this run, which replaces no foreign "
            f"checkpoint. Move it away, or save elsewhere."
        )


def _is_whole(directory: Where) -> bool:
    """Whether a checkpoint has all that its manifest names, in size; not so where that cannot be read."""
    return _manifest_of(directory) is not None


def _manifest_of(directory: Where) -> Manifest | None:
    """What a checkpoint tells of itself; None where it is not whole, or cannot be read."""
    try:
        return read_manifest(directory)
    except CheckpointError:
        return None


def _sync(directory: Path) -> None:
    """Have the entries of a directory on disk, where the system can."""
    try:
        handle = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
