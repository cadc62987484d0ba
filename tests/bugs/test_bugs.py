"""The planted bugs apply to today's sources, name tests that exist, and none was missed; `run.py` plants them."""

from __future__ import annotations

import pytest
import run

BUGS = run.read_bugs()


def test_every_bug_applies_and_its_tests_exist() -> None:
    assert run.check(BUGS, collect=False) == {}
    assert [bug.name for bug in BUGS if bug.new == bug.old or not bug.caught_by] == []


@pytest.mark.slow
def test_the_parameters_of_the_named_tests_exist() -> None:
    assert run.check(BUGS) == {}


def test_no_bug_was_missed_and_the_page_is_that_of_the_results() -> None:
    results = run.read_results()
    assert [bug.name for bug in BUGS if run.status(bug, results) == "missed"] == []
    assert run.TABLE.read_text(encoding="utf-8") == run.table(results)


@pytest.mark.parametrize(
    ("where", "old", "reason"),
    [
        ("Mesh.data_rank", "not in any source", "does not occur once in Mesh.data_rank; it occurs in no definition"),
        ("Mesh.no_such", "* self.degrees.dp_shard +", "there is no Mesh.no_such; it occurs in meshwright"),
        ("mesh.Mesh.__init__", "def __init__(", ""),
        ("__init__", "def __init__(", "there is no __init__"),
    ],
)
def test_a_bug_that_no_longer_applies_is_described(where: str, old: str, reason: str) -> None:
    bug = run.Bug("name", "why", where, old, "new", ())
    if not reason:
        assert run.locate(bug).name == "Mesh.__init__"
        return
    with pytest.raises(LookupError, match=reason):
        run.locate(bug)
