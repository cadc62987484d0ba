"""What a run is started in: the version of torch, drivers, and how torch's allocator is set up.

Options along an axis of one rank have no effect, and the first rank says so; one run file serves one and many.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.base.errors import MeshError, StrategyError
from meshwright.base.processes import ALLOCATOR_VARIABLES, prefer_expandable_segments, uses_expandable_segments
from meshwright.cli import main as command_line
from meshwright.files.versions import check_torch_version, get_min_torch_version
from meshwright.launch.open_world import describe_missing_driver, find_device
from meshwright.testing import Case
from meshwright_testing import pool
from meshwright_testing.parity import build_manager, train_steps

OLD = "2.1.0+cu118"


def test_an_old_torch_is_named_before_anything_is_imported_from_it(tmp_path: Path) -> None:
    metadata = tmp_path / "torch-2.1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {OLD}\n")
    (tmp_path / "torch.py").write_text("raise SystemExit('imported')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    needed = f"torch {OLD} is installed, and meshwright needs torch {get_min_torch_version()} or later."
    for command, code in ((["-m", "meshwright", "strategies"], 2), (["-c", "import meshwright; meshwright.fit"], 1)):
        line, environment = [sys.executable, *command], {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
        assert needed in done.stderr
        assert (done.returncode, "Traceback" in done.stderr) == (code, code == 1)


def test_the_oldest_torch_is_that_of_the_package_and_the_installed_one_passes() -> None:
    wanted = next(
        line for line in (Path(__file__).parents[4] / "pyproject.toml").read_text().splitlines() if '"torch>=' in line
    )
    assert f"torch>={get_min_torch_version()}," in wanted
    check_torch_version()


def test_another_version_is_compared_by_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.9.1")
    with pytest.raises(StrategyError, match=r"torch 2\.9\.1 is installed"):
        check_torch_version()
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.100.0a0+git1")
    check_torch_version()


def test_a_build_for_gpus_without_a_driver_says_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr("torch.version.cuda", "13.0")
    assert find_device(None) == torch.device("cpu")
    assert describe_missing_driver("why: ").startswith("why: torch ")
    assert "built for CUDA 13.0, but finds no GPU with a driver" in describe_missing_driver()
    reported = r"'cuda' is not available here. Available: cpu. Set device=cpu. torch .* finds no GPU with a driver\."
    with pytest.raises(MeshError, match=reported):
        find_device("cuda")
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr("torch.version.hip", None)
    assert describe_missing_driver("why: ") == ""


@pytest.mark.parametrize(
    ("given", "is_set"),
    [
        ({}, True),
        ({ALLOCATOR_VARIABLES[0]: ""}, True),
        ({ALLOCATOR_VARIABLES[0]: "expandable_segments: true"}, True),
        ({ALLOCATOR_VARIABLES[0]: "max_split_size_mb:128"}, False),
        ({ALLOCATOR_VARIABLES[1]: "expandable_segments:False"}, False),
        ({ALLOCATOR_VARIABLES[1]: "garbage_collection_threshold:0.8,expandable_segments:True"}, True),
    ],
)
def test_expandable_segments_are_set_unless_the_user_has_set_the_allocator(given: dict[str, str], is_set: bool) -> None:
    environment = dict(given)
    prefer_expandable_segments(environment)
    assert uses_expandable_segments(environment) is is_set
    if any(given.values()):
        assert environment == given
    else:
        assert environment == {ALLOCATOR_VARIABLES[0]: "expandable_segments:True"}


def test_rocm_keeps_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.13.0+rocm6.4")
    environment: dict[str, str] = {}
    prefer_expandable_segments(environment)
    assert environment == {}


def _setting() -> str | None:
    return os.environ.get(ALLOCATOR_VARIABLES[0])


def test_ranks_and_the_command_line_have_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool(2).run(_setting) == ["expandable_segments:True"] * 2
    monkeypatch.delenv(ALLOCATOR_VARIABLES[0], raising=False)
    monkeypatch.delenv(ALLOCATOR_VARIABLES[1], raising=False)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.setattr(command_line, "exit_process", lambda code: seen.append(code))
    seen: list[object] = []
    monkeypatch.setattr(command_line, "_invoke", lambda _: seen.append(_setting()) or 0)
    command_line.main()
    assert seen == ["expandable_segments:True", 0]


def _losses_and_warnings(strategy: str, config: dict[str, Any], sizes: dict[str, int]) -> tuple[list[float], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        manager = build_manager(strategy, config, sizes, Case())
    losses, _, _ = train_steps(manager, Case(), range(2))
    return losses, [
        str(each.message)
        for each in caught
        if "no effect here" in str(each.message) or "double_buffer" in str(each.message)
    ]


PLAN = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("megatron_fsdp", marks=pytest.mark.slow)])
def test_tensor_and_context_options_act_on_nothing_at_one_rank_and_the_first_rank_says_so_once(strategy: str) -> None:
    config = {"sequence_parallel": True, "tp_plan": PLAN, "cp_attention": "ulysses"}
    idle = pool(2).run(_losses_and_warnings, strategy, config, {})
    plain = pool(2).run(_losses_and_warnings, strategy, {}, {})
    assert [losses for losses, _ in idle] == [losses for losses, _ in plain]
    assert [reported for _, reported in plain] == [[], []]
    tensor, context = idle[0][1]
    assert tensor == f"sequence_parallel=True and tp_plan={PLAN} have no effect here: tp_size is 1."
    assert context == "cp_attention=ulysses has no effect here: cp_size is 1."
    assert idle[1][1] == []


LAYERS = ["LlamaAttention", "LlamaMLP"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "reported"),
    [
        ({"calculate_per_token_loss": True}, ["calculate_per_token_loss=True has no effect here: the loss is per"]),
        ({"gradient_reduce_div_fusion": False}, ["gradient_reduce_div_fusion=False has no effect here: gradients"]),
        ({"fsdp_double_buffer": True}, []),
        (
            {"fsdp_double_buffer": True, "megatron_fsdp_unit_modules": LAYERS},
            ["fsdp_double_buffer=True serves 3 of 6 units, which are equal."],
        ),
        (
            {"fsdp_double_buffer": True, "megatron_fsdp_unit_modules": ["LlamaForCausalLM"]},
            ["fsdp_double_buffer=True has no effect here: the whole model is one unit."],
        ),
    ],
    ids=str,
)
def test_options_of_megatron_fsdp_without_effect_say_so_once_and_change_nothing(config, reported):
    units = {"megatron_fsdp_unit_modules": config.get("megatron_fsdp_unit_modules")}
    (losses, first), (_, second) = pool(2).run(_losses_and_warnings, "megatron_fsdp", config, {})
    assert losses == pool(2).run(_losses_and_warnings, "megatron_fsdp", units, {})[0][0]
    assert [text[: len(start)] for text, start in zip(first, reported, strict=True)] == reported
    assert second == []
