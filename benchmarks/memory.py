"""Peak memory of a process, for benchmarks. Linux only."""

from __future__ import annotations

import gc
import threading
from pathlib import Path


class Peak:
    """The most anonymous memory (RssAnon) of this process while the context is entered, in MB above the start.

    Sampled every millisecond. Pages of mapped files, which can be dropped at will, do not count.
    """

    def __enter__(self) -> Peak:
        gc.collect()
        self._start = self.most = _anonymous_mb()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.most = max(self.most, _anonymous_mb())

    @property
    def growth(self) -> float:
        return self.most - self._start

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self.most = max(self.most, _anonymous_mb())


def _anonymous_mb() -> float:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("/proc/self/status has no RssAnon")
