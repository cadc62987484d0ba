"""Planted bugs can be planted in all rooms, name tests that exist, and were caught; `tests/bugs/run.py` plants them."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
ROOT = HERE.parent
sys.path.insert(0, str(HERE / "bugs"))

import run  # noqa: E402
from catalogue import BUGS, Bug  # noqa: E402

AT_LEAST = {
    **dict.fromkeys(("step", "manager", "parallel.tensor", "parallel.context", "checkpoint", "data", "train"), 5),
    **dict.fromkeys(("objectives", "fsdp2", "ddp", "pipeline", "plan"), 5),
    **dict.fromkeys(("base", "files", "launch", "mesh", "tensors", "model", "strategy", "cli", "clusters"), 2),
    **dict.fromkeys(("parallel.expert", "megatron_fsdp", "guide.doctor", "events", "profile", "watch"), 2),
    **dict.fromkeys(("memory", "replay"), 2),
}
WITHOUT = {"_compat", "single", "testing"}
"""What is held by canaries, is not more than what it inherits, or is itself a test."""


def _source(bug: Bug) -> str:
    package, *parts = bug.module.split(".")
    plugin = package.removeprefix("meshwright_")
    place = ROOT / "core" if package == "meshwright" else ROOT / "plugins" / plugin / "src"
    return place.joinpath(package, *parts).with_suffix(".py").read_text(encoding="utf-8")


def _room(bug: Bug) -> str:
    package, *parts = bug.module.split(".")
    return package.removeprefix("meshwright_") if package != "meshwright" else ".".join(parts[:-1])


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_can_be_planted_and_its_tests_exist(bug: Bug) -> None:
    source = _source(bug)
    assert source.count(bug.old) == 1
    assert bug.new != bug.old
    compile(source.replace(bug.old, bug.new), bug.module, "exec")
    assert 1 <= len(bug.caught_by) <= 3
    for test in bug.caught_by:
        file, _, name = test.partition("[")[0].partition("::")
        assert re.search(rf"def {name.rpartition('::')[2]}\(", (ROOT / file).read_text(encoding="utf-8")), test


def test_bugs_have_names_of_their_own_and_are_in_all_rooms() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS)
    counts = Counter(room for bug in BUGS for room in {_room(bug), _room(bug).partition(".pretrained")[0]})
    assert {room: count for room, count in AT_LEAST.items() if counts[room] < count} == {}
    core = {each.name for each in (ROOT / "core" / "meshwright").iterdir() if (each / "__init__.py").exists()}
    assert core - WITHOUT == {room.partition(".")[0] for room in AT_LEAST} & core


def test_every_bug_was_caught_and_the_table_is_that_of_the_results() -> None:
    results = run.read_results()
    assert [bug.name for bug in BUGS if not run.is_done(bug, results)] == [], "run python tests/bugs/run.py"
    assert [bug.name for bug in BUGS if run.is_done(bug, results) and not run.is_caught(bug, results)] == []
    assert run.TABLE.read_text(encoding="utf-8") == run.table(results)
