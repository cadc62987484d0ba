"""The table of ignored options is that of the options and tests there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]


def test_every_option_was_tried_and_the_tests_that_notice_are_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE / "mutation"))
    import sweep

    results = json.loads(sweep.RESULTS.read_text(encoding="utf-8"))
    assert set(results) == set(sweep.options()), "run python tests/mutation/sweep.py"
    gone = []
    for option, each in results.items():
        file, _, test = each.get("by", "").partition("::")
        if each["status"] != "killed":
            assert option.partition(":")[2] in sweep.REASONS, option
        elif f"def {test.partition('[')[0]}(" not in (HERE.parent / file).read_text(encoding="utf-8"):
            gone.append(option)
    assert not gone
    assert rows(sweep.TABLE.read_text(encoding="utf-8")) == rows(sweep.table(results))


def rows(page: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith("|")]
