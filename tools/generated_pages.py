"""Tables and lists of docs/ that follow from results that are kept, or from the sources.

    python tools/generated_pages.py            # write them all
    python tools/generated_pages.py --check    # say which are not as they should be, and end with 1 if any is not

Nothing is measured here. A page's results are made by the command that the page names, and kept in benchmarks/results.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"
FRONT = "index.md"
CONTESTANTS = {
    "step-cpu": {
        "fsdp2": "fsdp2 by hand",
        "ddp": "DDP by hand",
        "ddp-bucketed": "DDP by hand, with the bucketed engine",
        "ddp-zero1": "DDP and torch's ZeroRedundancyOptimizer",
    },
    "step-cpu-tp2": {"fsdp2": "fsdp2 with tp 2 by hand, 4 ranks"},
    "step-cpu-megatron": {"megatron-fsdp": "stock megatron-fsdp, ZeRO 3"},
    "step-cpu-pp2": {
        "pipeline-gpipe": "torch's pipeline by hand, GPipe",
        "pipeline-1f1b": "torch's pipeline by hand, 1F1B",
        "pipeline-interleaved1f1b": "torch's pipeline by hand, Interleaved1F1B",
    },
    "step-cpu-peers": {
        "automodel": "NeMo Automodel's FSDP2Manager",
        "fabric-fsdp2": "Lightning's Fabric, fsdp2",
        "fabric-ddp": "Lightning's Fabric, DDP",
    },
}
"""Results of benchmarks/step.py, and what each is beside."""


def load_script(path: str) -> Any:
    """A script of the repository as a module; what it imports from beside it is found."""
    file = ROOT / path
    name = f"script_{file.stem}"
    if name not in sys.modules:
        sys.path.append(str(file.parent))
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} cannot be loaded.")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def load_results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def replace_between_markers(page: str, marker: str, text: str) -> str:
    """A page with a text instead of what is between two of its marks."""
    begin, end = f"<!-- {marker}: begin -->", f"<!-- {marker}: end -->"
    whole = (DOCS / page).read_text(encoding="utf-8")
    before, rest = whole.split(begin)
    return f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}"


# -- of results


def render_performance() -> str:
    """Steps beside others' hands, into docs/reference/proofs/performance.md."""
    lines = ["| compared with | meshwright / other | noise |", "|---|---:|---:|"]
    for name, contestants in CONTESTANTS.items():
        found = load_results(name)["strategies"]
        for key, reported in contestants.items():
            ratios = [found[key]["cpu_time"][kind] for kind in ("ours_to_raw", "raw_to_raw")]
            lines.append(f"| {reported} | {' | '.join(map(_format_ratio, ratios))} |")
    return replace_between_markers("reference/proofs/performance.md", "time", "\n".join(lines))


def render_gpu() -> str:
    """What GPUs have shown, claim by claim: docs/reference/proofs/gpu.md."""
    page: str = load_script("tools/gpu_page.py").render_gpu_page(
        RESULTS / "gpu", load_script("benchmarks/gpu/all.py").parts("cuda")
    )
    return page


def _format_ratio(found: Mapping[str, float]) -> str:
    return f"{found['median']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def render_faults() -> str:
    """What has happened to runs, and what became of them: docs/reference/proofs/faults.md."""
    return "\n".join(
        [
            "# Faults: runs that recover from random failures",
            "",
            "This page proves that runs recover from failures with the metrics and weights of an undisturbed run, "
            "bitwise.",
            "Three experiments inject faults, measure the time from a dead rank to the next step, and kill runs at "
            "random.",
            "Each section names its command. In the tables, a row is a kind of fault or a layout, and times are in "
            "seconds.",
            "",
            *_render_fault_chain(),
            "",
            *_render_restarts(),
            "",
            *_render_kills(),
            "",
        ]
    )


def _render_provenance(name: str, found: Mapping[str, Any]) -> list[str]:
    versions = ", ".join(f"{each} {version}" for each, version in found["versions"].items())
    return [
        f"Generated from `benchmarks/results/{name}.json`, which `{found['command']}` wrote",
        f"on {found['date']} ({versions}); not edited by hand.",
        "",
    ]


FAULT_NAMES = {
    "agent": "torchrun agent killed",
    "bit in a copy": "bit flip in a replica",
    "bit in memory": "bit flip in memory",
    "bit on disk": "bit flip in a checkpoint",
    "cut": "network cut, temporary",
    "cut for good": "network cut, permanent",
    "full disk": "disk full",
    "node": "node lost",
    "parent": "launcher killed",
    "pre-emption": "preemption",
    "rank": "rank killed",
    "stop": "rank stopped (SIGSTOP)",
}
"""Kinds of faults in benchmarks/results/faults.json, as the page names them."""


def _name_source(where: str) -> str:
    """Name where a run resumed from."""
    if where == "on":
        return "not interrupted"
    return where.replace("the beginning", "step 0")


def _name_outcome(reported: str) -> str:
    """Name the result of a stack or layout."""
    for of_run in ("that nothing has happened to", "that was not killed"):
        reported = reported.replace(
            f"metrics and weights of a run {of_run}, bit for bit", "bitwise equal to an undisturbed run"
        )
    return reported


def _render_fault_chain() -> list[str]:
    found = load_results("faults")
    every, of_stack = found["faults"], Counter(each["stack"] for each in found["faults"])
    lines = [
        f"## A chain of {len(every)} random faults",
        "",
        *_render_provenance("faults", found),
        "Each stack trains a tiny model with dropout, with `verify_every: 3` and a `watchdog_s` of "
        f"{found['watchdog_s']:g}.",
        "Its faults hit one run, one after another. When the command ends, it is run again, as a scheduler would do.",
        "Multi-node runs use network namespaces on one host, each with a torchrun agent, connected by c10d.",
        "",
        "| stack | faults | result |",
        "|---|---:|---|",
        *[
            f"| {stack} | {of_stack[stack]} | {_name_outcome(reported)} |"
            for stack, reported in found["stacks"].items()
        ],
        "",
        "All remaining checkpoints are valid, no process or incomplete file is left, and no run resumed from an older "
        "step",
        'than its newest valid checkpoint. "Ranks gone" is the time until all old ranks have ended; "next step" is '
        "the time",
        "until the run completes a step beyond those before the fault:",
        "",
        "| fault | count | ranks gone, worst | next step, median | worst | resumed from |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for kind in sorted({each["kind"] for each in every}):
        those = [each for each in every if each["kind"] == kind]
        gone = [each["exit_s"] for each in those if each["exit_s"] is not None]
        times = [each["recovery_s"] for each in those]
        went = ", ".join(
            f"{_name_source(where)} {count}"
            for where, count in Counter(each["resumed_from"] for each in those).most_common()
        )
        worst = f"{max(gone):.1f}" if gone else "survive"
        lines.append(
            f"| {FAULT_NAMES.get(kind, kind)} | {len(those)} | {worst} | {statistics.median(times):.1f} | "
            f"{max(times):.1f} | {went} |"
        )
    lines += ["", "| resumed from | faults | next step, median [s] | worst [s] |", "|---|---:|---:|---:|"]
    for where, each in found["times"].items():
        lines.append(f"| {_name_source(where)} | {each['faults']} | {each['median_s']:.1f} | {each['worst_s']:.1f} |")
    return lines


def _render_restarts() -> list[str]:
    found = load_results("restarts")
    return [
        "## From a dead rank to the next step",
        "",
        *_render_provenance("restarts", found),
        f"Two ranks on {found['cpu']}, a tiny model, the rows in turns. Seconds.",
        "",
        "| | deaths | median | worst |",
        "|---|---:|---:|---:|",
        *[
            f"| {name} | {each['deaths']} | {each['median']:.1f} | {each['worst']:.1f} |"
            for name, each in found["seconds"].items()
        ],
    ]


def _render_kills() -> list[str]:
    found = load_results("kill")
    kills = found["kills"]
    lines = [
        "## Killed runs",
        "",
        *_render_provenance("kill", found),
        f"Each layout trains a tiny model with dropout for {found['steps']} steps and saves checkpoints. Its runs are "
        "killed with",
        "SIGKILL at random moments and restarted by the same command; the last one finishes. Metrics and exported",
        "weights are then compared with those of an undisturbed run.",
        "",
        "| layout | kills | runs | result |",
        "|---|---:|---:|---|",
    ]
    of_layout = Counter(kill["layout"] for kill in kills)
    for layout, ended in found["layouts"].items():
        lines.append(f"| {layout} | {of_layout[layout]} | {ended['runs']} | {_name_outcome(ended['result'])} |")
    lines += [
        "",
        "### When they were killed",
        "",
        "| killed during | a rank | the launcher | all |",
        "|---|---:|---:|---:|",
    ]
    moments = Counter((kill["moment"], kill["victim"]) for kill in kills)
    for moment in dict.fromkeys(kill["moment"] for kill in kills):
        counts = [str(moments[moment, victim]) for victim in ("rank", "parent", "all")]
        lines.append(f"| {moment} | {' | '.join(counts)} |")
    lines += [
        "",
        f"Of {len(kills)} kills, {sum(bool(kill['leftovers']) for kill in kills)} left an incomplete file, which the "
        "next",
        "start removed. The slowest run needed "
        f"{max(kill['exit_s'] for kill in kills):.1f} s until all of its processes had ended.",
        "",
        "### Each kill",
        "",
        "| layout | during | killed | steps done | incomplete files | ended after [s] |",
        "|---|---|---|---:|---|---:|",
    ]
    for kill in kills:
        left = ", ".join(f"`{each}`" for each in kill["leftovers"]) or "nothing"
        cells = (kill["layout"], kill["moment"], kill["victim"], kill["step"], left, f"{kill['exit_s']:.2f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def render_coverage() -> str:
    module = load_script("benchmarks/coverage.py")
    found, about = module.load(RESULTS / "zoo")
    with tempfile.TemporaryDirectory() as directory:
        page = Path(directory) / "coverage.md"
        module.write_page(found, about, page)
        return page.read_text(encoding="utf-8")


def render_exports() -> str:
    """What plain transformers loads of each type's exports: docs/reference/proofs/exports.md."""
    return replace_between_markers(
        "reference/proofs/exports.md", "types", load_script("benchmarks/exports.py").table(load_results("exports"))
    )


def render_plans() -> str:
    """The three tables of docs/reference/plan.md."""
    types, published, calibrated = (
        load_script(f"benchmarks/plan_{name}.py") for name in ("types", "published", "calibrated")
    )
    with tempfile.TemporaryDirectory() as directory:
        page = Path(directory) / "plan.md"
        page.write_text((DOCS / "reference/plan.md").read_text(encoding="utf-8"), encoding="utf-8")
        types.PAGE = published.PAGE = page
        types.write(load_results("plan_types"))
        rows = json.loads((ROOT / "benchmarks" / "published.json").read_text(encoding="utf-8"))
        keys = {published.key(row) for row in rows if published.left_out(row) is None}
        published.write(rows, {name: found for name, found in published.known().items() if name in keys})
        text = page.read_text(encoding="utf-8")
    before, rest = text.split(calibrated.BEGIN)
    table = calibrated.table(load_results("plan_calibrated"))
    return f"{before}{calibrated.BEGIN}\n\n{table}\n\n{calibrated.END}{rest.split(calibrated.END)[1]}"


def render_planted_bugs() -> str:
    module = load_script("tests/planted_bugs/plant.py")
    return str(module.render_table(module.read_results()))


def render_mutations() -> str:
    module = load_script("tests/mutation/sweep.py")
    return str(module.table(module.read_results()))


def render_versions() -> str:
    return str(load_script("tests/run_version_matrix.py").page(load_results("versions")))


def render_weight_decay() -> str:
    return str(load_script("benchmarks/decay.py").page(load_results("decay")))


def render_trainer_arguments() -> str:
    return str(load_script("plugins/trainer/tests/arguments_page.py").page())


def render_first_hour() -> str:
    """The journeys of new users and the answers to their slips."""
    found = load_results("journeys")
    slips, start = found["slips"], found["start"]
    lines = [
        "# The first hour",
        "",
        "What new users do first, as transcripts in `tests/journeys`, with what each command prints. "
        "`python tests/journeys/journeys.py` runs them; a test of the full tier does, too. Times are of two cores of a "
        "shared machine, without a GPU.",
        "",
        f"From `git clone` to the first step of `make train`: {start['first_step_s']:,} s, of which installing takes "
        f"{start['install_s']:,} s, with packages on disk. To the first answer of a fine-tuned model, the journey "
        f"`fine_tuner` takes {found['fine_tuner']['seconds']:,} s more.",
        "",
        "| journey | user | commands | seconds |",
        "|---|---|---:|---:|",
    ]
    for name, each in found.items():
        if name not in ("slips", "start"):
            lines.append(f"| `{name}` | {each['user']} | {each['commands']} | {each['seconds']:,} |")
    lines += [
        "",
        "## Slips",
        "",
        "What users of other libraries write, and the answer. Someone who had not seen the code rated each from 1 "
        "(misleading) to 5 (it is clear at once what to write).",
        "",
        "| command | answer | rating |",
        "|---|---|---:|",
    ]
    for line, each in slips.items():
        answer = " ".join(each["answer"].removeprefix("error: ").split()).replace("|", "\\|")
        answer = answer.removeprefix("examples/stdlib.yaml is not valid: ")
        lines.append(f"| `{line}` | {escape(answer)} | {each['rating']} |")
    return "\n".join(lines) + "\n"


# -- of the sources


def render_architecture() -> str:
    house = load_script("tests/support/package_map.py")
    text = (DOCS / "contribute/architecture.md").read_text(encoding="utf-8")
    return str(house.render_page(text, house.read_modules(ROOT / "core" / "meshwright")))


def render_reference_index() -> str:
    return str(load_script("tools/site/reference.py").render_index())


def render_run_file() -> str:
    return str(load_script("tools/site/run_file_page.py").render())


def render_commands() -> str:
    return str(load_script("tools/site/commands_page.py").render())


def render_front_page() -> str:
    """The pages of the site, into docs/index.md."""
    lines: list[str] = []
    for entry in load_script("tools/site/navigation.py").read_navigation():
        for title, pages in entry.items():
            if isinstance(pages, list):
                lines += ["", f"**{title}**", "", *_render_page_lines(pages)]
    return replace_between_markers(FRONT, "pages", "\n".join(lines).strip())


def _render_page_lines(pages: list[Any]) -> Iterator[str]:
    """A line for each page, and one for those of a section together; a section that is a folder, without titles."""
    for entry in pages:
        for title, page in entry.items() if isinstance(entry, dict) else [(_read_heading(entry), entry)]:
            if not isinstance(page, list):
                yield f"- [{title}]({page})"
            elif any(isinstance(each, dict) for each in page):
                inside = [each if isinstance(each, dict) else {_read_heading(each): each} for each in page]
                yield f"- {title}: " + ", ".join(f"[{name}]({to})" for each in inside for name, to in each.items())
            else:
                yield f"- [{title}]({Path(page[0]).parent.as_posix()})"


def _read_heading(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


PAGE_RENDERERS: dict[str, Callable[[], str]] = {
    "contribute/architecture.md": render_architecture,
    "reference/proofs/coverage.md": render_coverage,
    "reference/proofs/exports.md": render_exports,
    "reference/proofs/faults.md": render_faults,
    "reference/proofs/first-hour.md": render_first_hour,
    "reference/proofs/gpu.md": render_gpu,
    "index.md": render_front_page,
    "reference/proofs/ignored-options.md": render_mutations,
    "reference/proofs/performance.md": render_performance,
    "reference/plan.md": render_plans,
    "reference/api/README.md": render_reference_index,
    "reference/cli.md": render_commands,
    "reference/proofs/planted-bugs.md": render_planted_bugs,
    "reference/proofs/trainer-arguments.md": render_trainer_arguments,
    "reference/proofs/versions.md": render_versions,
    "reference/run-file.md": render_run_file,
    "reference/proofs/weight-decay.md": render_weight_decay,
}
"""Each page, and what makes it as it should be."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    given = parser.parse_args()
    stale = [page for page, made in PAGE_RENDERERS.items() if _refresh(DOCS / page, made(), write=not given.check)]
    for page in stale:
        sys.stdout.write(f"docs/{page}: {'not as it should be' if given.check else 'written'}\n")
    sys.exit(bool(stale) and given.check)


def _refresh(page: Path, text: str, *, write: bool) -> bool:
    """Whether a page was not as it should be."""
    if page.exists() and page.read_text(encoding="utf-8") == text:
        return False
    if write:
        page.write_text(text, encoding="utf-8")
    return True


if __name__ == "__main__":
    main()
