"""Save and load model and optimizer, under any strategy and mesh, from any other.

[Note: asynchronous saving] `Checkpointer.save` returns when this rank's part is copied; a thread writes it, with a
process group of its own, while training goes on. The next `save`, and `close`, wait for it and tell what went wrong.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from ..base.errors import CheckpointError, CheckpointWriteError
from ..files.terminal import warn
from ..mesh.world import new_group
from ..strategy.contract import StrategyManager
from .agreement import Agreement
from .directory import EVALUATIONS, retain
from .drafts import tidy
from .manifest import step_name
from .opening import place_of
from .places import Folder
from .saving import Saving, own_group, told

OnError = Literal["stop", "continue"]


def save_checkpoint(
    manager: StrategyManager,
    directory: str | Path | Folder,
    *,
    step: int,
    scheduler: LRScheduler | None = None,
    tokenizer: Any = None,
    extra: Mapping[str, Any] | None = None,
    with_optimizer: bool = True,
) -> None:
    """Write a checkpoint, all ranks together. It appears under its name when it is complete, and not before.

    Args:
        manager: whose model, and optimizer if it has one, are saved, with the random generators of all ranks.
        directory: of the checkpoint, or a URL or place; one that is there is replaced.
        step: optimizer steps done.
        scheduler: of the learning rate.
        tokenizer: of Hugging Face, to be exported with the model.
        extra: further values of JSON, the same on all ranks.
        with_optimizer: False leaves the optimizer out.

    Raises:
        CheckpointError: it could not be written (on all ranks); nothing has changed then.
    """
    place = manager.mesh.world.together(lambda: place_of(directory))
    with own_group() as group:
        Saving(
            manager,
            place,
            group,
            step=step,
            scheduler=scheduler,
            tokenizer=tokenizer,
            extra=extra,
            with_optimizer=with_optimizer,
        ).write()


class Checkpointer:
    """Saves checkpoints of a run while it goes on; see [Note: asynchronous saving]. A context manager.

    All ranks call its methods together.

    Args:
        manager: whose state is saved.
        root: directory of the checkpoints, which are named by their steps; or a URL or place of them.
        keep_last: how many to keep, whole ones of no later step than the one just saved; None keeps all.
        keep_every: those of steps that are multiples of it are kept, too.
        keep_best: so many are kept, too, of those with the lowest loss.
        best_of: name of the set of which that loss is; see `evaluations` of `save`.
        asynchronous: whether training goes on while one is written.
        on_error: whether a checkpoint that cannot be written ends the training, or is told in a warning. Either way
            those that were there are.
        tokenizer: of Hugging Face, to be exported with the model.

    Attributes:
        root: its place.
        saved: step of the last one that is on disk, of those that this has written; None: none is. After `wait`.
        seconds: what the longest of those has taken from the begin of `save` until it was on disk; 0: none was written.
    """

    def __init__(
        self,
        manager: StrategyManager,
        root: str | Path | Folder,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        best_of: str = "held_out",
        asynchronous: bool = True,
        on_error: OnError = "stop",
        tokenizer: Any = None,
    ) -> None:
        self._manager = manager
        world = manager.mesh.world
        self.root = world.together(lambda: place_of(root))
        self._keep_last, self._keep_every = keep_last, keep_every
        self.keep_best, self.best_of = keep_best, best_of
        self._asynchronous = asynchronous
        self._on_error = on_error
        self._tokenizer = tokenizer
        self._group = new_group("gloo")
        self._agreement = Agreement()
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self.saved: int | None = None
        self.seconds = 0.0
        world.from_first(lambda: tidy(self.root))

    def save(
        self,
        step: int,
        *,
        scheduler: LRScheduler | None = None,
        extra: Mapping[str, Any] | None = None,
        evaluations: Mapping[str, float] | None = None,
    ) -> None:
        """Save the state after `step` steps; see `save_checkpoint`. Collective.

        Args:
            evaluations: losses of this state by the names of sets; they go into `extra`.

        Raises:
            CheckpointError: this one, or the one before it, could not be written and `on_error` is "stop".
        """
        self.wait()
        began = time.monotonic()
        try:
            saving = Saving(
                self._manager,
                self.place(step),
                self._group,
                step=step,
                scheduler=scheduler,
                tokenizer=self._tokenizer,
                extra={**(extra or {}), EVALUATIONS: dict(evaluations or {})},
                agreement=self._agreement,
            )
        except CheckpointError as error:
            self._tell(error)
            return
        if not self._asynchronous:
            self._write(saving, step, began)
            self.wait()
            return
        saving.detach()
        self._thread = threading.Thread(target=self._write, args=(saving, step, began), name="meshwright-checkpoint")
        self._thread.start()

    def place(self, step: int) -> Folder:
        """Of the checkpoint of a step, which need not be there."""
        return self.root.at(step_name(step))

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk. Collective.

        Raises:
            CheckpointError: as of `save`.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            self._tell(error)

    def close(self) -> None:
        """Wait, and end the process group. Collective."""
        try:
            self.wait()
        finally:
            dist.destroy_process_group(self._group)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After an error the peers may never reach this point.
        if error_type is None:
            self.close()

    def _write(self, saving: Saving, step: int, began: float) -> None:
        try:
            saving.write()
            self.saved, self.seconds = step, max(self.seconds, time.monotonic() - began)
            self._error = self._retained(step)
        except CheckpointError as error:
            self._error = error
        except Exception as error:
            # A peer that is gone.
            self._error = CheckpointWriteError(f"a checkpoint failed: {told(error)}")

    def _retained(self, step: int) -> CheckpointError | None:
        """Remove what is no longer kept; why it could not be, on all ranks. Collective."""
        box: list[CheckpointError | None] = [None]
        if self._manager.mesh.rank == 0:
            try:
                retain(
                    self.root,
                    newest=step,
                    keep_last=self._keep_last,
                    keep_every=self._keep_every,
                    keep_best=self.keep_best,
                    of_set=self.best_of,
                )
            except (CheckpointError, OSError) as error:
                box[0] = CheckpointWriteError(f"older checkpoints in {self.root} cannot be removed: {told(error)}")
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]

    def _tell(self, error: CheckpointError) -> None:
        if self._on_error == "stop":
            raise error
        if self._manager.mesh.rank == 0:
            warn(f"{error} Training goes on (checkpoint.on_error=continue).", stacklevel=3)
