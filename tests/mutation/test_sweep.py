"""The results of the sweep are those of today's options, and the tests that noticed still exist."""

from __future__ import annotations

import sweep
from support.forked import ROOT


def test_every_option_was_tried_and_the_tests_that_notice_are_still_there() -> None:
    results = sweep.read_results()
    assert set(results) == set(sweep.options()), "run python tests/mutation/sweep.py"
    files = [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("plugins/*/tests/**/test_*.py")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    gone = [name for name, each in results.items() if "by" in each and f"def {each['by']}(" not in text]
    assert gone == []
    assert [name for name, each in results.items() if each["status"] != "killed" and name not in sweep.REASONS] == []
    assert sweep.TABLE.read_text(encoding="utf-8") == sweep.table(results)
