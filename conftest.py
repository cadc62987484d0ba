"""Tiers of tests, what a test cannot be named by, and what it must leave as it found it.

[Note: tiers] `-m first` is the first tier (see tests/tiers.py), `-m "not zoo"` all but the sweeps. `--part=K/N` leaves
every N-th test, from the K-th on: CI runs another part with each commit.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tiers

# No test asks the hub for anything; where one names what only the hub could have, it is told so at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="only the K-th of N parts of the tests; K from 0")
    parser.addoption("--times", type=Path, help="write the seconds that each test takes into this file")
    parser.addoption("--only-untimed", action="store_true", help="leave out what the file of --times has")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the first tier, and put the longest files first; see [Note: tiers]."""
    for item in items:
        for value in getattr(getattr(item, "callspec", None), "params", {}).values():
            if _has_set(value) and str(value) in item.nodeid:
                raise pytest.UsageError(f"{item.nodeid} is named by a set, which has another order in each process.")
    seconds, first = tiers.read()
    files: dict[Path, float] = defaultdict(float)
    for item in items:
        if item.get_closest_marker("zoo") is None and tiers.is_first(item.nodeid, seconds, first):
            item.add_marker(pytest.mark.first)
        files[item.path] += seconds.get(item.nodeid, 0.0)
    items.sort(key=lambda item: -files[item.path])
    if config.option.part is not None:
        part, _, parts = config.option.part.partition("/")
        items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % int(parts) == int(part)]
    if config.option.only_untimed:
        known = _times(config.option.times)
        items[:] = [item for item in items if item.nodeid not in known]


def _has_set(value: Any) -> bool:
    """Whether a value is a set of several things, or holds one."""
    if isinstance(value, set | frozenset):
        return len(value) > 1
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(map(_has_set, parts))


# -- what tests take


class Times:
    """Adds up the seconds of set-up, call and teardown of each test, and writes them now and then."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds = _times(path)
        self._reports = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup":
            self._seconds[report.nodeid] = 0.0
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        self._reports += 1
        if self._reports % 300 == 0:
            self.pytest_sessionfinish()

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(self._seconds, indent=1), encoding="utf-8")


def _times(path: Path) -> dict[str, float]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def pytest_configure(config: pytest.Config) -> None:
    # Workers send their reports to the process that started them.
    if config.option.times is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Times(config.option.times))


# -- what tests leave behind
@pytest.fixture(autouse=True)
def _leaves_the_process_as_it_was() -> Iterator[None]:
    """What one test switches for the whole process, another, which happens to follow, would fail or pass by."""
    before = _switches()
    yield
    for name, value in _switches().items():
        assert before.get(name, value) == value, f"this test leaves {name} behind: {value!r}, before {before[name]!r}"


def _switches() -> dict[str, Any]:
    """What libraries keep once for a whole process, of those that are imported already."""
    found: dict[str, Any] = {"the working directory": os.getcwd(), "logging.disable": logging.root.manager.disable}
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "get_default_dtype"):
        found["torch.get_default_dtype()"] = torch.get_default_dtype()
        found["torch.is_grad_enabled()"] = torch.is_grad_enabled()
        found["torch.are_deterministic_algorithms_enabled()"] = torch.are_deterministic_algorithms_enabled()
        found["torch.get_num_threads()"] = torch.get_num_threads()
        found["torch.distributed.is_initialized()"] = torch.distributed.is_initialized()
    if "transformers" in sys.modules:
        found["the verbosity of transformers"] = logging.getLogger("transformers").level
    return found
