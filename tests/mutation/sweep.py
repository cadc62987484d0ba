"""Have each option of each config be ignored, one at a time, and see whether a test fails.

    python tests/mutation/sweep.py                       # all; goes on where it was interrupted
    python tests/mutation/sweep.py --only fsdp2          # those of some configs, by a part of their names
    python tests/mutation/sweep.py --again               # survivors once more
    python tests/mutation/sweep.py --table               # write docs/mutations.md from what is there

An option is *killed* if a test fails when it is ignored, and passes when it is not. First the option is ignored by
those who act on it (`acting`); where all tests pass, it is dropped before its config checks it (`given`), which is how
options are killed of which every value but the default is refused. Tests are tried in the order of how much they
speak of the option, and only those that do. What survives needs a reason in `REASONS`.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "mutations.json"
TABLE = ROOT / "docs" / "mutations.md"
CONFIGS = {
    "meshwright_fsdp2.config": ["FSDP2Config"],
    "meshwright_ddp.config": ["DDPConfig", "DistributedDataParallelConfig"],
    "meshwright_megatron_fsdp.config": ["MegatronFSDPConfig"],
    "meshwright_pipeline.config": ["PipelineConfig"],
    "meshwright.single": ["SingleConfig"],
    "meshwright.runfile": ["RunConfig", "OptimizerConfig", "ScheduleConfig", "EvalConfig", "SampleConfig"],
    "meshwright.data.config": ["DataConfig"],
}
REASONS: dict[str, str] = {}
"""Why an option may survive, by `Class.option`."""
REFUSES = re.compile(r"refus|error|invalid|cannot|must|bad_|wrong|unknown|told")
"""Names of tests of errors: they are tried last, since they do not show that an option acts."""
AT_MOST_S = 400
MOST_TESTS = 60


def options() -> Iterator[str]:
    """All options, as `module:Class.option`."""
    for module, classes in CONFIGS.items():
        for name in classes:
            for option in getattr(importlib.import_module(module), name).model_fields:
                yield f"{module}:{name}.{option}"


class Tests:
    """The daily tests, and which of them speak of an option."""

    def __init__(self) -> None:
        told = subprocess.run(
            [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not slow"],
            cwd=ROOT, capture_output=True, text=True, check=False,
        ).stdout  # fmt: skip
        self.ids = [line for line in told.splitlines() if "::" in line]
        self.sources = {file: _functions(ROOT / file) for file in {each.partition("::")[0] for each in self.ids}}

    def of(self, option: str) -> list[str]:
        """Ids of tests, those that speak most of the option first."""
        *_, config, name = re.split("[:.]", option)
        word = re.compile(rf"\b{name}\b")
        plugin = option.partition(":")[0].partition(".")[0].removeprefix("meshwright_")
        scored = []
        for index, test in enumerate(self.ids):
            file, _, rest = test.partition("::")
            source = self.sources[file].get(rest.partition("[")[0], "")
            said = 3 * len(word.findall(rest.replace("-", " ").replace("=", " "))) + len(word.findall(source))
            if said:
                near = 2 * (f"plugins/{plugin}/" in file) + (config in source)
                whole_suite = "test_conformance" in file
                scored.append((bool(REFUSES.search(rest)), whole_suite, -near, -said, index, test))
        return [test for *_, test in sorted(scored)][:MOST_TESTS]


def _functions(file: Path) -> dict[str, str]:
    text = file.read_text(encoding="utf-8")
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            found[node.name] = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    return found


def run(tests: list[str], option: str | None, how: str) -> tuple[str, str]:
    """What became of some tests under a mutation: (passed, failed or timed out; the first that failed)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if option is not None:
        environment |= {
            "PYTHONPATH": str(HERE),
            "MESHWRIGHT_MUTATION_OPTION": option,
            "MESHWRIGHT_MUTATION_HOW": how,
        }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=AT_MOST_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "timed out", ""
    if done.returncode == 0:
        return "passed", ""
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return "failed", failed[1] if failed else f"exit code {done.returncode}"


def try_option(option: str, tests: list[str]) -> dict[str, str]:
    """Ignore one option; what became of it."""
    if not tests:
        return {"status": "survived", "told": "no test speaks of it"}
    for how in ("acting", "given"):
        status, by = run(tests, option, how)
        if status == "timed out":
            return {"status": "timed out", "how": how}
        if status == "failed":
            again, _ = run([by], None, how) if "::" in by else ("passed", "")
            if again == "passed":
                kind = "refused" if REFUSES.search(by.partition("[")[0]) else how
                return {"status": "killed", "how": kind, "by": by}
            return {"status": "unclear", "how": how, "by": by, "told": "the test also fails without the mutation"}
    return {"status": "survived", "told": f"{len(tests)} tests speak of it"}


def table(results: dict[str, dict[str, str]]) -> str:
    """The page of docs."""
    killed = sum(each["status"] == "killed" for each in results.values())
    reasons = [name for name in results if _short(name) in REASONS and results[name]["status"] != "killed"]
    lines = [
        "# Options that are ignored, and the tests that notice",
        "",
        "Each option of each config is made to be ignored, alone, and the tests that speak of it are run:",
        "`python tests/mutation/sweep.py`. *acting*: the config takes and checks the value, but whoever acts on it",
        "finds the default. *given*: the value is dropped before the config sees it. *refused*: the test that fails is",
        "one of errors; so options are killed of which all values but the default are refused here.",
        "",
        f"{len(results)} options, {killed} killed, {len(reasons)} survive with a reason, "
        f"{len(results) - killed - len(reasons)} others.",
        "",
        "| option | ignored by | test that fails |",
        "|---|---|---|",
    ]
    for name, each in sorted(results.items()):
        by = each.get("by", "") or REASONS.get(_short(name), "") or each.get("told", "")
        status = each.get("how", "") if each["status"] == "killed" else f"**{each['status']}**"
        lines.append(f"| `{_short(name)}` | {status} | {by.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def _short(option: str) -> str:
    return option.partition(":")[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of module:Class.option")
    parser.add_argument("--again", action="store_true", help="try again what was not killed")
    parser.add_argument("--table", action="store_true", help="only write the table")
    arguments = parser.parse_args()
    results: dict[str, dict[str, str]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known = list(options())
    results = {name: results[name] for name in known if name in results}
    if not arguments.table:
        tests = Tests()
        for option in known:
            done = option in results and not (arguments.again and results[option]["status"] != "killed")
            if done or arguments.only not in option:
                continue
            start = time.perf_counter()
            results[option] = try_option(option, tests.of(option))
            print(f"{time.perf_counter() - start:6.1f} s  {option}  {results[option]}", flush=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    TABLE.write_text(table(results), encoding="utf-8")
    print(f"{sum(each['status'] == 'killed' for each in results.values())} of {len(results)} killed")


if __name__ == "__main__":
    main()
