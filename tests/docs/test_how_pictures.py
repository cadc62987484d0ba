"""The pictures of docs/how are of what the code says: their data are asked for again, and all of them are drawn."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if str(ROOT / "docs") not in sys.path:
    sys.path.append(str(ROOT / "docs"))

import pictures  # noqa: E402

KEPT = json.loads(pictures.DATA.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mesh", "axes", "pieces", "pipelines"])
def test_a_picture_shows_what_the_code_says(name: str) -> None:
    assert json.loads(json.dumps(pictures.PICTURES[name]())) == KEPT[name]


def test_the_rule_is_the_gradient_of_one_process_and_a_mean_of_means_is_not() -> None:
    for each, kept in zip(pictures.gradient_rule(), KEPT["gradient-rule"], strict=True):
        assert each["tokens"] == kept["tokens"]
        assert each["the rule"] < 1e-14
        assert each["means of means"] == pytest.approx(kept["means of means"], rel=1e-6, abs=1e-14)
        assert (each["means of means"] > 0.1) == (len(set(each["tokens"])) == 2)


def test_the_picture_of_parity_shows_the_results_that_are_kept() -> None:
    found = pictures.parity_results()
    assert json.loads(json.dumps(found)) == {name: KEPT["parity"][name] for name in found}


@pytest.mark.slow
@pytest.mark.parametrize("name", pictures.PICTURES)
def test_each_picture_is_drawn_and_small_and_on_its_page(name: str, tmp_path: Path) -> None:
    from matplotlib import image

    drawn = image.imread(pictures.draw(name, KEPT, tmp_path))
    path = pictures.HOW / f"{name}.png"
    assert drawn.shape[:2] == image.imread(path).shape[:2]
    assert path.stat().st_size < 120_000
    page = (pictures.HOW / f"{name}.md").read_text(encoding="utf-8")
    assert re.search(rf"!\[[^\]]{{20,}}\]\({name}\.png\)", page)
