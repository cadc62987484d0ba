"""Train from a run file in Python, and read the results of a run: `meshwright.train` and `meshwright.Run`.

A run that no launcher has started is trained by the command `meshwright train` in a process of its own. So a notebook
keeps no process group and no memory of the device, and a script needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import yaml
from pydantic import BaseModel

from meshwright.plugin import (
    SAFE_PYTHON,
    ConfigError,
    MeshwrightError,
    RankError,
    echo,
    exit_process,
    get_rank_variable,
    is_launched,
    join_launcher,
    list_checkpoints,
    parse_error,
    read_json_object,
    to_path_or_url,
    to_plain_data,
    to_yaml,
)

from .metrics_report import read_metrics, to_record
from .run_directory import RunDirectory
from .run_file import RunConfig, load_run

_SHOWN_RESULTS = ("train_loss", "held_out_loss")
"""Keys of the summary that `repr` shows."""


class Run:
    """Results of a run, read from its directory whenever they are asked for.

    Args:
        output_dir: the directory of a run that has started.

    Raises:
        ConfigError: it is not the directory of a run.
    """

    def __init__(self, output_dir: str | os.PathLike[str]) -> None:
        self.output_dir = Path(output_dir)
        self._paths = RunDirectory(self.output_dir)
        # The other ranks of a run may be on nodes that do not have its directory.
        if get_rank_variable() == "0" and not self._paths.run_file.is_file():
            raise ConfigError(
                f"{str(output_dir)!r} is not a run directory: it has no {self._paths.run_file.name}. Give the "
                f"output_dir of a run."
            )

    @property
    def config(self) -> RunConfig:
        """The run file, with all settings."""
        return load_run(self._paths.run_file)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One flat record of each step, for `pandas.DataFrame`; a nested value has a name such as `times.data`."""
        steps = read_metrics(self._paths.metrics, last_step=sys.maxsize, num_steps=0)
        return [_flatten(to_record(each)) for each in steps]

    @property
    def summary(self) -> dict[str, Any]:
        """The values of summary.json, such as `train_loss`; empty until the run has finished."""
        try:
            return read_json_object(self._paths.summary) if self._paths.summary.exists() else {}
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._paths.summary} cannot be read: {error}. Remove it to resume the run.") from None

    @property
    def model_dir(self) -> Path | None:
        """The trained model, a Hugging Face directory, or an adapter; None until the run has finished."""
        return self._paths.model if self._paths.model.is_dir() else None

    @property
    def checkpoints(self) -> list[Path | str]:
        """Paths or URLs of the checkpoints, oldest first."""
        storage = RunDirectory(self.output_dir, self.config.checkpoint).checkpoint_storage
        return [to_path_or_url(each) for each in reversed(list_checkpoints(storage))]

    def __repr__(self) -> str:
        parts = [repr(str(self.output_dir))]
        with suppress(MeshwrightError, OSError):
            summary = self.summary
            steps = summary.get("step"), summary.get("num_steps")
            parts.append(f"step {steps[0]} of {steps[1]}" if summary else "not finished")
            parts += [f"{key}={summary[key]:.6g}" for key in _SHOWN_RESULTS if isinstance(summary.get(key), float)]
        return f"Run({', '.join(parts)})"


def train(run_file: str | os.PathLike[str], settings: Mapping[str, Any] | None = None, /, **changes: Any) -> Run:
    """Train from a run file, as the command `meshwright train` does, and return the run.

    Starts the ranks of this node, or joins those that a launcher has started. In a rank of a launcher, a failure of the
    run is reported once and ends the process.

    Args:
        run_file: a YAML file.
        settings: settings to change, by their dotted names, such as `{"optimizer.lr": 1e-3}`.
        changes: settings of the top level to change, such as `steps=100`.

    Raises:
        ConfigError: the run file or a setting is not valid.
        MeshwrightError: the error that has ended the run.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        raise ConfigError(
            "this process has a process group, and a run opens its own. Call train outside of open_world; "
            "mw.fit trains in an open world."
        )
    join_launcher()
    assignments = [_format_assignment(name, value) for name, value in {**(settings or {}), **changes}.items()]
    config = load_run(Path(run_file), assignments)
    if is_launched():
        from .start import start_run

        if code := start_run(config):
            exit_process(code)
    else:
        _run_command(config, os.fspath(run_file), assignments)
    return Run(config.output_dir)


def _format_assignment(name: str, value: Any) -> str:
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else to_plain_data(value)
    try:
        return f"{name}={to_yaml(str(plain) if isinstance(plain, os.PathLike) else plain)}"
    except yaml.YAMLError:
        raise ConfigError(
            f"{name}={value!r:.200} cannot be written in a run file. Give a number, string, list, mapping or config."
        ) from None


def _run_command(config: RunConfig, run_file: str, assignments: Sequence[str]) -> None:
    """Run `meshwright train` in another process, and raise its error."""
    command = [*SAFE_PYTHON, "-m", "meshwright", "train", run_file]
    command += [word for each in assignments for word in ("--set", each)]
    # Only a terminal can show a progress bar; notebooks replace this stream.
    stdout = None if sys.stdout is sys.__stdout__ else subprocess.PIPE
    held: list[str] = []
    # Notebooks set these, but lines that are forwarded cannot move the cursor.
    env = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "CLICOLOR_FORCE")}
    with subprocess.Popen(
        command, stdout=stdout, stderr=subprocess.PIPE, env=env, text=True, errors="backslashreplace"
    ) as child:
        threads = [threading.Thread(target=_forward_errors, args=(child.stderr, held, not config.max_restarts))]
        if child.stdout is not None:
            threads.append(threading.Thread(target=_forward_lines, args=(child.stdout,)))
        for each in threads:
            each.start()
        was_interrupted = _wait(child)
        for each in threads:
            each.join()
    report = "".join(held)
    if was_interrupted:
        raise KeyboardInterrupt
    if child.returncode == 0:
        echo(report, stderr=True)
    else:
        raise parse_error(report) or RankError(
            f"the run in output_dir={config.output_dir!r} failed with exit code {child.returncode}. {report}"
        )


def _wait(child: subprocess.Popen[str]) -> bool:
    """Wait for a process; return whether an interrupt, which is passed on, has ended it."""
    was_interrupted = False
    while True:
        try:
            child.wait()
            return was_interrupted
        except KeyboardInterrupt:
            # A terminal has sent it to both, which counts as one; a second one ends the run at once.
            child.send_signal(signal.SIGINT)
            was_interrupted = True


def _forward_lines(stream: IO[str]) -> None:
    for line in stream:
        echo(line)


def _forward_errors(stream: IO[str], held: list[str], holds_error: bool) -> None:
    """Forward lines; with `holds_error`, keep the report of the error that ends the run, which is raised instead."""
    for line in stream:
        if holds_error and (held or line.startswith("error: ")):
            held.append(line)
        else:
            echo(line, stderr=True)


def _flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in record.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat
