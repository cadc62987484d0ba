"""The page on runs: who has not its token sees nothing, and hostile files of one run leave the others as they are."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.watched_runs import write_rank_files, write_run_directory, write_timelines

from meshwright_watch import server
from meshwright_watch.metric_columns import MAX_LINE_BYTES, FileTail
from meshwright_watch.run import open_runs

PATHS = ["/", "/web/page.js", "/api/state", "/api/events?run=0", "/api/series?run=0&name=loss", "/api/ranks?run=0"]
TOKEN = "a-token"
LIMIT_S = 10.0
MEMORY_MB = 400


def _client(*directories: Path, token: str | None = TOKEN) -> TestClient:
    page = server.build_application(open_runs(directories), host="127.0.0.1", port=1, token=TOKEN)
    client = TestClient(page, base_url="http://127.0.0.1:1", raise_server_exceptions=False, follow_redirects=False)
    if token is not None:
        client.cookies.set("meshwright-1", token)
    return client


# -- who may ask


@pytest.mark.parametrize("token", [None, "", "another", TOKEN + "x", TOKEN[:-1]])
def test_without_the_token_nothing_is_answered(token: str | None, tmp_path: Path) -> None:
    client = _client(write_run_directory(tmp_path / "run", 3), token=token)
    for path in PATHS:
        answer = client.get(path)
        assert (answer.status_code, "token" in answer.text) == (403, True), path


def test_the_printed_address_lets_a_browser_in_and_hides_its_token(tmp_path: Path) -> None:
    client = _client(write_run_directory(tmp_path / "run", 3), token=None)
    assert client.get("/?token=another").status_code == 403
    # Not for answers: an address with a token would be in more places.
    assert client.get(f"/api/state?token={TOKEN}").status_code == 403
    answer = client.get(f"/?token={TOKEN}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert "httponly" in answer.headers["set-cookie"].lower()
    assert "samesite=strict" in answer.headers["set-cookie"].lower()
    assert client.get("/").status_code == 200
    tokens = {server.new_token() for _ in range(100)}
    assert (len(tokens), min(map(len, tokens)) >= 32) == (100, True)
    assert client.get("/api/state").json()["runs"][0]["step"] == 3


# -- hostile files


HUGE = "9" * 4000
LINES = {
    "half of a character": '{"step": 1, "loss": 1.0, "\\ud800": 1.0, "event": "\\udfff", "message": "\\ud800"}',
    "not a number": '{"step": 1, "loss": NaN, "event": "start", "num_steps": NaN, "values": [Infinity, {"a": '
    "-Infinity}]}",
    "huge": f'{{"step": 1, "loss": {HUGE}, "num_tokens": -{HUGE}, "event": "start", "num_steps": {HUGE}, '
    f'"time": {HUGE}}}',
    "too huge": f'{{"step": {HUGE * 2}, "event": "start", "num_steps": {HUGE * 2}}}',
    "of other types": '{"step": [1], "loss": {"a": {"b": {"c": []}}}, "event": {"a": 1}, "mesh": {}}',
    "nested": '{"step": 1, "event": "start", "a": ' + "[" * 50_000 + "]" * 50_000 + "}",
    "of no kind": '"text"\n[]\nnull\n5\n{}\n{"step": true, "event": true}',
    "binary": "\x00\x01\ufffe",
    "names": json.dumps({"step": 1, **{f"n{n}": n for n in range(5000)}}),
    "actions": f'{{"step": 1, "time": {HUGE}, "actions": [["F", 0, 0, {HUGE}, 1.0], ["F", 0, 0, NaN, 1], ["F"]]}}',
}
FILES = ["metrics.jsonl", "events.jsonl", "summary.json", "run.yaml", ".lock.json"]
FILES += ["ranks/0.jsonl", "timeline/planned.json", "timeline/rank-00000.jsonl"]


def _all(client: TestClient) -> None:
    """Every answer about the first run is one of JSON, in time, and the second is seen as it is."""
    began = time.monotonic()
    for _ in range(3):
        state = client.get("/api/state")
        assert state.status_code == 200, state.text
    assert [each["name"] for each in state.json()["runs"]] == ["hostile", "plain"]
    assert state.json()["runs"][1]["step"] == 20
    names = [name for name in state.json()["runs"][0]["names"] if name.isascii()][:20]
    series = "series?run=0" + "".join(f"&name={name}" for name in names)
    of_one = (
        "events?run=0",
        "settings?run=0",
        f"{series}&axis=time&from=1.5&smoothing=0.9",
        f"{series}&axis=tokens",
        "ranks?run=0",
        "rank?run=0&rank=0",
        "timeline?run=0",
    )
    for path in (series, *of_one, "compare?one=0&other=1", "compare?one=1&other=0"):
        answer = client.get(f"/api/{path}")
        assert answer.status_code in (200, 400), (path, answer.text)
        json.loads(answer.content, parse_constant=pytest.fail)
    assert time.monotonic() - began < LIMIT_S


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("hostile", "plain"):
        run = write_run_directory(tmp_path / name, 20)
        write_rank_files(run, 2)
        write_timelines(run)
    return tmp_path / "hostile", tmp_path / "plain"


@pytest.mark.parametrize("kind", LINES)
def test_lines_that_hold_anything_are_answered(kind: str, runs: tuple[Path, Path]) -> None:
    for name in FILES:
        path = runs[0] / name
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8", errors="surrogatepass") as file:
            file.write(LINES[kind] + "\n")
    _all(_client(*runs))
    for name in FILES:
        (runs[0] / name).write_text(LINES[kind] + "\n", encoding="utf-8", errors="surrogatepass")
    _all(_client(*runs))


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 3 << 30)


NO_FILES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "directory": Path.mkdir,
    "sparse": _sparse,
    "circle": lambda path: path.symlink_to(path),
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", NO_FILES)
def test_files_that_are_none_are_passed_over(kind: str, name: str, runs: tuple[Path, Path]) -> None:
    path = runs[0] / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    NO_FILES[kind](path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _all(_client(*runs))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY_MB * 1000


def test_a_line_that_is_too_long_is_left_out_and_those_behind_it_are_read(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail, found = FileTail(path), []
    for written in (b"one\n" + b"x" * (3 * MAX_LINE_BYTES + 5) + b"\ntwo\n", b"y" * (2 * MAX_LINE_BYTES), b"\nthree\n"):
        with path.open("ab") as file:
            file.write(written)
        found.append([line for _ in range(20) for line in tail.read(1 << 20).lines])
    assert found == [[b"one", b"two"], [], [b"three"]]


def test_a_run_of_which_nobody_has_thought_leaves_the_others(
    runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = _client(*runs)

    def fail(self: Any, *arguments: Any) -> Any:
        if self.name == "hostile":
            raise ZeroDivisionError
        return original(self)

    original = server.WatchedRun.get_state
    monkeypatch.setattr(server.WatchedRun, "get_state", fail)
    found = client.get("/api/state").json()["runs"]
    assert (found[0]["state"], "ZeroDivisionError" in found[0]["reason"]) == ("failed", True)
    assert found[0].keys() == found[1].keys()
    assert found[1]["step"] == 20
