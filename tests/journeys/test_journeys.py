"""The journeys of new users end where the documents say, and print what these show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from journeys import RESULTS, ROOT, find_missing, list_journeys, load_journey, normalize, run_journey


@pytest.mark.zoo
@pytest.mark.parametrize("name", list_journeys())
def test_a_journey_prints_what_its_transcript_shows(name: str, tmp_path: Path) -> None:
    run_journey(load_journey(name), tmp_path)


@pytest.mark.parametrize("name", list_journeys())
def test_the_documents_print_the_lines_of_a_journey(name: str) -> None:
    journey = load_journey(name)
    shown = {normalize(line) for page in journey.pages for line in (ROOT / page).read_text().splitlines()}
    missing = [line for step in journey.steps for line in step.shown if normalize(line) not in shown]
    assert not missing


def test_a_line_that_is_missing_or_out_of_order_is_found() -> None:
    output = "step 1/10  loss 7.3\nwritten runs/a\nexit code 2\n"
    assert find_missing(["step 3/10  loss 2.5", "...", "written ..."], output) is None
    assert find_missing(["written ...", "step 1/10  loss 7.3"], output) == "step 1/10  loss 7.3"
    assert find_missing(["written"], output) == "written"


def test_each_journey_and_each_slip_is_recorded() -> None:
    recorded = json.loads(RESULTS.read_text())
    assert len(list_journeys()) == 9
    assert {*recorded} == {*list_journeys(), "slips", "start"}
    slips = yaml.safe_load((RESULTS.parents[2] / "tests/journeys/slips.yaml").read_text())["slips"]
    assert len(recorded["slips"]) == len(slips) >= 25
    assert all(each["rating"] in range(1, 6) for each in recorded["slips"].values())
