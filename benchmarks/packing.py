"""Pack documents of long-tailed lengths: rows, fill, time and memory of best fit against packers written document by
document, and against trl's where it is installed.

    python benchmarks/packing.py

Times are of one process, as ratios to ours in the same run; fills are exact.
"""

from __future__ import annotations

import argparse
import bisect
import json
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import origin

from meshwright_run.data.bin_packing import pack_best_fit

Packer = Callable[[np.ndarray, int], int]
"""From lengths and room to the number of rows."""


def ours(lengths: np.ndarray, seq_len: int) -> int:
    return len(pack_best_fit(np.cumsum(lengths), seq_len))


def next_fit(lengths: np.ndarray, seq_len: int) -> int:
    """In the order in which they come: a row is closed by the first document that does not fit."""
    rows, room = 0, 0
    for length in lengths.tolist():
        if length > room:
            rows, room = rows + 1, seq_len
        room -= length
    return rows


def first_fit(lengths: np.ndarray, seq_len: int) -> int:
    """In the order in which they come, each into the first row that has room: a tree of the largest rooms."""
    leaves = 1 << (len(lengths) - 1).bit_length()
    tree = [seq_len] * (2 * leaves)
    rows = 0
    for length in lengths.tolist():
        node = 1
        while node < leaves:
            node = 2 * node if tree[2 * node] >= length else 2 * node + 1
        rows = max(rows, node - leaves + 1)
        tree[node] -= length
        while node > 1:
            node //= 2
            tree[node] = max(tree[2 * node], tree[2 * node + 1])
    return rows


def best_fit_by_document(lengths: np.ndarray, seq_len: int) -> int:
    """Longest first, each into the row with the least room: rooms in order."""
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        at = bisect.bisect_left(rooms, length)
        bisect.insort(rooms, (rooms.pop(at) if at < len(rooms) else seq_len) - length)
    return len(rooms)


def trl_packer() -> Packer | None:
    """trl's best fit decreasing over a dataset."""
    try:
        from datasets import Dataset
        from trl import pack_dataset
    except ImportError:
        return None

    def packed(lengths: np.ndarray, seq_len: int) -> int:
        dataset = Dataset.from_dict({"input_ids": [[0] * length for length in lengths.tolist()]})
        start = time.perf_counter()
        rows = len(pack_dataset(dataset, seq_len, strategy="bfd"))
        packed.seconds = time.perf_counter() - start  # type: ignore[attr-defined]
        return rows

    return packed


def drawn(name: str, count: int, seq_len: int) -> np.ndarray:
    """Lengths of documents: of conversations, of the web, or all about half a row, which is the worst for packing."""
    draw = np.random.default_rng(0)
    kinds = {
        "conversations": lambda: draw.lognormal(5.5, 1.0, count),
        "web": lambda: draw.lognormal(6.5, 1.4, count),
        "half a row": lambda: draw.normal(0.52 * seq_len, 0.1 * seq_len, count),
    }
    return np.clip(kinds[name]().astype(np.int64), 2, seq_len)


def measured(packer: Packer, lengths: np.ndarray, seq_len: int) -> dict[str, Any]:
    start = time.perf_counter()
    rows = packer(lengths, seq_len)
    seconds = getattr(packer, "seconds", time.perf_counter() - start)
    return {"rows": rows, "fill": round(float(lengths.sum()) / (rows * seq_len), 5), "seconds": round(seconds, 4)}


def compared(seq_len: int, count: int) -> list[dict[str, Any]]:
    packers: dict[str, Packer | None] = {
        "ours": ours,
        "next fit": next_fit,
        "first fit": first_fit,
        "best fit decreasing, by document": best_fit_by_document,
        "trl bfd": trl_packer(),
    }
    found = []
    for name in ("conversations", "web", "half a row"):
        lengths = drawn(name, count, seq_len)
        names = [each for each, packer in packers.items() if packer is not None]
        random.Random(0).shuffle(names)
        results = {each: measured(packers[each], lengths, seq_len) for each in names}  # type: ignore[arg-type]
        base = results["ours"]["seconds"]
        for each in packers:
            if each in results:
                entry = {"lengths": name, "documents": count, "seq_len": seq_len, "packer": each, **results[each]}
                found.append({**entry, "times ours": round(results[each]["seconds"] / base, 1)})
    return found


def at_scale(count: int, seq_len: int) -> dict[str, Any]:
    """Ours alone, with the memory that it takes beside the documents' ends."""
    ends = np.cumsum(drawn("web", count, seq_len))
    start = time.perf_counter()
    pack_best_fit(ends, seq_len)
    seconds = time.perf_counter() - start
    tracemalloc.start()
    packing = pack_best_fit(ends, seq_len)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "documents": count,
        "seq_len": seq_len,
        "rows": len(packing),
        "fill": round(float(ends[-1]) / (len(packing) * seq_len), 5),
        "seconds": round(seconds, 2),
        "bytes a document": {"kept": round(kept / count, 1), "peak": round(peak / count, 1)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--scale", type=int, nargs="*", default=[1_000_000, 10_000_000])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "packing.json")
    options = parser.parse_args()
    table = [entry for seq_len in (2048, 8192) for entry in compared(seq_len, options.documents)]
    scale = [at_scale(count, 4096) for count in options.scale]
    result = {**origin(), "against": table, "at scale": scale}
    for entry in [*table, *scale]:
        print(entry)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
