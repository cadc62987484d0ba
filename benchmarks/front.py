"""One model, one loss curve, eight layouts: runs them on this machine, and draws the picture at the top of README.

    python benchmarks/front.py           # runs all, writes results/front.json, draws docs/front*.png
    python benchmarks/front.py --only    # draws again what was written

Each layout trains on four ranks of the CPU over gloo, in float64, and one process does the same alone (`front_runs`);
all once more with a model whose norms are float64, too. Memory and bytes are counted on the ranks themselves, in a step
each; those of the rank that has most are kept.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import front_picture
from common import origin
from front_runs import BATCH, LAYOUTS, LENGTH, MODEL, ONE, RANKS, STEPS, trained

from meshwright_testing import pool

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "front.json"


def reported(name: str, *, wide_norms: bool) -> list[dict[str, Any]]:
    """Run one layout.

    Returns:
        What each rank tells.

    Raises:
        SystemExit: ranks have different losses.
    """
    ranks = pool(1 if name == ONE else RANKS).run(trained, LAYOUTS[name], wide_norms, timeout_s=1200.0)
    if any(rank["losses"] != ranks[0]["losses"] for rank in ranks):
        raise SystemExit(f"{name}: ranks have different losses")
    return ranks


def measured(name: str) -> dict[str, Any]:
    """Run one layout both ways, and keep what the picture shows."""
    start = time.perf_counter()
    ranks, wide = reported(name, wide_norms=False), reported(name, wide_norms=True)
    return {
        "layout": LAYOUTS[name],
        "losses": ranks[0]["losses"],
        "losses_wide_norms": wide[0]["losses"],
        "sent_bytes": max(rank["sent"] for rank in ranks),
        "held_bytes": max((rank["held"] for rank in ranks), key=lambda held: held["total"]),
        "seconds": round(time.perf_counter() - start, 1),
    }


def apart(layouts: dict[str, Any], name: str, losses: str) -> float:
    """By how much the losses of a layout differ from those of one process at most [nats per byte].

    Args:
        losses: "losses" or "losses_wide_norms".
    """
    return max(abs(a - b) for a, b in zip(layouts[name][losses], layouts[ONE][losses], strict=True))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(LAYOUTS), help="run these, and keep what is known of others")
    given = parser.parse_args()
    known = {} if given.only is None else json.loads(RESULTS.read_text(encoding="utf-8"))["layouts"]
    for name in LAYOUTS if given.only is None else given.only:
        known[name] = measured(name)
        plain, wide = (apart(known, name, losses) for losses in ("losses", "losses_wide_norms"))
        seconds = known[name]["seconds"]
        print(f"{name}: {plain:.1e} from one process, with wide norms {wide:.1e}, {seconds} s", flush=True)
        _written(known)
    front_picture.draw(_written(known), HERE.parent / "docs" / "images")


def _written(known: dict[str, Any]) -> dict[str, Any]:
    """Write results, in the order of the layouts."""
    settings = {"ranks": RANKS, "steps": STEPS, "batch": BATCH, "length": LENGTH, "dtype": "float64", "model": MODEL}
    layouts = {name: known[name] for name in LAYOUTS if name in known}
    content = {"benchmark": "front", **origin(), "settings": settings, "layouts": layouts}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return content


if __name__ == "__main__":
    main()
