"""Which tests are in which tier, chosen by what they catch and what they cost.

    python tests/tiers.py measure [--resume]   # run everything but the zoo, and write down what each test takes
    python tests/tiers.py choose               # choose the first tier from that, and from what is known to be caught

Tiers: `make test` runs the first, `make test-full` everything but the zoo, `make test-zoo` the sweeps (marker `zoo`).
tests/tiers.json holds what tests take that are no unit tests, and which of them are in the first tier; one that is not
in it is. The root's conftest.py reads it.

[Note: the first tier] In this order, while they fit into the time that is left:

1. all tests that take less than FAST seconds;
2. those that ALWAYS names;
3. for each planted bug (tests/bugs) and each option (docs/mutations.md) the cheapest test that is known to catch it;
4. of each test with many parameter sets the cheapest set, since what it is about is then tried once;
5. what is cheapest of the rest.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIERS = ROOT / "tests" / "tiers.json"
TIMES = ROOT / "tests" / ".times.json"
BUGS = ROOT / "benchmarks" / "results" / "bugs.json"
OPTIONS = ROOT / "benchmarks" / "results" / "mutations.json"
FAST = 0.5
"""Seconds under which a test is a unit test."""
HARDEST = re.compile(r".*::test_strategy_passes\[(single-one_rank|\w+-\w+=2)-all_at_once\]")
"""The hardest cell of each strategy on one axis of two ranks."""
NAMED = (
    "test_a_run_leaves_metrics_curve_model_and_summary[ddp]",
    "test_command_line[arguments1-2-strategy 'nothing' is not installed]",
    "test_command_line[arguments2-0-1 passed, 0 failed]",
    "test_four_ranks_start_and_reduce",
    "test_each_odd_value_of_each_key_is_refused_or_kept_as_it_is",
    "test_runs_are_planned_or_refused[300]",
)
RULES = r"tests/test_architecture\.py::.*"
ALWAYS = re.compile(rf"{HARDEST.pattern}|{RULES}|.*::({'|'.join(map(re.escape, NAMED))})")
"""Tests that are in the first tier whatever they take: these cells, rules for all sources, commands in processes of
their own, the fuzzer."""
BUDGET = 2 * 400
"""Seconds of two workers that share two cores; what is left of eight minutes is for starting them."""


def choose(times: Mapping[str, float], wanted: Iterable[Collection[str]], budget: float = BUDGET) -> set[str]:
    """The first tier, without unit tests; see [Note: the first tier].

    Args:
        times: seconds by test.
        wanted: tests of which one is to be in it, each time.
        budget: seconds.
    """
    left = budget - sum(each for each in times.values() if each < FAST)
    chosen: set[str] = set()

    def take(test: str) -> None:
        nonlocal left
        if times[test] >= FAST and test not in chosen and times[test] <= left:
            chosen.add(test)
            left -= times[test]

    for test in sorted(times):
        if ALWAYS.fullmatch(test):
            take(test)
    for tests in wanted:
        known = sorted((each for each in tests if each in times), key=times.__getitem__)
        if known and not any(times[each] < FAST or each in chosen for each in known):
            take(known[0])
    sets: dict[str, list[str]] = defaultdict(list)
    for test in times:
        sets[test.partition("[")[0]].append(test)
    tried = {test.partition("[")[0] for test in times if times[test] < FAST or test in chosen}
    for name in sorted(sets.keys() - tried, key=lambda each: min(times[test] for test in sets[each])):
        take(min(sets[name], key=times.__getitem__))
    for test in sorted(times, key=times.__getitem__):
        take(test)
    return chosen


def read() -> tuple[dict[str, float], set[str]]:
    """What tests take that are no unit tests [s], and those of them that are in the first tier."""
    found = json.loads(TIERS.read_text(encoding="utf-8")) if TIERS.is_file() else {"seconds": {}, "first": []}
    return found["seconds"], set(found["first"])


def is_first(test: str, seconds: Mapping[str, float], first: Collection[str]) -> bool:
    """Whether a test that is no sweep is in the first tier."""
    return test in first or test not in seconds


def known_to_catch() -> dict[str, list[str]]:
    """The tests that catch each planted bug, and each option that is ignored."""
    bugs = json.loads(BUGS.read_text(encoding="utf-8"))["bugs"]
    options = json.loads(OPTIONS.read_text(encoding="utf-8"))
    found = {
        name: [test for test, outcome in each["outcomes"].items() if outcome == "failed"]
        for name, each in bugs.items()
        if each["status"] == "caught"
    }
    return found | {name: [each["by"]] for name, each in options.items() if each.get("by")}


def measure(resume: bool) -> None:
    """Run all but the zoo, and write down what each test takes."""
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-m", "not zoo", f"--times={TIMES}"]
    if not resume:
        TIMES.unlink(missing_ok=True)
    subprocess.run([*command, *(["--only-untimed"] if resume else [])], cwd=ROOT, check=False)


def write() -> None:
    """Choose, and write what was chosen; what is left out is printed."""
    times = json.loads(TIMES.read_text(encoding="utf-8"))
    known = known_to_catch()
    chosen = choose(times, known.values())
    slow = {test: round(seconds, 1) for test, seconds in sorted(times.items()) if seconds >= FAST}
    TIERS.write_text(json.dumps({"seconds": slow, "first": sorted(chosen)}, indent=1) + "\n", encoding="utf-8")
    fast = sum(seconds for seconds in times.values() if seconds < FAST)
    taken = sum(times[test] for test in chosen)
    print(f"{len(times) - len(slow)} unit tests, {fast:.0f} s; {len(chosen)} of {len(slow)} others, {taken:.0f} s")
    missed = [name for name, tests in known.items() if not any(is_first(test, slow, chosen) for test in tests)]
    print(f"bugs and options that the first tier misses: {', '.join(missed) or 'none'}")
    outside = {test.partition("[")[0] for test in slow} - {
        test.partition("[")[0] for test in times if is_first(test, slow, chosen)
    }
    print(f"{len(outside)} tests of which no parameter set is in it")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "choose"])
    parser.add_argument("--resume", action="store_true", help="leave out tests that have been measured")
    arguments = parser.parse_args()
    if arguments.what == "measure":
        measure(arguments.resume)
    else:
        write()
