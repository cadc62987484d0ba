"""Profiles of real runs, what their faults leave behind, and exposed communication that is known beforehand."""

from __future__ import annotations

import gzip
import json
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.commands import write_run
from support.runs import RunWorkspace

from meshwright import ConfigError, Loop, MeshwrightError, StepResult, fit
from meshwright._compat.torch import is_profiling, record_if_profiling
from meshwright.strategy.registry import get_registry
from meshwright.testing import Case
from meshwright_run.preflight import preflight
from meshwright_run.profile.recorder import (
    NO_CONTEXT,
    CommunicationSampler,
    FaultFileWriter,
    get_profiler_activities,
    read_spans,
    warm_up_profiler,
)
from meshwright_run.profile.summary import load_summary
from meshwright_run.profile.trace import measure_exposed_communication, read_trace
from meshwright_run.run_file import load_run
from meshwright_testing import pool
from meshwright_testing.case import rank_microbatches
from meshwright_testing.parity import build_manager

PARTS = {"data", "forward_backward", "clip", "read", "optimizer"}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("profiles")
    write_run(directory)
    return directory


@pytest.mark.slow
def test_a_run_profiles_the_steps_and_the_ranks_that_were_chosen(workplace: Path, tmp_path: Path) -> None:
    place = RunWorkspace(workplace, tmp_path)
    asked = {"steps": [2, 3], "ranks": [1], "memory": True}
    more = {"eval": {"every": 2, "max_sequences": 2}, "profile": asked}
    _, error, code = place.run(ranks=2, strategy="fsdp2", steps=4, **more)
    assert code == 0, error
    names = {each.name for each in (place.out / "profile").iterdir()}
    assert names == {"rank-00001-memory.json", "rank-00001.json.gz", "summary.json", "summary.txt"}
    path = place.out / "profile" / "rank-00001.json.gz"
    with gzip.open(path, "rt") as file:
        assert (about := json.load(file)["meshwright"]).items() >= {"world_size": 2, "rank": 1, "last_step": 3}.items()
    assert about["window"] == [2, 3]
    spans = read_trace(path).spans
    assert all("Input Dims" in each.details for each in spans if each.name == "aten::mm")
    summary = load_summary(path)
    assert summary.steps == [2, 3]
    parts = {row.name: row for row in summary.phases}
    # Saved and evaluated after step 2, and restarted: what follows step 3 is not in the window.
    assert set(parts) == PARTS | {"save", "evaluation", "between"}
    assert [parts[name].calls for name in ("forward_backward", "optimizer", "save", "evaluation")] == [2, 2, 1, 1]
    whole = summary.computing_seconds + summary.exposed_seconds + summary.host_seconds
    assert whole == pytest.approx(summary.seconds)
    assert sum(row.seconds for row in summary.phases) == pytest.approx(summary.seconds)
    gathers = next(row for row in summary.communication if row.name == "gloo:all_gather")
    assert (gathers.bytes or 0) > 0
    assert load_summary(place.out / "profile" / "summary.json") == summary
    memory = json.loads((place.out / "profile" / "rank-00001-memory.json").read_text())
    assert memory["peak_bytes"] == max(memory["bytes"]) > 0
    assert summary.memory.phase == "forward_backward"


@pytest.mark.slow
def test_a_resumed_run_profiles_what_is_left_of_its_windows(workplace: Path, tmp_path: Path) -> None:
    place, asked = RunWorkspace(workplace, tmp_path), {"steps": [[1, 2], [4, 6]], "record_shapes": False}
    _, error, code = place.run(kill_after=5, profile=asked)
    assert code == 137, error
    first = place.out / "profile" / "rank-00000-steps-1-2.json.gz"
    assert load_summary(first).steps == [1, 2]
    assert not any("Input Dims" in each.details for each in read_trace(first).spans)
    before = first.read_bytes()
    place.run_successfully(profile=asked)  # it continues after step 4
    assert first.read_bytes() == before
    assert load_summary(place.out / "profile" / "rank-00000-steps-4-6.json.gz").steps == [5, 6]
    # They are not of the run that takes its place, which has another profile.
    place.run_successfully(steps=1, resume="never", overwrite=True, profile={"steps": [1, 1], "with_stack": True})
    names = {each.name for each in (place.out / "profile").iterdir()}
    assert names == {"rank-00000.json.gz", "summary.json", "summary.txt"}
    spans = read_trace(place.out / "profile" / "rank-00000.json.gz").spans
    assert "python_function" in {each.kind for each in spans}
    assert not (place.out / "faults").exists()


def test_a_window_beyond_the_last_step_is_refused_before_anything_starts(workplace: Path, tmp_path: Path) -> None:
    place = RunWorkspace(workplace, tmp_path)
    config = load_run(place.write_run_file(steps=4, profile={"steps": [3, 5]}))
    with pytest.raises(ConfigError, match=r"profile\.steps=\[3, 5\] ends after the last step of the run, 4"):
        preflight(config, 1)
    assert not place.out.exists()


def test_steps_that_nobody_looks_at_are_surrounded_by_nothing(tmp_path: Path) -> None:
    sampler = CommunicationSampler(4, torch.device("cpu"))
    assert [index for index in range(12) if sampler.step_context(index) is not NO_CONTEXT] == [3, 7, 11]
    assert sampler.read_times() == {}
    assert not is_profiling()
    assert isinstance(record_if_profiling("data"), nullcontext)
    # Private names of torch that are used on a GPU alone.
    assert callable(torch.cuda.memory._record_memory_history)
    assert callable(torch.cuda.memory._dump_snapshot)


def _delayed(delay_s: float) -> tuple[float, float, float]:
    """Of a message that rank 1 joins late: when this rank was there, when it had it, and what was exposed."""
    rank = dist.get_rank()
    device = torch.device("cpu")
    warm_up_profiler(device)
    tensor, matrix = torch.ones(1000), torch.ones(64, 64)
    dist.all_reduce(tensor)
    with (
        torch.profiler.profile(activities=get_profiler_activities(device)) as profiler,
        record_if_profiling("meshwright::step 1"),
    ):
        matrix @ matrix
        if rank == 1:
            time.sleep(delay_s)
        there = time.time()
        dist.all_reduce(tensor)
        had = time.time()
    return there, had, measure_exposed_communication(read_spans(profiler))


def test_the_wait_for_a_rank_that_is_late_is_exposed_to_some_milliseconds() -> None:
    (there, had, exposed), (came, _, of_late) = pool(2).run(_delayed, 0.4)
    assert had - there > 0.3
    # Some milliseconds; on a machine with more to do than cores, threads are not there at once.
    assert exposed == pytest.approx(had - there, abs=0.05)
    assert exposed == pytest.approx(came - there, abs=0.1)
    assert of_late < 0.2


@pytest.mark.slow
def test_a_run_file_asks_for_exposed_communication(workplace: Path, tmp_path: Path) -> None:
    place = RunWorkspace(workplace, tmp_path)
    _, error, code = place.run(ranks=2, strategy="fsdp2", steps=6, metrics={"communication_every": 2})
    assert code == 0, error
    lines = [json.loads(line) for line in (place.out / "metrics.jsonl").read_text().splitlines()]
    exposed = {line["step"]: line["times"].get("exposed_communication") for line in lines}
    assert [step for step, seconds in exposed.items() if seconds is not None] == [4, 6]
    assert all(0 < exposed[step] < lines[step - 1]["seconds"] for step in (4, 6))


def _breaks(result: StepResult) -> None:
    if result.rank == 0:
        raise ValueError("a callback of one rank is broken")


def _faulty(directory: str) -> str:
    case = Case()
    manager = build_manager("ddp", {}, {}, case)
    mesh = manager.mesh
    dist.all_reduce(torch.ones(5))
    loop = Loop(
        batches=lambda step: rank_microbatches(case, step, mesh.data_rank, mesh.data_size), steps=2, callbacks=[_breaks]
    )
    with pytest.raises((ValueError, MeshwrightError)) as caught:
        with get_registry().observing(FaultFileWriter(Path(directory), mesh.rank)):
            fit(manager, loop)
    return caught.type.__name__


@pytest.mark.slow
def test_each_rank_that_a_fault_ends_leaves_its_last_collectives_and_stacks(tmp_path: Path) -> None:
    assert pool(2).run(_faulty, str(tmp_path)) == ["ValueError", "TrainingError"]
    names = {path.name for path in (tmp_path / "faults").iterdir()}
    for rank, kind in enumerate(("ValueError", "TrainingError")):
        name = f"rank-{rank:05}"
        assert {f"{name}.json", f"{name}-gloo.pickle", f"{name}-stacks.txt"} <= names
        reported = json.loads((tmp_path / "faults" / f"{name}.json").read_text())
        assert (reported["fault"]["error_type"], reported["fault"]["rank"]) == (kind, rank)
        entries = reported["collectives"]["gloo"]["entries"]
        assert any(each["input_sizes"] == [[5]] and each["profiling_name"] == "gloo:all_reduce" for each in entries)
        assert "_faulty" in (tmp_path / "faults" / f"{name}-stacks.txt").read_text()
