"""Random faults one after another: a run ends as one that nothing has happened to. See faults/fault_chain.py, for
100."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.fault_chain import (
    FAULT_KINDS,
    NODE_FAULT_KINDS,
    STACKS,
    FaultRecord,
    draw_kinds,
    find_missing_requirement,
    run_chain,
    summarize_recovery,
)

FAULTS, SEED = 4, 24


def test_all_kinds_of_faults_are_tried_and_times_are_reported_by_what_a_run_resumed_from() -> None:
    assert {kind for name in STACKS for kind in draw_kinds(name, FAULTS, SEED)} == {*FAULT_KINDS, *NODE_FAULT_KINDS}
    every = [
        FaultRecord("a", "rank", resumed_from="memory", recovery_s=seconds, is_restarted=again)
        for seconds, again in ((3.0, False), (5.0, False), (9.0, True))
    ]
    assert summarize_recovery(every) == {
        "memory": {"faults": 2, "median_s": 4.0, "worst_s": 5.0},
        "memory, by a new command": {"faults": 1, "median_s": 9.0, "worst_s": 9.0},
    }


@pytest.mark.zoo
@pytest.mark.parametrize("name", list(STACKS))
def test_a_run_survives_a_chain_of_faults_bit_for_bit(name: str, tmp_path: Path) -> None:
    if reason := find_missing_requirement():
        pytest.skip(reason)
    struck = list(run_chain(tmp_path, name, FAULTS, SEED))
    assert [each.kind for each in struck] == draw_kinds(name, FAULTS, SEED)
    # The rest is checked by the chain itself, which raises.
    assert all(each.resumed_step is None or each.resumed_step <= each.step for each in struck)
