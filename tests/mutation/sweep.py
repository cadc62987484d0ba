"""Let each option of each config have no effect, one at a time, and see whether a test fails.

    python tests/mutation/sweep.py                       # all that have no result yet
    python tests/mutation/sweep.py --only FSDP2Config    # those whose Class.option matches a pattern
    python tests/mutation/sweep.py --again               # also those that were not killed

An option is killed if a test fails while it is ignored and passes otherwise. It is ignored in two ways, see `ignore`:
`acting`, with tests that are not about errors, then `given`, with all tests. Only tests that mention the option run.
An option that survives needs a reason in REASONS.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.forked_tests import CHANGE_VARIABLE, ROOT, collect_test_ids, run_tests, run_with_hook, start_fork_server

RESULTS = ROOT / "benchmarks" / "results" / "mutations.json"
TABLE = ROOT / "docs" / "reference" / "proofs" / "ignored-options.md"
_PER_TOKEN = "no effect: under every strategy the loss is per token of the global batch"
REASONS = {
    "DataConfig.template": "only eight tests run; those that encode with each template (test_layouts) are not "
    "among them",
    "MegatronFSDPConfig.calculate_per_token_loss": _PER_TOKEN,
    "nvfsdp_strategy_parallelize.calculate_per_token_loss": _PER_TOKEN,
    "RunConfig.plan": "each of its options is tried by itself",
    "RunConfig.seq_len": "it becomes data.seq_len before the file is validated, where nothing is dropped yet",
}
ERRORS = re.compile(
    r"refus|error|invalid|cannot|must|bad_(?!steps)|wrong|unknown|schema|on_nothing|no_value|configs?\.py"
)  # Tests of errors and of configs alone, which do not show that an option acts
SKIPPED = re.compile("parity|conformance|one_process|loop_by_hand|files_are_data|readme|architecture|fuzz|_back_as")
"""Tests of equal results, which most options do not change, and of no option in particular."""
SPURIOUS = re.compile("ValidationError|ConfigError|is not valid|acts only with")
"""Errors that follow from the dropped value alone."""
PAGE = """# Ignored options: every option has a test

This page proves that each option of each config is tested. `python tests/mutation/sweep.py` makes one option at a time
ignored, and runs the tests that mention it until one fails (mutation testing). "yes" means that a test fails.

- *acting*: the config validates the value, but the code that reads it gets the default.
- *given*: the value is dropped before validation, so tests of errors count too.

A result is kept until its option is tried again; it may be older than the last commit.
"""
MOST_TESTS, TIMEOUT_S = 8, 300.0


def owners() -> list[Any]:
    """Configs of the strategies and of a run file, and functions whose arguments are options."""
    import meshwright
    import meshwright_ddp
    import meshwright_fsdp2
    import meshwright_megatron_fsdp

    found: list[Any] = [meshwright_ddp.DistributedDataParallelConfig, meshwright.MeshSizes]
    for name in ("fsdp2", "ddp", "megatron_fsdp", "pipeline", "single"):
        found.append(meshwright.get_strategy(name).config_cls)
    found += [meshwright_fsdp2.fsdp2_strategy_parallelize, meshwright_fsdp2.apply_fsdp_sharding_recursively]
    return [*found, meshwright_megatron_fsdp.nvfsdp_strategy_parallelize, *_sections(meshwright.RunConfig)]


def _sections(annotation: Any) -> Iterator[Any]:
    """The config classes within an annotation, and those of their fields, except for names of environment variables."""
    if hasattr(annotation, "model_fields") and annotation.__name__ != "FromEnvironment":
        yield annotation
    fields = getattr(annotation, "model_fields", {}).values()
    for part in (*get_args(annotation), *(field.annotation for field in fields)):
        yield from _sections(part)


def options() -> dict[str, Any]:
    """All options as `Class.option`, with their classes; an option of a base that is listed belongs to the base."""
    known = list(dict.fromkeys(owners()))
    found = {}
    for owner in known:
        if inspect.isfunction(owner):
            parameters = inspect.signature(owner).parameters.values()
            names = [each.name for each in parameters if each.default is not each.empty]
        else:
            bases = [each for each in owner.__mro__[1:] if each in known]
            names = [name for name in owner.model_fields if not any(name in base.model_fields for base in bases)]
        found.update({f"{owner.__name__}.{name}": owner for name in names})
    return found


def tests_of(option: str, ids: list[str], sources: dict[str, dict[str, str]], *, with_errors: bool) -> list[str]:
    """The tests that mention an option most."""
    owner, _, name = option.partition(".")
    scored = []
    for index, test in enumerate(ids):
        function, _, values = test.partition("[")
        file, _, function_name = function.partition("::")
        text = sources[file].get(function_name, "")
        count = 9 * len(re.findall(rf"\b{name}\b", values)) + 2 * len(re.findall(rf"\b{name}\b", text))
        count += 9 * (name in function_name) + 2 * (owner in text)
        if count > 2 and not SKIPPED.search(function) and (with_errors or not ERRORS.search(function)):
            scored.append((-min(count, 30), index, function))
    chosen: list[str] = []
    for _, index, function in sorted(scored):
        if sum(each.startswith(function) for each in chosen) < 3 and len(chosen) < MOST_TESTS:
            chosen.append(ids[index])
    return chosen


def functions_of(file: Path) -> dict[str, str]:
    """The source of each test, with that of the helpers of its file that it names."""
    nodes = ast.parse(file.read_text(encoding="utf-8")).body
    sources = {node.name: ast.unparse(node) for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    helpers = {name: text for name, text in sources.items() if not name.startswith("test")}
    return {
        name: "\n".join([text, *(other for each, other in helpers.items() if re.search(rf"\b{each}\b", text))])
        for name, text in sources.items()
    }


def try_option(option: str, module: str, ids: list[str], sources: dict[str, dict[str, str]]) -> dict[str, str]:
    """Status and, if a test fails, how the option was ignored."""
    owner, _, name = option.partition(".")
    count = 0
    for how in ("acting", "given"):
        chosen = tests_of(option, ids, sources, with_errors=how == "given")
        count += len(chosen)
        change = {"module": module, "owner": owner, "option": name, "how": how}
        for test, (outcome, error) in run_tests(chosen, change, timeout_s=TIMEOUT_S, stop_early=True).items():
            # A dropped value that another check misses says nothing about the option's own effect.
            if outcome != "failed" or (how == "given" and not ERRORS.search(test) and SPURIOUS.search(error)):
                continue
            if run_tests([test], None, timeout_s=TIMEOUT_S)[test][0] == "passed":
                return {"status": "killed", "how": how}
    return {"status": "survived", "tests": str(count)}


def table(results: dict[str, dict[str, str]]) -> str:
    """The page docs/reference/proofs/ignored-options.md."""
    killed = sum(each["status"] == "killed" for each in results.values())
    excused = sum(name in REASONS and each["status"] != "killed" for name, each in results.items())
    others = len(results) - killed - excused
    counted = f"{len(results)} options: {killed} killed, {excused} survive with a reason, {others} survive without one."
    lines = [PAGE, counted, "", "| option | ignored | a test fails |\n|---|---|---|"]
    for name, each in sorted(results.items()):
        is_killed = each["status"] == "killed"
        cells = (each["how"], "yes") if is_killed else ("both ways", f"no: {REASONS.get(name, 'no test fails')}")
        lines.append(f"| `{name}` | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


def read_results() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a pattern of Class.option")
    parser.add_argument("--again", action="store_true", help="also what was not killed")
    parser.add_argument("--list", action="store_true", help="print all options with their modules, as JSON")
    arguments = parser.parse_args()
    if arguments.list:
        print(json.dumps({option: owner.__module__ for option, owner in options().items()}))
        return 0
    if CHANGE_VARIABLE not in os.environ:
        return run_with_hook()
    # This process, which tests are forked from, must import none of our modules.
    listed = subprocess.run([sys.executable, __file__, "--list"], stdout=subprocess.PIPE, text=True, check=True).stdout
    modules: dict[str, str] = json.loads(listed)
    start_fork_server()
    results = {name: each for name, each in read_results().items() if name in modules}
    done = {name for name, each in results.items() if not arguments.again or each["status"] == "killed"}
    ids = collect_test_ids([])
    sources = {file: functions_of(ROOT / file) for file in {each.partition("::")[0] for each in ids}}
    for option in modules:
        if option in done or not re.search(arguments.only, option):
            continue
        results[option] = try_option(option, modules[option], ids, sources)
        print(f"{option}: {results[option]}", flush=True)
        lines = [f" {json.dumps(name)}: {json.dumps(results[name])}" for name in modules if name in results]
        RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        TABLE.write_text(table(results), encoding="utf-8")
    return int(any(each["status"] != "killed" and name not in REASONS for name, each in results.items()))


if __name__ == "__main__":
    sys.exit(main())
