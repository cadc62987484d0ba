"""`meshwright doctor` finds what is wrong with a machine, says how to mend it, and has the ranks of a launcher join."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from support.commands import LAUNCHER_VARIABLES, command
from typer.testing import CliRunner

from meshwright.base.processes import usable_cores
from meshwright.cli.main import app
from meshwright.launch.open_world import open_world
from meshwright.strategy.registry import Registry
from meshwright_diagnose import plugin as doctor_command
from meshwright_diagnose.doctor import checks as directory
from meshwright_diagnose.doctor import examine
from meshwright_diagnose.doctor import examine as together
from meshwright_diagnose.doctor.checks import (
    Finding,
    as_lines,
    clock_findings,
    directory_findings,
    exit_code,
    failed,
    limit_findings,
    plugin_findings,
    setting_findings,
    version_findings,
)
from meshwright_testing import pool

LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {each.name: each for each in findings}


def test_the_exit_code_is_that_of_what_is_wrong():
    ok, warning = Finding("a", "b", "ok", "c"), Finding("a", "b", "warning", "c", "d")
    wrong, tried = Finding("a", "b", "wrong", "c", "d"), failed("a", "b", "c", "d")
    assert [exit_code([ok, warning]), exit_code([ok, tried]), exit_code([tried, wrong])] == [0, 1, 2]
    assert as_lines([ok, wrong]) == [
        "a",
        "  ok       b: c",
        "  wrong    b: c",
        "           d",
        "1 wrong, 0 warning, 1 ok",
    ]


@pytest.mark.parametrize(
    ("requires", "python", "state", "said"),
    [
        ("torch>=99", ">=3.11", "wrong", "outside of >=99"),
        ("nothing-of-that-name>=1", ">=3.11", "wrong", "not installed"),
        ('torch>=99; extra == "more"', ">=3.11", "warning", "outside of >=99"),
        ('torch>=99; extra == "dev"', ">=3.11", "", ""),
        ('torch>=99; python_version < "3"', ">=3.11", "", ""),
        ("pluggy", ">=99", "wrong", "needs >=99"),
    ],
)
def test_versions_are_held_against_what_each_distribution_declares(requires, python, state, said, tmp_path):
    found = tmp_path / "meshwright_odd-0.1.0.dist-info"
    found.mkdir()
    lines = ["Metadata-Version: 2.1", "Name: meshwright-odd", "Version: 0.1.0", f"Requires-Python: {python}"]
    lines += [f"Provides-Extra: {extra}" for extra in ("more", "dev")]
    (found / "METADATA").write_text("\n".join([*lines, f"Requires-Dist: {requires}", ""]), encoding="utf-8")
    sys.path.insert(0, str(tmp_path))
    try:
        findings = list(version_findings())
    finally:
        sys.path.remove(str(tmp_path))
    told = [each for each in findings if each.state != "ok"]
    assert [each.state for each in told] == ([state] if state else [])
    assert all(said in each.said and each.mend for each in told)
    assert by_name(findings)["meshwright-odd"].said == "0.1.0"


def test_a_plugin_that_cannot_be_loaded_is_wrong_and_the_others_are_told():
    broken = EntryPoint("odd", "no_such_module_at_all", "meshwright")
    strategies, failure = plugin_findings(Registry([broken]))
    assert (strategies.state, strategies.said) == ("ok", "single")
    assert (failure.name, failure.state) == ("odd", "wrong")
    assert "no_such_module_at_all" in failure.said
    assert failure.mend


@pytest.mark.parametrize(
    ("value", "state"),
    [(None, "ok"), ("1", "ok"), ("none", "wrong"), ("0", "wrong"), ("64", "warning" if usable_cores() > 1 else "ok")],
)
def test_threads_that_are_no_number_or_too_many_are_told(value, state):
    environment = {} if value is None else {"OMP_NUM_THREADS": value}
    assert by_name(list(setting_findings(environment, 4)))["OMP_NUM_THREADS"].state == state


def test_settings_of_the_hub_are_told(tmp_path):
    (hub,) = [
        each for each in setting_findings({"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}, 1) if each.name == "hub"
    ]
    assert hub.state == "ok"
    assert hub.said == f"HF_HUB_OFFLINE=1: only what is in {tmp_path}"


def test_few_open_files_are_told():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1000), hard))
        found = by_name(list(limit_findings()))["open files"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found.state == "warning"
    assert "ulimit -n" in found.mend


def test_a_clock_that_is_behind_the_files_or_is_being_set_is_told(monkeypatch):
    assert [each.state for each in clock_findings()] == ["ok"]
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 1e9)
    (behind,) = clock_findings()
    assert (behind.state, "before the files" in behind.said) == ("warning", True)
    jumps = iter([0.0, 30.0])
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    (jumped,) = clock_findings()
    assert (jumped.state, "being set" in jumped.said) == ("warning", True)


def test_a_directory_is_tried_and_left_as_it_was(tmp_path):
    place = tmp_path / "runs"
    found = by_name(list(directory_findings(place)))
    assert {"writable", "renaming", "locks", "free", "speed"} == found.keys()
    assert {found[name].state for name in ("writable", "renaming", "locks")} == {"ok"}
    assert not list(place.iterdir())


def test_a_directory_that_cannot_be_made_or_holds_no_locks_or_is_full_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    (found,) = directory_findings(tmp_path / "file")
    assert (found.state, exit_code([found])) == ("wrong", 2)
    monkeypatch.setattr(directory, "FREE", 1 << 62)
    monkeypatch.setattr(directory, "SLOW", 1e15)

    class NoLock:
        def __init__(self, *_: object, **__: object) -> None: ...

        def __enter__(self) -> NoLock:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(directory, "FileLock", NoLock)
    states = {name: each.state for name, each in by_name(list(directory_findings(tmp_path))).items()}
    assert states["locks"] == "wrong"
    assert states["free"] == states["speed"] == "warning"


def _as_two_nodes(place: str, ahead_s: float) -> list[tuple[str, str, str]]:
    """Each rank as the first of a node, the second with a clock of its own."""
    os.environ["LOCAL_RANK"] = "0"
    real = time.time
    try:
        with open_world("cpu") as world:
            if world.rank == 1:
                time.time = lambda: real() + ahead_s
            found = list(together.findings_of(world, Path(place)))
            return [(each.name, each.state, each.said) for each in found]
    finally:
        time.time = real


@pytest.mark.parametrize(("ahead_s", "state"), [(0.0, "ok"), (-5.0, "warning")])
def test_nodes_compare_their_clocks_and_what_they_see_of_a_directory(ahead_s, state, tmp_path):
    found = {name: (state, said) for name, state, said in pool(2).run(_as_two_nodes, str(tmp_path), ahead_s)[0]}
    assert found["nodes"][0] == state, found
    if ahead_s:
        assert f"5 s {'ahead of' if ahead_s > 0 else 'behind'} rank 0" in found["nodes"][1]
    assert found["shared"][0] == "ok"
    # A lock of one process holds another.
    assert found["locks of nodes"][0] == "ok"
    assert found["gloo"][0] == "ok"
    assert "16 MiB over 2 ranks" in found["gloo"][1]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_alone_it_starts_two_ranks_and_tells_all_as_json(tmp_path):
    done = command("doctor", "--json", "--dir", str(tmp_path / "runs"))
    told = json.loads(done.stdout)
    wrong = [each for each in told["findings"] if each["state"] == "wrong"]
    assert done.returncode == told["exit_code"] == (2 if wrong else 0), wrong
    names = {f"{each['area']}: {each['name']}" for each in told["findings"]}
    assert {"versions: torch", "plugins: strategies", "devices: cpu", "limits: open files", "backends: gloo"} <= names
    assert {"settings: OMP_NUM_THREADS", "clocks: this machine", "directory: locks", "ranks: ranks"} <= names
    assert "links: gloo" in names
    assert all(each["mend"] for each in told["findings"] if each["state"] != "ok")


@pytest.mark.slow
def test_ranks_of_a_launcher_join_and_the_first_one_tells(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = command("doctor", launcher=LAUNCHER)
    assert done.stdout.count("have met") == 1, done.stderr
    assert "2 on 1 host have met" in done.stdout
    assert done.stdout.count("versions\n") == 1


def test_what_is_wrong_sets_the_exit_code_of_the_command(monkeypatch):
    monkeypatch.setattr(examine, "of_local_ranks", lambda: iter(()))
    monkeypatch.setattr(doctor_command, "leave", sys.exit)
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 2
    assert "wrong    OMP_NUM_THREADS: 'many' is no number of threads" in done.stdout
    assert "Unset OMP_NUM_THREADS" in done.stdout
