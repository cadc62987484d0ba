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

TIME_LIMIT_S = 60  # Of one case, on a busy machine; on a quiet one they take milliseconds
HEADROOM = 4 << 30
MAX_PEAK_GROWTH = 1 << 30
"""Bytes of address space that a case may take, and of memory by which it may raise the peak of this process."""


class TimeLimitExceeded(BaseException):
    """No `except Exception` may take it for an error of the input."""


@contextmanager
def limit_resources(case: Any) -> Iterator[None]:
    """Fail if a case takes too long or too much memory, or raises an error that is not meshwright's."""
    peak = _read_peak_rss()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + HEADROOM, limits[1]))
    before = signal.signal(signal.SIGALRM, _raise_time_limit)
    signal.alarm(TIME_LIMIT_S)
    try:
        yield
    except TimeLimitExceeded:
        pytest.fail(f"no end after {TIME_LIMIT_S} s: {case}")
    except MeshwrightError:
        raise
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}, which is no error of meshwright, from {case}") from error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)
    grown = _read_peak_rss() - peak
    assert grown < MAX_PEAK_GROWTH, f"{grown / 1e9:.1f} GB for {case}"


def check_user_error(error: MeshwrightError) -> None:
    """Check that an error is a message for a user, as text that steers no terminal."""
    assert error.exit_code in (1, 2)
    assert "Traceback" not in str(error)
    assert all(each.isprintable() or each in "\n\t" for each in str(error)), repr(error)


def _raise_time_limit(*_: Any) -> None:
    raise TimeLimitExceeded


def _read_peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
