"""The picture at the top of README: what it says is in the results, and it is drawn from them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from meshwright.mesh.sizes import MeshSizes

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import front
import front_picture

CONTENT = json.loads(front.RESULTS.read_text(encoding="utf-8"))
LAYOUTS = CONTENT["layouts"]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_results_are_of_the_runs_that_the_program_does() -> None:
    assert CONTENT["run"] == front.RUN
    assert {name: each["changes"] for name, each in LAYOUTS.items()} == front.LAYOUTS
    sizes = [
        {key: size for key, size in each["changes"].items() if key in MeshSizes.model_fields}
        for each in LAYOUTS.values()
    ]
    assert len(sizes) == 9
    assert all(front.RANKS % size == 0 for each in sizes for size in each.values())


def test_every_layout_has_the_losses_of_one_process_as_readme_says() -> None:
    one = np.array(LAYOUTS[front.ONE]["losses"])
    assert len(one) == front.RUN["steps"]
    assert one[-5:].mean() < one[:5].mean() - 1
    apart = max(np.abs(np.array(each["losses"]) - one).max() for each in LAYOUTS.values())
    (told,) = re.findall(r"losses of a single process, to (\S+) in float64", README.replace("\n", " "))
    assert apart <= float(told) <= 1e-9


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_held_and_sent_what_was_planned(name: str) -> None:
    found = LAYOUTS[name]
    assert found["beside"].count("as planned") == 3
    told = re.search(r"memory at the peak: ([\d.]+) MB", found["beside"])
    assert told is not None
    assert sum(found["peak_by_owner"].values()) == found["peak_bytes"]
    assert (found["sent_bytes"] == 0) == (name == front.ONE)


def test_bytes_are_sent_around_a_ring() -> None:
    row = {"kind": "all_gather", "ranks": 4, "bytes": 100}
    assert front.sent(row) == 75
    assert front.sent({**row, "kind": "all_reduce"}) == 150
    assert front.sent({**row, "kind": "send"}) == 100
    assert front.sent({**row, "kind": "recv"}) == 0
    with pytest.raises(KeyError, match="gossip"):
        front.sent({**row, "kind": "gossip"})


def test_the_picture_is_drawn_from_the_results(tmp_path: Path) -> None:
    front_picture.draw(CONTENT, tmp_path)
    for name in ("front.png", "front-dark.png"):
        assert f'"docs/{name}"' in README.partition("## Two commands")[0]
        drawn, kept = (np.asarray(Image.open(path / name).convert("L"), float) for path in (tmp_path, ROOT / "docs"))
        assert drawn.shape == kept.shape
        # Of grey values up to 255; another version of a font moves edges of letters.
        assert np.abs(drawn - kept).mean() < 2
