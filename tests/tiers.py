"""Which tests are in which tier, chosen by what they catch and what they cost.

    python tests/tiers.py measure [--resume]   # run everything but the zoo, and write down what each test takes
    python tests/tiers.py choose               # choose the first tier from that, and from what is known to be caught

Tiers: `make test` runs the first, `make test-full` everything but the zoo, `make test-zoo` the sweeps (marker `zoo`).
tests/tiers.json holds what tests take that are no unit tests, and which of them are in the first tier; one that is not
in it is. The root's conftest.py reads it.

[Note: the first tier] In this order, while they fit into the time that is left:

1. all tests that take less than FAST seconds;
2. for each planted bug (tests/bugs) and each option (docs/mutations.md) the cheapest test that is known to catch it;
3. of each test with many parameter sets the cheapest set, since what it is about is then tried once;
4. what is cheapest of the rest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIERS = ROOT / "tests" / "tiers.json"
TIMES = ROOT / "tests" / ".times.json"
BUGS = ROOT / "benchmarks" / "results" / "bugs.json"
OPTIONS = ROOT / "benchmarks" / "results" / "mutations.json"
FAST = 0.5
"""Seconds under which a test is a unit test."""
BUDGET = 2 * 7 * 60
"""Seconds of two workers; what is left of eight minutes is for starting them."""


def choose(times: Mapping[str, float], wanted: Iterable[list[str]], budget: float = BUDGET) -> set[str]:
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

    for tests in wanted:
        known = sorted((each for each in _sets(tests, times)), key=times.__getitem__)
        if known and not any(times[each] < FAST or each in chosen for each in known):
            take(known[0])
    sets: dict[str, list[str]] = defaultdict(list)
    for test in times:
        sets[test.partition("[")[0]].append(test)
    for name in sorted(sets, key=lambda each: min(times[test] for test in sets[each])):
        take(min(sets[name], key=times.__getitem__))
    for test in sorted(times, key=times.__getitem__):
        take(test)
    return chosen


def _sets(tests: Iterable[str], times: Mapping[str, float]) -> Iterable[str]:
    """These tests; all parameter sets of one that is named without."""
    for test in tests:
        yield from [test] if test in times else [each for each in times if each.partition("[")[0] == test]


def known_to_catch() -> list[list[str]]:
    """For each planted bug and each option, the tests that catch it."""
    bugs = json.loads(BUGS.read_text(encoding="utf-8"))["bugs"]
    options = json.loads(OPTIONS.read_text(encoding="utf-8"))
    found = [[test for test, end in each["outcomes"].items() if end != "passed"] for each in bugs.values()]
    return found + [[each["by"]] for each in options.values() if each.get("by")]


def measure(resume: bool) -> None:
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-m", "not zoo", f"--times={TIMES}"]
    if not resume:
        TIMES.unlink(missing_ok=True)
    subprocess.run([*command, *(["--only-untimed"] if resume else [])], cwd=ROOT, check=False)


def write() -> None:
    times = json.loads(TIMES.read_text(encoding="utf-8"))
    chosen = choose(times, known_to_catch())
    slow = {test: round(seconds, 1) for test, seconds in sorted(times.items()) if seconds >= FAST}
    TIERS.write_text(json.dumps({"seconds": slow, "first": sorted(chosen)}, indent=1) + "\n", encoding="utf-8")
    fast = sum(seconds for seconds in times.values() if seconds < FAST)
    taken = sum(times[test] for test in chosen)
    print(f"{len(times) - len(slow)} unit tests, {fast:.0f} s; {len(chosen)} of {len(slow)} others, {taken:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "choose"])
    parser.add_argument("--resume", action="store_true", help="leave out tests that have been measured")
    arguments = parser.parse_args()
    if arguments.what == "measure":
        measure(arguments.resume)
    else:
        write()
