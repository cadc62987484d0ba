"""The rows that a run trains and is evaluated on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..base.errors import DataError
from .cache import cache_root
from .config import DataConfig
from .documents import Documents
from .prepare import PreparedData
from .rows import JoinedRows, Rows, make_rows


@dataclass(frozen=True)
class RunRows:
    """What documents have become.

    Attributes:
        training: of each source.
        weights: of each source, for its share; None: by their numbers of rows.
        held_out: by name of the set.
    """

    training: tuple[Rows, ...]
    weights: tuple[float, ...] | None
    held_out: Mapping[str, Rows]


def lay_out(data: PreparedData, config: DataConfig) -> RunRows:
    """Rows of what was prepared, as the run packs them."""
    kind, cache = config.packing_kind(), cache_root(config.cache_dir) / "packed"

    def rows_of(documents: Documents) -> Rows:
        return make_rows(documents, kind, config.seq_len, cache=cache)

    streamed = next((source.config.place for source in data.sources if source.train is None), None)
    if streamed is not None:
        raise DataError(f"{streamed!r} is to be read while training (streaming: true), which is not there yet.")
    weights = tuple(source.config.weight for source in data.sources if source.config.weight is not None)
    return RunRows(
        tuple(rows_of(source.train) for source in data.sources if source.train is not None),
        weights or None,
        {name: JoinedRows([rows_of(each) for each in documents]) for name, documents in data.held_out.items()},
    )
