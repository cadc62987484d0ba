"""Sources that are datasets of Hugging Face: a directory that was saved, or one of the hub.

The library keeps what it has downloaded or converted as Arrow files, which are read row by row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._compat.datasets import is_reader, own_files
from ...base.errors import DataError, nearest
from ..extras import extra
from ..progress import Meter

if TYPE_CHECKING:
    from ..config import SourceConfig

_ROWS = 256
_SAVED = ("state.json", "dataset_dict.json")
"""What `save_to_disk` leaves: of one split, and of several."""


def directory_of(config: SourceConfig) -> Path | None:
    """The local directory that a source names; None for a name of the hub.

    Raises:
        DataError: it looks like a directory, and is none; or it is one, and has options of the hub.
    """
    named = str(config.dataset)
    path = Path(named).expanduser()
    if path.is_dir():
        if config.revision is not None:
            raise DataError(f"revision={config.revision!r} is of a dataset of the hub, but {path} is a directory.")
        return path.absolute()
    if path.is_file():
        raise DataError(f"dataset {named!r} is a file. Name it under files.")
    if named.startswith(("/", "~", ".")) or named.count("/") > 1:
        raise DataError(
            f"dataset {named!r} is no directory ({path.absolute()}), nor the name of one of the hub, which is "
            "'owner/name'."
        )
    return None


def open_dataset(config: SourceConfig, *, streaming: bool = False) -> Any:
    """The split of a dataset: a `datasets.Dataset`, or an `IterableDataset` where it is streamed.

    Raises:
        DataError: it cannot be found, read or downloaded, or has no such split or configuration.
    """
    datasets = extra("datasets", f"the dataset {config.dataset!r}")
    directory = directory_of(config)
    if directory is None and is_reader(datasets, str(config.dataset)):
        raise DataError(
            f"dataset {config.dataset!r} is a reader of the library `datasets`, which would read the current "
            "directory. Name files under files, or the directory that holds them."
        )
    try:
        if directory is not None and any((directory / name).is_file() for name in _SAVED):
            found = _saved(datasets, config, directory)
            return found.to_iterable_dataset() if streaming else found
        place = str(directory or config.dataset)
        with own_files(extra("datasets.data_files", f"the dataset {place}"), place, directory):
            return datasets.load_dataset(
                place, config.name, split=config.split, revision=config.revision, streaming=streaming
            )
    except DataError:
        raise
    except Exception as error:  # the library raises whatever its readers and downloads meet
        raise DataError(_why_not_opened(config, directory, error)) from error


def _saved(datasets: Any, config: SourceConfig, directory: Path) -> Any:
    """What `save_to_disk` has written, of several splits the one that is named."""
    if config.name is not None:
        raise DataError(f"name={config.name!r} is a configuration of a dataset, but {directory} was saved without any.")
    found = datasets.load_from_disk(str(directory))
    if not isinstance(found, datasets.DatasetDict):
        saved = None if found.split is None else str(found.split)
        if config.split not in (saved, "train"):
            raise DataError(f"split={config.split!r}: {directory} holds one split{f', {saved}' if saved else ''}.")
        return found
    if config.split not in found:
        raise DataError(
            f"split={config.split!r}: {directory} has no such split.{nearest(config.split, found)} It has "
            f"{', '.join(found)}."
        )
    return found[config.split]


def _why_not_opened(config: SourceConfig, directory: Path | None, error: Exception) -> str:
    text = _first_line(error)
    if directory is not None:
        return f"the dataset in {directory} cannot be opened: {text}."
    at = "" if config.revision is None else f" at revision {config.revision!r}"
    return (
        f"the dataset {config.dataset!r}{at} cannot be had from the hub: {type(error).__name__}: {text}. Look at its "
        "name, configuration, split and revision; without a network, save it with `save_to_disk` where there is one, "
        "and name the directory."
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__


def files_of(dataset: Any) -> list[Path]:
    """The files that hold a dataset, which change whenever it does.

    Raises:
        DataError: it is held in memory.
    """
    found = [Path(entry["filename"]) for entry in dataset.cache_files]
    if not found:
        raise DataError(
            "the dataset is held in memory, not in files by which its changes are seen. Leave "
            "HF_DATASETS_IN_MEMORY_MAX_SIZE out, or save it with `save_to_disk` and name the directory."
        )
    return found


def rows(config: SourceConfig, meter: Meter, dataset: Any = None) -> Iterator[tuple[Any, str]]:
    """Yield the rows of a dataset and the place of each, "owner/name[train]:5"; the first is 0.

    Args:
        meter: is told how many have been read.
        dataset: where it is open already.

    Raises:
        DataError: it cannot be opened or read.
    """
    found = open_dataset(config) if dataset is None else dataset
    meter.total = len(found)
    with reading(config):
        for batch in found.iter(_ROWS):
            for values in zip(*batch.values(), strict=True):
                yield dict(zip(batch, values, strict=True)), place_of_row(config, meter.done)
                meter.done += 1


@contextmanager
def reading(config: SourceConfig) -> Iterator[None]:
    """A context, in which what is wrong with the rows of a dataset is a DataError."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # the library raises whatever its readers and downloads meet
        raise DataError(f"the dataset {config.dataset!r} cannot be read: {_first_line(error)}.") from error


def place_of_row(config: SourceConfig, number: int) -> str:
    return f"{config.dataset}[{config.split}]:{number}"
