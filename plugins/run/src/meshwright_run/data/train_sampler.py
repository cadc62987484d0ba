"""Rows of a run, and the microbatches of each step on each rank.

[Note: rows of one length] Padded rows have the length of the longest one in their microbatch. So the rows of a step are
sorted by length before they are divided, the longest first, and the microbatches with the same index are equally long
on all data ranks. The global batch does not depend on the mesh, but which rows share a microbatch does.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.plugin import IGNORE_INDEX, CheckpointError, ConfigError, DataError

from .config import DataConfig, SourceConfig
from .documents import TokenizedDocuments, get_cache_root
from .order import DataOrder, SourceMixture, StreamingSource, build_record_loader, check_batch_size, shuffle_indices
from .packing import ConcatDataset, RowDataset, build_row_dataset
from .parallel_tokenization import ChunkEncoder, build_tokenization
from .prepare import HELD_OUT, PreparedData
from .sources import Record
from .tokenizer import disable_tokenizer_threads, load_tokenizer

if TYPE_CHECKING:
    from meshwright.plugin import Batch


_KEPT_COUNTS = 8
"""Number of steps whose token count is kept; batches are read at most a few steps ahead."""


@dataclass(frozen=True)
class DataShard:
    """The part of a global batch that a rank has, and the shapes of its microbatches.

    Lengths of padded rows are multiples of `length_multiple`; if `seq_len` is not a multiple, all rows have `seq_len`.
    `uniform_length`: all microbatches of a step have the same length, as pipeline stages require.
    """

    data_rank: int
    data_size: int
    micro_batch_size: int
    length_multiple: int = 1
    uniform_length: bool = False

    def __post_init__(self) -> None:
        for name, value in (("data_size", self.data_size), ("micro_batch_size", self.micro_batch_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if not 0 <= self.data_rank < self.data_size:
            raise ValueError(f"data_rank must be in [0, {self.data_size}), not {self.data_rank}")


class TrainSampler:
    """Select the rows of each step. Streams need steps in order, and `load_state_dict` when a run resumes.

    Attributes:
        token_counts: number of tokens of the global batches read last, by step.
    """

    def __init__(
        self,
        sources: Sequence[RowDataset | StreamingSource],
        shard: DataShard,
        *,
        batch_size: int,
        seed: int,
        weights: Sequence[float] | None = None,
        origin: tuple[int, int] = (0, 0),
    ) -> None:
        """Set the order. `weights`: of sources; None: one order of all rows. `origin`: a step, and rows before it."""
        check_batch_size(batch_size, data_size=shard.data_size, micro_batch_size=shard.micro_batch_size)
        self._sources, self._group_size = tuple(sources), sources[0].group_size
        check_group_size(self._group_size, batch_size=batch_size, micro_batch_size=shard.micro_batch_size)
        self._shard, self._seed = shard, seed
        self.token_counts: dict[int, int] = {}
        self._streams = [each for each in sources if isinstance(each, StreamingSource)]
        datasets = [each for each in sources if not isinstance(each, StreamingSource)]
        self._dataset = ConcatDataset(datasets) if datasets else None
        if weights is None and self._streams:
            weights = [1.0] * len(sources)
        self._mixture = None if weights is None else SourceMixture(weights, seed)
        first, rows = origin
        self._order = DataOrder(
            # If all sources are streams, only positions are needed, which do not depend on epochs.
            1 if self._dataset is None else len(self._dataset) // self._group_size,
            batch_size // self._group_size,
            seed,
            origin=(first, rows // self._group_size),
        )
        for stream in self._streams:
            stream.reset(seed)

    def compute_data_position(self, step: int) -> int:
        return self._order.compute_position(step) * self._group_size

    def read_microbatches(self, step: int) -> list[Batch]:
        """Return this rank's microbatches of a step, counted from 0, as returned by `RowDataset.read_batch`."""
        rows, units = self._select_rows(step)
        self.token_counts = {key: count for key, count in self.token_counts.items() if abs(key - step) <= _KEPT_COUNTS}
        self.token_counts[step] = rows.count_tokens(_to_row_indices(rows, units).reshape(-1))
        return _split_into_microbatches(rows, units, self._shard)

    def read_local_batches(self, step: int) -> list[list[Batch]]:
        rows, units = self._select_rows(step)
        ranks = range(self._shard.data_size)
        return [_split_into_microbatches(rows, units, replace(self._shard, data_rank=rank)) for rank in ranks]

    def state_dict(self, step: int) -> list[dict[str, Any]] | None:
        """Return the JSON state for `load_state_dict` to resume at a step; this step or the one before must be the last
        one read."""
        if self._mixture is None or not self._streams:
            return None
        before = self._mixture.count_before(self._order.compute_position(step))
        pairs = zip(self._sources, before, strict=True)
        return [source.state_dict(count) for source, count in pairs if isinstance(source, StreamingSource)]

    def load_state_dict(self, state: Sequence[dict[str, Any]] | None) -> None:
        if len(state or ()) != len(self._streams):
            raise CheckpointError(
                f"{len(self._streams)} sources are read during training, but the checkpoint has the state of "
                f"{len(state or ())}. Start over with resume=never."
            )
        for stream, own in zip(self._streams, state or (), strict=True):
            stream.reset(self._seed, own)

    def _select_rows(self, step: int) -> tuple[RowDataset, np.ndarray]:
        """Return rows, and the indices of the groups that a step uses."""
        if self._mixture is not None:
            return self._select_from_mixture(self._mixture, step)
        if self._dataset is None:
            raise ValueError("there are no sources")
        return self._dataset, self._order.get_indices(step)

    def _select_from_mixture(self, mixture: SourceMixture, step: int) -> tuple[RowDataset, np.ndarray]:
        sources, ranks = mixture.assign(self._order.compute_position(step), self._order.compute_position(step + 1))
        tables: list[RowDataset] = []
        units, of_table = np.empty(len(sources), np.int64), np.empty(len(sources), np.int64)
        for number, source in enumerate(self._sources):
            (mine,) = np.nonzero(sources == number)
            if not len(mine):
                continue
            if isinstance(source, StreamingSource):
                found = source.read_groups(int(ranks[mine[0]]), int(ranks[mine[-1]]) + 1)
            else:
                found = iter([(source, self._shuffle_in_epochs(number, len(source) // self._group_size, ranks[mine]))])
            for table, chosen in found:
                here, mine = mine[: len(chosen)], mine[len(chosen) :]
                units[here], of_table[here] = chosen, len(tables)
                tables.append(table)
        joined = ConcatDataset(tables)
        return joined, units + joined.offsets[of_table] // self._group_size

    def _shuffle_in_epochs(self, number: int, size: int, ranks: np.ndarray) -> np.ndarray:
        """Return the groups of a source at the given ranks of its consecutive epochs."""
        epochs, offsets = np.divmod(ranks, size)
        groups = np.empty_like(offsets)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            groups[in_epoch] = shuffle_indices(
                offsets[in_epoch], size, seed=self._seed, epoch=int(epoch), domain=f"source {number}"
            )
        return groups


def check_group_size(group_size: int, *, batch_size: int, micro_batch_size: int) -> None:
    for name, size in (("batch_size", batch_size), ("micro_batch_size", micro_batch_size)):
        if size % group_size:
            raise ConfigError(
                f"{name}={size} must be a multiple of {group_size}, since {group_size} rows belong together (chosen "
                "and rejected)."
            )


def read_eval_microbatches(dataset: RowDataset, shard: DataShard, *, num_rows: int | None) -> list[Batch]:
    """Read one data rank's share of `num_rows` rows (None: all), spread evenly over the dataset.

    All ranks get equally many microbatches of equal shape. Missing rows repeat others, with all labels masked.
    """
    if num_rows is not None and num_rows < 1:
        raise ValueError(f"num_rows must be at least 1, or None for all, not {num_rows}")
    if len(dataset) == 0:
        raise ValueError("there are no sequences to evaluate on")
    if num_rows is not None and num_rows > len(dataset):
        raise ConfigError(
            f"cannot evaluate on {num_rows} sequences: the split holds {len(dataset)}. Set at most {len(dataset)}, "
            "leave the number out to use all, or increase eval_fraction."
        )
    check_group_size(
        dataset.group_size, batch_size=num_rows or dataset.group_size, micro_batch_size=shard.micro_batch_size
    )
    available = len(dataset) // dataset.group_size
    per_step = shard.data_size * shard.micro_batch_size // dataset.group_size
    num_rows = available if num_rows is None else num_rows // dataset.group_size
    padded = -(-num_rows // per_step) * per_step
    numbers = np.arange(padded)
    return _split_into_microbatches(
        dataset, numbers % num_rows * available // num_rows, shard, masked_groups=numbers >= num_rows
    )


def _to_row_indices(dataset: RowDataset, groups: np.ndarray) -> np.ndarray:
    indices: np.ndarray = groups[:, None] * dataset.group_size + np.arange(dataset.group_size)
    return indices


def _split_into_microbatches(
    dataset: RowDataset, groups: np.ndarray, shard: DataShard, *, masked_groups: np.ndarray | None = None
) -> list[Batch]:
    """Return this rank's microbatches of `groups`, with the labels of those in `masked_groups` masked."""
    indices = _to_row_indices(dataset, groups)
    per_batch = shard.micro_batch_size // dataset.group_size
    lengths = dataset.lengths(indices.reshape(-1))
    if lengths is None:
        parts = np.arange(len(groups)).reshape(shard.data_size, -1)[shard.data_rank].reshape(-1, per_batch)
        widths = [dataset.seq_len] * len(parts)
    else:
        # See [Note: rows of one length].
        lengths = lengths.reshape(indices.shape).max(1)
        sorted_ = np.argsort(-lengths, kind="stable").reshape(-1, shard.data_size, per_batch)
        parts = sorted_[:, shard.data_rank]
        widths = _pad_lengths(lengths[sorted_].reshape(len(parts), -1).max(1), dataset.seq_len, shard)
    batches: list[Batch] = []
    for part, width in zip(parts, widths, strict=True):
        batch = dict(dataset.read_batch(indices[part].reshape(-1), width))
        if masked_groups is not None and masked_groups[part].any():
            batch["labels"][np.repeat(masked_groups[part], dataset.group_size)] = IGNORE_INDEX
        batches.append(batch)
    return batches


def _pad_lengths(longest: np.ndarray, seq_len: int, shard: DataShard) -> list[int]:
    if seq_len % shard.length_multiple:
        # A length that cannot be divided is an error at the first step, not only at a step with rows this long.
        return [seq_len] * len(longest)
    if shard.uniform_length:
        longest = np.full_like(longest, longest.max())
    unit = max(2, shard.length_multiple)
    return [min(seq_len, int(-(-each // unit)) * unit) for each in longest]


@dataclass(frozen=True)
class RunDatasets:
    """The datasets of a run: one per source, weights (None: by number of rows), and evaluation sets by name."""

    train_sets: tuple[RowDataset | StreamingSource, ...]
    weights: tuple[float, ...] | None
    eval_sets: Mapping[str, RowDataset]

    @property
    def num_streams(self) -> int:
        return sum(isinstance(each, StreamingSource) for each in self.train_sets)

    @property
    def num_rows(self) -> int:
        return sum(len(each) for each in self.train_sets if not isinstance(each, StreamingSource))

    @property
    def num_rows_per_epoch(self) -> int | None:
        return None if self.num_streams else self.num_rows

    @property
    def main_eval_set(self) -> RowDataset:
        return self.eval_sets.get(HELD_OUT) or next(iter(self.eval_sets.values()))


def build_datasets(data: PreparedData, config: DataConfig, *, mask_padding: bool = False) -> RunDatasets:
    """Build the rows of prepared data. `mask_padding`: see [Note: padding without a mask] in `packing`."""
    cache = get_cache_root(config.cache_dir) / "rows"

    def build_rows(documents: TokenizedDocuments, location: str) -> RowDataset:
        rows = build_row_dataset(
            documents,
            config.resolve_packing(),
            config.seq_len,
            cache=cache,
            mask_padding=mask_padding,
            column_dtypes=data.column_dtypes,
        )
        if not len(rows):
            raise DataError(
                f"{location} does not fill one row of seq_len={config.seq_len}: it holds {len(documents.tokens)} "
                f"tokens in {len(documents)} documents. Give more documents, or decrease data.seq_len."
            )
        return rows

    def build_eval_set(name: str, documents: Sequence[TokenizedDocuments]) -> RowDataset:
        return ConcatDataset([build_rows(each, f"the evaluation set {name!r}") for each in documents])

    weights = tuple(source.config.weight for source in data.sources if source.config.weight is not None)
    return RunDatasets(
        train_sets=tuple(
            _build_stream(data, config, source.config, mask_padding)
            if source.train_documents is None
            else build_rows(source.train_documents, repr(source.config.location))
            for source in data.sources
        ),
        weights=weights or None,
        eval_sets={name: build_eval_set(name, documents) for name, documents in data.eval_sets.items()},
    )


def _build_stream(data: PreparedData, config: DataConfig, source: SourceConfig, mask_padding: bool) -> StreamingSource:
    tokenization = build_tokenization(source, config, 0.0)

    @functools.cache
    def encoder() -> ChunkEncoder:
        return ChunkEncoder(tokenization, load_tokenizer(data.tokenizer_dir))

    def encode(records: list[Record]) -> TokenizedDocuments | None:
        with disable_tokenizer_threads():
            documents = encoder()(records).documents.get("train")
        return None if documents is None else replace(documents, group_size=data.group_size)

    def make_rows(documents: TokenizedDocuments) -> RowDataset:
        return build_row_dataset(documents, config.resolve_packing(), config.seq_len, mask_padding=mask_padding)

    return StreamingSource(
        source.location,
        lambda records: build_record_loader(source, records),
        encode,
        make_rows,
        group_size=data.group_size,
    )
