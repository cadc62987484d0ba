"""The numbers at the top of README are those of the results that are kept, and of runs made now."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.tracing.collectives import Collective
from meshwright_testing.workers import pool

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import front  # noqa: E402
import front_runs  # noqa: E402

CONTENT = json.loads(front.RESULTS.read_text(encoding="utf-8"))
LAYOUTS = CONTENT["layouts"]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_layout_has_the_losses_of_one_process_as_readme_says() -> None:
    assert {name: each["layout"] for name, each in LAYOUTS.items()} == front_runs.LAYOUTS
    assert CONTENT["settings"]["model"] == front_runs.MODEL
    one = np.array(LAYOUTS[front_runs.ONE]["losses"])
    assert len(one) == front_runs.STEPS
    assert one[-5:].mean() < one[:5].mean() - 1
    said = re.search(
        r"in float64 within (\S+) of one process, .* within (\S+) with norms in float64", README.replace("\n", " ")
    )
    assert said is not None
    for reported, losses in zip(map(float, said.groups()), ("losses", "losses_wide_norms"), strict=True):
        assert reported / 10 < max(front.apart(LAYOUTS, name, losses) for name in LAYOUTS) <= reported


def _first_losses(layout: dict[str, object], wide_norms: bool) -> list[float]:
    front_runs.STEPS = 4
    return front_runs.trained(layout, wide_norms)["losses"]


@pytest.mark.slow
@pytest.mark.parametrize(("kept", "wide_norms"), [("losses", False), ("losses_wide_norms", True)])
def test_the_runs_still_have_one_curve(kept: str, wide_norms: bool) -> None:
    kept_losses = LAYOUTS[front_runs.ONE][kept][:4]
    if CONTENT["versions"]["python"].rpartition(".")[0] != "{}.{}".format(*sys.version_info):
        # The data are the sources of Python's standard library.
        (kept_losses,) = pool(1).run(_first_losses, front_runs.LAYOUTS[front_runs.ONE], wide_norms)
    for losses in pool(2).run(_first_losses, front_runs.LAYOUTS["fsdp2, tensor 2 x 2"], wide_norms):
        assert np.abs(np.array(losses) - kept_losses).max() < 1e-9


def test_bytes_are_sent_around_a_ring() -> None:
    for kind, sent in {"all_gather": 75, "all_reduce": 150, "send": 100, "recv": 0}.items():
        assert front_runs.sent(Collective(kind, "dp", 4, torch.float32, 100)) == sent
