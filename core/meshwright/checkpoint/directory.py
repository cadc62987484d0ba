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
from dataclasses import asdict
from pathlib import Path

from ..base.errors import CheckpointError, CheckpointWriteError
from .manifest import MANIFEST, Manifest, beside, digest, read_manifest, steps_in, text_of

HUGGING_FACE = "huggingface"
"""Where a checkpoint has the model's configuration and the tokenizer."""
EVALUATIONS = "evaluations"
"""Where `extra` of a checkpoint has the losses of its state, by set."""
_ABANDONED = re.compile(r"abandoned-(\d+)")


def begin(final: Path) -> Path:
    """Make the empty directory that a checkpoint is written into.

    Raises:
        CheckpointError: it cannot be made.
    """
    writing = beside(final, "writing")
    try:
        recover(final)
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
    except OSError as error:
        raise CheckpointWriteError(f"the checkpoint {final} cannot be written: {error}.") from error
    return writing


def commit(writing: Path, final: Path, manifest: Manifest) -> None:
    """Give a complete checkpoint its manifest and its name; see [Note: complete or absent].

    One of that name is replaced. OSError: nothing has changed, or `recover` mends what has.
    """
    content = asdict(manifest)
    version = content.pop("format")
    if manifest.base is None:
        del content["base"]
    with (writing / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(text_of({"format": version, "sha256": digest(content), **content}))
        file.flush()
        os.fsync(file.fileno())
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


def remove(final: Path) -> None:
    """Remove a checkpoint, so that no part of it is ever seen under its name."""
    doomed = beside(final, "deleting")
    shutil.rmtree(doomed, ignore_errors=True)
    final.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(root: Path) -> None:
    """Remove what interrupted runs have left half written or half removed, but for what `recover` can mend.

    Raises:
        CheckpointWriteError: what can be mended cannot be renamed.
    """
    for path in root.glob("step-*.replaced"):
        try:
            recover(path.with_suffix(""))
        except OSError as error:
            raise CheckpointWriteError(f"{path} cannot be given its name back: {error}.") from error
    for kind in ("writing", "deleting", "replaced"):
        for path in root.glob(f"step-*.{kind}"):
            shutil.rmtree(path, ignore_errors=True)


def retain(
    root: Path,
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
    whole = [(step, path) for step, path in steps_in(root) if step <= newest and _is_whole(path)]
    best = {step for _, step, _ in best_of([path for _, path in whole], of_set, keep_best or 0)}
    kept = 0
    for step, path in whole:
        if kept >= keep_last and (step in best or (keep_every is not None and step % keep_every == 0)):
            continue
        kept += 1
        if kept > keep_last:
            remove(path)


def best_of(checkpoints: Sequence[Path], name: str, count: int) -> list[tuple[float, int, Path]]:
    """Loss, step and directory of so many checkpoints with the lowest losses of a set, by what they themselves tell;
    the best first, of equal ones the earlier. Those that have no such loss, or a loss that is not finite, are none."""
    found = []
    for path in checkpoints if count else ():
        manifest = _manifest_of(path)
        loss = None if manifest is None else manifest.extra.get(EVALUATIONS, {}).get(name)
        if manifest is not None and isinstance(loss, int | float) and math.isfinite(loss):
            found.append((float(loss), manifest.step, path))
    return sorted(found)[:count]


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
    numbers = [int(match[1]) for path in root.iterdir() if (match := _ABANDONED.fullmatch(path.name))]
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


def _is_whole(directory: Path) -> bool:
    """Whether a checkpoint has all that its manifest names, in size; not so where that cannot be read."""
    return _manifest_of(directory) is not None


def _manifest_of(directory: Path) -> Manifest | None:
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
