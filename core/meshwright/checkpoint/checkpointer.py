"""Save checkpoints of model and optimizer under any strategy and mesh.

[Note: asynchronous saving] `Checkpointer.save` returns once this rank's shard is copied. A thread with its own process
group writes the copy while training continues. The next `save`, and `close`, wait for the thread and raise its errors.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from ..base.errors import CheckpointError, CheckpointWriteError
from ..files.terminal import warn
from ..mesh.world import new_group
from ..strategy.contract import StrategyManager
from .lifecycle import EVALUATIONS_KEY, apply_retention, cleanup
from .manifest import format_step_name
from .remote_storage import open_storage
from .saving import CheckpointSave, SavePlanner, collect_content, format_exception, run_on_first, temporary_group
from .storage import Storage

OnError = Literal["stop", "continue"]


def save_checkpoint(
    manager: StrategyManager,
    directory: str | Path | Storage,
    *,
    step: int,
    scheduler: LRScheduler | None = None,
    tokenizer: Any = None,
    extra: Mapping[str, Any] | None = None,
    with_optimizer: bool = True,
) -> None:
    """Save a checkpoint. It appears under its name only when it is complete. Collective.

    Args:
        manager: its model, its optimizer if it has one, and the random generators of all ranks are saved.
        directory: directory or URL of the checkpoint, or its storage. An existing checkpoint is replaced.
        step: number of optimizer steps done.
        scheduler: learning-rate scheduler.
        tokenizer: Hugging Face tokenizer, exported with the model.
        extra: further JSON values, equal on all ranks.
        with_optimizer: whether to save the optimizer.

    Raises:
        CheckpointError: the checkpoint cannot be written. Raised on all ranks. In a directory, an existing checkpoint
            is unchanged; in an object store, it may be gone.
    """
    storage = manager.mesh.world.run_on_all_ranks(lambda: open_storage(directory))
    with temporary_group() as group:
        content = collect_content(
            manager, group, step=step, scheduler=scheduler, extra=extra, with_optimizer=with_optimizer
        )
        CheckpointSave(manager, storage, group, content, tokenizer).write()


class Checkpointer:
    """Save the checkpoints of a run; see [Note: asynchronous saving]. A context manager. All methods are collective.

    Args:
        manager: manager whose state is saved.
        root: directory or URL that holds the checkpoints, or its storage. Each checkpoint is named by its step.
        keep_last: number of valid checkpoints to keep, not counting those of later steps than the one just saved. None
            keeps all.
        keep_every: also keep checkpoints whose step is a multiple of this number.
        keep_best: also keep this many checkpoints with the lowest loss.
        best_eval_set: evaluation set whose loss `keep_best` compares; see `evaluations` of `save`.
        asynchronous: whether training continues while a checkpoint is written.
        on_error: whether a checkpoint that cannot be written stops training or only warns. Earlier checkpoints are
            unchanged either way.
        tokenizer: Hugging Face tokenizer, exported with the model.

    Attributes:
        last_saved_step: step of the last complete checkpoint; None before the first.
        max_save_s: longest time from a call of `save` until its checkpoint was complete.
    """

    def __init__(
        self,
        manager: StrategyManager,
        root: str | Path | Storage,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        best_eval_set: str = "held_out",
        asynchronous: bool = True,
        on_error: OnError = "stop",
        tokenizer: Any = None,
    ) -> None:
        self._manager = manager
        world = manager.mesh.world
        self.root = world.run_on_all_ranks(lambda: open_storage(root))
        self._apply_retention = partial(
            apply_retention, keep_last=keep_last, keep_every=keep_every, keep_best=keep_best, eval_set=best_eval_set
        )
        self.keep_best, self.best_eval_set = keep_best, best_eval_set
        self._asynchronous, self._on_error, self._tokenizer = asynchronous, on_error, tokenizer
        self._group, self._planner = new_group("gloo"), SavePlanner()
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self.last_saved_step: int | None = None
        self.max_save_s = 0.0
        world.run_on_first_rank(lambda: cleanup(self.root))

    def __repr__(self) -> str:
        return f"Checkpointer({str(self.root)!r}, last_saved_step={self.last_saved_step})"

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
            evaluations: losses of this state by evaluation set; stored in `extra`.

        Raises:
            CheckpointError: this checkpoint or the previous one cannot be written, and `on_error` is "stop".
        """
        self.wait()
        began = time.monotonic()
        try:
            values = {**(extra or {}), EVALUATIONS_KEY: dict(evaluations or {})}
            content = collect_content(
                self._manager, self._group, step=step, scheduler=scheduler, extra=values, planner=self._planner
            )
            saving = CheckpointSave(self._manager, self.storage_for_step(step), self._group, content, self._tokenizer)
        except CheckpointError as error:
            self._report(error)
            return
        if not self._asynchronous:
            self._write(saving, step, began)
            self.wait()
            return
        content.copy_to_cpu()
        self._thread = threading.Thread(target=self._write, args=(saving, step, began), name="meshwright-checkpoint")
        self._thread.start()

    def storage_for_step(self, step: int) -> Storage:
        """Return the storage of a step's checkpoint, which need not exist."""
        return self.root.child(format_step_name(step))

    def wait(self) -> None:
        """Wait until the last checkpoint is written. Collective. Raises like `save`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            self._report(error)

    def close(self) -> None:
        """Wait for the last checkpoint and destroy the process group. Collective."""
        try:
            self.wait()
        finally:
            dist.destroy_process_group(self._group)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        # After an error, other ranks may never get here.
        if error_type is None:
            self.close()

    def _write(self, saving: CheckpointSave, step: int, start_time: float) -> None:
        try:
            saving.write()
            self.last_saved_step, self.max_save_s = step, max(self.max_save_s, time.monotonic() - start_time)
            self._error = run_on_first(self._group, lambda: self._apply_retention(self.root, newest_step=step))
        except CheckpointError as error:
            self._error = error
        except Exception as error:
            # Another rank has exited.
            self._error = CheckpointWriteError(f"a checkpoint failed: {format_exception(error)}")

    def _report(self, error: CheckpointError) -> None:
        if self._on_error == "stop":
            raise error
        if self._manager.mesh.rank == 0:
            warn(f"{error} Training continues (checkpoint.on_error=continue).", stacklevel=3)
