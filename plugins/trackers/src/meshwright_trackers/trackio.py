"""Tracker that logs to trackio. Source: trackio.init, Run.log, Run.alert."""

from __future__ import annotations

from collections.abc import Mapping

import trackio

from meshwright.plugin import EndReason, RunInfo

from .config import TrackioConfig
from .tracker import Tracker, flatten_parameters


class TrackioTracker(Tracker):
    """Log to a run of trackio, identified by its name. By default this has a part of the meshwright run's id."""

    def __init__(self, config: TrackioConfig, run: RunInfo) -> None:
        # A name from the options may belong to another run; a name with the run's id does not.
        continues = config.name is None or run.start_step > 0
        self._run = trackio.init(
            project=config.project,
            name=config.name or f"{run.name}-{run.id[:8]}",
            group=config.group,
            space_id=config.space_id,
            private=config.private,
            server_url=config.server_url,
            config=flatten_parameters(run),
            resume="allow" if continues else "never",
            embed=False,
            auto_log_cpu=config.system_metrics,
            auto_log_gpu=config.system_metrics,
        )
        self._step = run.start_step

    def log(self, values: Mapping[str, float], *, step: int, end_time: float) -> None:
        self._step = step
        self._run.log(dict(values), step=step)

    def log_text(self, name: str, text: str, *, step: int) -> None:
        if name == "fault":
            self._run.alert(title="the run has failed", text=text, level=trackio.AlertLevel.ERROR, step=step)
        self._run.log({name: text}, step=step)

    def finish(self, reason: EndReason, facts: Mapping[str, str | float]) -> None:
        self._run.log(dict(facts or {"end/reason": reason}), step=self._step)
        trackio.finish()
