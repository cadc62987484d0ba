"""Run the tests that hang on versions under each set of versions that the packages promise.

    make test-versions                                   # all, each in an environment of its own under .versions
    python tests/run_version_matrix.py --only oldest

Writes what passed, with the date, to docs/reference/proofs/versions.md. An environment takes up to 5 GB: builds of
torch other than the pinned one come with CUDA.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / ".versions"
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
CHECKED = ROOT / "benchmarks" / "results" / "check-oldest.json"
PAGE = ROOT / "docs" / "reference" / "proofs" / "versions.md"
PLUGINS = ("fsdp2", "ddp", "megatron_fsdp", "pipeline")
PACKAGES = ["-e", ".[dev]", "-r", "requirements.txt"]
_ROOMS = ("contract", "parallel", "model", "optim", "checkpoint")
TESTS = [
    *(f"tests/{room}" for room in _ROOMS),
    *(f"plugins/{name}/tests" for name in (*PLUGINS, "run", "plan", "testing")),
]


@dataclass(frozen=True)
class Versions:
    """What is installed together; `lowest`: with the oldest that our packages allow of everything else, too."""

    name: str
    torch: str
    transformers: str
    python: str = "3.11"
    megatron_fsdp: str = "0.6.1"
    lowest: bool = False

    def pins(self) -> list[str]:
        named = {"torch": self.torch, "transformers": self.transformers, "megatron-fsdp": self.megatron_fsdp}
        return [f"{name}=={version}" for name, version in ((lowest_versions() if self.lowest else {}) | named).items()]


def lowest_versions() -> dict[str, str]:
    """Where the ranges of core's dependencies and extras begin; transformers has a narrower range of tokenizers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    ranges = [*project["dependencies"], *extras["data"], *extras["peft"]]
    pairs = (re.fullmatch(r"([\w-]+)>=([\d.]+).*", each) for each in ranges)
    return {pair[1]: pair[2] for pair in pairs if pair is not None and pair[1] != "tokenizers"}


MATRIX = [
    Versions("pinned", "2.13.0", "5.23.0"),
    Versions("oldest", "2.11.0", "5.17.0", lowest=True),
    Versions("GPU machines", "2.11.0", "5.17.0", python="3.12"),
    Versions("torch 2.14", "2.14.1", "5.23.0", python="3.13"),
    Versions("newest torch", "2.15.0", "5.23.0"),
]


def environment(versions: Versions) -> Path:
    """The Python of an environment with these versions; made if it is not there."""
    directory = ENVIRONMENTS / versions.name.replace(" ", "-")
    python, done = directory / "bin" / "python", directory / "installed"
    if not done.exists() or done.read_text() != str(versions):
        shutil.rmtree(directory, ignore_errors=True)
        subprocess.run([interpreter(versions.python), "-m", "venv", directory], check=True)
        install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*install, *versions.pins(), *PACKAGES], cwd=ROOT, check=True)
        done.write_text(str(versions))
    return python


def interpreter(version: str) -> str:
    """A Python of this version: this one, or one on the path."""
    if sys.version.startswith(f"{version}."):
        return sys.executable
    found = shutil.which(f"python{version}")
    if found is None:
        sys.exit(f"python{version} is not on the path. Install it, or leave out what needs it: --only NAME.")
    return found


def try_versions(versions: Versions, tests: list[str]) -> dict[str, object]:
    """Run the tests; how many passed, failed and were skipped, and the names of those that failed."""
    ran = subprocess.run(
        [environment(versions), "-m", "pytest", "-q", "-m", "not slow and not zoo", "-p", "no:cacheprovider", *tests],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    last = ran.stdout.strip().splitlines()[-1] if ran.stdout.strip() else ran.stderr.strip()[-200:]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", ran.stdout, re.MULTILINE)
    print(f"{versions.name}: {last}", *failed, sep="\n  ", flush=True)
    return {
        "python": versions.python,
        "torch": versions.torch,
        "transformers": versions.transformers,
        "megatron-fsdp": versions.megatron_fsdp,
        "date": datetime.date.today().isoformat(),
        **{word: counts.get(word, 0) for word in ("passed", "failed", "skipped")},
        "tests that failed": failed,
    }


def _checked() -> list[str]:
    """What `meshwright check` has found with the oldest torch."""
    found = json.loads(CHECKED.read_text(encoding="utf-8"))
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    counts = [(name, each.get("passed", 0), each.get("failed", 0)) for name, each in found["strategies"].items()]
    return [
        f"`meshwright check` on four ranks in float64, with {versions}, Python {found['python']}, {found['date']}: "
        + "; ".join(f"{name} {passed} passed, {failed} failed" for name, passed, failed in counts)
        + ".",
        "",
    ]


def page(results: dict[str, dict[str, object]]) -> str:
    lines = [
        "# Tested versions",
        "",
        "This page proves that the listed versions of torch and transformers work. `make test-versions` runs the "
        "tests of",
        "compatibility, parity, state, loading, data, adapters, plans and each axis with each row, on a CPU over gloo.",
        "A row counts the tests that passed, failed and were skipped. The ranges in `pyproject.toml` follow from it.",
        "",
        "| | python | torch | transformers | megatron-fsdp | passed | failed | skipped | date |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    columns = ("python", "torch", "transformers", "megatron-fsdp", "passed", "failed", "skipped", "date")
    lines += [f"| {name} | {' | '.join(str(each[key]) for key in columns)} |" for name, each in results.items()]
    lines += [
        "",
        *_checked(),
        "*oldest*, if listed, has the oldest versions that core's `pyproject.toml` allows. *GPU machines* has those of",
        "GPU vendors' images, run on a CPU. Both are CUDA builds of torch without a driver. Known differences:",
        "",
        "- Before torch 2.13, `full_tensor()` fails for packed weights under tensor parallelism, such as Phi-3's",
        "  `gate_up_proj`. `manager.unshard()`, `iter_parameters` and `state_dict` work in every version.",
        "- Before torch 2.13, compiled float64 blocks on a CPU use unfused attention: torch's compiler mistakes what "
        "its",
        "  fused attention saves for float32. GPUs and other dtypes are not affected.",
        "- Before torch 2.13, the recompilation limit is per process, so it is raised there and not per function.",
        "- torch 2.10 is rejected: it lacks an operator for collectives in compiled code, and names for gloo's threads",
        "  in a profile. `meshwright check --ranks 2` passed there on 2026-11-27 (single 25, ddp 8, fsdp2 24,",
        "  megatron_fsdp 20, pipeline 8, none failed).",
        "- With torch 2.15, `fsdp2` with `reduce_dtype` sums the two gradients of a tied weight in that dtype;",
        "  autograd uses the weight's dtype. With tied weights, losses then equal those of other strategies only up "
        "to rounding;",
        "  with torch 2.13 they are bitwise identical.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[each.name for each in MATRIX], help="one set of versions")
    parser.add_argument("--keep", action="store_true", help="leave environments in .versions for the next time")
    parser.add_argument("tests", nargs="*", default=TESTS)
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for versions in MATRIX:
        if arguments.only in (None, versions.name):
            results[versions.name] = try_versions(versions, arguments.tests)
    if arguments.tests == TESTS:
        names = [each.name for each in MATRIX]
        results = {name: results[name] for name in names if name in results}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(page(results), encoding="utf-8")
    if not arguments.keep:
        shutil.rmtree(ENVIRONMENTS, ignore_errors=True)
    if any(each["failed"] for each in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
