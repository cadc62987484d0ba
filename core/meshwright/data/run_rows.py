"""The rows that a run trains and is evaluated on."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..base.errors import DataError
from .cache import cache_root
from .config import DataConfig, SourceConfig
from .documents import Documents
from .encoding.tokenizing import PieceEncoder, tokenizing
from .prepare import HELD_OUT, PreparedData
from .reading.records import Record
from .rows.rows import JoinedRows, Rows, make_rows
from .rows.stream import Stream
from .tokenizer import load_tokenizer, no_tokenizer_threads


@dataclass(frozen=True)
class RunRows:
    """What documents have become.

    Attributes:
        training: of each source.
        weights: of each source, for its share; None: by their numbers of rows.
        held_out: by name of the set.
    """

    training: tuple[Rows | Stream, ...]
    weights: tuple[float, ...] | None
    held_out: Mapping[str, Rows]

    @property
    def streams(self) -> int:
        """How many sources are read while training."""
        return sum(isinstance(each, Stream) for each in self.training)

    @property
    def at_hand(self) -> int:
        """How many rows the other sources have."""
        return sum(len(each) for each in self.training if not isinstance(each, Stream))

    @property
    def rows_per_epoch(self) -> int | None:
        """Of all sources together; None where one is read while training."""
        return None if self.streams else self.at_hand

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
            _stream(data, config, source.config, masks)
            if source.train is None
            else rows_of(source.train, repr(source.config.place))
            for source in data.sources
        ),
        weights=weights or None,
        held_out={name: joined(name, documents) for name, documents in data.held_out.items()},
    )


def _stream(data: PreparedData, config: DataConfig, source: SourceConfig, masks: bool) -> Stream:
    how = tokenizing(source, config, 0.0)

    @functools.cache
    def encoder() -> PieceEncoder:
        return PieceEncoder(how, load_tokenizer(data.tokenizer_dir))

    def encode(records: list[Record]) -> Documents | None:
        with no_tokenizer_threads():
            documents = encoder()(records).documents.get("train")
        return None if documents is None else replace(documents, group=data.group)

    def open_loader(records: int) -> Any:
        from .rows.record_loader import loader_of

        return loader_of(source, records)

    def make(documents: Documents) -> Rows:
        return make_rows(documents, config.packing_kind(), config.seq_len, masks=masks)

    return Stream(source.place, open_loader, encode, make, group=data.group)
