"""Run the conformance cases on a GPU, over NCCL, and write what came of them.

    python tests/gpu/run.py --out gpu.json

Each part runs in a process of its own under a time limit of its own, so that a failure or a hang loses nothing else;
altogether about 8 minutes at most. The file is written again after each part. The exit code is 1 if anything failed.
Cases for which there was no time are listed as such, and are no failure.

Several ranks share the one GPU, which NCCL refuses by default. Three ways are tried, and the first that works is used:
a host name of its own for each rank (NCCL_HOSTID), so that NCCL talks over sockets; NCCL_MULTI_RANK_GPU_ENABLE, which
newer versions know; and gloo, which carries CUDA tensors through the host.

`--device cpu --tiny` goes through the same code with few cases, where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 20
"""How long a part may take beyond its limit to end its last case."""

STRATEGIES = ("fsdp2", "ddp")
NCCL_OVER_SOCKETS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
WAYS: dict[str, dict[str, str]] = {
    # LOCAL_WORLD_SIZE=1: each rank believes to be alone on its node, and so takes NCCL.
    "nccl, a host name for each rank": {"LOCAL_WORLD_SIZE": "1", "NCCL_HOSTID": "rank-{rank}", **NCCL_OVER_SOCKETS},
    "nccl, NCCL_MULTI_RANK_GPU_ENABLE": {"LOCAL_WORLD_SIZE": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1"},
    "gloo": {"LOCAL_WORLD_SIZE": "{size}"},
}

Report = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """Something to run under a time limit.

    Attributes:
        name: in the report.
        limit_s: no case is started after that; GRACE_S later the process is ended.
        run: yields what is known so far, again and again; the last is the result. "failed" in it is a list of errors.
    """

    name: str
    limit_s: int
    run: Callable[[argparse.Namespace, float], Iterator[Report]]


def versions(options: argparse.Namespace, deadline: float) -> Iterator[Report]:
    import torch
    import transformers

    found: Report = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    found["transformers"] = transformers.__version__
    if options.device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    yield found


def canaries(options: argparse.Namespace, deadline: float) -> Iterator[Report]:
    """Whether the private names of torch that we use are what we think, in this torch."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_compat.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    tail = done.stdout.splitlines()[-40:]
    failed = [line for line in tail if re.match(r"(FAILED|ERROR)", line)]
    if done.returncode and not failed:
        failed = [f"pytest ended with exit code {done.returncode}", *tail, *done.stderr.splitlines()[-10:]]
    yield {"summary": tail[-1] if tail else "", "failed": failed}


def one_rank(options: argparse.Namespace, deadline: float) -> Iterator[Report]:
    """Every case of the strategies in a world of one, where the same collectives run over NCCL."""
    from meshwright.testing import conformance

    cells = []
    for strategy in STRATEGIES:
        listed = conformance(strategy, ranks=4, device=options.device)
        # The layout with all cases; those about differences between ranks have no meaning here.
        main = max({cell.layout for cell in listed}, key=lambda name: sum(cell.layout == name for cell in listed))
        for cell in listed:
            if cell.layout == main and cell.case.shares is None and cell.kind != "bad input":
                cells.append(replace(cell, layout="one rank", ranks=1, sizes={}))
    yield from _run_cells(_sample(cells, options), deadline, lambda cell: None)


def shared(ranks: int) -> Callable[[argparse.Namespace, float], Iterator[Report]]:
    """The cases of all layouts of so many ranks on one GPU."""

    def run(options: argparse.Namespace, deadline: float) -> Iterator[Report]:
        from ranks import prepare
        from tried import backend_that_works

        from meshwright.testing import conformance, pool

        ways = WAYS if options.device == "cuda" else {"gloo": WAYS["gloo"]}
        way, tried = backend_that_works(ways, ranks, options.device)
        about: Report = {"backend": way, "tried": tried}
        if way is None:
            yield {**about, "failed": [f"no backend lets {ranks} ranks share a GPU"]}
            return
        yield about
        cells = [
            cell
            for strategy in STRATEGIES
            for cell in conformance(strategy, ranks=ranks, device=options.device)
            if cell.ranks == ranks
        ]
        # Workers are new after a failure.
        before = lambda cell: pool(cell.ranks).run(prepare, ways[way])  # noqa: E731
        for report in _run_cells(_sample(cells, options), deadline, before):
            yield {**about, **report}

    return run


def _sample(cells: list[Any], options: argparse.Namespace) -> list[Any]:
    """First one case of each layout and strategy, then the next one of each, so that a short time covers all."""
    turns: Counter[tuple[str, str]] = Counter()
    order = []
    for cell in cells:
        order.append(turns[cell.strategy, cell.layout])
        turns[cell.strategy, cell.layout] += 1
    ordered = [cell for _, cell in sorted(zip(order, cells, strict=True), key=lambda pair: pair[0])]
    return ordered[: 2 * len(turns)] if options.tiny else ordered


def _run_cells(cells: list[Any], deadline: float, before: Callable[[Any], object]) -> Iterator[Report]:
    results: list[Report] = []
    failed: list[str] = []
    for index, cell in enumerate(cells):
        name = f"{cell.strategy}: {cell}"
        if time.monotonic() > deadline:
            left = [f"{each.strategy}: {each}" for each in cells[index:]]
            yield _cell_report(results, failed, left)
            return
        start = time.monotonic()
        try:
            before(cell)
            result = cell.run()
            status, detail, worst = result.status, result.detail, result.worst
        except Exception as error:
            status, detail, worst = "failed", f"{type(error).__name__}: {error}", None
        seconds = round(time.monotonic() - start, 2)
        results.append({"cell": name, "status": status, "worst": worst, "detail": detail[-2000:], "seconds": seconds})
        if status == "failed":
            failed.append(f"{name}: {detail[-300:]}")
        yield _cell_report(results, failed, [])


def _cell_report(results: list[Report], failed: list[str], left: list[str]) -> Report:
    counts = Counter(result["status"] for result in results)
    return {"counts": dict(counts), "not_run_for_time": left, "failed": failed, "cells": results}


PARTS = {
    part.name: part
    for part in (
        Part("versions", 40, versions),
        Part("canaries", 60, canaries),
        Part("one rank", 100, one_rank),
        Part("2 ranks", 60, shared(2)),
        Part("4 ranks", 135, shared(4)),
    )
}


def main() -> int:
    options = _options()
    if options.part is not None:
        return _run_part(PARTS[options.part], options)
    report: Report = {"command": f"python tests/gpu/run.py --device {options.device}", "parts": {}}
    for part in PARTS.values():
        report["parts"][part.name] = found = _run_in_process(part, options)
        report["passed"] = not any(each["failed"] for each in report["parts"].values())
        report["complete"] = len(report["parts"]) == len(PARTS)
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        sys.stdout.write("\n  ".join([f"{part.name}: {_line(found)}", *found["failed"]]) + "\n")
        sys.stdout.flush()
    return 0 if report["passed"] else 1


def _run_in_process(part: Part, options: argparse.Namespace) -> Report:
    notes = options.out.with_name(f"{options.out.stem}.part.json")
    notes.unlink(missing_ok=True)
    start = time.monotonic()
    command = [sys.executable, __file__, "--part", part.name, "--out", str(notes), "--device", options.device]
    command += ["--started", str(start)]
    process = subprocess.Popen(
        [*command, *(["--tiny"] if options.tiny else [])],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=part.limit_s + GRACE_S)
        ending = None if process.returncode == 0 else f"ended with exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        # The part's ranks are of its session.
        os.killpg(process.pid, signal.SIGKILL)
        _, errors = process.communicate()
        ending = f"took more than {part.limit_s + GRACE_S} s"
    found: Report = json.loads(notes.read_text(encoding="utf-8")) if notes.exists() else {}
    notes.unlink(missing_ok=True)
    found["seconds"] = round(time.monotonic() - start, 1)
    found.setdefault("failed", [])
    if ending is not None:
        found["failed"].append(f"{part.name} {ending}: {errors[-2000:]}")
    return found


def _run_part(part: Part, options: argparse.Namespace) -> int:
    """The child's side."""
    sys.path.insert(0, str(Path(__file__).parent))
    deadline = options.started + part.limit_s
    for found in part.run(options, deadline):
        text = json.dumps(found)
        scratch = options.out.with_suffix(".tmp")
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(options.out)
    return 0


def _line(found: Mapping[str, Any]) -> str:
    shown: Iterable[str] = (
        f"{key} {value}" for key, value in found.items() if key not in ("cells", "failed", "not_run_for_time", "tried")
    )
    left = found.get("not_run_for_time", [])
    return ", ".join([*shown, *([f"no time for {len(left)}"] if left else []), f"{len(found['failed'])} failed"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the JSON goes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="two cases of each strategy and layout only")
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    # On Linux, processes share the monotonic clock.
    parser.add_argument("--started", type=float, default=time.monotonic(), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.absolute()
    if not options.out.parent.is_dir():
        parser.error(f"--out {options.out}: its directory does not exist")
    return options


if __name__ == "__main__":
    sys.exit(main())
