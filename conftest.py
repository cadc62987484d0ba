"""Parts of the test suite, unstable test names, and process-wide state that a test leaves behind.

`make test` runs the tests that are marked neither `slow` nor `zoo`, `make test-full` all but `zoo`. `--part=K/N` picks
every N-th test, from the K-th on; CI runs another part with each commit.
"""

from __future__ import annotations

import logging
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

# No test downloads from the hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="only the K-th of N parts of the tests; K from 0")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse names that differ between processes, and select the part that `--part` names."""
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid} is named by the address of an object.")
        for value in getattr(getattr(item, "callspec", None), "params", {}).values():
            if _has_set(value) and str(value) in item.nodeid:
                raise pytest.UsageError(f"{item.nodeid} is named by a set, whose order differs between processes.")
    if config.option.part is not None:
        part, _, parts = config.option.part.partition("/")
        items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % int(parts) == int(part)]


def _has_set(value: Any) -> bool:
    """Whether a value is or contains a set with several elements."""
    if isinstance(value, set | frozenset):
        return len(value) > 1
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(map(_has_set, parts))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name binary parameters by their argument: compressed data hold the time at which they were made."""
    return argname if isinstance(val, bytes) and not val.isascii() else None


# -- what tests leave behind
@pytest.fixture(autouse=True)
def _leaves_the_process_as_it_was() -> Iterator[None]:
    """Fail a test that changes process-wide state, which would change the tests after it."""
    before = _switches()
    yield
    for name, value in _switches().items():
        assert before.get(name, value) == value, f"this test leaves {name} behind: {value!r}, before {before[name]!r}"


def _switches() -> dict[str, Any]:
    """Process-wide settings of the libraries that are imported already."""
    found: dict[str, Any] = {"the working directory": os.getcwd(), "logging.disable": logging.root.manager.disable}
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "get_default_dtype"):
        found["torch.get_default_dtype()"] = torch.get_default_dtype()
        found["torch.is_grad_enabled()"] = torch.is_grad_enabled()
        found["torch.are_deterministic_algorithms_enabled()"] = torch.are_deterministic_algorithms_enabled()
        found["torch.get_num_threads()"] = torch.get_num_threads()
        found["torch.distributed.is_initialized()"] = torch.distributed.is_initialized()
    if "transformers" in sys.modules:
        found["the verbosity of transformers"] = logging.getLogger("transformers").level
        loggers = sorted(name for name in logging.root.manager.loggerDict if name.startswith("transformers"))
        found["disabled loggers of transformers"] = [name for name in loggers if logging.getLogger(name).disabled]
    return found


@pytest.fixture
def registry_of_its_own() -> Iterator[None]:
    """Forget the strategies that a test brings by modules of its own, so that the tests after it have none of them."""
    from meshwright.strategy.registry import get_registry
    from meshwright_testing.cells import _registered_modules

    yield
    get_registry.cache_clear()
    _registered_modules.clear()
