"""What `meshwright watch` reads, thins out, compares and tells, as docs/watch.md says; without a browser."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.watched import event, make_ranks, make_run, make_timeline, start, step_line, write_lines

from meshwright.base.errors import ConfigError
from meshwright.train.run.report import read_metrics
from meshwright.train.run.stragglers import stragglers
from meshwright.watch import server, timelines
from meshwright.watch.columns import Columns
from meshwright.watch.compare import compare, differing_settings
from meshwright.watch.downsample import chosen, within
from meshwright.watch.ranks import Ranks
from meshwright.watch.run import WatchedRun, watched
from meshwright.watch.tail import Tail, parse_lines

MOST = 1 << 20


def _lines(tail: Tail, most: int = MOST) -> list[bytes]:
    return tail.read(most).lines


# -- files that grow


def test_each_line_is_given_once_and_a_torn_one_when_it_is_whole(tmp_path):
    path = tmp_path / "lines"
    tail = Tail(path)
    assert _lines(tail) == []
    path.write_bytes(b"one\ntwo\nthr")
    assert _lines(tail) == [b"one", b"two"]
    assert _lines(tail) == []
    with path.open("ab") as file:
        file.write(b"ee\nfour")
    assert _lines(tail) == [b"three"]
    assert _lines(tail) == []


def _replaced(path: Path) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(b"other and longer than before\nmore of it\n")
    new.replace(path)


@pytest.mark.parametrize(
    "change",
    [
        _replaced,
        lambda path: path.write_bytes(b"1\n"),
        lambda path: path.write_bytes(b"another first line\n2\n3\n4\n"),
    ],
    ids=["replaced", "cut short", "written anew and longer"],
)
def test_a_file_that_is_another_is_read_from_its_beginning(change, tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"first\nsecond\n")
    tail = Tail(path)
    _lines(tail)
    change(path)
    part = tail.read(MOST)
    assert part.is_new
    assert part.lines == path.read_bytes().splitlines()
    path.unlink()
    assert tail.read(MOST).is_new


def test_reading_is_bounded_and_says_that_there_is_more(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"".join(b"%05d\n" % number for number in range(1000)) + b"x" * 5000 + b"\n")
    tail, found = Tail(path), []
    for _ in range(200):
        part = tail.read(100)
        found += part.lines
        if not part.has_more:
            break
    assert found == path.read_bytes().splitlines()


def test_of_a_window_the_first_torn_line_is_left_out(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"".join(b"%09d\n" % number for number in range(1000)))
    assert _lines(Tail(path, window=55)) == [b"%09d" % number for number in range(995, 1000)]


def test_lines_that_hold_no_object_are_counted_and_left_out():
    lines = [b'{"a": 1}', b'{"a"', b"[1]", b"", b"nul\xff", b'{"b": NaN}', b"[" * 5000]
    found, unread = parse_lines(lines)
    assert [list(each) for each in found] == [["a"], ["b"]]
    assert unread == 4
    # Two that are wrong only together.
    assert parse_lines([b'{"a": 1}, {"b": 2}', b'{"c": 3}']) == ([{"c": 3}], 1)


# -- columns


def test_later_lines_replace_earlier_ones_as_for_a_run_that_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [step_line(step) for step in (1, 2, 3, 4, 5, 6)]
    again = [step_line(step, seed=1) for step in (4, 5)]
    write_lines(path, [*lines, *again, {"no": "step"}, step_line(6, seed=2)])
    with path.open("a") as file:
        file.write('{"step": 7, "loss"')
    columns = Columns()
    unread = columns.add(parse_lines(Tail(path).read(MOST).lines)[0])
    with pytest.warns(UserWarning, match="cannot be read"):
        known = read_metrics(path, until=100, steps=100)
    steps, losses = columns.column("loss")
    assert steps.tolist() == [result.step for result in known] == [1, 2, 3, 4, 5, 6]
    assert losses.tolist() == [result.loss for result in known]
    assert columns.column("times/data")[0].tolist() == [1, 2, 3, 4, 5, 6]
    assert unread == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), max_size=40), st.integers(1, 7))
def test_columns_are_those_of_reading_line_by_line(given_lines, batch):
    """Whatever the steps, keys and parts in which lines come."""
    keys = [{"a": 1.5}, {"a": 2, "g": {"x": 3.0}}, {"g": {"x": None, "y": 10**400}}, {"a": "text", "g": {"x": True}}]
    records = [{"step": step, **keys[kind]} for step, kind in given_lines]
    columns = Columns()
    for begin in range(0, len(records), batch):
        columns.add(records[begin : begin + batch])
    expected: dict[str, dict[int, float]] = {"a": {}, "g/x": {}, "g/y": {}}
    for record in records:
        expected = {
            name: {step: value for step, value in column.items() if step < record["step"]}
            for name, column in expected.items()
        }
        for name, value in (("a", record.get("a")), *((f"g/{k}", v) for k, v in record.get("g", {}).items())):
            if value is None and name == "a":
                continue
            if value is None or type(value) in (int, float):
                big = isinstance(value, int) and value > 10**300
                expected[name][record["step"]] = math.nan if value is None else math.inf if big else float(value)
    for name, column in expected.items():
        steps, values = columns.column(name)
        assert steps.tolist() == list(column)
        np.testing.assert_array_equal(values, np.array(list(column.values())))


def test_a_step_that_is_no_number_of_one_is_no_step():
    columns = Columns()
    bad = [{"step": "1"}, {"step": True}, {"step": 0}, {"step": -3}, {"step": 1.0}, {"step": 1 << 60}, {}]
    assert columns.add(bad) == len(bad)
    assert columns.names == []


# -- fewer points


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan)), min_size=1, max_size=400),
    st.integers(2, 60),
    st.integers(1, 1000),
)
def test_the_lowest_and_highest_of_all_are_drawn_whatever_is_left_out(numbers, points, begin):
    values = np.array(numbers)
    steps = np.arange(begin, begin + len(values))
    places = chosen(steps, values, points)
    assert (np.diff(places) > 0).all()
    assert places[0] == 0
    assert places[-1] == len(values) - 1
    assert len(places) <= 3 * points + 2
    finite = values[np.isfinite(values)]
    if len(finite):
        assert np.nanmin(values[places]) == finite.min()
        assert np.nanmax(values[places]) == finite.max()
    # What is not finite is a gap in the picture, too.
    assert np.isnan(values[places]).any() == np.isnan(values).any()


def test_points_that_were_drawn_stay_where_they_are_when_a_run_goes_on():
    values = np.random.default_rng(0).normal(size=1100)
    steps = np.arange(1, 1101)
    before, after = chosen(steps[:1090], values[:1090], 300), chosen(steps, values, 300)
    assert set(before[:-3]) <= set(after)


def test_a_part_of_the_steps_has_one_more_on_either_side():
    steps = np.array([1, 5, 9, 13])
    assert steps[within(steps, 5, 9)].tolist() == [1, 5, 9, 13]
    assert steps[within(steps, 6, 8)].tolist() == [5, 9]
    assert steps[within(steps, None, None)].tolist() == [1, 5, 9, 13]
    assert steps[within(steps, 90, 100)].tolist() == [13]


# -- two runs


def _column(values: list[float], first: int = 1) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(first, first + len(values)), np.array(values)


def test_the_first_differing_step_and_the_first_that_has_parted():
    found = compare(_column([1.0, 2.0, 3.0, math.nan, 5.0]), _column([1.0, 2.0 + 1e-9, 3.0, math.nan, 5.1]))
    assert found.steps == 5
    assert (found.first.step, found.first.one, found.first.other) == (2, 2.0, 2.0 + 1e-9)
    assert found.parted.step == 5
    assert found.largest == pytest.approx(0.1 / 5.1)


def test_only_steps_of_both_runs_are_compared_and_a_lost_value_is_a_difference():
    found = compare(_column([1.0, 2.0, 3.0]), _column([2.0, math.nan], first=2))
    assert found.steps == 2
    assert found.first.step == found.parted.step == 3
    assert math.isinf(found.largest)
    same = compare(_column([1.0, 2.0]), _column([1.0, 2.0]))
    assert (same.first, same.parted, same.largest) == (None, None, 0.0)
    assert compare(_column([]), _column([1.0])).steps == 0


def test_settings_of_run_files_that_differ_are_told_by_key():
    one = {"steps": 10, "optimizer": {"name": "AdamW", "lr": 0.1}, "a": None}
    other = {"steps": 10, "optimizer": {"name": "SGD", "lr": 0.1}, "b": True, "empty": {}}
    assert differing_settings(one, other) == [
        ("optimizer.name", "AdamW", "SGD"),
        ("a", "null", "(not set)"),
        ("b", "(not set)", "true"),
    ]


# -- ranks


def test_a_slow_rank_is_a_straggler_in_the_part_in_which_it_is_slow(tmp_path):
    make_ranks(tmp_path, 16, slow=5)
    found = Ranks(tmp_path / "ranks").look()
    assert found["ranks"] == list(range(16))
    assert [(each["rank"], each["part"]) for each in found["stragglers"]] == [(5, "forward_backward")]
    assert found["memory"]["host"][3] == 503 << 20
    assert found["parts"]["seconds"]["low"][0] <= found["parts"]["seconds"]["median"][0]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0, 1.5], [4]),
        ([1.0, 1.0, 1.0, 1.0, 1.01], []),
        ([1.0, 1.1, 1.2, 1.3, 1.4], []),
        ([1.0, 1.0, 9.0], []),
        ([math.nan, 1.0, 1.0, 1.0, 1.0, 2.0], [5]),
    ],
    ids=["one", "less than a fiftieth of a step", "spread", "of three ranks", "one without numbers"],
)
def test_stragglers_by_median_absolute_deviations(seconds, expected):
    found = stragglers(list(range(len(seconds))), "seconds", np.array(seconds), step_seconds=1.0)
    assert [each.rank for each in found] == expected


def test_medians_by_rank_are_those_of_numpy(tmp_path):
    for rank, count in enumerate((1, 2, 5, 8)):
        values = np.random.default_rng(rank).uniform(1, 2, count).tolist()
        lines = [{"step": step, "seconds": value} for step, value in enumerate(values, start=1)]
        write_lines(tmp_path / f"{rank:05}.jsonl", lines)
        found = Ranks(tmp_path).look()["parts"]["seconds"]
        told = [found[name][rank] for name in ("low", "median", "high")]
        assert told == pytest.approx([min(values), np.median(values), max(values)], abs=0)


def test_only_the_end_of_a_ranks_file_is_read_and_a_step_done_again_counts_once(tmp_path):
    make_ranks(tmp_path, 2, 3000)
    ranks = Ranks(tmp_path / "ranks")
    assert ranks.look()["steps"] == [3000, 3000]
    again = [{"step": step, "seconds": 9.0} for step in (2999, 3000)]
    write_lines(tmp_path / "ranks" / "00001.jsonl", again)
    found = ranks.look(last=2)
    assert found["parts"]["seconds"]["median"][1] == 9.0
    assert ranks.history(0, None, None, 100)["series"]["seconds"]["count"] == 3000
    assert ranks.history(2, None, None, 100) is None


def test_a_rank_over_its_steps_goes_on_where_its_file_does(tmp_path):
    make_ranks(tmp_path, 2, 300)
    ranks, path = Ranks(tmp_path / "ranks"), tmp_path / "ranks" / "00001.jsonl"

    def steps(rank: int, low: int | None = None, high: int | None = None) -> list[int]:
        return ranks.history(rank, low, high, 1000)["series"]["seconds"]["x"]

    assert steps(1) == [*range(1, 301)]
    # One more on either side, to which lines go.
    assert steps(1, 100, 110) == [*range(99, 112)]
    write_lines(path, [{"step": 301, "seconds": 1.0}])
    assert steps(1) == [*range(1, 302)]
    write_lines(path, [{"step": 201, "seconds": 2.0}])
    assert steps(1) == [*range(1, 202)]
    assert steps(0) == [*range(1, 301)]
    assert steps(1) == [*range(1, 202)]
    # Written anew, of a run that has gone on elsewhere: nothing is left of what was before.
    write_lines(path, [{"step": 150, "seconds": 2.0}], mode="w")
    assert steps(1) == [150]


# -- a run


def test_a_run_is_followed_while_it_goes_on(tmp_path):
    run = WatchedRun(tmp_path, "run")
    run.refresh()
    assert (run.state()["state"], run.state()["step"]) == ("waiting", 0)
    write_lines(tmp_path / "metrics.jsonl", [step_line(1), step_line(2)])
    write_lines(tmp_path / "events.jsonl", [start(10)])
    holder = {"pid": 1, "host": "elsewhere", "started": "now"}
    (tmp_path / ".lock.json").write_text(json.dumps(holder), encoding="utf-8")
    run.refresh()
    first = run.state()
    assert (first["state"], first["step"], first["steps"], first["world_size"]) == ("running", 2, 10, 4)
    write_lines(tmp_path / "metrics.jsonl", [step_line(3)])
    run.refresh()
    assert run.state()["step"] == 3
    assert run.state()["versions"] != first["versions"]
    write_lines(tmp_path / "events.jsonl", [event("end", 3, reason="done")])
    run.refresh()
    assert run.state()["state"] == "done"


@pytest.mark.parametrize(
    ("events", "holder", "expected", "why"),
    [
        ([event("fault", 5, rank=1, kind="OSError", message="no <b>disk</b>")], None, "failed", "OSError: no"),
        ([event("fault", 5, rank=0, kind="E", message="m"), event("exit", 5, code=1)], None, "failed", "E: m"),
        ([event("exit", 5, code=-9)], None, "failed", "exit code -9"),
        ([event("end", 5, reason="signal")], None, "stopped", "signal"),
        ([event("end", 5, reason="early stopping")], None, "done", "early stopping"),
        ([], {"pid": 2**22 + 1, "host": socket.gethostname()}, "gone", "without a word"),
        ([], None, "stopped", ""),
        ([event("end", 5, reason="done"), start(10, begin=5)], {"pid": 1, "host": "elsewhere"}, "running", ""),
    ],
)
def test_how_a_run_has_ended_is_told(events, holder, expected, why, tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [step_line(step) for step in range(1, 6)])
    write_lines(tmp_path / "events.jsonl", [start(10), *events])
    if holder is not None:
        (tmp_path / ".lock.json").write_text(json.dumps(holder), encoding="utf-8")
    run = WatchedRun(tmp_path, "run")
    run.refresh()
    assert run.state()["state"] == expected
    assert why in run.state()["why"]


def test_columns_drawn_together_are_of_the_same_steps(tmp_path):
    run = WatchedRun(make_run(tmp_path, 3000), "run")
    while run.refresh():
        pass
    found = run.metrics.together(
        "seconds", ["seconds", "times/data", "evaluations/held_out", "unknown"], 100, 2900, 200
    )
    assert 100 <= len(found["x"]) <= 404
    for step, seconds in zip(found["x"], found["columns"]["seconds"], strict=True):
        assert seconds == step_line(step)["seconds"]
    assert set(found["columns"]["unknown"]) == {None}
    told = [step for step, loss in zip(found["x"], found["columns"]["evaluations/held_out"], strict=True) if loss]
    assert all(step % 50 == 0 for step in told)


def test_directories_of_runs_are_checked(tmp_path):
    make_run(tmp_path / "runs" / "a", 3)
    make_run(tmp_path / "more" / "a", 3)
    assert [run.name for run in watched([tmp_path / "runs" / "a", tmp_path / "more" / "a"])] == ["runs/a", "more/a"]
    assert [run.name for run in watched([tmp_path / "runs" / "a"] * 2)] == ["a"]
    with pytest.raises(ConfigError, match=r"no directory of a run.*Runs beside it: .*runs/a"):
        watched([tmp_path / "runs" / "b"])
    with pytest.raises(ConfigError, match=r"holds 1. Name those to watch: meshwright watch .*runs/a"):
        watched([tmp_path / "runs"])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ConfigError, match="it is no directory of a run"):
        watched([tmp_path / "other"])


def test_a_timeline_is_told_on_the_clock_of_all_its_ranks(tmp_path):
    make_timeline(tmp_path, steps=(10, 20))
    found = timelines.look(tmp_path / "timeline")
    assert (found["steps"], found["step"]) == ([10, 20], 20)
    first, second = found["measured"]
    assert first["actions"][0] == ["F", 0, 0, 0.0, pytest.approx(0.011)]
    # Its step began a millisecond later.
    assert second["actions"][0][3] == pytest.approx(0.01 + 0.001, abs=1e-6)
    assert found["planned"]["schedule"] == "1F1B"
    assert timelines.look(tmp_path / "timeline", 10)["step"] == 10
    assert timelines.look(tmp_path / "none") == {"planned": None, "steps": [], "step": None, "measured": []}


# -- the server


class _Served:
    """A server on loopback, with runs."""

    def __init__(self, runs: list[WatchedRun]) -> None:
        self._listener = server.listening("127.0.0.1", 0, default=0)
        self.url = server.address(self._listener, "").partition("?")[0]
        self.cookie = f"meshwright-{self._listener.getsockname()[1]}=t"
        options = {"host": "127.0.0.1", "token": "t"}
        threading.Thread(target=server.serve, args=(runs, self._listener), kwargs=options, daemon=True).start()

    def get(self, path: str, *, host: str | None = None, method: str = "GET") -> tuple[int, bytes, Any]:
        request = urllib.request.Request(self.url + path.lstrip("/"), method=method, headers={"Cookie": self.cookie})
        if host is not None:
            request.add_header("Host", host)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, answer.read(), answer.headers
        except urllib.error.HTTPError as error:
            return error.code, error.read(), error.headers

    def json(self, path: str) -> Any:
        status, body, _ = self.get(path)
        assert status == 200, body
        return json.loads(body)


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> _Served:
    directory = tmp_path_factory.mktemp("runs")
    one = make_run(directory / "<img src=x onerror=alert(1)>", 400)
    other = make_run(directory / "b", 400, seed=1)
    make_ranks(one, 6, slow=2)
    make_timeline(one)
    write_lines(one / "events.jsonl", [event("fault", 300, rank=0, kind="E", message="</script>", ended=math.nan)])
    (directory / "secret").write_text("secret", encoding="utf-8")
    return _Served(watched([one, other]))


def test_answers_of_the_server(served):
    while served.json("/api/state")["more"]:
        pass
    state = served.json("/api/state")
    assert [run["step"] for run in state["runs"]] == [400, 400]
    found = served.json("/api/series?run=0&name=loss&name=grad_norm&from=100&to=200&points=50")
    assert found["loss"]["x"][0] == 99
    assert found["loss"]["x"][-1] == 201
    assert found["loss"]["count"] == 103
    assert len(found["loss"]["x"]) < 103
    assert served.json("/api/events?run=0")[-1]["message"] == "</script>"
    assert [each["rank"] for each in served.json("/api/ranks?run=0")["stragglers"]] == [2]
    assert served.json("/api/rank?run=0&rank=3")["series"]["seconds"]["count"] == 60
    assert served.json("/api/timeline?run=0&step=10")["step"] == 10
    compared = served.json("/api/compare?one=0&other=1")
    assert compared["columns"]["loss"]["first"]["step"] == 1
    assert ["optimizer.lr", "0.001", "0.002"] in compared["settings"]


@pytest.mark.parametrize(
    "path",
    [
        "/api/series?run=2&name=loss",
        "/api/series?name=loss",
        "/api/series?run=-1",
        "/api/series?run=%D9%A1",
        "/api/series?run=0&points=1",
        "/api/series?run=0&from=1e9",
        "/api/rank?run=0&rank=99",
        "/api/rank?run=0",
    ],
)
def test_a_question_that_names_what_is_not_there_is_refused(path, served):
    status, body, _ = served.get(path)
    assert status == 400
    assert json.loads(body)["error"]


@pytest.mark.parametrize(
    "path",
    [
        "/web/../server.py",
        "/web/..%2Fserver.py",
        "/web/%2e%2e/%2e%2e/secret",
        "/web/vendor/..%2F..%2Fserver.py",
        "/web//etc/passwd",
        "/etc/passwd",
        "/web/vendor",
        "/web/vendor/README.md",
        "/docs",
    ],
)
def test_nothing_but_the_page_is_served(path, served):
    assert served.get(path)[0] == 404


def test_the_page_and_its_parts_come_from_this_server_alone(served):
    status, body, headers = served.get("/")
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for part in (b"/web/page.js", b"/web/page.css", b"/web/vendor/uPlot.iife.min.js", b"/web/vendor/uPlot.min.css"):
        assert part in body
        assert served.get(part.decode())[0] == 200
    for path in [*server.WEB.glob("*.*")]:
        text = path.read_text(encoding="utf-8")
        assert "innerHTML" not in text
        assert "http://" not in text.replace("http://www.w3.org", "")
        assert "https://" not in text


def test_other_methods_are_refused(served):
    assert served.get("/api/state", method="POST")[0] == 405
    assert served.get("/", method="DELETE")[0] == 405


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil", ""])
def test_another_name_for_this_machine_is_refused(host, served):
    assert served.get("/api/state", host=host)[0] == 421
    assert served.get("/", host=host)[0] == 421


@pytest.mark.parametrize("host", ["localhost:1", "LOCALHOST", "127.0.0.1", "[::1]:6420", "192.168.0.7:80"])
def test_addresses_and_localhost_are_names_of_this_machine(host, served):
    assert served.get("/", host=host)[0] == 200


def test_the_command_starts_without_torch_and_ends_by_a_signal(tmp_path):
    make_run(tmp_path / "x", 3)
    code = (
        "import sys; from meshwright.watch import server, run, answers; import meshwright.watch.command; "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    command = [sys.executable, "-m", "meshwright", "watch", str(tmp_path / "x"), "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        assert line.startswith("watching x at http://127.0.0.1:")
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        opener.open(line.split()[3], timeout=20).close()
        with opener.open(line.split()[3].partition("?")[0] + "api/state", timeout=20) as answer:
            assert json.loads(answer.read())["runs"][0]["step"] == 3
        begun = time.monotonic()
        process.send_signal(2)
        assert process.wait(20) in (0, -2, 130)
        assert time.monotonic() - begun < 10


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nothing"], "no directory of a run"),
        ([".", "--host", "no.such.host.invalid", "--port", "1"], "cannot be served on"),
    ],
)
def test_what_cannot_be_watched_is_told_with_exit_code_2(arguments, told, tmp_path):
    make_run(tmp_path, 1)
    command = [sys.executable, "-m", "meshwright", "watch", *arguments, "--no-browser"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (found.returncode, told in found.stderr) == (2, True), found.stderr


def test_a_missing_extra_is_told_with_how_to_install_it(tmp_path):
    make_run(tmp_path / "x", 1)
    (tmp_path / "uvicorn.py").write_text("raise ImportError('no uvicorn')\n", encoding="utf-8")
    code = "from meshwright.cli.main import main; main()"
    command = [sys.executable, "-c", code, "watch", str(tmp_path / "x"), "--no-browser"]
    found = subprocess.run(
        command, env={"PYTHONPATH": str(tmp_path), "PATH": ""}, capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 2
    assert "pip install -e '.[watch]'" in found.stderr
