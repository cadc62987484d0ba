"""What a trace comes to, by traces made up so that the answer is known by hand; and what is no trace."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.commands import invoke_in_process

from meshwright.base.errors import ConfigError
from meshwright_run.profile import trace as traces
from meshwright_run.profile.config import ProfileConfig, check_profile
from meshwright_run.profile.render import compare_profiles
from meshwright_run.profile.summary import (
    build_memory_timeline,
    iter_self_times,
    load_summary,
    summarize_trace,
    summary_from_dict,
    summary_to_dict,
)
from meshwright_run.profile.trace import TraceSpan, measure_activity, measure_exposed_communication, read_trace

MAIN, GLOO, STREAM, NCCL_STREAM = 1, 2, 7, 20


def _operator(name: str, start: float, end: float, thread: int = MAIN, **details: Any) -> TraceSpan:
    return TraceSpan(name, "cpu_op", start, end, thread, details=details)


def _mark(name: str, start: float, end: float) -> TraceSpan:
    return TraceSpan(f"meshwright::{name}", "user_annotation", start, end, MAIN)


def _gloo(name: str, start: float, end: float, thread: int = GLOO, details: dict[str, Any] | None = None) -> TraceSpan:
    return TraceSpan(f"gloo:{name}", "user_annotation", start, end, thread, details=details or {})


def _kernel(name: str, start: float, end: float, stream: int = STREAM, **more: Any) -> TraceSpan:
    return TraceSpan(name, "kernel", start, end, stream, **more)


def test_stretches_of_time_are_what_counting_moments_says() -> None:
    draw = random.Random(3)
    for _ in range(200):
        one, two = (
            traces.merge_intervals(
                (start, start + draw.randrange(5)) for start in draw.choices(range(40), k=draw.randrange(8))
            )
            for _ in range(2)
        )
        first, second = ({moment for a, b in each for moment in range(int(a), int(b))} for each in (one, two))
        sets = (
            (traces.intersect_intervals(one, two), first & second),
            (traces.subtract_intervals(one, two), first - second),
            (one, first),
        )
        for found, expected in sets:
            assert {moment for a, b in found for moment in range(int(a), int(b))} == expected
            assert traces.total_length(found) == len(expected)


ON_CPU = {
    "what gloo takes while the main thread runs no operator: from 1 to 2, and from 4 to 7": (
        [
            _mark("step 1", 0, 10),
            _operator("c10d::allreduce_", 0.5, 1),
            _gloo("all_reduce", 1, 6),
            _operator("aten::mm", 2, 4),
            # What a thread of gloo does itself is its message's work.
            _operator("aten::copy_", 4.5, 5.5, GLOO),
            # A second message overlaps with the first.
            _gloo("all_gather", 5, 7, 3),
        ],
        4,
    ),
    "an operator that waits for messages computes nothing though another is around it": (
        [
            _operator("aten::add", 0, 10),
            _operator("_c10d_functional::wait_tensor", 1, 9),
            _gloo("all_reduce", 0, 9),
            _operator("autograd::engine::evaluate_function: MmBackward0", 10, 20),
            _operator("MmBackward0", 10, 20),
            _operator("aten::mm", 10, 12),
            _gloo("all_gather", 10, 19),
        ],
        8 + 7,
    ),
    "what is compiled computes": (
        [_gloo("all_reduce", 0, 10), _operator("aten::mm", 0, 1), _operator("Torch-Compiled Region: 0/0", 2, 5)],
        6,
    ),
    "no message": ([_operator("aten::mm", 0, 1)], 0),
    "nothing": ([], 0),
}


@pytest.mark.parametrize(("spans", "seconds"), ON_CPU.values(), ids=ON_CPU)
def test_exposed_on_a_cpu(spans: list[TraceSpan], seconds: float) -> None:
    assert measure_exposed_communication(spans) == pytest.approx(seconds)
    assert not measure_activity(spans).is_on_device


def test_on_a_gpu_exposed_is_what_nccl_takes_while_no_other_kernel_or_copy_runs() -> None:
    spans = [
        # The host's operators say nothing of the device.
        _operator("aten::mm", 0, 100),
        _kernel("ampere_sgemm_128x64_tn", 0, 4),
        _kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 3, 9, NCCL_STREAM),
        _kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 8, 12, 21),
        TraceSpan("Memcpy DtoD", "gpu_memcpy", 10, 11, STREAM),
        # An annotation of the device's timeline is no work.
        TraceSpan("nccl:all_gather", "gpu_user_annotation", 3, 9, NCCL_STREAM),
    ]
    # From 4 to 10, and from 11 to 12.
    assert measure_exposed_communication(spans) == pytest.approx(7)
    assert measure_activity(spans).is_on_device


def test_time_within_is_not_counted_twice() -> None:
    outer, first = _operator("a", 0, 10), _operator("b", 1, 4)
    inner, second, other = _operator("c", 2, 3), _operator("b", 5, 9), _operator("a", 2, 3, GLOO)
    found = {id(span): seconds for span, seconds in iter_self_times([second, inner, other, outer, first])}
    assert [found[id(each)] for each in (outer, first, inner, second, other)] == [3, 2, 1, 4, 1]


def _trace_file(
    path: Path, spans: list[TraceSpan], memory: Sequence[tuple[float, int, int]] = (), **about: Any
) -> Path:
    events: list[dict[str, Any]] = []
    for span in spans:
        times = {"ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6}
        details = {**span.details, **({"External id": span.operator} if span.operator else {})}
        events.append({"ph": "X", "cat": span.kind, "name": span.name, "tid": span.thread, **times, "args": details})
    for at, size, total in memory:
        details = {"Bytes": size, "Total Allocated": total, "Device Type": 0}
        event = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "tid": MAIN, "ts": at * 1e6}
        events.append({**event, "args": details})
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
    found = summarize_trace(read_trace(_trace_file(tmp_path / "rank-00000.json.gz", TWO_STEPS, run="a run")))
    assert (found.steps, found.num_steps, found.metadata["run"]) == ([4, 5], 2, "a run")
    seconds = (found.seconds, found.computing_seconds, found.exposed_seconds, found.host_seconds)
    assert (seconds, found.communication_seconds) == (pytest.approx((20, 9, 3, 8)), pytest.approx(5))
    parts = {
        row.name: (row.calls, row.seconds, row.computing_seconds, row.exposed_seconds, row.host_seconds)
        for row in found.phases
    }
    assert parts["data"] == pytest.approx((2, 2, 0, 0, 2))
    assert parts["forward_backward"] == pytest.approx((2, 15, 9, 3, 3))
    assert parts["save"] == pytest.approx((1, 2, 0, 0, 2))
    assert parts["between"] == pytest.approx((1, 1, 0, 0, 1))
    operators = [(each.name, each.calls, each.seconds) for each in found.operators]
    assert operators == [("aten::mm", 2, pytest.approx(8)), ("aten::add", 1, pytest.approx(1))]
    (row,) = found.communication
    assert (row.name, row.calls, row.bytes) == ("gloo:all_reduce", 2, 6 * 4 + 10 * 8)
    assert (row.seconds, row.exposed_seconds) == pytest.approx((5, 3))
    assert summary_from_dict(json.loads(json.dumps(summary_to_dict(found))), Path("summary.json")) == found


def test_kernels_are_those_of_the_operators_that_have_launched_them(tmp_path: Path) -> None:
    nccl = {"In msg nelems": 100, "dtype": "BFloat16", "Collective name": "_allgather_base"}
    spans = [
        TraceSpan("aten::mm", "cpu_op", 0, 0.5, MAIN, operator=8),
        TraceSpan("aten::addmm", "cpu_op", 1, 1.5, MAIN, operator=9),
        _kernel("gemm", 1, 3, operator=8),
        _kernel("gemm", 3, 4, operator=9),
        _kernel("gemm", 4, 5, operator=9),
        _kernel("ncclDevKernel_AllGather_RING_LL(args)", 5, 7, details=nccl),
    ]
    found = summarize_trace(read_trace(_trace_file(tmp_path / "trace.json.gz", spans)))
    times = {row.name: (row.seconds, row.device_seconds) for row in found.operators}
    assert times["aten::mm"] == times["aten::addmm"] == pytest.approx((0.5, 2))
    (row,) = found.communication
    assert (row.name, row.bytes, found.exposed_seconds) == ("nccl:AllGather", 200, pytest.approx(2))


def test_memory_is_reported_at_its_peak_by_part_and_by_who_took_it(tmp_path: Path) -> None:
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
    peak = summarize_trace(trace).memory
    assert (peak.bytes, peak.phase, peak.operator) == (150, "forward_backward", "aten::add")
    # What was held when a part began counts.
    assert peak.phases == {"forward_backward": 150, "optimizer": 150}
    reported = build_memory_timeline(trace)
    assert reported["allocated_by_operator"] == {"aten::mm": 100, "aten::add": 50, "aten::sqrt": 10}
    assert (reported["seconds"], reported["bytes"]) == (pytest.approx([2, 4.5, 5.5, 7]), [100, 150, 50, 60])


def test_a_comparison_is_by_step_and_by_the_size_of_the_difference(tmp_path: Path) -> None:
    one_step = [
        _mark("step 9", 0, 16),
        _mark("forward_backward", 0, 16),
        _operator("aten::mm", 0, 2),
        _operator("aten::softmax", 2, 12),
        _operator("aten::softmax", 12, 13),
    ]
    paths = [_trace_file(tmp_path / name, spans) for name, spans in (("a.json.gz", TWO_STEPS), ("b.json.gz", one_step))]
    found = compare_profiles(load_summary(paths[0]), load_summary(paths[1]), ("a", "b"))
    assert [(row.name, row.before, row.after) for row in found.operators] == [
        ("aten::softmax", 0, pytest.approx(11)),
        ("aten::mm", pytest.approx(4), pytest.approx(2)),
        ("aten::add", pytest.approx(0.5), 0),
    ]
    whole = {row.name: row.seconds for row in found.totals}
    assert whole["time"] == pytest.approx(16 - 10)
    assert whole["exposed communication"] == pytest.approx(-1.5)
    parts = {row.name: row.seconds for row in found.phases}
    assert parts["forward_backward"] == pytest.approx(16 - 7.5)
    code, output = invoke_in_process("profile", "compare", *paths)
    assert (code, "+11,000" in output, "aten::softmax" in output) == (0, True, True)


def test_the_command_shows_the_profile_of_a_run_directory_and_of_a_file(tmp_path: Path) -> None:
    directory = tmp_path / "run" / "profile"
    directory.mkdir(parents=True)
    for rank in (1, 3):
        _trace_file(directory / f"rank-{rank:05}.json.gz", TWO_STEPS, rank=rank, world_size=4, run=f"run {rank}")
    for arguments, run in (
        ([tmp_path / "run"], "run 1"),
        ([tmp_path / "run", "--rank", "3"], "run 3"),
        ([directory / "rank-00003.json.gz"], "run 3"),
    ):
        code, output = invoke_in_process("profile", "show", *arguments, "--json", tmp_path / "out.json")
        assert (code, f"profile of {run}" in output, "exposed communication 15.0 %" in output) == (0, True, True)
        assert json.loads((tmp_path / "out.json").read_text())["exposed_seconds"] == pytest.approx(3)
    assert invoke_in_process("profile", "show", directory, "--rows", "1", "--svg", tmp_path / "picture.svg")[0] == 0
    assert invoke_in_process("profile", "show", directory, "--svg", tmp_path)[0] == 2


def test_what_is_no_trace_is_refused_with_what_to_give_instead(tmp_path: Path) -> None:
    files = {
        "text.json.gz": (b"step: 1", "it is not JSON"),
        "other.json": (b'{"traceEvents": 3}', "it has no list traceEvents"),
        "empty.json": (b'{"traceEvents": []}', "has no event with a duration"),
        "odd.json": (b'{"traceEvents": [3]}', "an event is malformed"),
        "cut.json.gz": (gzip.compress(b'{"traceEvents": []}')[:-9], "cannot decompress"),
        "summary.json": (b'{"strategy": "ddp"}', "is not a profile summary"),
        "summary-steps-1-2.json": (b'{"profile_summary": 99}', "has summary format 99"),
        "summary-steps-3-4.json": (b'{"profile_summary": 2}', "is not a valid profile summary"),
    }
    for name, (content, wrong) in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=wrong) as caught:
            load_summary(tmp_path / name)
        assert name in str(caught.value)
    with pytest.raises(ConfigError, match="does not exist"):
        load_summary(tmp_path / "nothing")
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match=r"holds no profile.*profile\.steps"):
        load_summary(tmp_path / "run")
    _trace_file(tmp_path / "run" / "rank-00002.json.gz", TWO_STEPS)
    with pytest.raises(ConfigError, match=r"no profile of rank 1\. It has ranks 2\."):
        load_summary(tmp_path / "run", rank=1)
    assert invoke_in_process("profile", "show", tmp_path / "nothing")[0] == 2


def test_windows_are_in_order_within_the_run_and_on_ranks_that_are_there() -> None:
    several = ProfileConfig(steps=[[1, 2], [5, 5]], ranks=[3, 1])
    assert (several.windows, several.summary_rank, several.includes_rank(3), several.includes_rank(0)) == (
        [(1, 2), (5, 5)],
        1,
        True,
        False,
    )
    assert ProfileConfig(steps=[10, 12]).windows == [(10, 12)]
    assert ProfileConfig(steps=[1, 1], ranks="all").includes_rank(7)
    for steps, ranks, wrong in (
        ([3, 2], [0], "ends before it starts"),
        ([[1, 4], [4, 5]], [0], "must not overlap"),
        ([], [0], "names no step"),
        ([1, 1], [], "names no rank"),
    ):
        with pytest.raises(ValueError, match=wrong):
            ProfileConfig(steps=steps, ranks=ranks)
    check_profile(several, num_steps=5, world_size=4)
    with pytest.raises(
        ConfigError, match=r"profile\.ranks=\[3, 1\] names a rank that does not exist: the run has 3 ranks"
    ):
        check_profile(several, num_steps=5, world_size=3)
