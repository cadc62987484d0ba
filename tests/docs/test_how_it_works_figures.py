"""The figures of docs/concepts are of what the code says: their data are asked for again."""

from __future__ import annotations

import json
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


def test_the_rule_is_the_gradient_of_one_process_and_a_mean_of_means_is_not() -> None:
    for each, kept in zip(pictures.gradient_rule(), KEPT["gradient-rule"], strict=True):
        assert each["tokens"] == kept["tokens"]
        assert each["the rule"] < 1e-14
        assert each["means of means"] == pytest.approx(kept["means of means"], rel=1e-6, abs=1e-14)
        assert (each["means of means"] > 0.1) == (len(set(each["tokens"])) == 2)
