"""The picture at the top of README: what it says is in the results, and it is drawn from them."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from meshwright.tracing.collectives import Collective
from meshwright_testing.workers import pool

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import front  # noqa: E402
import front_picture  # noqa: E402
import front_runs  # noqa: E402

CONTENT = json.loads(front.RESULTS.read_text(encoding="utf-8"))
LAYOUTS = CONTENT["layouts"]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_results_are_of_the_runs_that_the_program_does() -> None:
    assert {name: each["layout"] for name, each in LAYOUTS.items()} == front_runs.LAYOUTS
    assert CONTENT["settings"]["model"] == front_runs.MODEL
    assert len(LAYOUTS) == 9


def test_every_layout_has_the_losses_of_one_process_as_readme_says() -> None:
    one = np.array(LAYOUTS[front_runs.ONE]["losses"])
    assert len(one) == front_runs.STEPS
    assert one[-5:].mean() < one[:5].mean() - 1
    said = re.search(r"all stay within (\S+) of that process, and within (\S+) where", README.replace("\n", " "))
    assert said is not None
    for told, losses in zip(map(float, said.groups()), ("losses", "losses_wide_norms"), strict=True):
        assert told / 10 < max(front.apart(LAYOUTS, name, losses) for name in LAYOUTS) <= told


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_drawn_of_a_layout_was_counted(name: str) -> None:
    held = LAYOUTS[name]["held_bytes"]
    assert sum(size for kind, size in held.items() if kind != "total") == held["total"]
    assert (LAYOUTS[name]["sent_bytes"] == 0) == (name == front_runs.ONE)
    # Weights and optimizer of one process are divided, or on every rank.
    alone = LAYOUTS[front_runs.ONE]["held_bytes"]
    assert held["parameters"] + held["optimizer"] <= alone["parameters"] + alone["optimizer"] + 1024


def test_bytes_are_sent_around_a_ring() -> None:
    call = Collective("all_gather", "dp", 4, torch.float32, 100)
    assert front_runs.sent(call) == 75
    assert front_runs.sent(replace(call, kind="all_reduce")) == 150
    assert front_runs.sent(replace(call, kind="send")) == 100
    assert front_runs.sent(replace(call, kind="recv")) == 0
    with pytest.raises(KeyError, match="gossip"):
        front_runs.sent(replace(call, kind="gossip"))


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


@pytest.mark.slow
def test_the_picture_is_drawn_from_the_results(tmp_path: Path) -> None:
    front_picture.draw(CONTENT, tmp_path)
    for name in ("front.png", "front-dark.png"):
        assert f'"docs/{name}"' in README.partition("## Two commands")[0]
        drawn, kept = (np.asarray(Image.open(path / name).convert("L"), float) for path in (tmp_path, ROOT / "docs"))
        assert drawn.shape == kept.shape
        # Of grey values up to 255; another version of a font moves edges of letters.
        assert np.abs(drawn - kept).mean() < 2
