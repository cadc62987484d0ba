"""What each argument of a trainer means over a mesh: the list is whole, what is refused is, and what acts does."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import argument_cases
import pytest
import transformers
import trl
from packaging.version import Version
from test_trainers import ranks
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from meshwright.base.errors import ConfigError
from meshwright.strategy.registry import get_registry
from meshwright_trainer import MeshArguments, MeshTrainerMixin
from meshwright_trainer.arguments import adopt_router_loss, check_arguments, known_arguments, layout_options
from meshwright_trainer.mesh_options import mesh_options

CONFIGS = (TrainingArguments, trl.SFTConfig, trl.DPOConfig, trl.RewardConfig, trl.GRPOConfig)


def differences(wanted: Any, found: Any, tolerance: float, unlike: tuple[str, ...] = (), at: str = "") -> list[str]:
    """Where two things that runs tell are not alike."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        if wanted.keys() != found.keys():
            return [f"{at}: {sorted(wanted.keys() ^ found.keys())}"]
        keys = [key for key in wanted if key not in unlike]
        return [each for key in keys for each in differences(wanted[key], found[key], tolerance, unlike, f"{at}.{key}")]
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        pairs = enumerate(zip(wanted, found, strict=True))
        return [text for i, (a, b) in pairs for text in differences(a, b, tolerance, unlike, f"{at}[{i}]")]
    if isinstance(wanted, float) and isinstance(found, (int, float)):
        is_close = math.isclose(wanted, found, rel_tol=tolerance, abs_tol=tolerance * 0.1)
        return [] if is_close else [f"{at}: {found} and not {wanted}"]
    return [] if wanted == found else [f"{at}: {found!r:.200} and not {wanted!r:.200}"]


@functools.cache
def plain(at: int, directory: Path) -> dict[str, Any]:
    """What transformers' or TRL's own trainer tells on one process, with an argument changed."""
    case = argument_cases.CASES[at]
    return argument_cases.told(case, None, directory / f"plain-{at}", 1, is_changed=True)


@pytest.mark.parametrize("at", range(len(argument_cases.CASES)), ids=[case.name for case in argument_cases.CASES])
def test_an_argument_that_acts_does_what_it_does_without_a_mesh(at, tmp_path, tmp_path_factory):
    case = argument_cases.CASES[at]
    wanted = plain(at, tmp_path_factory.getbasetemp())
    found = argument_cases.told(case, case.mesh or {}, tmp_path / "changed", 1, is_changed=True)
    unlike = (*case.unlike, *(["final"] if "eval_loss" in case.unlike else []))
    assert not differences(wanted, found, case.allowed, unlike)
    usual = argument_cases.told(case, case.mesh or {}, tmp_path / "usual", 1, is_changed=False)
    assert bool(differences(usual, found, case.allowed)) != case.is_same


@pytest.mark.parametrize("mesh", [{"strategy": "fsdp2"}, {"strategy": "fsdp2", "tp_size": 2}], ids=["data2", "tp2"])
def test_an_argument_that_acts_does_so_on_two_ranks(mesh, tmp_path, tmp_path_factory):
    ranks(2, "argument_cases.py", str(tmp_path), json.dumps(mesh))
    wrong = {}
    for at, case in enumerate(argument_cases.CASES):
        if case.alone:
            continue
        found = json.loads((tmp_path / f"{case.name}.json").read_text())
        wanted = plain(at, tmp_path_factory.getbasetemp())
        unlike = (*case.unlike, *(["final"] if "eval_loss" in case.unlike else []))
        wrong[case.name] = differences(wanted, found, case.allowed, unlike)
    assert not {name: texts for name, texts in wrong.items() if texts}
