"""Count the examples of a source that cannot be used, and report the first ones together."""

from __future__ import annotations

import time
from collections.abc import Iterable

from meshwright.plugin import DataError

MAX_LISTED = 5
"""Number of errors that a message lists."""
MAX_COUNTED, MAX_SECONDS = 1000, 10.0
"""Number of errors, and time since the first one [s], after which the rest of the source is not read."""


class RecordErrors:
    def __init__(self, location: str) -> None:
        self._location = location
        self._listed: list[DataError] = []
        self._count = 0
        self._stops_at = 0.0

    def add(self, errors: Iterable[DataError], *, num_records: int) -> None:
        """Add errors of examples. Raises DataError if there are enough; `num_records`: number of examples so far."""
        for error in errors:
            self._stops_at = self._stops_at or time.monotonic() + MAX_SECONDS
            self._count += 1
            if len(self._listed) < MAX_LISTED:
                self._listed.append(error)
        if self._count >= MAX_COUNTED or (self._count and time.monotonic() > self._stops_at):
            self.check(num_records, is_complete=False)

    def check(self, num_records: int, *, is_complete: bool = True) -> None:
        """Raise DataError if there were errors. `num_records`: number of examples that were read."""
        if not self._count:
            return
        if self._count == 1:
            others = f" The other {num_records - 1:,} examples are valid." if is_complete and num_records > 1 else ""
            raise DataError(f"{self._listed[0]}{others}")
        read = f"{num_records:,}" if is_complete else f"the first {num_records:,}"
        listed = "".join(f"\n  {error}" for error in self._listed)
        what = "They are" if self._count <= MAX_LISTED else f"The first {MAX_LISTED}"
        raise DataError(f"{self._count:,} of {read} examples of {self._location!r} cannot be used. {what}:{listed}")
