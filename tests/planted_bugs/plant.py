"""Plant each bug of bugs.yaml, alone, and run the tests that should notice it.

    python tests/planted_bugs/plant.py                          # all that have no result yet
    python tests/planted_bugs/plant.py --only clip              # those whose name, reason or function matches a pattern
    python tests/planted_bugs/plant.py --again                  # also those that have a result
    python tests/planted_bugs/plant.py --only clip --tests ...  # which of other tests notice it; no result is written
    python tests/planted_bugs/plant.py --check                  # list the bugs that no longer apply, and why; plant
    nothing

A bug is caught if every test that it names fails while it is planted; the same tests must pass without it. No file is
changed: the source is rewritten on import, in every process of a test (`tests/mutation/sitecustomize.py`).
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.forked_tests import CHANGE_VARIABLE, ROOT, collect_test_ids, run_tests, run_with_hook, start_fork_server

HERE = Path(__file__).parent
RESULTS = ROOT / "benchmarks" / "results" / "bugs.json"
PAGE_PATH = ROOT / "docs" / "reference" / "proofs" / "planted-bugs.md"
PAGE_HEADER = """# Planted bugs: mistakes that the tests catch

This page proves that the tests catch realistic bugs: wrong reductions, gradients, shards and schedules, lost data,
wrong numbers, security. `python tests/planted_bugs/plant.py` plants each bug of `tests/planted_bugs/bugs.yaml`
alone, in all processes of a test. A bug is caught if the listed tests pass without it and fail with it; other
tests may fail too. `--check` lists bugs whose text or tests have changed since.
"""


@dataclass(frozen=True)
class PlantedBug:
    """A bug of bugs.yaml, by which `old`, which occurs once in the source of `where`, becomes `new`."""

    name: str
    description: str
    target: str  # Qualified name of a function, class or constant, after names of its packages if that is ambiguous
    original: str
    replacement: str
    caught_by: tuple[str, ...]  # Names of tests with their parameters, without their files

    @property
    def digest(self) -> str:
        """Changes with everything that a result depends on."""
        return hashlib.sha256(
            repr((self.target, self.original, self.replacement, self.caught_by)).encode()
        ).hexdigest()[:8]


@dataclass(frozen=True)
class Definition:
    """Source of a function, class or constant."""

    module: str
    name: str
    source: str

    def is_named(self, where: str) -> bool:
        """Whether `where` is the qualified name, or package names followed by it."""
        packages, name = where.split("."), self.name.split(".")
        return packages[-len(name) :] == name and {*packages[: -len(name)]} <= {*self.module.split(".")}


def read_bugs() -> list[PlantedBug]:
    entries = yaml.safe_load((HERE / "bugs.yaml").read_text(encoding="utf-8"))
    return [
        PlantedBug(name, each["description"], each["target"], *each["change"], tuple(each["caught_by"]))
        for name, each in entries.items()
    ]


# -- where bugs and tests are


@functools.cache
def find_definitions() -> list[Definition]:
    """All functions, classes and constants of core and of the plugins."""
    found = []
    for folder in (ROOT / "core", *sorted(ROOT.glob("plugins/*/src"))):
        for file in sorted(folder.rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            module = ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
            lines = text.splitlines(keepends=True)
            for name, first, last in _iter_spans(ast.parse(text), ""):
                found.append(Definition(module, name, "".join(lines[first - 1 : last])))
    return found


def _iter_spans(parent: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
    """Qualified names with their first and last lines."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name, min(each.lineno for each in (node, *node.decorator_list)), node.end_lineno or 0
            yield from _iter_spans(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not prefix:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, node.lineno, node.end_lineno or 0
        else:
            yield from _iter_spans(node, prefix)


def locate(bug: PlantedBug) -> Definition:
    """Find the definition that a bug changes. LookupError, which says where the text does occur: there is not one."""
    named = [each for each in find_definitions() if each.is_named(bug.target)]
    fitting = [each for each in named if each.source.count(bug.original) == 1]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise LookupError(f"{bug.target} is ambiguous: {', '.join(each.module for each in fitting)}")
    reason = f"{bug.original!r} does not occur once in {bug.target}" if named else f"there is no {bug.target}"
    others = sorted(
        {f"{each.module}.{each.name}" for each in find_definitions() if each.source.count(bug.original) == 1}
    )
    raise LookupError(f"{reason}; it occurs in {', '.join(others[-5:]) or 'no definition'}")


def find_test_files(names: Iterable[str]) -> dict[str, list[Path]]:
    """For each name of a test, the files that define a test function of that name."""
    files = [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("*/*/tests/**/test_*.py")]
    texts = {file: file.read_text(encoding="utf-8") for file in sorted(files)}
    wanted = {name: f"def {name.partition('[')[0].rpartition('::')[2]}(" for name in names}
    return {name: [file for file, text in texts.items() if head in text] for name, head in wanted.items()}


def find_tests(names: Iterable[str]) -> dict[str, list[str]]:
    """For each name of a test, the ids that pytest collects for it; all parameters if it names none."""
    names = list(dict.fromkeys(names))
    files = sorted({str(file) for found in find_test_files(names).values() for file in found})
    ids = collect_test_ids(files) if files else []
    return {name: [each for each in ids if each.endswith(f"::{name}") or f"::{name}[" in each] for name in names}


def find_stale_bugs(bugs: Sequence[PlantedBug], *, collect: bool = True) -> dict[str, str]:
    """Return why bugs no longer apply, by name; with `collect` also where parameters of tests do not exist."""
    names = [test for bug in bugs for test in bug.caught_by]
    known: dict[str, Any] = find_tests(names) if collect else find_test_files(names)
    found = {}
    for bug in bugs:
        try:
            there = locate(bug)
            changed = there.source.replace(bug.original, bug.replacement)
            compile("if True:\n" + changed if changed[:1].isspace() else changed, there.module, "exec")
        except (LookupError, SyntaxError) as error:
            found[bug.name] = str(error)
        missing = [test for test in bug.caught_by if not known[test]]
        if missing:
            found[bug.name] = "; ".join([*filter(None, [found.get(bug.name)]), f"no test {', '.join(missing)}"])
    return found


# -- results


def read_results() -> dict[str, Any]:
    """By name of a bug: its status (caught or missed), the digest of what was tried, and the time of the tests [s]."""
    return dict(json.loads(RESULTS.read_text(encoding="utf-8"))) if RESULTS.exists() else {}


def find_status(bug: PlantedBug, results: dict[str, Any]) -> str:
    found = results.get(bug.name, {})
    return str(found["status"]) if found.get("digest") == bug.digest else "not tried"


def write_results(results: dict[str, Any]) -> None:
    bugs = read_bugs()
    kept = {bug.name: results[bug.name] for bug in bugs if find_status(bug, results) != "not tried"}
    lines = [f" {json.dumps(name)}: {json.dumps(found)}" for name, found in sorted(kept.items())]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    PAGE_PATH.write_text(render_table(results), encoding="utf-8")


def render_table(results: dict[str, Any]) -> str:
    """The page docs/reference/proofs/planted-bugs.md."""
    bugs = read_bugs()
    counts = {
        kind: sum(find_status(bug, results) == kind for bug in bugs) for kind in ("caught", "missed", "not tried")
    }
    counted = (
        f"{counts['caught']} caught, {counts['missed']} missed, {counts['not tried']} changed since they were planted."
    )
    lines = [
        PAGE_HEADER,
        f"{len(bugs)} bugs: {counted}\n\n| bug | effect | in | tests | result |\n|---|---|---|---|---|",
    ]
    for bug in bugs:
        tests = ", ".join(dict.fromkeys(f"`{test.partition('[')[0]}`" for test in bug.caught_by))
        lines.append(f"| {bug.name} | {bug.description} | `{bug.target}` | {tests} | {find_status(bug, results)} |")
    return "\n".join(lines) + "\n"


# -- planting


def run_with_bug(ids: Sequence[str], bug: PlantedBug | None) -> dict[str, str]:
    """Outcomes of tests by id, with a bug or without one."""
    change = None
    if bug is not None:
        there = locate(bug)
        change = {
            "module": there.module,
            "old": there.source,
            "new": there.source.replace(bug.original, bug.replacement),
        }
    return {test: outcome for test, (outcome, _) in run_tests(ids, change).items()}


def try_bug(bug: PlantedBug, tests: dict[str, list[str]]) -> dict[str, Any]:
    """Run the tests of a bug without it and with it; each name must have a test that passes and then fails."""
    ids = [each for name in bug.caught_by for each in tests[name]]
    without = run_with_bug(ids, None)
    passing = [each for each in ids if without[each] == "passed"]
    for each in {*ids} - {*passing}:
        print(f"  {without[each]} without the bug: {each}", flush=True)
    start = time.perf_counter()
    failed = {each for each, outcome in run_with_bug(passing, bug).items() if outcome == "failed"}
    is_caught = all(any(each in failed for each in tests[name]) for name in bug.caught_by)
    seconds = round(time.perf_counter() - start, 1)
    return {"status": "caught" if is_caught else "missed", "digest": bug.digest, "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a pattern of names, reasons or functions")
    parser.add_argument("--again", action="store_true", help="also bugs that have a result")
    parser.add_argument("--tests", nargs="+", default=[], help="ids of tests to run instead of those that are named")
    parser.add_argument("--check", action="store_true", help="list the bugs that no longer apply")
    arguments = parser.parse_args()
    results = read_results()
    bugs = [bug for bug in read_bugs() if re.search(arguments.only, f"{bug.name} {bug.description} {bug.target}")]
    if arguments.check:
        stale = find_stale_bugs(bugs)
        for name, reason in stale.items():
            print(f"{name}: {reason}")
        print(f"{len(bugs) - len(stale)} of {len(bugs)} bugs apply")
        return int(bool(stale))
    if CHANGE_VARIABLE not in os.environ:
        return run_with_hook()
    start_fork_server()
    if arguments.tests:
        for bug in bugs:
            found = run_with_bug(arguments.tests, bug)
            print(f"{bug.name}:", *(f"\n  {outcome} {test}" for test, outcome in found.items()), flush=True)
        return 0
    bugs = [bug for bug in bugs if arguments.again or find_status(bug, results) == "not tried"]
    tests = find_tests(test for bug in bugs for test in bug.caught_by)
    stale = find_stale_bugs(bugs, collect=False)
    for bug in bugs:
        if bug.name in stale or not all(tests[name] for name in bug.caught_by):
            print(f"{bug.name}: no longer applies, see --check", flush=True)
            continue
        results[bug.name] = try_bug(bug, tests)
        write_results(results)
        print(f"{bug.name}: {results[bug.name]['status']}", flush=True)
    return int(any(find_status(bug, results) != "caught" for bug in bugs))


if __name__ == "__main__":
    sys.exit(main())
