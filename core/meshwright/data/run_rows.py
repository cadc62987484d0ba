"""The rows that a run trains and is evaluated on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..base.errors import DataError
from .cache import cache_root
from .config import DataConfig
from .documents import Documents
from .prepare import HELD_OUT, PreparedData
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

    @property
    def evaluated(self) -> Rows:
        """What is held out of the sources, or else the first set."""
        return self.held_out.get(HELD_OUT) or next(iter(self.held_out.values()))


def lay_out(data: PreparedData, config: DataConfig, *, masks: bool = False) -> RunRows:
    """Rows of what was prepared, of one kind.

    Args:
        masks: padded rows have an attention mask; see [Note: padding without a mask] in `rows`.

    Raises:
        DataError: a source or a set fills no row.
    """
    cache = cache_root(config.cache_dir) / "rows"

    def rows_of(documents: Documents, place: str) -> Rows:
        rows = make_rows(
            documents, config.packing_kind(), config.seq_len, cache=cache, masks=masks, dtypes=data.columns
        )
        if not len(rows):
            raise DataError(
                f"{place} fills no row of seq_len={config.seq_len}: it holds {len(documents.tokens)} tokens in "
                f"{len(documents)} documents. Give more, or lower data.seq_len."
            )
        return rows

    def joined(name: str, documents: Sequence[Documents]) -> Rows:
        return JoinedRows([rows_of(each, f"the evaluation set {name!r}") for each in documents])

    weights = tuple(source.config.weight for source in data.sources if source.config.weight is not None)
    return RunRows(
        training=tuple(
            rows_of(source.train, repr(source.config.place)) for source in data.sources if source.train is not None
        ),
        weights=weights or None,
        held_out={name: joined(name, documents) for name, documents in data.held_out.items()},
    )
