"""One model, one loss curve, eight layouts: runs them on this machine, and draws the picture at the top of README.

    python benchmarks/front.py           # runs all, writes results/front.json, draws docs/front*.png
    python benchmarks/front.py --only    # draws again what was written
    python benchmarks/front.py --wide-norms    # how far curves lie apart where the model's norms are float64, too

Each layout trains on four ranks of the CPU over gloo, in float64, and one process does the same alone (`front_runs`).
Memory and bytes are counted on the ranks themselves, in a step each; those of the rank that has most are kept.
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

from meshwright.testing import pool

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "front.json"


def told(name: str, *, wide_norms: bool = False) -> list[dict[str, Any]]:
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


def apart(losses: list[float], one: list[float]) -> float:
    """By how much losses differ at most [nats per byte]."""
    return max(abs(a - b) for a, b in zip(losses, one, strict=True))


def measured(name: str) -> dict[str, Any]:
    """Run one layout, and keep what the picture shows."""
    start = time.perf_counter()
    ranks = told(name)
    return {
        "layout": LAYOUTS[name],
        "losses": ranks[0]["losses"],
        "sent_bytes": max(rank["sent"] for rank in ranks),
        "held_bytes": max((rank["held"] for rank in ranks), key=lambda held: held["total"]),
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(LAYOUTS), help="run these, and keep what is known of others")
    parser.add_argument("--wide-norms", action="store_true", help="compare runs whose norms are float64, too")
    given = parser.parse_args()
    if given.wide_norms:
        _compare_wide_norms()
        return
    known = {} if given.only is None else _known()
    for name in LAYOUTS if given.only is None else given.only:
        known[name] = measured(name)
        distance = apart(known[name]["losses"], known[ONE]["losses"])
        print(f"{name}: {distance:.1e} from one process, {known[name]['seconds']} s", flush=True)
        _written(known)
    front_picture.draw(_written(known), HERE.parent / "docs")


def _compare_wide_norms() -> None:
    """Beside each layout, write how far it is from one process where nothing is rounded to float32."""
    known, one = _known(), told(ONE, wide_norms=True)[0]["losses"]
    for name in LAYOUTS:
        losses = one if name == ONE else told(name, wide_norms=True)[0]["losses"]
        known[name]["apart"] = apart(known[name]["losses"], known[ONE]["losses"])
        known[name]["apart_wide_norms"] = apart(losses, one)
        print(f"{name}: {known[name]['apart']:.1e}, with wide norms {known[name]['apart_wide_norms']:.1e}", flush=True)
        _written(known)


def _known() -> dict[str, Any]:
    known: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))["layouts"]
    return known


def _written(known: dict[str, Any]) -> dict[str, Any]:
    """Write results, in the order of the layouts."""
    settings = {"ranks": RANKS, "steps": STEPS, "batch": BATCH, "length": LENGTH, "dtype": "float64", "model": MODEL}
    layouts = {name: known[name] for name in LAYOUTS if name in known}
    content = {"benchmark": "front", **origin(), "settings": settings, "layouts": layouts}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return content


if __name__ == "__main__":
    main()
