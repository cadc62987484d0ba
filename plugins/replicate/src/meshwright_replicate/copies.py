"""Copies of training state in the memory of nodes, as a run sees them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from meshwright.plugin import Access, Key, LoopExtension, StepResult, StrategyManager, World, marked_part

from .copier import Copier
from .keepers import open_keepers
from .place import MemoryPlace, places_of
from .room import memory_of_host


class NodeMemory:
    """Implements `meshwright.train.loop.extension.StateCopies`. Making one is collective; raises as `open_keepers`."""

    def __init__(self, world: World) -> None:
        self._keepers = open_keepers(world)

    def places(self, world: World, run: str, access: Access) -> list[tuple[int, MemoryPlace]]:
        found = places_of(self._keepers, self._keepers.listed(world), run, access)
        return [(place.step, place) for place in found]

    @contextmanager
    def copying(
        self,
        manager: StrategyManager,
        scheduler: Any,
        *,
        run: str,
        start: int,
        every: int,
        bandwidth: float | None,
        key: Key | None,
        tell: Callable[..., None],
    ) -> Iterator[LoopExtension]:
        with Copier(
            manager,
            self._keepers,
            run=run,
            step=start,
            every=every,
            bandwidth=bandwidth,
            key=key,
            memory_bytes=memory_of_host(),
            tell=tell,
        ) as copier:
            yield _Copies(manager, copier, scheduler)


class _Copies(LoopExtension):
    """Copies the state after the steps that are due, and reports the time with the step after."""

    def __init__(self, manager: StrategyManager, copier: Copier, scheduler: Any) -> None:
        self._progress, self._copier, self._scheduler = manager.mesh.world.progress, copier, scheduler
        self._times: dict[str, float] = {}

    def after_step(self, result: StepResult) -> StepResult:
        times, self._times = self._times, {}
        return replace(result, times={**result.times, **times}) if times else result

    def end_step(self, step: int, extra: Callable[[], dict[str, Any]]) -> None:
        if not self._copier.is_due(step):
            return
        start = time.perf_counter()
        self._progress.enter("copy")
        with marked_part("copy"):
            self._copier.copy(step, scheduler=self._scheduler, extra=extra)
        self._times = {"copy": time.perf_counter() - start}
