"""What a trace comes to, by traces made up so that the answer is known by hand; and what is no trace."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.base.errors import ConfigError
from meshwright.cli import main as cli
from meshwright_run.profile.config import ProfileConfig, check_profile
from meshwright_run.profile.show import compare
from meshwright_run.profile.summary import as_values, from_values, load_summary, own_seconds, summarized, timeline
from meshwright_run.profile.trace import (
    Span,
    activity,
    common,
    exposed_communication,
    length,
    read_trace,
    union,
    without,
)

MAIN, GLOO, STREAM, NCCL_STREAM = 1, 2, 7, 20


def _operator(name: str, start: float, end: float, thread: int = MAIN, **details: Any) -> Span:
    return Span(name, "cpu_op", start, end, thread, details=details)


def _mark(name: str, start: float, end: float) -> Span:
    return Span(f"meshwright::{name}", "user_annotation", start, end, MAIN)


def _gloo(name: str, start: float, end: float, thread: int = GLOO, details: dict[str, Any] | None = None) -> Span:
    return Span(f"gloo:{name}", "user_annotation", start, end, thread, details=details or {})


def _kernel(name: str, start: float, end: float, stream: int = STREAM, **more: Any) -> Span:
    return Span(name, "kernel", start, end, stream, **more)


# -- stretches of time


def test_stretches_of_time_are_what_counting_moments_says() -> None:
    draw = random.Random(3)
    for _ in range(200):
        one, two = (
            union((start, start + draw.randrange(5)) for start in draw.choices(range(40), k=draw.randrange(8)))
            for _ in range(2)
        )
        first, second = ({moment for a, b in each for moment in range(int(a), int(b))} for each in (one, two))
        for found, expected in ((common(one, two), first & second), (without(one, two), first - second), (one, first)):
            assert {moment for a, b in found for moment in range(int(a), int(b))} == expected
            assert length(found) == len(expected)
            assert all(a < b for a, b in found)


# -- exposed communication


def test_on_a_cpu_exposed_is_what_gloo_takes_while_the_main_thread_runs_no_operator() -> None:
    spans = [
        _mark("step 1", 0, 10),
        _operator("c10d::allreduce_", 0.5, 1),
        _gloo("all_reduce", 1, 6),
        _operator("aten::mm", 2, 4),
        _operator("aten::resolve_conj", 2, 2.1),
        # What a thread of gloo does itself is its message's work.
        _operator("aten::copy_", 4.5, 5.5, GLOO),
        # A second message overlaps with the first.
        _gloo("all_gather", 5, 7, 3),
    ]
    # From 1 to 2, and from 4 to 7.
    assert exposed_communication(spans) == pytest.approx(4)
    assert not activity(spans).is_on_device


def test_an_operator_that_waits_for_messages_computes_nothing_though_another_is_around_it() -> None:
    spans = [
        _operator("aten::add", 0, 10),
        _operator("_c10d_functional::wait_tensor", 1, 9),
        _gloo("all_reduce", 0, 9),
        _operator("autograd::engine::evaluate_function: MmBackward0", 10, 20),
        _operator("MmBackward0", 10, 20),
        _operator("aten::mm", 10, 12),
        _gloo("all_gather", 10, 19),
    ]
    assert exposed_communication(spans) == pytest.approx(8 + 7)


def test_what_is_compiled_computes() -> None:
    spans = [_gloo("all_reduce", 0, 10), _operator("aten::mm", 0, 1), _operator("Torch-Compiled Region: 0/0", 2, 5)]
    assert exposed_communication(spans) == pytest.approx(6)


def test_on_a_gpu_exposed_is_what_nccl_takes_while_no_other_kernel_or_copy_runs() -> None:
    spans = [
        # The host's operators say nothing of the device.
        _operator("aten::mm", 0, 100),
        _kernel("ampere_sgemm_128x64_tn", 0, 4),
        _kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 3, 9, NCCL_STREAM),
        _kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 8, 12, 21),
        Span("Memcpy DtoD", "gpu_memcpy", 10, 11, STREAM),
        # An annotation of the device's timeline is no work.
        Span("nccl:all_gather", "gpu_user_annotation", 3, 9, NCCL_STREAM),
    ]
    # From 4 to 10, and from 11 to 12.
    assert exposed_communication(spans) == pytest.approx(7)
    assert activity(spans).is_on_device


def test_without_messages_nothing_is_exposed() -> None:
    assert (exposed_communication([_operator("aten::mm", 0, 1)]), exposed_communication([])) == (0, 0)


# -- summaries


def test_time_within_is_not_counted_twice() -> None:
    outer, first = _operator("a", 0, 10), _operator("b", 1, 4)
    inner, second = _operator("c", 2, 3), _operator("b", 5, 9)
    other = _operator("a", 2, 3, GLOO)
    found = {id(span): seconds for span, seconds in own_seconds([second, inner, other, outer, first])}
    assert [found[id(each)] for each in (outer, first, inner, second, other)] == [3, 2, 1, 4, 1]


def _trace_file(path: Path, spans: list[Span], memory: Sequence[tuple[float, int, int]] = (), **about: Any) -> Path:
    events: list[dict[str, Any]] = [
        {
            "ph": "X",
            "cat": span.kind,
            "name": span.name,
            "tid": span.thread,
            "ts": span.start * 1e6,
            "dur": (span.end - span.start) * 1e6,
            "args": {**span.details, **({"External id": span.operator} if span.operator else {})},
        }
        for span in spans
    ]
    events += [
        {
            "ph": "i",
            "cat": "cpu_instant_event",
            "name": "[memory]",
            "tid": MAIN,
            "ts": at * 1e6,
            "args": {"Bytes": size, "Total Allocated": total, "Device Type": 0},
        }
        for at, size, total in memory
    ]
    events.append({"ph": "M", "name": "process_name", "pid": 3, "args": {"name": "python"}})
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events, "meshwright": about}, file)
    return path


TWO_STEPS = [
    _mark("step 4", 0, 10),
    _mark("data", 0, 1),
    _mark("forward_backward", 1, 10),
    _operator("aten::mm", 1, 5),
    _gloo("all_reduce", 4, 8, details={"Input Dims": [[3, 2], []], "Input type": ["float", "Scalar"]}),
    _mark("save", 10, 12),
    _mark("step 5", 12, 20),
    _mark("data", 12, 13),
    _mark("forward_backward", 13, 19),
    _operator("aten::mm", 13, 17),
    _operator("aten::add", 17, 18),
    _gloo("all_reduce", 13, 14, details={"Input Dims": [[10]], "Input type": ["double"]}),
]


def test_a_window_is_divided_among_computing_exposed_communication_and_the_host(tmp_path: Path) -> None:
    found = summarized(read_trace(_trace_file(tmp_path / "rank-00000.json.gz", TWO_STEPS, run="a run")))
    assert (found.steps, found.count, found.about["run"]) == ([4, 5], 2, "a run")
    seconds = (found.seconds, found.computing_seconds, found.exposed_seconds, found.host_seconds)
    assert (seconds, found.communication_seconds) == (pytest.approx((20, 9, 3, 8)), pytest.approx(5))
    parts = {
        row.name: (row.calls, row.seconds, row.computing_seconds, row.exposed_seconds, row.host_seconds)
        for row in found.parts
    }
    assert parts["data"] == pytest.approx((2, 2, 0, 0, 2))
    assert parts["forward_backward"] == pytest.approx((2, 15, 9, 3, 3))
    assert parts["save"] == pytest.approx((1, 2, 0, 0, 2))
    assert parts["between"] == pytest.approx((1, 1, 0, 0, 1))
    assert sum(row.seconds for row in found.parts) == pytest.approx(found.seconds)
    (operator, other) = found.operators
    assert (operator.name, operator.calls, operator.seconds) == ("aten::mm", 2, pytest.approx(8))
    assert other.name == "aten::add"
    (row,) = found.communication
    assert (row.name, row.calls, row.bytes) == ("gloo:all_reduce", 2, 6 * 4 + 10 * 8)
    assert (row.seconds, row.exposed_seconds) == pytest.approx((5, 3))


def test_kernels_are_those_of_the_operators_that_have_launched_them(tmp_path: Path) -> None:
    nccl = {"In msg nelems": 100, "dtype": "BFloat16", "Collective name": "_allgather_base"}
    spans = [
        Span("aten::mm", "cpu_op", 0, 0.5, MAIN, operator=8),
        Span("aten::addmm", "cpu_op", 1, 1.5, MAIN, operator=9),
        _kernel("gemm", 1, 3, operator=8),
        _kernel("gemm", 3, 4, operator=9),
        _kernel("gemm", 4, 5, operator=9),
        _kernel("ncclDevKernel_AllGather_RING_LL(args)", 5, 7, details=nccl),
    ]
    found = summarized(read_trace(_trace_file(tmp_path / "trace.json.gz", spans)))
    times = {row.name: (row.seconds, row.device_seconds) for row in found.operators}
    assert times["aten::mm"] == pytest.approx((0.5, 2))
    assert times["aten::addmm"] == pytest.approx((0.5, 2))
    assert found.is_on_device
    (row,) = found.communication
    assert (row.name, row.bytes, found.exposed_seconds) == ("nccl:AllGather", 200, pytest.approx(2))


def test_memory_is_told_at_its_peak_by_part_and_by_who_took_it(tmp_path: Path) -> None:
    spans = [
        _mark("step 1", 0, 10),
        _mark("forward_backward", 1, 5),
        _mark("optimizer", 5, 10),
        _operator("aten::mm", 1, 3),
        _operator("aten::empty", 1.5, 2.5),
        _operator("aten::add", 4, 6),
        _operator("aten::sqrt", 6.5, 7.5),
    ]
    memory = [(2, 100, 100), (4.5, 50, 150), (5.5, -100, 50), (7, 10, 60)]
    trace = read_trace(_trace_file(tmp_path / "rank-00000.json.gz", spans, memory))
    peak = summarized(trace).memory
    assert (peak.bytes, peak.part, peak.operator) == (150, "forward_backward", "aten::add")
    # What was held when a part began counts.
    assert peak.parts == {"forward_backward": 150, "optimizer": 150}
    told = timeline(trace)
    assert told["taken_by_operator"] == {"aten::mm": 100, "aten::add": 50, "aten::sqrt": 10}
    assert (told["seconds"], told["bytes"]) == (pytest.approx([2, 4.5, 5.5, 7]), [100, 150, 50, 60])


def test_a_summary_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = summarized(read_trace(_trace_file(tmp_path / "t.json.gz", TWO_STEPS, [(1, 5, 5)], run="x")))
    assert from_values(json.loads(json.dumps(as_values(found))), Path("summary.json")) == found


# -- comparisons


def test_a_comparison_is_by_step_and_by_the_size_of_the_difference(tmp_path: Path) -> None:
    one_step = [
        _mark("step 9", 0, 16),
        _mark("forward_backward", 0, 16),
        _operator("aten::mm", 0, 2),
        _operator("aten::softmax", 2, 12),
        _operator("aten::softmax", 12, 13),
    ]
    paths = [_trace_file(tmp_path / name, spans) for name, spans in (("a.json.gz", TWO_STEPS), ("b.json.gz", one_step))]
    found = compare(load_summary(paths[0]), load_summary(paths[1]), ("a", "b"))
    assert [(row.name, row.before, row.after) for row in found.operators] == [
        ("aten::softmax", 0, pytest.approx(11)),
        ("aten::mm", pytest.approx(4), pytest.approx(2)),
        ("aten::add", pytest.approx(0.5), 0),
    ]
    assert found.operators[0].calls == (0, 2)
    assert found.operators[1].calls == (1, 1)
    whole = {row.name: row.seconds for row in found.whole}
    assert whole["time"] == pytest.approx(16 - 10)
    assert whole["exposed communication"] == pytest.approx(-1.5)
    parts = {row.name: row.seconds for row in found.parts}
    assert parts["forward_backward"] == pytest.approx(16 - 7.5)
    output = CliRunner().invoke(cli.app, ["profile", "compare", *map(str, paths)]).output
    (softmax,) = [line for line in output.splitlines() if "aten::softmax" in line]
    assert "+11,000" in softmax
    assert "new" in softmax
    assert "gone" in next(line for line in output.splitlines() if "aten::add" in line)


def test_the_command_shows_the_profile_of_a_run_directory_and_of_a_file(tmp_path: Path) -> None:
    directory = tmp_path / "run" / "profile"
    directory.mkdir(parents=True)
    for rank in (1, 3):
        _trace_file(directory / f"rank-{rank:05}.json.gz", TWO_STEPS, rank=rank, world_size=4, run=f"run {rank}")
    for arguments, run in (
        ([str(tmp_path / "run")], "run 1"),
        ([str(tmp_path / "run"), "--rank", "3"], "run 3"),
        ([str(directory)], "run 1"),
        ([str(directory / "rank-00003.json.gz")], "run 3"),
    ):
        written = tmp_path / "out.json"
        done = CliRunner().invoke(cli.app, ["profile", "show", *arguments, "--json", str(written)])
        assert done.exit_code == 0, done.output
        assert f"profile of {run}" in done.output
        assert "exposed communication 15.0 %" in done.output
        assert json.loads(written.read_text())["exposed_seconds"] == pytest.approx(3)
        shown_again = CliRunner().invoke(cli.app, ["profile", "show", str(written)])
        assert shown_again.exit_code == 2, "a file that is not called summary is read as a trace"
    picture = tmp_path / "picture.svg"
    done = CliRunner().invoke(cli.app, ["profile", "show", str(directory), "--rows", "1", "--svg", str(picture)])
    assert "exposed" in picture.read_text()
    assert "@font-face" not in picture.read_text()
    unwritable = CliRunner().invoke(cli.app, ["profile", "show", str(directory), "--svg", str(tmp_path)])
    assert unwritable.exit_code == 2
    assert "aten::mm" in done.output
    assert "1 others" in done.output


# -- what is no trace


def test_what_is_no_trace_is_refused_with_what_to_give_instead(tmp_path: Path) -> None:
    whole = gzip.compress(json.dumps({"traceEvents": []}).encode())
    files = {
        "text.json.gz": (b"step: 1", "it is not JSON"),
        "list.json": (b"[1, 2]", "it has no list traceEvents"),
        "other.json": (b'{"traceEvents": 3}', "it has no list traceEvents"),
        "empty.json": (b'{"traceEvents": []}', "holds no event that lasts"),
        "odd.json": (b'{"traceEvents": [3]}', "an event of it is malformed"),
        "words.json": (b'{"traceEvents": [{"ph": "X", "name": "a", "ts": "x", "dur": 1}]}', "is malformed"),
        "cut.json.gz": (whole[:-9], "cannot unpack"),
        "summary.json": (b'{"strategy": "ddp"}', "is no summary of a profile"),
        "summary-steps-1-2.json": (b'{"profile_summary": 99}', "of format 99"),
        "summary-steps-3-4.json": (b'{"profile_summary": 1}', "is no whole summary"),
    }
    for name, (content, wrong) in files.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=wrong) as caught:
            load_summary(path)
        assert str(path) in str(caught.value)
    with pytest.raises(ConfigError, match="is not there"):
        load_summary(tmp_path / "nothing")
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match=r"holds no profile.*profile\.steps"):
        load_summary(tmp_path / "run")
    _trace_file(tmp_path / "run" / "rank-00002.json.gz", TWO_STEPS)
    with pytest.raises(ConfigError, match=r"no profile of rank 1\. It has those of 2\."):
        load_summary(tmp_path / "run", rank=1)
    with pytest.raises(ConfigError, match="chooses among the traces of a directory"):
        load_summary(tmp_path / "run" / "rank-00002.json.gz", rank=1)
    done = CliRunner().invoke(cli.app, ["profile", "show", str(tmp_path / "nothing")])
    assert done.exit_code == 2


# -- the section


def test_windows_are_in_order_within_the_run_and_on_ranks_that_are_there() -> None:
    several = ProfileConfig(steps=[[1, 2], [5, 5]], ranks=[3, 1])
    assert several.windows == [(1, 2), (5, 5)]
    assert (several.teller, several.takes(3), several.takes(0)) == (1, True, False)
    assert ProfileConfig(steps=[10, 12]).windows == [(10, 12)]
    assert ProfileConfig(steps=[1, 1], ranks="all").takes(7)
    for steps, wrong in (
        ([3, 2], "ends before it begins"),
        ([[1, 4], [4, 5]], "share no step"),
        ([], "names no step"),
        ([0, 1], "greater than or equal to 1"),
    ):
        with pytest.raises(ValueError, match=wrong):
            ProfileConfig(steps=steps)
    with pytest.raises(ValueError, match="names no rank"):
        ProfileConfig(steps=[1, 1], ranks=[])
    check_profile(None, steps=1, world_size=1)
    check_profile(several, steps=5, world_size=4)
    with pytest.raises(ConfigError, match=r"profile\.steps=\[5, 5\] ends behind the last step of the run, 4"):
        check_profile(several, steps=4, world_size=4)
    with pytest.raises(ConfigError, match=r"profile\.ranks=\[3, 1\] names a rank that is not there: 3 ranks"):
        check_profile(several, steps=5, world_size=3)
