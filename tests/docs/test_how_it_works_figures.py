"""The figures of docs/concepts are of what the code says: their data are asked for again. Pages show every picture."""

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
@pytest.mark.parametrize("name", ["mesh", "parallel-axes", "checkpoints", "pipelines"])
def test_a_picture_shows_what_the_code_says(name: str) -> None:
    assert json.loads(json.dumps(pictures.PICTURES[name]())) == KEPT[name]


@pytest.mark.slow
@pytest.mark.usefixtures("registry_of_its_own")
def test_the_figure_of_parity_shows_the_recorded_comparisons_and_the_planted_bugs() -> None:
    found, kept = pictures.parity(), dict(KEPT["parity"])
    # Sums of ranks round differently on other machines.
    assert found.pop("bugs") == pytest.approx(kept.pop("bugs"), rel=1e-6)
    assert json.loads(json.dumps(found)) == kept


def test_the_rule_is_the_gradient_of_one_process_and_a_mean_of_means_is_not() -> None:
    for each, kept in zip(pictures.gradient_rule(), KEPT["gradient-rule"], strict=True):
        assert each["tokens"] == kept["tokens"]
        assert each["the rule"] < 1e-14
        assert each["means of means"] == pytest.approx(kept["means of means"], rel=1e-6, abs=1e-14)
        assert (each["means of means"] > 0.1) == (len(set(each["tokens"])) == 2)


def test_pages_show_every_picture_and_scripts_write_to_these() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    drawn = {path.name for folder in ("images", "concepts") for path in (ROOT / "docs" / folder).glob("*.*g")}
    assert {name for name in drawn if f"/{name}" not in pages and f"({name})" not in pages} == set()
    scripts = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "tests" / "support").glob("*.py")]
    written = {
        match.replace('" / "', "/")
        for path in scripts
        for match in re.findall(r'ROOT / "(docs" / [^)\n]*\.(?:png|svg))"', path.read_text(encoding="utf-8"))
    }
    assert written
    assert {name for name in written if not (ROOT / name).is_file()} == set()
