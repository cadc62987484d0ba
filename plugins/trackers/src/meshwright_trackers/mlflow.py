"""Tracker that logs to MLflow. Source: mlflow.MlflowClient."""

from __future__ import annotations

import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import mlflow
from mlflow.entities import Metric, Param, RunTag

from meshwright.plugin import EndReason, RunInfo

from .config import MLflowConfig
from .tracker import BackgroundSender, Tracker, flatten_parameters

RUN_ID_TAG = "meshwright.run_id"
STATUS_BY_REASON = {"failed": "FAILED", "signal": "KILLED"}
"""MLflow status of a run by the reason for its end; FINISHED for other reasons."""
HEALTH_CHECK_TIMEOUT_S = 10.0

# MLflow's limits of the size of a batch, and of the length of a value.
_MAX_METRICS, _MAX_PARAMS, _MAX_TAGS = 1000, 100, 100
_MAX_PARAM_LENGTH, _MAX_TAG_LENGTH = 6000, 8000

_Item: TypeAlias = "Metric | RunTag | str"
"""A str is the final status of the run."""


class MLflowTracker(Tracker):
    """Log to a run of MLflow, which has a tag with the id of the meshwright run. A thread sends the values."""

    def __init__(self, config: MLflowConfig, run: RunInfo) -> None:
        directory = (run.directory or Path()).absolute()
        uri = config.tracking_uri
        if uri is None:
            uri = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else f"sqlite:///{directory / 'mlflow.db'}"
        _check_reachable(uri)
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self._timeout_s = config.flush_timeout_s
        experiment = _get_or_create_experiment(self._client, config, directory)
        self._run_id = _get_or_create_run(self._client, experiment, config, run)
        _log_parameters(self._client, self._run_id, run)
        self._background: BackgroundSender[_Item] = BackgroundSender(self._send, name="mlflow")

    def log(self, values: Mapping[str, float], *, step: int, end_time: float) -> None:
        milliseconds = int(end_time * 1000)
        self._background.put(*(Metric(_escape_name(name), value, milliseconds, step) for name, value in values.items()))

    def log_text(self, name: str, text: str, *, step: int) -> None:
        self._background.put(RunTag(f"meshwright.{_escape_name(name)}", text[:_MAX_TAG_LENGTH]))

    def finish(self, reason: EndReason, facts: Mapping[str, str | float]) -> None:
        tags = [RunTag(f"meshwright.{name}", str(value)) for name, value in facts.items()]
        self._background.put(*tags, STATUS_BY_REASON.get(reason, "FINISHED"))
        self._background.finish(self._timeout_s)

    def _send(self, items: Sequence[_Item]) -> None:
        metrics = [each for each in items if isinstance(each, Metric)]
        tags = {each.key: each for each in items if isinstance(each, RunTag)}
        for start in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MAX_METRICS])
        if tags:
            self._client.log_batch(self._run_id, tags=list(tags.values())[:_MAX_TAGS])
        for status in (each for each in items if isinstance(each, str)):
            self._client.set_terminated(self._run_id, status=status)


def _check_reachable(uri: str) -> None:
    """Raise OSError if the server does not respond, since the client itself would retry for minutes."""
    if not uri.startswith(("http://", "https://")):
        return
    parts = urllib.parse.urlsplit(uri)
    # urllib does not support a user and password in the host.
    host = parts.netloc.rpartition("@")[2]
    health = urllib.parse.urlunsplit((parts.scheme, host, f"{parts.path.rstrip('/')}/health", "", ""))
    try:
        urllib.request.urlopen(health, timeout=HEALTH_CHECK_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        # The server responds. The client reports errors of its requests.
        return


def _get_or_create_experiment(client: Any, config: MLflowConfig, directory: Path) -> str:
    found = client.get_experiment_by_name(config.experiment)
    if found is not None:
        return str(found.experiment_id)
    # A file store would create the directory of artifacts in the working directory.
    location = None if client.tracking_uri.startswith("http") else (directory / "mlartifacts").as_uri()
    return str(client.create_experiment(config.experiment, artifact_location=location))


def _get_or_create_run(client: Any, experiment: str, config: MLflowConfig, run: RunInfo) -> str:
    tags = {RUN_ID_TAG: run.id, **config.tags}
    found = client.search_runs([experiment], f"tags.`{RUN_ID_TAG}` = '{run.id}'", max_results=1)
    if not found:
        return str(client.create_run(experiment, tags=tags, run_name=config.run_name or run.name).info.run_id)
    run_id = str(found[0].info.run_id)
    client.update_run(run_id, status="RUNNING")
    client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])
    return run_id


def _log_parameters(client: Any, run_id: str, run: RunInfo) -> None:
    """Log parameters. MLflow does not allow changes, so a parameter that differs in a resumed run becomes a tag."""
    known = client.get_run(run_id).data.params
    wanted = {_escape_name(name): str(value)[:_MAX_PARAM_LENGTH] for name, value in flatten_parameters(run).items()}
    missing = [Param(name, value) for name, value in wanted.items() if name not in known]
    changed = [RunTag(f"changed.{name}", value) for name, value in wanted.items() if known.get(name, value) != value]
    for start in range(0, len(missing), _MAX_PARAMS):
        client.log_batch(run_id, params=missing[start : start + _MAX_PARAMS])
    for start in range(0, len(changed), _MAX_TAGS):
        client.log_batch(run_id, tags=changed[start : start + _MAX_TAGS])


def _escape_name(name: str) -> str:
    """Replace each character that MLflow rejects with its hexadecimal code point."""
    return re.sub(r"[^\w\-. :/]", lambda match: f"_{ord(match[0]):x}_", name, flags=re.ASCII)
