"""What observers learn of a run, and what a run leaves behind of it: events, files of ranks, and pictures."""

from __future__ import annotations

import io
import json
import math
import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import runs
from support.commands import leave_launcher
from transformers import AutoModelForCausalLM

from meshwright.base.errors import ConfigError, MeshwrightError
from meshwright.base.validation import FrozenModel
from meshwright.events.run import Evaluation, Fault, RunInfo, RunSummary, SavedCheckpoint, TrackerSpec
from meshwright.events.step import StepResult
from meshwright.strategy.hooks import hookimpl
from meshwright.strategy.registry import Registry, get_registry
from meshwright.training.loop.step import Stopwatch
from meshwright_run.observers import list_trackers, resolve_trackers
from meshwright_run.run_directory import EVENTS, LOSS_CURVE, METRICS, RunDirectory
from meshwright_run.run_file import load_run
from meshwright_run.run_logs import RankLog, get_run_id
from meshwright_run.run_rank import run_rank
from meshwright_testing import pool

ORDER = ["start", "step", "evaluation", "step", "checkpoint", "step", "evaluation", "step", "checkpoint", "end"]
"""Of four steps with an evaluation and a checkpoint after every second."""


@dataclass
class Seen:
    """An observer that keeps what it is reported."""

    reported: list[tuple[str, Any]] = field(default_factory=list)

    @hookimpl
    def on_run_start(self, run: RunInfo, mesh: Any) -> None:
        assert str(mesh.degrees) == run.mesh
        self.reported.append(("start", run))

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        self.reported.append(("step", result))

    @hookimpl
    def on_evaluation(self, evaluation: Evaluation) -> None:
        self.reported.append(("evaluation", evaluation))

    @hookimpl
    def on_checkpoint(self, checkpoint: SavedCheckpoint) -> None:
        self.reported.append(("checkpoint", checkpoint))

    @hookimpl
    def on_fault(self, fault: Fault) -> None:
        self.reported.append(("fault", fault))

    @hookimpl
    def on_run_end(self, summary: RunSummary) -> None:
        self.reported.append(("end", summary))


class Fails:
    @hookimpl
    def on_run_start(self) -> None:
        raise RuntimeError("no room")


class FailsAtTheEnd:
    @hookimpl
    def on_run_end(self) -> None:
        raise RuntimeError("no room")


class Options(FrozenModel):
    """Of the trackers of these tests."""

    fails_in: str | None = None


class _Plugin:
    """Brings a tracker that writes what it gets into the directory of the run."""

    @hookimpl
    def register_trackers(self) -> list[TrackerSpec]:
        return [TrackerSpec("lines", "lines", Options, _Lines), TrackerSpec("dead", "fails", Options, _dead)]


class _Lines:
    def __init__(self, config: Options, run: RunInfo) -> None:
        self._fails_in, self._path = config.fails_in, Path(str(run.directory)) / "lines"
        self._write(f"rank {run.rank}")

    def _write(self, text: str) -> None:
        with self._path.open("a") as file:
            file.write(text + "\n")

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        if self._fails_in == "on_step_end" and result.step == 2:
            raise ConnectionError("the server is gone")
        self._write(f"step {result.step}")

    def close(self) -> None:
        self._write("closed")


def _dead(config: Options, run: RunInfo) -> Any:
    raise ConnectionError("no server")


def _rank(path: str, observers: Mapping[int, list[Any]], plugs: bool) -> tuple[list[Any], str, list[str]]:
    """What an observer of this rank was reported, the rank's error, and its warnings."""
    seen, rank = Seen(), torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    with ExitStack() as held, pytest.MonkeyPatch.context() as patch:
        warned = held.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        held.enter_context(redirect_stdout(io.StringIO()))
        held.enter_context(get_registry().observing(seen, *observers.get(rank, [])))
        if plugs:
            held.enter_context(get_registry().observing(_Plugin()))
        leave_launcher(patch)
        error = ""
        try:
            run_rank(None, load_run(path))
        except MeshwrightError as caught:
            error = str(caught)
        except RuntimeError as caught:
            error = f"raw: {caught}"
    return seen.reported, error, [str(each.message) for each in warned]


class Place(runs.RunWorkspace):
    """Runs in one directory, with observers."""

    def observe(
        self, *, ranks: int = 2, observers: Mapping[int, list[Any]] | None = None, plugs: bool = False, **changes: Any
    ) -> list[tuple[list[Any], str, list[str]]]:
        values = {"strategy": "fsdp2", "nproc": "auto", "steps": 4, "timeout_s": 20}
        values |= {"eval": {"every": 2, "max_sequences": 2}, "checkpoint": {"every": 2, "asynchronous": False}}
        return pool(ranks).run(_rank, str(self.write_run_file(**values | changes)), observers or {}, plugs)

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / name).read_text().splitlines()]


@pytest.fixture
def place(workplace: Path, tmp_path: Path) -> Place:
    return Place(workplace, tmp_path)


# -- hooks


def test_observers_of_every_rank_are_reported_the_whole_course(place: Place) -> None:
    seen = place.observe(optimizer={"lr": 1e-2, "weight_decay": 0.1}, metrics={"norms_every": 2, "per_rank": False})
    assert not (place.out / "ranks").exists()
    for rank, (reported, error, _) in enumerate(seen):
        assert not error
        assert [name for name, _ in reported] == ORDER
        assert all(each.rank == rank for _, each in reported)
        run, summary = reported[0][1], reported[-1][1]
        assert (run.start_step, run.num_steps, run.world_size, run.strategy, run.mesh) == (
            0,
            4,
            2,
            "fsdp2",
            "dp_shard=2",
        )
        assert run.directory == place.out
        assert run.config["steps"] == 4
        results = [each for name, each in reported if name == "step"]
        evaluations = [each for name, each in reported if name == "evaluation"]
        assert [each.evaluations for each in results[1::2]] == [each.losses for each in evaluations]
        assert [each.path.name for name, each in reported if name == "checkpoint"] == ["step-00000002", "step-00000004"]
        assert (summary.reason, summary.step, summary.loss) == ("done", 4, results[-1].loss)
        assert summary.evaluations == results[-1].evaluations
        model = AutoModelForCausalLM.from_pretrained(place.out / "model")
        assert run.num_parameters == sum(each.numel() for each in model.parameters())
        _check_parts(results)
    assert [each.get("norms", {}) for each in place.lines(METRICS)] == [each.block_grad_norms for each in results]


def _check_parts(results: list[StepResult]) -> None:
    """Times, rates, memory and norms of steps; norms are those of every second one."""
    for result in results:
        parts = {name: value for name, value in result.times.items() if name not in ("save", "evaluation", "norms")}
        assert set(parts) == {"data", "forward_backward", "clip", "read", "optimizer"}
        assert sum(parts.values()) == pytest.approx(result.seconds - result.times.get("norms", 0), rel=1e-9)
        assert set(result.learning_rates.values()) == {result.learning_rate}
        assert 2**20 < result.memory["host"] <= result.memory["host_peak"]
        assert result.tokens_per_second_per_device == result.tokens_per_second / 2
        assert result.flops is result.mfu is None
        assert bool(result.block_grad_norms) == (result.step % 2 == 0)
        if result.block_grad_norms:
            assert {"embedding", "model.layers.0", "model.layers.1"} <= set(result.block_grad_norms)
            assert math.hypot(*result.block_grad_norms.values()) == pytest.approx(result.grad_norm, rel=1e-5)
    further = [sorted({"save", "evaluation"} & set(each.times)) for each in results]
    assert further == [[], ["evaluation"], ["save"], ["evaluation"]]
    assert time.time() - 60 < results[0].end_time < results[1].end_time


def test_utilization_is_the_models_work_of_what_all_devices_could_do() -> None:
    result = StepResult(1, 1, 2.0, 1.0, 0.1, num_tokens=100, seconds=2.0, rank=0, world_size=4)
    assert result.mfu is None
    assert replace(result, flops=400.0, peak_flops=100.0).mfu == 400 / (2 * 100 * 4)


def test_what_fails_is_reported_as_a_fault_and_an_end(place: Place) -> None:
    for reported, error, _ in place.observe(observers={0: [], 1: []}, optimizer={"lr": 1e30}):
        names = [name for name, _ in reported]
        assert names[-2:] == ["fault", "end"]
        fault, summary = reported[-2][1], reported[-1][1]
        assert (fault.error_type, fault.message, summary.reason) == ("TrainingError", error, "failed")
        assert fault.step == summary.step == names.count("step")
    events = place.lines(EVENTS)
    assert [each["event"] for each in events[-2:]] == ["fault", "end"]
    assert events[-2]["error_type"] == "TrainingError"
    assert (place.out / LOSS_CURVE).stat().st_size > 5000


def test_an_observer_that_fails_at_the_start_is_reported_on_all_ranks(place: Place) -> None:
    errors = [error for _, error, _ in place.observe(observers={1: [Fails()]})]
    assert errors[1] == "raw: no room"
    assert "an observer fails at the start of the run: RuntimeError: no room" in errors[0]


# -- what is left behind


@pytest.mark.slow
def test_events_and_files_of_ranks_continue_with_a_run_that_is_resumed(place: Place) -> None:
    place.observe()
    first = [each["event"] for each in place.lines(EVENTS)]
    assert first == ["start", "startup_times", "evaluation", "checkpoint", "evaluation", "checkpoint", "end"]
    (startup,) = [each for each in place.lines(EVENTS) if each["event"] == "startup_times"]
    seconds = startup["seconds"]
    assert {"process group", "model", "sharding and weights", "first step", "total"} < seconds.keys()
    assert sum(each for part, each in seconds.items() if part != "total") == pytest.approx(seconds["total"], abs=0.02)
    assert min(seconds.values()) >= 0
    place.observe(steps=6)
    events = place.lines(EVENTS)
    starts = [each for each in events if each["event"] == "start"]
    assert [each["start_step"] for each in starts] == [0, 4]
    assert starts[0]["id"] == starts[1]["id"] == get_run_id(place.out / EVENTS)
    for rank in range(2):
        path = RunDirectory(place.out).get_rank_log_path(rank).relative_to(place.out)
        lines = place.lines(str(path))
        assert [each["step"] for each in lines] == [1, 2, 3, 4, 5, 6]
        assert all(each["memory"]["host"] > 2**20 and each["times"]["forward_backward"] > 0 for each in lines)
    metrics = place.lines(METRICS)
    assert [each["step"] for each in metrics] == [1, 2, 3, 4, 5, 6]
    # What was done before comes back whole.
    assert metrics[1]["times"]["evaluation"] > 0
    place.observe(steps=2, resume="never", overwrite=True)
    again = [each for each in place.lines(EVENTS) if each["event"] == "start"]
    assert len(again) == 1
    assert again[0]["id"] != starts[0]["id"]
    assert [each["step"] for each in place.lines(str(path))] == [1, 2]


def test_a_disk_that_takes_nothing_is_reported_once_and_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "ranks").write_text("a file")
    now = iter(range(0, 1000, 10))
    log = RankLog(RunDirectory(tmp_path).get_rank_log_path(3), clock=lambda: float(next(now)))
    result = StepResult(1, 1, 2.0, 1.0, 0.1, num_tokens=100, seconds=2.0, rank=3)
    with pytest.warns(UserWarning, match="cannot be written"):
        log.on_step_end(result)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            log.on_step_end(result)


# -- trackers


def test_a_tracker_runs_on_the_first_rank_is_closed_and_left_aside_once_it_fails(place: Place) -> None:
    assert not any(error for _, error, _ in place.observe(plugs=True, trackers=["lines"], steps=2))
    assert (place.out / "lines").read_text() == "rank 0\nstep 1\nstep 2\nclosed\n"
    (place.out / "lines").unlink()
    place.out = place.out / "failing"
    reported, error, warned = place.observe(plugs=True, trackers=[{"name": "lines", "fails_in": "on_step_end"}])[0]
    assert not error
    assert [name for name, _ in reported] == ORDER
    assert [each for each in warned if "tracker" in each] == [
        "tracker 'lines' failed in on_step_end and is disabled: ConnectionError: the server is gone. Training "
        "continues; metrics.jsonl has all metrics."
    ]
    assert (place.out / "lines").read_text() == "rank 0\nstep 1\nclosed\n"


def test_a_tracker_that_cannot_be_started_is_reported_on_all_ranks(place: Place) -> None:
    errors = {error for _, error, _ in place.observe(plugs=True, trackers=["dead"])}
    assert errors == {
        "tracker 'dead' cannot be started: ConnectionError: no server. Fix that, or remove it from trackers."
    }


def test_a_wrong_tracker_and_one_of_two_plugins_are_refused_by_name() -> None:
    registry = Registry([])
    registry.register(_Plugin(), name="lines (tests)")
    wrong: list[tuple[Any, str]] = [
        ("line", "tracker 'line' is not installed. Did you mean 'lines'? Installed: dead, lines."),
        ({"fails_in": "x"}, "tracker None is not installed."),
        ({"name": "lines", "fail_in": "x"}, "fail_in: unknown key. Did you mean 'fails_in'?"),
    ]
    for asked, reported in wrong:
        with pytest.raises(ConfigError) as caught:
            resolve_trackers([asked], registry)
        assert reported in str(caught.value)
    registry.register(_Plugin(), name="others (tests)")
    with pytest.raises(ConfigError, match="two plugins register a tracker"):
        list_trackers(registry)


# -- the stopwatch of an accelerator, on a made-up one


@dataclass
class _Event:
    device: list[float]
    at: float

    def query(self) -> bool:
        return self.device[1] >= self.at

    def elapsed_time(self, other: _Event) -> float:
        return (other.at - self.at) * 1e3


def test_parts_of_an_accelerator_are_reported_as_soon_as_they_are_known() -> None:
    # What has been issued, and what is done, in seconds of the device.
    device = [0.0, 0.0]
    watch = Stopwatch(lambda: _Event(device, device[0]), clock=lambda: 0.0)
    reported = []
    for forward, optimizer in ((2.0, 0.5), (3.0, 0.25)):
        watch.begin_step()
        watch.end_phase("data")
        for part, took in (("forward_backward", forward), ("clip", 1.0)):
            device[0] += took
            watch.end_phase(part)
        device[1] = device[0]
        watch.end_phase("read")
        device[0] += optimizer
        watch.end_phase("optimizer")
        reported.append({name: value for name, value in watch.pop_times().items() if value})
    assert reported == [
        {"forward_backward": 2.0, "clip": 1.0},
        {"forward_backward": 3.0, "clip": 1.0, "optimizer": 0.5},
    ]


@pytest.mark.slow
def test_an_observer_that_fails_at_the_end_does_not_hide_what_has_ended_the_run(place: Place) -> None:
    _, error, warned = place.observe(ranks=1, observers={0: [FailsAtTheEnd()]}, nproc=1, optimizer={"lr": 1e30})[0]
    assert "the loss is" in error
    assert any("an observer fails at the end of the run: RuntimeError: no room" in each for each in warned)


@pytest.mark.slow
def test_metrics_and_trackers_do_not_make_another_run(place: Place) -> None:
    place.observe(plugs=True)
    before = {path: path.read_bytes() for path in place.out.rglob("*") if path.is_file() and ".lock" not in path.name}
    reported, error, _ = place.observe(plugs=True, metrics={"per_rank": False}, trackers=["lines"])[0]
    assert not reported
    assert not error
    assert before == {path: path.read_bytes() for path in before}
