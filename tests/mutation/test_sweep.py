"""The results of the sweep are those of today's options, and each option that no test notices has a reason."""

from __future__ import annotations

import sweep


def test_every_option_was_tried_and_what_no_test_notices_has_a_reason() -> None:
    results = sweep.read_results()
    assert set(results) == set(sweep.options()), "run python tests/mutation/sweep.py"
    assert [name for name, each in results.items() if each["status"] != "killed" and name not in sweep.REASONS] == []
    assert sweep.TABLE.read_text(encoding="utf-8") == sweep.table(results)
