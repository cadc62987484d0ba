"""Train every model type for a step and compare what plain transformers loads from its export with what was trained.

    python benchmarks/exports.py             # all types: about half an hour; continues where it was interrupted
    python benchmarks/exports.py llama gpt2  # some types, tried again

A cell is a type, a head (of the type, tied, contradicting its configuration) and a door
(`tests/support/export_routes.py`). Writes benchmarks/results/exports.json; `python tools/generated_pages.py` makes
docs/reference/proofs/exports.md of it.
"""

from __future__ import annotations

import datetime
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
HEADS = {"plain": "default of the type", "tied": "tied", "contradicting": "untied, though the configuration ties it"}
KNOWN = {
    "youtu": "transformers sets the row of the padding token to zero when it loads this type, and its Trainer adds one."
}
"""By model type: what is wrong for a reason outside of this project."""
RESULTS = ROOT / "benchmarks" / "results" / "exports.json"


def tried(model_type: str, ties: str, door: str) -> str:
    """What one cell shows: "equal", "none: why there is no such case", or what is wrong."""
    from support import export_routes

    root = Path(tempfile.mkdtemp(prefix="meshwright-"))
    try:
        return export_routes.find_difference(model_type, ties, door, root) or "equal"
    except export_routes.NotApplicable as error:
        return f"none: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(root)


def main(types: list[str]) -> None:
    from support.export_routes import EXPORT_ROUTES, TIE_VARIANTS

    from meshwright_testing import pool
    from meshwright_testing.zoo import zoo_types, zoo_unsupported_reason

    found = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"types": [], "others": []}
    for model_type in types or zoo_types():
        if zoo_unsupported_reason(model_type) is not None or (not types and model_type in found["types"]):
            continue
        cells = [
            [model_type, ties, door, pool(1).run(tried, model_type, ties, door)[0]]
            for ties in TIE_VARIANTS
            for door in EXPORT_ROUTES
        ]
        print(model_type, [cell[1:] for cell in cells if _is_wrong(cell[3])] or "equal", flush=True)
        others = [cell for cell in [*found["others"], *cells] if cell[0] != model_type or cell in cells]
        found["others"] = sorted(cell for cell in others if cell[3] != "equal")
        found["types"] = sorted({*found["types"], model_type})
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        found |= {
            "date": str(datetime.date.today()),
            "versions": versions,
            "heads": list(TIE_VARIANTS),
            "doors": list(EXPORT_ROUTES),
        }
        lines = [f'"{name}": {json.dumps(value)}' for name, value in sorted(found.items()) if name != "others"]
        rows = ",\n".join(json.dumps(cell) for cell in found["others"])
        RESULTS.write_text("{\n" + ",\n".join([*lines, f'"others": [\n{rows}\n]']) + "\n}\n")


def table(found: dict[str, Any]) -> str:
    """Counts of cells by head and door, and every cell that is not equal, or of a case that a type does not have."""
    cells = found["others"]
    heads, doors = found["heads"], found["doors"]
    lines = [
        f"{len(found['types'])} model types, each trained for a step from a base with files beside its weights; "
        f"{found['date']}, transformers {found['versions']['transformers']}, torch {found['versions']['torch']}, on "
        f"the CPU (`python benchmarks/exports.py`). A cell counts types whose exports give the logits of what was "
        f"trained, within 1e-5 of the largest (merged: 1e-4), and have all files; of the types that have such a case.",
        "",
        f"| LM head | {' | '.join(doors)} |",
        f"|---|{'---|' * len(doors)}",
    ]
    for ties in heads:
        counts = []
        for door in doors:
            texts = [cell[3] for cell in cells if cell[1:3] == [ties, door]]
            known = len(found["types"]) - sum(text.startswith("none") for text in texts)
            counts.append(f"{known - sum(map(_is_wrong, texts))} of {known}")
        lines.append(f"| {HEADS[ties]} | {' | '.join(counts)} |")
    none: dict[str, set[str]] = {}
    for model_type, _, _, text in cells:
        if text.startswith("none"):
            none.setdefault(text.removeprefix("none: ").split("\n")[0][:120], set()).add(model_type)
    lines += ["", "Cases that types do not have:", ""]
    lines += [f"- {reason}: {', '.join(sorted(types))}" for reason, types in sorted(none.items())]
    wrong = [cell for cell in cells if _is_wrong(cell[3])]
    if wrong:
        lines += ["", "| type | LM head | route | error |", "|---|---|---|---|"]
        lines += [f"| {t} | {HEADS[ties]} | {door} | {' '.join(text.split())[:120]} |" for t, ties, door, text in wrong]
        lines += ["", *(f"- {t}: {KNOWN[t]}" for t in sorted({cell[0] for cell in wrong} & KNOWN.keys()))]
    return "\n".join(lines)


def _is_wrong(text: str) -> bool:
    return text != "equal" and not text.startswith("none")


if __name__ == "__main__":
    main(sys.argv[1:])
