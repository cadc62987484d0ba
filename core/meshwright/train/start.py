"""Start a run: join the ranks that a launcher has started, or start them here, and again after a failure."""

from __future__ import annotations

import os
import time

from ..data.progress import CONSOLE
from ..launch.environment import started_by_launcher
from ..launch.rank import guarded
from .companion import Accompany, Companion
from .fate import is_finished
from .observing import note_failure
from .plan import plan_run
from .report import say_finished
from .restarts import Restarts, rank_counts
from .run import run_rank
from .run_file import RunConfig
from .startup import Startup


def start(
    config: RunConfig,
    *,
    show_traceback: bool = False,
    accompany: Accompany | None = None,
    startup: Startup | None = None,
) -> int:
    """Run `config`: join the ranks that torchrun started, or start them here.

    Args:
        accompany: makes who goes along with the run.
        startup: what it took to come here.

    Returns:
        The exit code; what went wrong has been written to stderr.

    Raises:
        MeshwrightError: the run is not valid; nothing was started.
    """
    if started_by_launcher():
        leads = accompany is not None and os.environ["RANK"] == "0"
        companion = accompany(config, int(os.environ["WORLD_SIZE"])) if accompany is not None and leads else None
        return guarded(run_rank, (config, companion, startup), show_traceback=show_traceback)
    if is_finished(config):
        say_finished(config)
        return 0
    with CONSOLE.status("preparing the run"):
        restarts = Restarts(config, rank_counts(config))
        plan_run(config, restarts.ranks)
        companions = _Companions(config, accompany)
        companion = companions.of(restarts.ranks)
    if companion is not None and companion.refusal is not None:
        raise companion.refusal
    startup = startup or Startup()
    startup.end("plan and data")
    if restarts.ranks == 1 and not config.max_restarts:
        return guarded(run_rank, (config, companion, startup), show_traceback=show_traceback)
    from ..launch.local import launch

    passed_on = config.checkpoint.stops_on.signals
    while True:
        order = config, companions.of(restarts.ranks), startup
        code = launch(run_rank, order, nproc=restarts.ranks, show_traceback=show_traceback, passed_on=passed_on)
        note_failure(config, code)
        if not restarts.again(code):
            return code
        startup = Startup(startup.is_shown, begin=time.time())


class _Companions:
    """Who goes along with a run on so many ranks; made once, since that takes seconds."""

    def __init__(self, config: RunConfig, accompany: Accompany | None) -> None:
        self._config, self._accompany = config, accompany
        self._made: dict[int, Companion | None] = {}

    def of(self, ranks: int) -> Companion | None:
        if self._accompany is None:
            return None
        if ranks not in self._made:
            self._made[ranks] = self._accompany(self._config, ranks)
        return self._made[ranks]
