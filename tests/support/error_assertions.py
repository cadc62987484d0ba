"""Errors that name everything that a user needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def raises_containing(error: type[Exception], *texts: str) -> Iterator[None]:
    """Expect an error whose message contains all these texts."""
    with pytest.raises(error) as caught:
        yield
    message = str(caught.value)
    assert [text for text in texts if text not in message] == [], message
