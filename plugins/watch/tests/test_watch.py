"""What `meshwright watch` reads, thins out, compares and answers, as docs/reference/watch.md says; without a
browser."""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient
from support.commands import invoke_in_process
from support.watched_runs import (
    build_event_line,
    build_metrics_line,
    build_start_event,
    write_lines,
    write_rank_files,
    write_run_directory,
    write_timelines,
)

from meshwright.base.errors import ConfigError
from meshwright_run.metrics_report import read_metrics
from meshwright_run.observers import find_stragglers
from meshwright_watch import api as timelines
from meshwright_watch import server
from meshwright_watch.api import compare_columns
from meshwright_watch.metric_columns import FileTail, MetricColumns, choose_points, parse_lines
from meshwright_watch.run import RankMetrics, WatchedRun, open_runs
from meshwright_watch.smoothing import smooth
from meshwright_watch.x_axis import XAxis

MOST = 1 << 20
NUMBERS = st.one_of(st.floats(-1e6, 1e6), st.just(math.nan))


# -- files that grow


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.with_suffix(".new").replace(path),
        lambda path: path.write_bytes(b"1\n"),
        lambda path: path.write_bytes(b"another first line\n2\n3\n4\n"),
    ],
)
def test_a_file_that_is_another_is_read_from_its_beginning(change: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"first\nsecond\n")
    path.with_suffix(".new").write_bytes(b"other and longer than before\nmore of it\n")
    tail = FileTail(path)
    tail.read(MOST)
    change(path)
    part = tail.read(MOST)
    assert (part.is_restarted, part.lines) == (True, path.read_bytes().splitlines())
    path.unlink()
    assert tail.read(MOST).is_restarted


def test_each_line_is_read_once_in_bounded_parts_and_a_incomplete_one_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail, found = FileTail(path), []
    assert tail.read(MOST).lines == []
    path.write_bytes(b"".join(b"%05d\n" % number for number in range(1000)) + b"x" * 5000 + b"\n")
    for _ in range(200):
        part = tail.read(100)
        found += part.lines
        if not part.has_more:
            break
    assert found == path.read_bytes().splitlines()
    # Of a window, the first line is incomplete.
    assert FileTail(path, window=5016).read(MOST).lines == [b"00998", b"00999", b"x" * 5000]
    for written, lines in ((b"one\nthr", [b"one"]), (b"ee\nfour", [b"three"])):
        with path.open("ab") as file:
            file.write(written)
        assert [tail.read(MOST).lines for _ in range(2)] == [lines, []]


def test_lines_that_hold_no_object_are_counted_and_left_out() -> None:
    found, unread = parse_lines([b'{"a": 1}', b'{"a"', b"[1]", b"", b"nul\xff", b'{"b": NaN}', b"[" * 5000])
    assert ([list(each) for each in found], unread) == ([["a"], ["b"]], 4)
    # Two that are wrong only together.
    assert parse_lines([b'{"a": 1}, {"b": 2}', b'{"c": 3}']) == ([{"c": 3}], 1)
    bad = [{"step": "1"}, {"step": True}, {"step": 0}, {"step": -3}, {"step": 1.0}, {"step": 1 << 60}, {}]
    assert MetricColumns().add(bad) == len(bad)


# -- columns


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), max_size=40), st.integers(1, 7))
def test_columns_are_those_of_reading_line_by_line(given_lines: list[tuple[int, int]], batch: int) -> None:
    """Later lines replace earlier ones, as for a run that resumes."""
    keys: list[dict[str, Any]] = [{"a": 1.5}, {"a": 2, "g": {"x": 3.0}}]
    keys += [{"g": {"x": None, "y": 10**400}}, {"a": "text", "g": {"x": True}}]
    values = [{"a": 1.5}, {"a": 2.0, "g/x": 3.0}, {"g/x": math.nan, "g/y": math.inf}, {}]
    columns, records = MetricColumns(), [{"step": step, **keys[kind]} for step, kind in given_lines]
    for begin in range(0, len(records), batch):
        columns.add(records[begin : begin + batch])
    expected: dict[int, dict[str, float]] = {}
    for step, kind in given_lines:
        expected = {known: line for known, line in expected.items() if known < step} | {step: values[kind]}
    for name in ("a", "g/x", "g/y"):
        steps, found = columns.get_column(name)
        lines = {step: line[name] for step, line in expected.items() if name in line}
        assert steps.tolist() == list(lines)
        np.testing.assert_array_equal(found, np.array(list(lines.values())))


@settings(max_examples=100, deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=400), st.integers(2, 60), st.integers(1, 1000))
def test_the_lowest_and_highest_of_all_are_drawn_whatever_is_left_out(numbers, points, begin):
    values = np.array(numbers)
    places = choose_points(np.arange(begin, begin + len(values)), values, points)
    assert (np.diff(places) > 0).all()
    assert (places[0], places[-1]) == (0, len(values) - 1)
    assert len(places) <= 3 * points + 2
    finite = values[np.isfinite(values)]
    if len(finite):
        assert (np.nanmin(values[places]), np.nanmax(values[places])) == (finite.min(), finite.max())
    # What is not finite is a gap in the picture, too.
    assert np.isnan(values[places]).any() == np.isnan(values).any()


def test_columns_drawn_together_are_of_the_same_steps(tmp_path: Path) -> None:
    run = WatchedRun(write_run_directory(tmp_path, 3000), "run")
    while run.refresh():
        pass
    names = ["seconds", "times/data", "evaluations/held_out", "unknown"]
    found = run.metrics.get_aligned("seconds", names, 100, 2900, 200)
    assert 100 <= len(found["x"]) <= 404
    assert found["columns"]["seconds"] == [build_metrics_line(step)["seconds"] for step in found["x"]]
    assert set(found["columns"]["unknown"]) == {None}
    evaluated = [step for step, loss in zip(found["x"], found["columns"]["evaluations/held_out"], strict=True) if loss]
    assert all(step % 50 == 0 for step in evaluated)


def test_positions_of_steps_by_time_and_tokens_and_the_steps_of_a_span() -> None:
    columns = MetricColumns()
    times, tokens = [100.0, 101.0, 111.0, 110.0, math.nan], [10, 20, 0, 5, 7]
    columns.add(
        [
            {"step": step, "time": time, "num_tokens": number, "seconds": 0.5}
            for step, time, number in zip(range(3, 8), times, tokens, strict=True)
        ]
    )
    # From the start of the first step; a clock that is set back stays where it was.
    for name, steps, expected in (
        ("time", [3, 4, 5, 6], [0.5, 1.5, 11.5, 11.5]),
        ("tokens", [3, 4, 5, 6, 7], [10.0, 30.0, 30.0, 35.0, 42.0]),
    ):
        line: dict[str, Any] = {"x": steps}
        XAxis(columns, name).place(line)
        assert (line["x"], line["at"]) == (expected, steps)
    assert XAxis(columns, "time").to_steps(1.6, 11.0) == (4, 5)
    assert XAxis(columns, "tokens").to_steps(None, 31.0) == (3, 6)
    assert XAxis(columns, "tokens").to_steps(1e9, 2e9) == (7, 7)
    assert XAxis(columns, "step").to_steps(3.5, 4.2) == (3, 5)
    nothing: dict[str, Any] = {"x": [1, 2]}
    XAxis(MetricColumns(), "tokens").place(nothing)
    assert nothing["x"] == []


@settings(max_examples=60, deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=700), st.sampled_from([0.0, 0.5, 0.9, 0.99]))
def test_the_moving_average_is_that_of_a_loop(numbers: list[float], weight: float) -> None:
    total, weights, expected = 0.0, 0.0, []
    for number in numbers:
        is_known = math.isfinite(number)
        total, weights = weight * total + (number if is_known else 0.0), weight * weights + is_known
        expected.append(total / weights if is_known else math.nan)
    np.testing.assert_allclose(smooth(np.array(numbers), weight), expected, rtol=1e-9, atol=1e-6)


def test_a_zoom_does_not_change_the_moving_average() -> None:
    columns = MetricColumns()
    columns.add([{"step": step, "loss": float(step % 7)} for step in range(1, 101)])
    full, part = (columns.get_series(["loss"], *span, 1000, smoothing=0.9)["loss"] for span in ((None, None), (50, 60)))
    assert part["x"] == list(range(49, 62))
    assert part["smooth"] == full["smooth"][48:61]


# -- two runs


def _column(values: list[float], first: int = 1) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(first, first + len(values)), np.array(values)


def test_the_first_differing_step_and_the_first_that_has_parted() -> None:
    span = (None, None, 100)
    found = compare_columns(
        _column([1.0, 2.0, 3.0, math.nan, 5.0]), _column([1.0, 2.0 + 1e-9, 3.0, math.nan, 5.1]), *span
    )
    assert (found["steps"], found["first"]) == (5, {"step": 2, "one": 2.0, "other": 2.0 + 1e-9})
    assert (found["diverged"]["step"], found["max_difference"]) == (5, pytest.approx(0.1 / 5.1))
    assert (found["x"], found["y"][0]) == ([1, 2, 3, 4, 5], 0.0)
    # A lost value is a difference, and steps of one run alone are not compared.
    found = compare_columns(_column([1.0, 2.0, 3.0]), _column([2.0, math.nan], first=2), *span)
    assert found["first"] == found["diverged"] == {"step": 3, "one": 3.0, "other": None}
    assert (found["steps"], found["max_difference"], found["x"]) == (2, None, [2, 3])


# -- ranks


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0, 1.5], [4]),
        ([1.0, 1.0, 1.0, 1.0, 1.01], []),
        ([1.0, 1.1, 1.2, 1.3, 1.4], []),
        ([1.0, 1.0, 9.0], []),
        ([math.nan, 1.0, 1.0, 1.0, 1.0, 2.0], [5]),
    ],
)
def test_stragglers_by_median_absolute_deviations(seconds: list[float], expected: list[int]) -> None:
    found = find_stragglers(list(range(len(seconds))), "seconds", np.array(seconds), step_s=1.0)
    assert [each.rank for each in found] == expected


def test_the_history_of_a_rank_continues_where_its_file_does(tmp_path: Path) -> None:
    write_rank_files(tmp_path, 2, 300)
    ranks, path = RankMetrics(tmp_path / "ranks"), tmp_path / "ranks" / "00001.jsonl"
    values = [json.loads(line)["seconds"] for line in path.read_text().splitlines()[-50:]]
    spans = [ranks.summarize(num_steps=50)["parts"]["seconds"][name][1] for name in ("low", "median", "high")]
    assert spans == pytest.approx([min(values), np.median(values), max(values)], abs=0)

    def steps(rank: int, low: int | None = None, high: int | None = None) -> list[int]:
        return ranks.get_history(rank, low, high, 1000)["series"]["seconds"]["x"]

    assert ranks.summarize()["steps"] == [300, 300]
    # One more on either side, to which lines go.
    assert (steps(1), steps(1, 100, 110)) == ([*range(1, 301)], [*range(99, 112)])
    write_lines(path, [{"step": step, "seconds": 9.0} for step in (299, 300, 301)])
    assert (steps(1), ranks.summarize(num_steps=3)["parts"]["seconds"]["low"][1]) == ([*range(1, 302)], 9.0)
    write_lines(path, [{"step": 201, "seconds": 2.0}])
    assert [steps(rank) for rank in (1, 0, 1)] == [[*range(1, 202)], [*range(1, 301)], [*range(1, 202)]]
    # Written again, by a run that has resumed elsewhere: nothing is left of what was before.
    write_lines(path, [{"step": 150, "seconds": 2.0}], mode="w")
    assert steps(1) == [150]
    assert ranks.get_history(2, None, None, 100) is None


def test_a_timeline_is_on_the_clock_of_all_its_ranks(tmp_path: Path) -> None:
    write_timelines(tmp_path, steps=(10, 20))
    found = timelines.load_timeline(tmp_path / "timeline")
    assert (found["steps"], found["step"]) == ([10, 20], 20)
    first, second = found["measured"]
    assert first["actions"][0] == ["F", 0, 0, 0.0, pytest.approx(0.011)]
    # Its step began a millisecond later.
    assert second["actions"][0][3] == pytest.approx(0.01 + 0.001, abs=1e-6)
    assert found["planned"]["schedule"] == "1F1B"
    assert timelines.load_timeline(tmp_path / "none") == {"planned": None, "steps": [], "step": None, "measured": []}


# -- a run


def test_a_run_is_followed_while_it_continues(tmp_path: Path) -> None:
    run, metrics = WatchedRun(tmp_path, "run"), tmp_path / "metrics.jsonl"

    def state() -> tuple[str, int]:
        run.refresh()
        return run.get_state()["state"], run.get_state()["step"]

    assert state() == ("waiting", 0)
    write_lines(metrics, [build_metrics_line(step) for step in (*range(1, 7), 4, 5)])
    write_lines(tmp_path / "events.jsonl", [build_start_event(10)])
    (tmp_path / ".lock.json").write_text('{"pid": 1, "host": "elsewhere", "started": "now"}', encoding="utf-8")
    assert state() == ("running", 5)
    assert (run.get_state()["steps"], run.get_state()["parameters"]) == (10, 1_234_567)
    versions = run.get_state()["versions"]
    write_lines(metrics, [build_metrics_line(6, seed=2)])
    assert state() == ("running", 6)
    assert run.get_state()["versions"] != versions
    steps, losses = run.metrics.get_column("loss")
    known = read_metrics(metrics, last_step=100, num_steps=100)
    assert (steps.tolist(), losses.tolist()) == ([each.step for each in known], [each.loss for each in known])
    write_lines(tmp_path / "events.jsonl", [build_event_line("end", 6, reason="done")])
    assert state() == ("done", 6)


@pytest.mark.parametrize(
    ("events", "holder", "expected", "why"),
    [
        (
            [build_event_line("fault", 5, rank=1, error_type="OSError", message="no <b>disk</b>")],
            None,
            "failed",
            "OSError: no",
        ),
        ([build_event_line("exit", 5, code=-9)], None, "failed", "exit code -9"),
        ([build_event_line("end", 5, reason="signal")], None, "stopped", "signal"),
        ([], {"pid": 2**22 + 1, "host": socket.gethostname()}, "lost", "without reporting"),
        ([], None, "stopped", ""),
        (
            [build_event_line("end", 5, reason="done"), build_start_event(10, begin=5)],
            {"pid": 1, "host": "elsewhere"},
            "running",
            "",
        ),
    ],
)
def test_how_a_run_has_ended(events, holder, expected, why, tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [build_metrics_line(step) for step in range(1, 6)])
    write_lines(tmp_path / "events.jsonl", [build_start_event(10), *events])
    if holder is not None:
        (tmp_path / ".lock.json").write_text(json.dumps(holder), encoding="utf-8")
    run = WatchedRun(tmp_path, "run")
    run.refresh()
    assert run.get_state()["state"] == expected
    assert why in run.get_state()["reason"]


def test_what_cannot_be_watched_is_refused(tmp_path: Path) -> None:
    one, other = (write_run_directory(tmp_path / name / "a", 3) for name in ("runs", "more"))
    assert [run.name for run in open_runs([one, other])] == ["runs/a", "more/a"]
    for path, text in (
        ("runs/b", r"not a run directory.*Runs next to it: .*runs/a"),
        ("runs", "Name the runs to watch"),
    ):
        with pytest.raises(ConfigError, match=text):
            open_runs([tmp_path / path])
    code, reported = invoke_in_process("watch", one, "--host", "no.such.host.invalid", "--port", 1, "--no-browser")
    assert (code, "cannot listen on" in reported) == (2, True), reported


# -- the server


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    directory = tmp_path_factory.mktemp("runs")
    one = write_run_directory(directory / "<img src=x onerror=alert(1)>", 400)
    other = write_run_directory(directory / "b", 400, seed=1)
    write_rank_files(one, 6, slow=2)
    write_timelines(one)
    write_lines(
        one / "events.jsonl",
        [build_event_line("fault", 300, rank=0, error_type="E", message="</script>", error_time=math.nan)],
    )
    page = server.build_application(open_runs([one, other]), host="127.0.0.1", port=1, token="t")
    return TestClient(page, base_url="http://127.0.0.1:1", cookies={"meshwright-1": "t"})


def test_answers_of_the_server(client: TestClient) -> None:
    def get(path: str) -> Any:
        answer = client.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    while get("/api/state")["more"]:
        pass
    assert [run["step"] for run in get("/api/state")["runs"]] == [400, 400]
    loss = get("/api/series?run=0&name=loss&name=grad_norm&from=100&to=200&points=50")["loss"]
    assert (loss["x"][0], loss["x"][-1], loss["count"]) == (99, 201, 103)
    assert len(loss["x"]) < 103
    by_tokens = get("/api/series?run=0&name=loss&axis=tokens&from=4096.5&to=20000&smoothing=0.9")["loss"]
    assert (by_tokens["at"], by_tokens["x"]) == ([*range(1, 7)], [4096.0 * step for step in range(1, 7)])
    assert by_tokens["smooth"][0] == pytest.approx(by_tokens["y"][0])
    assert get("/api/rank?run=0&rank=3&axis=tokens")["series"]["seconds"]["x"][:2] == [4096, 8192]
    assert get("/api/compare?one=0&other=1&axis=tokens")["columns"]["loss"]["steps"] == 400
    chosen = {key: (value, default) for key, value, default in get("/api/settings?run=1")}
    assert (chosen["optimizer.lr"], chosen["optimizer.name"]) == (("0.002", "0.001"), ("AdamW", "AdamW"))
    assert chosen["steps"] == ("400", "null")
    assert get("/api/events?run=0")[-1]["message"] == "</script>"
    ranks = get("/api/ranks?run=0")
    assert [(each["rank"], each["phase"]) for each in ranks["stragglers"]] == [(2, "forward_backward")]
    assert ranks["memory"]["host"][3] == 503 << 20
    assert get("/api/rank?run=0&rank=3")["series"]["seconds"]["count"] == 60
    assert get("/api/timeline?run=0&step=10")["step"] == 10
    compared = get("/api/compare?one=0&other=1")
    assert compared["columns"]["loss"]["first"]["step"] == 1
    assert ["optimizer.lr", "0.001", "0.002"] in compared["settings"]


@pytest.mark.parametrize(
    ("status", "paths"),
    [
        (400, "series?run=2&name=loss series?name=loss series?run=-1 series?run=%D9%A1 series?run=0&points=1"),
        (400, "series?run=0&from=1e9 series?run=0&axis=x series?run=0&smoothing=1 rank?run=0&rank=99 rank?run=0"),
        (404, "../web/..%2Fserver.py ../web/%2e%2e/%2e%2e/secret ../web/vendor/..%2F..%2Fserver.py ../docs"),
        (404, "../web//etc/passwd ../etc/passwd ../web/vendor ../web/vendor/README.md"),
    ],
)
def test_questions_and_files_that_do_not_exist_are_refused(status: int, paths: str, client: TestClient) -> None:
    for path in paths.split():
        url = path.removeprefix("..") if path.startswith("..") else f"/api/{path}"
        answer = client.get(url)
        assert answer.status_code == status, url
        assert status == 404 or answer.json()["error"]


def test_the_page_and_its_parts_come_from_this_server_alone(client: TestClient) -> None:
    page = client.get("/")
    policy = page.headers["Content-Security-Policy"]
    assert page.status_code == 200
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for part in ("/web/page.js", "/web/page.css", "/web/vendor/uPlot.iife.min.js", "/web/vendor/uPlot.min.css"):
        assert part in page.text
        assert client.get(part).status_code == 200
    for path in server.WEB_DIRECTORY.glob("*.*"):
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org", "")
        assert not re.search("innerHTML|https?://", text), path
    assert client.post("/api/state").status_code == client.delete("/").status_code == 405


@pytest.mark.parametrize(
    ("status", "hosts"),
    [
        (421, ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil", ""]),
        (200, ["localhost:1", "LOCALHOST", "127.0.0.1", "[::1]:6420", "192.168.0.7:80"]),
    ],
)
def test_only_addresses_and_localhost_are_names_of_this_machine(status, hosts, client):
    for host in hosts:
        assert [client.get(path, headers={"Host": host}).status_code for path in ("/", "/api/state")] == [status] * 2


# -- the command


@pytest.mark.slow
def test_the_command_starts_without_torch_and_ends_by_a_signal(tmp_path: Path) -> None:
    write_run_directory(tmp_path / "x", 3)
    modules = "server, run, api; import meshwright_watch.plugin"
    code = f"import sys; from meshwright_watch import {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    command = [sys.executable, "-m", "meshwright", "watch", str(tmp_path / "x"), "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        assert line.startswith("watching x at http://127.0.0.1:")
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        opener.open(line.split()[3], timeout=20).close()
        with opener.open(line.split()[3].partition("?")[0] + "api/state", timeout=20) as answer:
            assert json.loads(answer.read())["runs"][0]["step"] == 3
        started = time.monotonic()
        process.send_signal(2)
        assert process.wait(20) in (0, -2, 130)
        assert time.monotonic() - started < 10
