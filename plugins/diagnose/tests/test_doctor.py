"""`meshwright doctor` finds what is wrong with a machine, says how to mend it, and has the ranks of a launcher join."""

from __future__ import annotations

import json
import os
import resource
import time
from contextlib import nullcontext
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from support.commands import run_command

from meshwright.base.processes import count_usable_cores
from meshwright.launch.open_world import open_world
from meshwright.strategy.registry import Registry
from meshwright_diagnose.doctor import checks
from meshwright_diagnose.doctor import rank_checks as together
from meshwright_diagnose.doctor.checks import CheckResult, check_directory, find_exit_code
from meshwright_testing import pool

LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def by_name(findings: list[CheckResult]) -> dict[str, CheckResult]:
    return {each.name: each for each in findings}


def test_the_exit_code_is_that_of_what_is_wrong():
    ok, warning = CheckResult("a", "b", "ok", "c"), CheckResult("a", "b", "warning", "c", "d")
    wrong, tried = CheckResult("a", "b", "error", "c", "d"), checks.make_failure("a", "b", "c", "d")
    assert [find_exit_code([ok, warning]), find_exit_code([ok, tried]), find_exit_code([tried, wrong])] == [0, 1, 2]
    assert checks.format_results([ok, wrong])[-3:] == ["  error    b: c", "           d", "1 error, 0 warning, 1 ok"]


@pytest.mark.parametrize(
    ("requires", "python", "state", "said"),
    [
        ("torch>=99", ">=3.11", "error", "outside of >=99"),
        ("nothing-of-that-name>=1", ">=3.11", "error", "not installed"),
        ('torch>=99; extra == "more"', ">=3.11", "warning", "outside of >=99"),
        ('torch>=99; python_version < "3"', ">=3.11", "", ""),
        ("pluggy", ">=99", "error", "needs >=99"),
    ],
)
def test_versions_are_held_against_what_is_declared(requires, python, state, said, tmp_path, monkeypatch):
    found = tmp_path / "meshwright_odd-0.1.0.dist-info"
    found.mkdir()
    lines = ["Metadata-Version: 2.1", "Name: meshwright-odd", "Version: 0.1.0", f"Requires-Python: {python}"]
    lines += ["Provides-Extra: more", f"Requires-Dist: {requires}", ""]
    (found / "METADATA").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    reported = [each for each in checks.check_versions() if each.status != "ok"]
    assert [each.status for each in reported] == ([state] if state else [])
    assert all(said in each.message and each.fix for each in reported)


def test_a_plugin_that_cannot_be_loaded_is_wrong_and_the_others_are_reported():
    broken = EntryPoint("odd", "no_such_module_at_all", "meshwright")
    strategies, failure = checks.check_plugins(Registry([broken]))
    assert (strategies.status, strategies.message) == ("ok", "single")
    assert (failure.name, failure.status, "no_such_module_at_all" in failure.message) == ("odd", "error", True)


def test_threads_that_are_no_number_or_too_many_are_reported():
    many = "warning" if count_usable_cores() > 1 else "ok"
    for value, state in ((None, "ok"), ("1", "ok"), ("none", "error"), ("0", "error"), ("64", many)):
        environment = {} if value is None else {"OMP_NUM_THREADS": value}
        assert by_name(list(checks.check_settings(environment, 4)))["OMP_NUM_THREADS"].status == state


def test_few_open_files_are_reported(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 1000))
    found = by_name(list(checks.check_limits()))["open files"]
    assert (found.status, "ulimit -n" in found.fix) == ("warning", True)


def test_a_clock_that_is_behind_the_files_or_is_being_set_is_reported(monkeypatch):
    assert [each.status for each in checks.check_clocks()] == ["ok"]
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 1e9)
    assert [(each.status, "before the files" in each.message) for each in checks.check_clocks()] == [("warning", True)]
    jumps = iter([0.0, 30.0])
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    assert [(each.status, "being set" in each.message) for each in checks.check_clocks()] == [("warning", True)]


def test_a_directory_is_tried_and_left_as_it_was(tmp_path):
    place = tmp_path / "runs"
    found = by_name(list(check_directory(place)))
    assert {"writable", "renaming", "locks", "free", "speed"} == found.keys()
    assert {found[name].status for name in ("writable", "renaming", "locks")} == {"ok"}
    assert not list(place.iterdir())


def test_a_directory_that_cannot_be_made_or_holds_no_locks_or_is_full_is_reported(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    (found,) = check_directory(tmp_path / "file")
    assert (found.status, find_exit_code([found])) == ("error", 2)
    monkeypatch.setattr(checks, "MIN_FREE_BYTES", 1 << 62)
    monkeypatch.setattr(checks, "MIN_WRITE_SPEED", 1e15)
    monkeypatch.setattr(checks, "FileLock", lambda *_, **__: nullcontext())
    states = {name: each.status for name, each in by_name(list(check_directory(tmp_path))).items()}
    assert (states["locks"], states["free"], states["speed"]) == ("error", "warning", "warning")


def _as_two_nodes(place: str, ahead_s: float) -> list[tuple[str, str, str]]:
    """Each rank as the first of a node, the second with a clock of its own."""
    os.environ["LOCAL_RANK"] = "0"
    real = time.time
    try:
        with open_world("cpu") as world:
            if world.rank == 1:
                time.time = lambda: real() + ahead_s
            found = list(together.check_ranks(world, Path(place)))
            return [(each.name, each.status, each.message) for each in found]
    finally:
        time.time = real


@pytest.mark.parametrize(("ahead_s", "state"), [(0.0, "ok"), (-5.0, "warning")])
def test_nodes_compare_their_clocks_and_what_they_see_of_a_directory(ahead_s, state, tmp_path):
    found = {name: (state, said) for name, state, said in pool(2).run(_as_two_nodes, str(tmp_path), ahead_s)[0]}
    assert found["nodes"][0] == state, found
    assert ahead_s == 0 or "5 s behind rank 0" in found["nodes"][1]
    # A lock of one process holds another.
    assert [found[name][0] for name in ("shared", "locks of nodes", "gloo")] == ["ok"] * 3
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_alone_it_starts_two_ranks_and_tells_all_as_json(tmp_path):
    done = run_command("doctor", "--json", "-", "--dir", str(tmp_path / "runs"))
    reported = json.loads(done.stdout)
    wrong = [each for each in reported["findings"] if each["status"] == "error"]
    assert done.returncode == reported["exit_code"] == (2 if wrong else 0), wrong
    areas = {each["category"] for each in reported["findings"]}
    assert {"versions", "plugins", "devices", "limits", "backends", "clocks", "directory", "ranks", "links"} <= areas


@pytest.mark.slow
def test_ranks_of_a_launcher_join_and_the_first_one_tells(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = run_command("doctor", launcher=LAUNCHER)
    assert done.stdout.count("2 ranks on 1 host are connected") == done.stdout.count("versions\n") == 1, done.stderr
