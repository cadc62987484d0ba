"""Limits of time and memory around one case of a test."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.errors import MeshwrightError

PATIENCE_S = 60  # Of one case, on a busy machine; on a quiet one they take milliseconds
HEADROOM = 4 << 30
GROWTH = 1 << 30
"""Bytes of address space that a case may take, and of memory by which it may raise the peak of this process."""


class Endless(BaseException):
    """No `except Exception` may take it for an error of the input."""


@contextmanager
def bounded(case: Any) -> Iterator[None]:
    """Fail if a case takes too long or too much memory, or raises an error that is not meshwright's."""
    peak = _peak()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + HEADROOM, limits[1]))
    before = signal.signal(signal.SIGALRM, _ring)
    signal.alarm(PATIENCE_S)
    try:
        yield
    except Endless:
        pytest.fail(f"no end after {PATIENCE_S} s: {case}")
    except MeshwrightError:
        raise
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}, which is no error of meshwright, from {case}") from error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)
    grown = _peak() - peak
    assert grown < GROWTH, f"{grown / 1e9:.1f} GB for {case}"


def check_refusal(error: MeshwrightError) -> None:
    """Check that an error is a message for a user, as text that steers no terminal."""
    assert error.exit_code in (1, 2)
    assert "Traceback" not in str(error)
    assert all(each.isprintable() or each in "\n\t" for each in str(error)), repr(error)


def _ring(*_: Any) -> None:
    raise Endless


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
