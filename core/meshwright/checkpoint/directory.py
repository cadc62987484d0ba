"""The checkpoints of a run: which are kept, moved aside, and removed. This module imports no torch."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from ..base.errors import CheckpointWriteError
from .drafts import is_foreign, recover, valid_manifest
from .manifest import BESIDE, MANIFEST, all_in
from .places import STEP, Folder, LocalFolder, Where, steps_of
from .remote import place_of

Checkpoint = TypeVar("Checkpoint", bound=Where)

HUGGING_FACE = "huggingface"
"""Directory of the model's configuration and the tokenizer in a checkpoint."""
EVALUATIONS = "evaluations"
"""Key of `Manifest.extra` with the losses of a checkpoint, by evaluation set."""
ABANDONED = re.compile(r"abandoned-(\d+)")
"""Name of a place for checkpoints of later steps than the one a run went back to."""


def retain(
    root: str | Path | Folder,
    *,
    newest: int,
    keep_last: int | None,
    keep_every: int | None = None,
    keep_best: int | None = None,
    of_set: str = "",
) -> None:
    """Remove older checkpoints of a run.

    Args:
        root: directory of the checkpoints.
        newest: the step that was saved last. Checkpoints of later steps are neither counted nor removed: the run went
            back behind them.
        keep_last: number of checkpoints to keep; None keeps all. Only valid ones are counted and removed.
        keep_every: keep also those of steps that are multiples of this.
        keep_best: keep also this many with the lowest loss.
        of_set: evaluation set of that loss.
    """
    if keep_last is None:
        return
    found = [(int(place.name.rpartition("-")[2]), place) for place in all_in(place_of(root))]
    valid = [(step, place) for step, place in found if step <= newest and valid_manifest(place) is not None]
    best = {step for _, step, _ in best_of([place for _, place in valid], of_set, keep_best or 0)}
    kept = 0
    for step, place in valid:
        if kept >= keep_last and (step in best or (keep_every is not None and step % keep_every == 0)):
            continue
        kept += 1
        if kept > keep_last:
            place.remove()


def best_of(checkpoints: Sequence[Checkpoint], name: str, count: int) -> list[tuple[float, int, Checkpoint]]:
    """Return loss, step and place of the `count` checkpoints with the lowest finite losses of an evaluation set.

    The best comes first; of equal losses, the earlier step.
    """
    found = []
    for place in checkpoints if count else ():
        manifest = valid_manifest(place)
        losses = None if manifest is None else manifest.extra.get(EVALUATIONS)
        loss = losses.get(name) if isinstance(losses, dict) else None
        if manifest is not None and isinstance(loss, int | float) and math.isfinite(loss):
            found.append((float(loss), manifest.step, place))
    found.sort(key=lambda each: each[:2])
    return found[:count]


def tidy(root: Folder) -> None:
    """Remove what interrupted runs left incomplete; only the writer of `root` may call this.

    Checkpoints that are complete and not signed with the key of `root` stay.

    Raises CheckpointWriteError if it cannot be done.
    """
    if isinstance(root, LocalFolder):
        _tidy_directory(root)
        return
    try:
        for _, place in steps_of(root):
            if MANIFEST not in (place.sizes() or {}):
                place.remove()
    except OSError as error:
        raise CheckpointWriteError(f"what a run has left in {root} cannot be removed: {error}.") from error


def _tidy_directory(root: LocalFolder) -> None:
    for path in root.path.glob("step-*.replaced"):
        try:
            recover(path.with_suffix(""))
        except OSError as error:
            raise CheckpointWriteError(f"{path} cannot be given its name back: {error}.") from error
    for kind in BESIDE:
        for path in root.path.glob(f"step-*{kind}"):
            if not is_foreign(LocalFolder(path, root.access)):
                shutil.rmtree(path, ignore_errors=True)


def move_aside(root: Folder, *, after: int, copies: Sequence[Path] = ()) -> Folder | None:
    """Move the checkpoints of steps later than `after` to `root`/abandoned-N.

    Args:
        after: the step that the run resumes from; -1 moves all.
        copies: files that are copied there if they exist.

    Returns:
        The new place; None if there was nothing to move.

    Raises CheckpointWriteError if they cannot be moved.
    """
    if not hasattr(root, "put"):
        raise CheckpointWriteError(f"{root} cannot be written to. Name a directory or a URL.")
    try:
        later = [place for step, place in steps_of(root) if step > after]
        if not later:
            return None
        numbers = [int(match[1]) for name in root.names() if (match := ABANDONED.fullmatch(name))]
        aside = root.at(f"abandoned-{max(numbers, default=0) + 1}")
        for file in copies:
            if file.is_file():
                aside.put(file.name, [file.read_bytes()])
        for place in later:
            place.move(aside.at(place.name))
    except OSError as error:
        raise CheckpointWriteError(f"checkpoints of later steps in {root} cannot be moved: {error}.") from error
    return aside


def remove_all(root: Folder) -> None:
    """Remove all checkpoints of a run that starts over, from a place that may hold other things.

    Raises CheckpointWriteError if they cannot be removed.
    """
    try:
        for name in root.names():
            if STEP.fullmatch(name) or ABANDONED.fullmatch(name):
                root.at(name).remove()
    except OSError as error:
        raise CheckpointWriteError(f"the checkpoints in {root} cannot be removed: {error}.") from error
