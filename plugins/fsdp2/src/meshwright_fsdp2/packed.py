"""The option `patch_is_packed_sequence`: transformers' check for packed sequences answers False during steps."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from meshwright.plugin import Batch, BatchError, StrategyError

from ._compat import never_packed


@contextmanager
def without_packed_check() -> Iterator[None]:
    """Let transformers take no sequence for packed, and put the check back on leaving.

    Raises:
        StrategyError: this version of transformers has no such check.
    """
    with never_packed() as found:
        if not found:
            raise StrategyError(
                "patch_is_packed_sequence=true, but this version of transformers has no check to be patched. "
                "Set patch_is_packed_sequence=false."
            )
        yield


def check_not_packed(microbatches: Sequence[Batch]) -> None:
    """Refuse packed data, which would be attended across its documents. Waits for the device of the data.

    Raises:
        BatchError: position ids, integers, (..., sequence), restart; on this rank alone.
    """
    # What is no sequence of mappings is refused with the rest of the checks.
    batches = microbatches if isinstance(microbatches, Sequence) else ()
    for index, batch in enumerate(batches):
        positions = batch.get("position_ids") if isinstance(batch, Mapping) else None
        if positions is not None and bool((positions.diff(dim=-1) <= 0).any()):
            raise BatchError(
                f"microbatch {index} of {len(batches)} is packed: its position_ids restart, but "
                f"patch_is_packed_sequence=true takes every sequence for one document. "
                f"Set patch_is_packed_sequence=false for packed data."
            )


# Held, or the check would be put back with it.
_for_good = ExitStack()


@functools.cache
def _patch_is_packed_sequence_for_training() -> None:
    """Let the check answer False for the rest of the process, for loops of the reference. Not for packed data."""
    _for_good.enter_context(without_packed_check())
