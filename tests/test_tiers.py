"""The first tier is what `tests/tiers.py` says it is, and catches nearly all that the full one does."""

from __future__ import annotations

import re
from pathlib import Path

import tiers

ROOT = Path(__file__).parents[1]
CELL = "tests/test_conformance.py::test_strategy_passes[fsdp2-dp_shard=2-all_at_once]"


def test_what_catches_bugs_comes_before_what_is_cheap_and_all_within_the_budget() -> None:
    times = {
        CELL: 9.0,
        "a[1]": 0.1,
        "b[1]": 7.0,
        "b[2]": 5.0,
        "c": 6.0,
        "d[1]": 2.0,
        "d[2]": 3.0,
        "e[1]": 1.0,
        "e[2]": 1.5,
    }
    assert tiers.choose(times, [["b[1]", "b[2]"], ["a[1]", "c"]], budget=19.0) == {CELL, "b[2]", "e[1]", "d[1]", "e[2]"}
    assert tiers.choose(times, [["b[1]"]], budget=17.0) == {CELL, "b[1]"}
    assert tiers.choose(times, [["b[1]", "b[2]"]], budget=100.0) == times.keys() - {"a[1]"}


def test_a_test_that_was_never_measured_is_in_the_first_tier() -> None:
    assert tiers.is_first("new", {"old": 3.0}, set())
    assert not tiers.is_first("old", {"old": 3.0}, set())


def test_the_first_tier_catches_nearly_all_that_is_known_to_be_caught() -> None:
    seconds, first = tiers.read()
    known = tiers.known_to_catch()
    missed = [name for name, tests in known.items() if not any(tiers.is_first(each, seconds, first) for each in tests)]
    assert len(missed) <= 0.05 * len(known), missed


def test_every_strategy_and_axis_is_in_the_first_tier_with_the_hardest_cell() -> None:
    seconds, first = tiers.read()
    assert {test for test in seconds if tiers.ALWAYS.fullmatch(test)} <= first
    assert [name for name in tiers.NAMED if not any(test.endswith(f"::{name}") for test in seconds)] == []
    hard = {test for test in seconds if tiers.HARDEST.fullmatch(test)}
    alone = {re.sub(r".*\[|-all_at_once\]", "", test) for test in hard}
    assert {each.partition("-")[0] for each in alone} >= {"ddp", "fsdp2", "megatron_fsdp", "pipeline"}
    assert {f"fsdp2-{axis}=2" for axis in ("dp_replicate", "dp_shard", "cp", "tp", "ep")} <= alone


def test_tests_that_were_measured_exist() -> None:
    names = {test.partition("[")[0] for test in tiers.read()[0]}
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file in {name.partition("::")[0] for name in names}}
    gone = [name for name in names if f"def {name.rpartition('::')[2]}(" not in sources[name.partition("::")[0]]]
    assert gone == [], "run python tests/tiers.py measure, and choose"
