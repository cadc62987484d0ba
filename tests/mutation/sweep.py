"""Have each option of each config be ignored, one at a time, and see whether a test fails.

    python tests/mutation/sweep.py                       # all; goes on where it was interrupted
    python tests/mutation/sweep.py --only fsdp2          # those of some configs, by a part of their names
    python tests/mutation/sweep.py --again               # what was not killed, once more
    python tests/mutation/sweep.py --table               # write docs/mutations.md from what is there

An option is *killed* if a test fails when it is ignored, and passes when it is not. Three ways are tried in turn:

- `acting`: whoever acts on the option finds its default, while the config takes, checks and gives it back as ever.
- `given`: the option is dropped before its config sees it, for what acts within the config.
- `refused`: the same, with tests of errors; so options are killed of which all values but the default are refused.

Only tests that speak of an option are run, those first that start no processes and speak of it most. Tests of configs
alone count as tests of errors: they do not show that an option acts. What survives needs a reason in `REASONS`.
"""

from __future__ import annotations

import argparse
import ast
import atexit
import importlib
import inspect
import json
import multiprocessing
import multiprocessing.forkserver
import os
import re
import signal
import time
from collections.abc import Generator, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import ignore
import pytest
from _pytest.runner import runtestprotocol

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "mutations.json"
TABLE = ROOT / "docs" / "mutations.md"
OWNERS = {
    "meshwright_fsdp2.config": ["FSDP2Config"],
    "meshwright_fsdp2.functions": ["fsdp2_strategy_parallelize", "apply_fsdp_sharding_recursively"],
    "meshwright_ddp.config": ["DDPConfig", "DistributedDataParallelConfig"],
    "meshwright_megatron_fsdp.config": ["MegatronFSDPConfig"],
    "meshwright_megatron_fsdp.functions": ["nvfsdp_strategy_parallelize"],
    "meshwright_pipeline.config": ["PipelineConfig"],
    "meshwright.single.config": ["SingleConfig"],
    "meshwright.mesh.sizes": ["MeshSizes"],
    "meshwright.train.run.run_file": ["RunConfig", "ScheduleConfig"],
    "meshwright.optim.config": ["OptimizerConfig", "OptimizerGroup", "EMAConfig"],
    "meshwright.train.run.run_sections": [
        *("EvalConfig", "EarlyStoppingConfig", "SampleConfig", "ElasticConfig", "ResumeConfig"),
        *("PlanConfig", "MetricsConfig", "StragglersConfig"),
    ],
    "meshwright.train.run.checkpoint_section": [
        "CheckpointConfig",
        "KeepBestConfig",
        "OnSignalConfig",
        "ReplicateConfig",
    ],
    "meshwright.train.loop.bad_steps": ["BadStepConfig"],
    "meshwright.train.run.launch_section": [
        *("LaunchConfig", "SlurmSection", "KubernetesSection", "SkyPilotSection", "RaySection"),
    ],
    "meshwright.data.config": ["DataConfig", "SourceConfig"],
    "meshwright.profile.config": ["ProfileConfig"],
}
"""Configs, and functions with options as arguments."""
_PER_TOKEN = "nothing hangs on it: under every strategy the loss is per token of the global batch"
REASONS: dict[str, str] = {
    "MegatronFSDPConfig.calculate_per_token_loss": _PER_TOKEN,
    "nvfsdp_strategy_parallelize.calculate_per_token_loss": _PER_TOKEN,
    "RunConfig.plan": "each of its options is tried by itself",
    "RunConfig.seq_len": "it becomes data.seq_len before the file is validated, where nothing is dropped yet",
}
"""Why an option may survive, by `Class.option`."""
REFUSES = re.compile(
    r"refus|error|invalid|cannot|must|bad_(?!steps)|wrong|unknown|schema|on_nothing|no_value|/test_(\w+_)?configs?\.py"
)
"""Tests of errors and of configs alone: they do not show that an option acts."""
ELSEWHERE = re.compile("parity|conformance|one_process|loop_by_hand|files_are_data|readme|architecture|_back_as")
"""Left out: that a step is that of one process, since most options change none; and what is about no option."""
RANKS = re.compile(r"\bpool\((\d)")
PROCESSES = re.compile(r"subprocess|launch|Popen|\bcli\b")
PRELOAD = (
    *("torch", "transformers.models.llama.modeling_llama", "meshwright.testing.preload", "meshwright.testing.parity"),
    *(f"meshwright_{plugin}.manager" for plugin in ("fsdp2", "ddp", "megatron_fsdp", "pipeline")),
)
MOST_TESTS = {"acting": 8, "given": 4, "refused": 16}
AT_MOST_S = 75


def options() -> Iterator[str]:
    """All options, as `module:owner.option`; those of a base that is an owner itself are left to it."""
    for module, names in OWNERS.items():
        for name in names:
            owner = getattr(importlib.import_module(module), name)
            if inspect.isfunction(owner):
                own = [
                    each.name for each in inspect.signature(owner).parameters.values() if each.default is not each.empty
                ]
            else:
                known = {each for every in OWNERS.values() for each in every}
                bases = [base for base in owner.__mro__[1:] if base.__name__ in known]
                own = [each for each in owner.model_fields if not any(each in base.model_fields for base in bases)]
            yield from (f"{module}:{name}.{option}" for option in own)


class Tests:
    """The daily tests, and which of them speak of an option."""

    def __init__(self, ids: list[str]) -> None:
        self.ids = ids
        files = {each.partition("::")[0] for each in ids}
        self.sources = {file: _functions(ROOT / file) for file in files}
        self.about = {file: ast.get_docstring(ast.parse((ROOT / file).read_text())) or "" for file in files}

    def of(self, option: str, how: str) -> list[str]:
        """Ids of the tests that speak most of an option, in the order in which to try them."""
        refusing = how == "refused"
        *_, owner, name = re.split("[:.]", option)
        word = re.compile(rf"\b{name}\b")
        plugin = option.partition(":")[0].partition(".")[0].removeprefix("meshwright_")
        scored = []
        for index, test in enumerate(self.ids):
            file, _, rest = test.partition("::")
            function, _, values = rest.partition("[")
            source, around = self.sources[file].get(function, ("", ""))
            named = len(word.findall(values.replace("-", " ").replace("=", " "))) + (name in function)
            alike = sum(part in function for part in name.split("_") if len(part) > 3)
            said = 9 * named + 2 * len(word.findall(source)) + len(word.findall(around))
            if (
                said
                and not ELSEWHERE.search(test.partition("[")[0])
                and bool(REFUSES.search(test.partition("[")[0])) == refusing
            ):
                near = 9 * (f"plugins/{plugin}/" in file) + 24 * (owner in self.about[file])
                near += 3 * (owner in source + around) + 3 * bool(re.search(rf"\b{plugin}\b", values))
                starts = max([9 * bool(PROCESSES.search(source + around)), *map(int, RANKS.findall(source + around))])
                scored.append((-near - min(said, 12) - 4 * alike, (not named, starts), index, function))
        chosen: list[tuple[tuple[bool, int], int, int, str]] = []
        for score, starts, index, function in sorted(scored):
            # Parameter sets of one test are much alike; where they cost little, all are tried.
            same = sum(function == each for *_, each in chosen)
            if (same < 3 or (refusing and not starts[-1])) and len(chosen) < MOST_TESTS[how]:
                chosen.append((starts, score, index, function))
        return [self.ids[index] for _, _, index, _ in sorted(chosen)]


def _functions(file: Path) -> dict[str, tuple[str, str]]:
    """Of each test its own source, and that of what it names in its file, directly or not."""
    text = file.read_text(encoding="utf-8")
    lines, top = text.splitlines(), ast.parse(text).body
    sources: dict[str, str] = {}
    for node in top:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            sources[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                    sources[ast.unparse(each)] = ast.unparse(node)
    found = {}
    for name in sources:
        if name.startswith("test"):
            reached, new = {name}, {name}
            while new:
                new = {each for one in new for each in re.findall(r"\w+", sources[one]) if each in sources} - reached
                reached |= new
            found[name] = (sources[name], "\n".join(sources[each] for each in reached - {name}))
    return found


Outcome = dict[str, str]
Wanted = tuple[list[str], str]
"""Tests, and how the option is ignored; no word: not at all."""


def try_option(option: str, tests: Tests) -> Generator[Wanted, Outcome, Outcome]:
    """Asks for tests to be run while an option is ignored; what became of it."""
    count = late = 0
    for how, change in (("acting", "acting"), ("given", "given"), ("refused", "given")):
        chosen = tests.of(option, how)
        count += len(chosen)
        outcome = (yield chosen, change) if chosen else {"status": "passed"}
        late += outcome["status"] == "timed out"
        if outcome["status"] == "failed":
            alone = yield [outcome["by"]], ""
            told = {"how": how, "by": outcome["by"]}
            if alone["status"] != "passed":
                return {"status": "unclear", **told, "told": "the test also fails without the mutation"}
            # What is dropped may be missed by the checks of others, which tells nothing of its own effect.
            spurious = how == "given" and re.search(
                "ValidationError|ConfigError|is not valid|acts only with", outcome["error"]
            )
            return {"status": "unclear" if spurious else "killed", **told}
    if late:
        return {"status": "timed out", "told": f"{count} tests were not through in time"}
    return {"status": "survived", "told": f"{count} tests speak of it" if count else "no test speaks of it"}


class Sweep:
    """A plugin of pytest that runs the sweep in place of the tests.

    Each option gets a process of its own, forked from one that has collected all tests, and ranks forked from one that
    has imported what they need: the imports would take most of the time otherwise.
    """

    def __init__(self, arguments: argparse.Namespace, results: dict[str, Outcome]) -> None:
        self.arguments, self.results = arguments, results

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        multiprocessing.set_forkserver_preload([*PRELOAD])
        multiprocessing.forkserver.ensure_running()
        tests = Tests([*self.items])
        known = [*options()]
        done = {name for name, each in self.results.items() if not self.arguments.again or each["status"] == "killed"}
        waiting = [name for name in known if name not in done and re.search(self.arguments.only, name)]
        running: dict[Connection, tuple[str, Any, int, float]] = {}
        start = time.perf_counter()
        while waiting or running:
            while waiting and len(running) < self.arguments.jobs:
                self._go_on(running, waiting.pop(0), None, tests, None)
            for connection in wait([*running], timeout=1) or [each for each in running if self._is_late(running[each])]:
                option, asking, pid, _ = running.pop(connection)  # type: ignore[index]
                outcome = _ended(connection, pid)  # type: ignore[arg-type]
                if self._go_on(running, option, asking, tests, outcome):
                    print(f"{time.perf_counter() - start:6.0f} s  {option}  {self.results[option]}", flush=True)
                    kept = {name: self.results[name] for name in known if name in self.results}
                    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
        return True

    def _is_late(self, running: tuple[str, Any, int, float]) -> bool:
        return time.perf_counter() - running[-1] > AT_MOST_S

    def _go_on(self, running: Any, option: str, asking: Any, tests: Tests, outcome: Outcome | None) -> bool:
        """Start what an option wants to be run next; whether it wants nothing more."""
        asking = asking or try_option(option, tests)
        try:
            chosen, how = asking.send(outcome)
        except StopIteration as end:
            self.results[option] = end.value
            return True
        ours, theirs = multiprocessing.Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os._exit(self._run(option, chosen, how, theirs))
        theirs.close()
        running[ours] = option, asking, pid, time.perf_counter()
        return False

    def _run(self, option: str, chosen: list[str], how: str, told: Connection) -> int:
        """In a process of its own: the first of some tests that fails."""
        silent = os.open(os.devnull, os.O_RDWR)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        # The fork server is not this process's child, but is there.
        multiprocessing.forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
        if how:
            os.environ.update(MESHWRIGHT_MUTATION_OPTION=option, MESHWRIGHT_MUTATION_HOW=how, PYTHONPATH=str(HERE))
            ignore.ignore(option, how)
            ignore_in_ranks(option, how)
        outcome = {"status": "passed"}
        for test in chosen:
            reports = runtestprotocol(self.items[test], log=False, nextitem=None)
            failed = [each for each in reports if each.failed]
            if failed:
                lines = [line for line in failed[0].longreprtext.splitlines() if line.startswith("E  ")]
                outcome = {"status": "failed", "by": test, "error": " ".join(lines[:1] + lines[-1:])[:300]}
                break
        told.send(outcome)
        atexit._run_exitfuncs()
        return 0


def ignore_in_ranks(option: str, how: str) -> None:
    """Have the ranks that tests start ignore an option."""
    from meshwright.testing.pool import WorkerPool

    run = WorkerPool.run

    def ignoring(self: WorkerPool, task: Any, *arguments: Any, **limits: Any) -> Any:
        return run(self, ignore.run_ignoring, option, how, task, *arguments, **limits)

    WorkerPool.run = ignoring  # type: ignore[method-assign]


def _ended(connection: Connection, pid: int) -> Outcome:
    """What a process has told, which is ended."""
    try:
        outcome = connection.recv() if connection.poll() else {"status": "timed out"}
        if outcome["status"] != "timed out":
            # It lets its ranks end.
            for _ in range(80):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    return outcome
                time.sleep(0.1)
    except EOFError:
        outcome = {"status": "timed out"}
    try:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass
    return outcome


def table(results: dict[str, dict[str, str]]) -> str:
    """The page of docs."""
    killed = sum(each["status"] == "killed" for each in results.values())
    reasons = [name for name in results if _short(name) in REASONS and results[name]["status"] != "killed"]
    by_error = sum(each["status"] == "killed" and each["how"] == "refused" for each in results.values())
    lines = [
        "# Options that are ignored, and the tests that notice",
        "",
        "Each option of each config, and of the functions for loops by hand, is made to be ignored, alone, and daily",
        "tests that speak of it are run until one fails that passes otherwise: `python tests/mutation/sweep.py`.",
        "",
        "- *acting*: the config takes and checks the value, but whoever acts on it finds the default.",
        "- *given*: the value is dropped before the config sees it; what acts is made within the config.",
        "- *refused*: the same, and the test is one of errors: for options of which all values but the default are",
        "  refused on a CPU, or whose effect is an error.",
        "",
        "Tests of equal results are left out, since most options change none, and so are tests of configs alone.",
        "",
        f"On {time.strftime('%Y-%m-%d')}: {len(results)} options, {killed} killed ({by_error} of them *refused*), "
        f"{len(reasons)} survive with a reason, {len(results) - killed - len(reasons)} others.",
        "",
        "| option | ignored by | test that fails, or why none does |",
        "|---|---|---|",
    ]
    for name, each in sorted(results.items()):
        by = each.get("by", "").partition("[")[0] or each.get("told", "")
        if each["status"] != "killed":
            by = REASONS.get(_short(name), by)
        status = each.get("how", "") if each["status"] == "killed" else f"**{each['status']}**"
        lines.append(f"| `{_short(name)}` | {status} | {by.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def _short(option: str) -> str:
    return option.partition(":")[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a pattern of module:Class.option")
    parser.add_argument("--again", action="store_true", help="try again what was not killed")
    parser.add_argument("--tests", nargs="*", default=[], help="files to look for tests in; all")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once")
    parser.add_argument("--table", action="store_true", help="only write the table")
    arguments = parser.parse_args()
    results: dict[str, dict[str, str]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known = list(options())
    results = {name: results[name] for name in known if name in results}
    if not arguments.table:
        quiet = ["-q", "-q", "-s", "-m", "not zoo", "-p", "no:cacheprovider"]
        pytest.main([*quiet, *arguments.tests], plugins=[Sweep(arguments, results)])
    TABLE.write_text(table(results), encoding="utf-8")
    print(f"{sum(each['status'] == 'killed' for each in results.values())} of {len(results)} killed")


if __name__ == "__main__":
    main()
