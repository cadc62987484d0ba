"""Read a source from where another reader has stopped, in groups of records, by torchdata's loader.

Only what reads while training imports this module: it needs torch and the extra `meshwright[data]`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import IterableDataset

from ..config import SourceConfig
from ..extras import extra
from ..reading import hub
from ..reading.records import Record, read_records, record_of
from ..reading.sources import FoundSource, find_source


def loader_of(config: SourceConfig, records: int) -> Any:
    """A `StatefulDataLoader` over lists of so many records of a source; the last one of an epoch may be shorter.

    Its state is of values of JSON, as long as that of the dataset is.

    Raises:
        DataError: the source cannot be opened, or torchdata is not installed.
    """
    with warnings.catch_warnings():
        # Of torch, about what torchdata still calls when it is imported.
        warnings.simplefilter("ignore")
        loaders = extra("torchdata.stateful_dataloader", "streaming: true")
    dataset = FileRecords(find_source(config)) if config.dataset is None else DatasetRecords(config)
    # It draws a number whenever it begins, which is not to be one of the run's.
    own = torch.Generator()
    return loaders.StatefulDataLoader(dataset, batch_size=records, collate_fn=list, num_workers=0, generator=own)


class FileRecords(IterableDataset):
    """The records of files; its state is how many of which file have been read."""

    def __init__(self, found: FoundSource) -> None:
        self._found = found
        self._file = self._record = 0

    def __iter__(self) -> Iterator[Record]:
        while self._file < len(self._found.files):
            one = replace(self._found, files=self._found.files[self._file : self._file + 1])
            # What has changed since it was found is other data than the run has begun with.
            one.check_unchanged()
            for record in read_records(one, self._record):
                self._record += 1
                yield record
            self._file, self._record = self._file + 1, 0
        self._file = 0

    def state_dict(self) -> dict[str, Any]:
        return {"file": self._file, "record": self._record}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._file, self._record = state["file"], state["record"]


class DatasetRecords(IterableDataset):
    """The rows of a dataset of Hugging Face, which knows where it is by itself."""

    def __init__(self, config: SourceConfig) -> None:
        self._config, self._row = config, 0
        self._dataset = hub.open_dataset(config, streaming=True)

    def __iter__(self) -> Iterator[Record]:
        with hub.reading(self._config):
            for value in self._dataset:
                self._row += 1
                yield record_of(value, hub.place_of_row(self._config, self._row - 1), self._config)
        # One that went on from a state would begin there again.
        self._row, self._dataset = 0, hub.open_dataset(self._config, streaming=True)

    def state_dict(self) -> dict[str, Any]:
        # Before its first row, it has none.
        return {"row": self._row, "dataset": self._dataset.state_dict() if self._row else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._row = state["row"]
        if state["dataset"] is not None:
            self._dataset.load_state_dict(state["dataset"])
