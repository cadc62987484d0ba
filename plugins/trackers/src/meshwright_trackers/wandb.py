"""Tracker that logs to Weights & Biases. Source: wandb.init, Run.log, Run.mark_preempting."""

from __future__ import annotations

from collections.abc import Mapping

import wandb

from meshwright.plugin import EndReason, RunInfo

from .config import WandbConfig
from .tracker import Tracker, flatten_parameters


class WandbTracker(Tracker):
    """Log to a run of Weights & Biases with the meshwright run's id, so that a resumed run continues it."""

    def __init__(self, config: WandbConfig, run: RunInfo) -> None:
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=config.name or run.name,
            group=config.group,
            job_type=config.job_type,
            tags=config.tags,
            notes=config.notes,
            mode=config.mode,
            dir=config.dir or (None if run.directory is None else str(run.directory)),
            id=run.id,
            resume="allow",
            reinit="create_new",
            # Do not capture the terminal, which ranks write to themselves.
            settings=wandb.Settings(console="off"),
        )
        # A run may be resumed with other options.
        self._run.config.update(flatten_parameters(run), allow_val_change=True)

    def log(self, values: Mapping[str, float], *, step: int, end_time: float) -> None:
        self._run.log(dict(values), step=step)

    def log_text(self, name: str, text: str, *, step: int) -> None:
        self._run.summary[name] = text

    def finish(self, reason: EndReason, facts: Mapping[str, str | float]) -> None:
        self._run.summary.update(dict(facts))
        if reason == "signal":
            self._run.mark_preempting()
        self._run.finish(exit_code=1 if reason in ("failed", "signal") else 0)
