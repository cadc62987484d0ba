"""docs/fleet.md: its numbers are those of the results, and these those of the code; its picture is drawn from them."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from meshwright_plan.config import PlanConfig
from meshwright_plan.fleet import advice
from meshwright_plan.fleet.advice import Costs
from meshwright_plan.fleet.fleet import HOUR, NODES, PAIRS, Copies, Fleet, Saves, best_every, goodput
from meshwright_run.run_file import RunConfig

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import fleet as benchmark  # noqa: E402

CONTENT = json.loads(benchmark.RESULTS.read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "fleet.md").read_text(encoding="utf-8")
TEXT = re.sub(r"\s+", " ", PAGE)
ASKED = PlanConfig()


def _fleet(ranks: int, restart_s: float = ASKED.restart_s) -> tuple[Fleet, Copies]:
    kept = {**CONTENT["fleets"][str(ranks)], "restart_s": restart_s}
    saves, copies = Saves(**kept.pop("saves")), Copies(**kept.pop("copies"))
    names = Fleet.__dataclass_fields__
    return Fleet(**{name: each for name, each in kept.items() if name in names}, saves=saves), copies


def _curve(ranks: int, restart_s: float, is_copied: bool = False) -> dict[str, Any]:
    return next(
        each
        for each in CONTENT["curves"]
        if (each["ranks"], each["restart_s"], each["copied_every"] is not None) == (ranks, restart_s, is_copied)
    )


def _said(pattern: str) -> tuple[float, ...]:
    found = re.search(pattern, TEXT)
    assert found is not None, pattern
    return tuple(float(each) for each in found.groups())


def _percent(part: float) -> float:
    return round(100 * part, 1)


def test_results_are_of_the_code_that_is_there() -> None:
    fleet, copies = benchmark.published_fleet()
    assert (replace(fleet, restart_s=300.0), copies) == _fleet(16_384)
    for found in CONTENT["curves"]:
        fleet, copies = _fleet(found["ranks"], found["restart_s"])
        if found["copied_every"] is None:
            told = best_every(fleet)
            closed = [goodput(replace(fleet, saves=replace(fleet.saves, every=each))) for each in found["every"]]
            assert closed == pytest.approx(found["closed_form"], abs=6e-6)
            assert closed == pytest.approx(found["goodput"], abs=4 * found["error"])
        else:
            copies, told = advice.copied(fleet, copies)
            assert copies.every == found["copied_every"]
        assert told == found["recommended"]["every"]


def test_defaults_are_those_of_the_table() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d.e-]+) \|", PAGE, re.MULTILINE))
    for name, value in rows.items():
        default = advice.ASSUMED_DETECTION_S if name == "detection_s" else getattr(ASKED, name)
        assert default == pytest.approx(float(value), rel=2e-3), name
    new = set(PlanConfig.model_fields) - {"enabled", "device", "when_too_large"}
    assert new == set(rows)
    assert _said(r"(\d+) % take their node with them, .*?; (\d+) % take a node and") == (100 * NODES, 100 * PAIRS)


def test_the_printed_plan_is_what_is_printed() -> None:
    fleet, copies = _fleet(1_024)
    took = Costs(846_644_477_952, 827_550_720, fleet.saves, copies)
    rows = advice.rows(advice.settings(fleet, took, 1000))
    for row in rows:
        parts = row["parts"]
        saving = parts["saves"] + parts["copies"]
        waiting = parts["detection"] + parts["restart"] + parts["reading"]
        shares = [f"{each:.1%}" for each in (parts["useful"], parts["redone"], saving, waiting)]
        every = [f"{row['every']:,}", f"{row['minutes']:.3g}", *filter(None, [str(row["copied_every"] or "")])]
        assert " ".join([row["name"], *every, *shares]) in TEXT
    config = RunConfig(model={"model_type": "llama"}, batch_size=1, steps=1)
    found = {"ranks": 1024, "mtbf_hours": fleet.mtbf_s / HOUR, "state_bytes": took.state_bytes, "rows": rows}
    (table,) = advice.told({**found, "saves": CONTENT["fleets"]["1024"]["saves"]}, config)
    assert table.title in TEXT
    assert table.caption.partition(" Copied")[0] in TEXT


def test_numbers_of_the_page_are_those_of_the_results() -> None:
    small, large, llama = CONTENT["fleets"]["1024"], CONTENT["fleets"]["16384"], CONTENT["llama_3"]
    alone, copied = (_curve(16_384, 300.0, each)["recommended"] for each in (False, True))
    few = {_percent(_curve(1_024, 300.0, each)["recommended"]["goodput"]) for each in (False, True)}
    fleet, _ = _fleet(16_384)
    hourly = goodput(replace(fleet, saves=replace(fleet.saves, every=round(HOUR / fleet.step_s))))
    lost = [
        _curve(ranks, 300.0)["recommended"]["goodput"] - _curve(ranks, 900.0)["recommended"]["goodput"]
        for ranks in benchmark.RANKS[::-1]
    ]
    step_s, minutes = large["step_s"], alone["every"] * large["step_s"] / 60
    assumed, longest = llama["settings"]["as assumed"], llama["settings"]["the longest restart"]
    saves, restart_s = large["saves"], longest["restart_s"]
    interrupted = llama["planned"] + llama["unexpected"], llama["days"], llama["planned"], 100 * llama["effective"]
    expected: dict[str, tuple[float, ...]] = {
        r"a 70B whose step \(([\d.]+) s\)": (round(small["step_s"], 2),),
        r"a step of ([\d.]+) s, .*? holds up (\d+) s and is written in (\d+) s": (
            round(step_s, 2),
            saves["hold_s"],
            round(saves["write_s"]),
        ),
        r"one each ([\d.]+) hours": (round(large["mtbf_hours"], 1),),
        r"of 5 minutes, a save each ([\d.]+) minutes leaves ([\d.]+) %": (
            round(minutes, 1),
            _percent(alone["goodput"]),
        ),
        r"Without copies, a save each hour would leave ([\d.]+) %": (_percent(hourly),),
        r"Copies every ([\d.]+) minutes leave ([\d.]+) %, .*? each (\d+) minutes, a tenth": (
            round(minutes, 1),
            _percent(copied["goodput"]),
            round(copied["every"] * step_s / 60),
        ),
        r"On 1,024 ranks it is ([\d.]+) % either way": tuple(few),
        r"instead of 5, ([\d.]+) % of the time of 16,384 ranks, and ([\d.]+) % of 1,024": tuple(map(_percent, lost)),
        r"(\d+) interruptions in (\d+) days, (\d+) of them planned, and more than (\d+) %": interrupted,
        r"have ([\d.]+) % \(([\d.]+) to ([\d.]+) %": tuple(map(_percent, (assumed["goodput"], *assumed["of_runs"]))),
        r"less than (\d+) s, about (\d+) minutes": (restart_s, round(restart_s / 60)),
        r"Saves each hour would leave ([\d.]+) %": (_percent(llama["settings"]["saved each hour"]["goodput"]),),
    }
    for pattern, numbers in expected.items():
        assert _said(pattern) == numbers
    assert copied["every"] == 10 * _curve(16_384, 300.0, True)["copied_every"]
    for each in CONTENT["curves"]:
        assert each["copied_every"] is not None or each["best"] == each["recommended"]
        assert each["best"]["goodput"] - each["recommended"]["goodput"] <= 1e-4
    assert longest["goodput"] == pytest.approx(llama["effective"], abs=1e-3)
    assert llama["failures"] == pytest.approx(466, abs=3)


def test_the_picture_is_drawn_from_the_results(tmp_path: Path) -> None:
    benchmark.draw(CONTENT, tmp_path / "fleet.png")
    drawn, kept = (np.asarray(Image.open(path / "fleet.png").convert("L"), float) for path in (tmp_path, ROOT / "docs"))
    assert "](fleet.png)" in PAGE
    assert drawn.shape == kept.shape
    # Of grey values up to 255; another version of a font moves edges of letters.
    assert np.abs(drawn - kept).mean() < 2
