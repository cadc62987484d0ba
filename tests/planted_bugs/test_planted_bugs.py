"""The planted bugs apply to today's sources, name tests that exist, and none was missed; `plant.py` plants them."""

from __future__ import annotations

import plant
import pytest

BUGS = plant.read_bugs()


def test_every_bug_applies_and_its_tests_exist() -> None:
    assert plant.find_stale_bugs(BUGS, collect=False) == {}
    assert [bug.name for bug in BUGS if bug.replacement == bug.original or not bug.caught_by] == []


@pytest.mark.slow
def test_the_parameters_of_the_named_tests_exist() -> None:
    assert plant.find_stale_bugs(BUGS) == {}


def test_no_bug_was_missed_and_the_page_is_that_of_the_results() -> None:
    results = plant.read_results()
    assert [bug.name for bug in BUGS if plant.find_status(bug, results) == "missed"] == []
    assert plant.PAGE_PATH.read_text(encoding="utf-8") == plant.render_table(results)


def test_a_bug_that_no_longer_applies_is_described() -> None:
    def located(where: str, old: str) -> str:
        return plant.locate(plant.PlantedBug("name", "why", where, old, "new", ())).name

    assert located("mesh.Mesh.__init__", "def __init__(") == "Mesh.__init__"
    with pytest.raises(LookupError, match=r"does not occur once in Mesh\.data_rank; it occurs in no definition"):
        located("Mesh.data_rank", "not in any source")
    with pytest.raises(LookupError, match=r"there is no Mesh\.no_such; it occurs in meshwright"):
        located("Mesh.no_such", "* self.degrees.dp_shard +")
