"""Read what trackers have written, each by what its library has for that, or from its file as it lies."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Points = dict[str, list[tuple[int, float]]]
"""Of each metric, (step, value) in the order in which they lie there."""

_BLOCK, _HEADER = 32768, 7


def accumulated(directory: Path) -> Any:
    """TensorBoardTracker's own reader of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def tensorboard_points(directory: Path) -> Points:
    found = accumulated(directory)
    points = {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    # A name stays known where all that it had was voided.
    return {tag: each for tag, each in points.items() if each}


def tensorboard_hparams(directory: Path) -> Any:
    """What was said when a session began and ended there, as the plugin's messages: of several, the first."""
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    content = accumulated(directory).PluginTagToContent("hparams")
    found = [plugin_data_pb2.HParamsPluginData() for _ in range(2)]
    for each, tag in zip(found, (metadata.SESSION_START_INFO_TAG, metadata.SESSION_END_INFO_TAG), strict=True):
        each.ParseFromString(content[tag])
    return found[0].session_start_info, found[1].session_end_info


class WandbFile:
    """A .wandb file: W&B's messages, in the framing of LevelDB's log (blocks of 32 KiB, which records of crc, length
    and kind fill; 1 is whole, 2, 3, 4 are first, middle and last part)."""

    def __init__(self, path: Path) -> None:
        from wandb.proto.wandb_internal_pb2 import Record

        self._records = [Record.FromString(data) for data in _log_records(path.read_bytes())]

    def of(self, kind: str) -> list[Any]:
        return [getattr(each, kind) for each in self._records if each.WhichOneof("record_type") == kind]

    def points(self) -> Points:
        found: Points = defaultdict(list)
        for record in self.of("history"):
            for name, value in _items(record.item).items():
                if not name.startswith("_"):
                    found[name].append((record.step.num, value))
        return dict(found)

    def config(self) -> dict[str, Any]:
        return _items([each for run in self.of("run") for each in run.config.update] + self._updates("config"))

    def summary(self) -> dict[str, Any]:
        return _items(self._updates("summary"))

    def _updates(self, kind: str) -> list[Any]:
        return [each for record in self.of(kind) for each in record.update]


def _items(items: Any) -> dict[str, Any]:
    return {"/".join(each.nested_key) or each.key: json.loads(each.value_json) for each in items}


def _log_records(data: bytes) -> Iterator[bytes]:
    at, whole = _HEADER, b""
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (1, 4):
            yield whole
            whole = b""


def mlflow_run(uri: str, experiment: str) -> tuple[Any, Points]:
    """The one run of an experiment, and its points."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return run, {name: [(each.step, each.value) for each in found] for name, found in histories.items()}


def trackio_rows(directory: Path, project: str) -> list[tuple[str, int, dict[str, Any]]]:
    """(name of the run, step, values) of all rows."""
    with sqlite3.connect(directory / f"{project}.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    return [(name, step, json.loads(values)) for name, step, values in rows]


def trackio_points(directory: Path, project: str) -> Points:
    found: Points = defaultdict(list)
    for _, step, values in trackio_rows(directory, project):
        for name, value in values.items():
            if not isinstance(value, str):
                found[name].append((step, value))
    return dict(found)


def without_trackers_of_the_environment() -> dict[str, str]:
    """What the environment says to none of the libraries, but to keep to themselves."""
    own = ("WANDB_", "MLFLOW_", "TRACKIO_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return {**kept, "DO_NOT_TRACK": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false"}
