"""Run conformance cases on a GPU, over NCCL, and write what came of each.

    python tests/gpu/conformance_cells.py --ranks 2 --out cells.json --seconds 60

One rank runs every case of the layout that has the most of them; two and four run those of each layout in turn.
Several ranks share the one GPU, which NCCL refuses by default, so three ways are tried, and the first that works is
used: a host name of its own for each rank (NCCL_HOSTID), so that NCCL talks over sockets; NCCL_MULTI_RANK_GPU_ENABLE,
which newer versions know; and gloo, which carries CUDA tensors through the host.

The file is written again after each case. The exit code is 1 if any failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from rank_tasks import prepare, try_collectives

from meshwright.testing import WorkerPool
from meshwright_testing import conformance, pool

STRATEGIES = ("fsdp2", "ddp")
NCCL_OVER_SOCKETS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
WAYS: dict[str, dict[str, str]] = {
    # LOCAL_WORLD_SIZE=1: each rank believes to be alone on its node, and so takes NCCL.
    "nccl, a host name for each rank": {"LOCAL_WORLD_SIZE": "1", "NCCL_HOSTID": "rank-{rank}", **NCCL_OVER_SOCKETS},
    "nccl, NCCL_MULTI_RANK_GPU_ENABLE": {"LOCAL_WORLD_SIZE": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1"},
    "gloo": {"LOCAL_WORLD_SIZE": "{size}"},
}

PROBE_LIMIT_S = 25
Report = dict[str, Any]


def backend_that_works(ways: dict[str, dict[str, str]], ranks: int, device: str) -> tuple[str | None, Report]:
    """Return the first way under which all collectives give the right numbers, or None, and what became of each."""
    tried: Report = {}
    for way, environment in ways.items():
        # Of its own, since NCCL reads its variables once in the life of a process.
        workers = WorkerPool(ranks)
        try:
            workers.run(prepare, environment)
            answers = workers.run(try_collectives, device, device=device, timeout_s=PROBE_LIMIT_S)
            backend, outcomes = answers[0]
            works = all(outcome == "ok" for _, found in answers for outcome in found.values())
            works &= device == "cpu" or way.startswith(backend)
            tried[way] = {"backend": backend, "collectives": outcomes, "works": works}
        except Exception as error:
            tried[way] = {"works": False, "error": f"{type(error).__name__}: {str(error)[-1500:]}"}
        finally:
            workers.close()
        if tried[way]["works"]:
            return way, tried
    return None, tried


def cells_of(ranks: int, device: str) -> list[Any]:
    """One case of each strategy and layout, then another of each, so that a short time covers all."""
    found = []
    for strategy in STRATEGIES:
        listed = conformance(strategy, ranks=max(ranks, 4) if ranks == 1 else ranks, device=device)
        if ranks > 1:
            found += [cell for cell in listed if cell.ranks == ranks]
            continue
        # The layout with all cases; those about differences between ranks have no meaning here.
        ((main_layout, _),) = Counter(cell.layout for cell in listed).most_common(1)
        for cell in listed:
            if cell.layout == main_layout and cell.case.shares is None and cell.kind != "bad input":
                found.append(replace(cell, layout="one rank", ranks=1, sizes={}))
    turns: dict[tuple[str, str], Iterator[int]] = defaultdict(count)
    return sorted(found, key=lambda cell: next(turns[cell.strategy, cell.layout]))


def run_cells(cells: list[Any], deadline: float, environment: dict[str, str] | None) -> Iterator[Report]:
    """Run cases until the deadline; yields the report so far after each."""
    results: list[Report] = []
    prepared: set[int] = set()
    for index, cell in enumerate(cells):
        if time.monotonic() > deadline:
            yield report(results, [f"{each.strategy}: {each}" for each in cells[index:]])
            return
        start = time.monotonic()
        try:
            workers = pool(cell.ranks)
            # Workers are new after a failure; else they, and what CUDA has loaded in them, continue.
            if environment is not None and id(workers._workers) not in prepared:
                workers.run(prepare, environment)
                prepared.add(id(workers._workers))
            result = cell.run()
            status, detail, worst = result.status, result.detail, result.worst
        except Exception as error:
            status, detail, worst = "failed", f"{type(error).__name__}: {error}", None
        seconds = round(time.monotonic() - start, 2)
        found = {"cell": f"{cell.strategy}: {cell}", "status": status, "worst": worst, "seconds": seconds}
        results.append({**found, "detail": detail[-500:]} if status == "failed" else found)
        yield report(results, [])


def report(results: list[Report], left: list[str]) -> Report:
    counts = Counter(each["status"] for each in results)
    return {"counts": dict(counts), "not_run_for_time": len(left), "cells": results}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the JSON goes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4), default=1, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=60, help="no case begins after so many; default: %(default)s")
    parser.add_argument("--most", type=int, help="run at most so many cases")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    about: Report = {"ranks": options.ranks}
    environment = None
    if options.ranks > 1:
        ways = WAYS if options.device == "cuda" else {"gloo": WAYS["gloo"]}
        way, tried = backend_that_works(ways, options.ranks, options.device)
        about |= {"backend": way, "tried": tried}
        if way is None:
            options.out.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
            return 1
        environment = ways[way]
    found: Report = {}
    for found in run_cells(cells_of(options.ranks, options.device)[: options.most], deadline, environment):
        options.out.write_text(json.dumps({**about, **found}, indent=1) + "\n", encoding="utf-8")
    return 1 if found.get("counts", {}).get("failed") else 0


if __name__ == "__main__":
    sys.exit(main())
