"""Tracker that writes event files for TensorBoard.

Source: tensorboard.summary.writer, event.proto, tensorboard.plugins.hparams.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.hparams import metadata as hparams
from tensorboard.plugins.text import metadata as texts
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from meshwright.plugin import EndReason, RunInfo

from .config import TensorBoardConfig
from .tracker import Tracker, flatten_parameters

_MAX_QUEUE_SIZE = 1000
"""Maximum number of events that wait for the library's thread; beyond it, a step waits."""
_FLUSH_S = 10
"""Time between flushes [s] if TensorFlow, which buffers, is installed; without it, events are written at once."""


class TensorBoardTracker(Tracker):
    """Write event files for TensorBoard, with the run file as text and as hyperparameters.

    The file of a resumed run marks earlier events from its first step on as void.
    """

    def __init__(self, config: TensorBoardConfig, run: RunInfo) -> None:
        directory = Path(config.log_dir) if config.log_dir else (run.directory or Path()) / "tensorboard"
        self._writer = EventFileWriter(str(directory), max_queue_size=_MAX_QUEUE_SIZE, flush_secs=_FLUSH_S)
        self._step = run.start_step
        # Harmless in a new run, which has no earlier events.
        started = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=run.start_step + 1, session_log=started))
        given = flatten_parameters(run)
        self._write_values([_make_text_value("run", _format_markdown_table(given))], step=run.start_step)
        self._write_values([_make_hparams_value(_make_session_start(run.id, given))], step=run.start_step)
        self._writer.flush()

    def log(self, values: Mapping[str, float], *, step: int, end_time: float) -> None:
        self._step = step
        self._write_values(
            [Summary.Value(tag=name, simple_value=value) for name, value in values.items()], step, end_time
        )

    def log_text(self, name: str, text: str, *, step: int) -> None:
        self._write_values([_make_text_value(name, text)], step=step)

    def finish(self, reason: EndReason, facts: Mapping[str, str | float]) -> None:
        self._write_values(
            [_make_text_value("end", _format_markdown_table(facts or {"end/reason": reason}))], step=self._step
        )
        if reason not in ("failed", "signal"):
            # TensorBoard keeps the first status, but a failed run may be resumed.
            ended = plugin_data_pb2.SessionEndInfo(status=api_pb2.STATUS_SUCCESS, end_time_secs=time.time())
            self._write_values(
                [_make_hparams_value(plugin_data_pb2.HParamsPluginData(session_end_info=ended))], step=self._step
            )
        self._writer.close()

    def _write_values(self, values: list[Summary.Value], step: int, end_time: float | None = None) -> None:
        wall_time = time.time() if end_time is None else end_time
        self._writer.add_event(Event(wall_time=wall_time, step=step, summary=Summary(value=values)))


def _make_text_value(name: str, text: str) -> Summary.Value:
    tensor = TensorProto(
        dtype=DT_STRING,
        string_val=[text.encode()],
        tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
    )
    return Summary.Value(tag=name, metadata=texts.create_summary_metadata(name, ""), tensor=tensor)


def _format_markdown_table(values: Mapping[str, object]) -> str:
    rows = [f"| {name} | {_escape_cell(value)} |" for name, value in values.items()]
    return "\n".join(["| key | value |", "|---|---|", *rows])


def _escape_cell(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _make_session_start(name: str, values: Mapping[str, object]) -> plugin_data_pb2.HParamsPluginData:
    info = plugin_data_pb2.SessionStartInfo(group_name=name, start_time_secs=time.time())
    for key, value in values.items():
        # A bool is an int in Python, but not a number in TensorBoard.
        if isinstance(value, bool):
            info.hparams[key].bool_value = value
        elif isinstance(value, int | float):
            info.hparams[key].number_value = value
        elif isinstance(value, str):
            info.hparams[key].string_value = value
    return plugin_data_pb2.HParamsPluginData(session_start_info=info)


def _make_hparams_value(data: plugin_data_pb2.HParamsPluginData) -> Summary.Value:
    starts = data.HasField("session_start_info")
    tag = hparams.SESSION_START_INFO_TAG if starts else hparams.SESSION_END_INFO_TAG
    described: SummaryMetadata = hparams.create_summary_metadata(data)
    return Summary.Value(tag=tag, metadata=described, tensor=hparams.NULL_TENSOR)
