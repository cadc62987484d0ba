"""Two runs are compared: where they part first, by number, tensor and module, and whether rounding has done it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import run_command, write_run
from support.replays import build_performer, copy_run, train_run, write_run_file

from meshwright.base.errors import ConfigError
from meshwright_diagnose.replay.diff import Divergence, RunDiff, StepComparison, compare_metrics, diff_runs
from meshwright_diagnose.replay.request import RecordedRun
from meshwright_diagnose.replay.tensors import compare_tensors


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("diff")
    write_run(directory)
    return directory


def _trained(workplace: Path, name: str, fault: str = "none", **changes: Any) -> Path:
    model = {"attention_dropout": 0.0, **changes.pop("model", {})}
    return train_run(write_run_file(workplace, name, **{"nproc": 2, "model": model, **changes}), fault=fault)


@pytest.fixture(scope="module")
def plain(workplace: Path) -> Path:
    return _trained(workplace, "plain")


def of(
    one: Path, other: Path, fault: str = "none", **options: Any
) -> tuple[RunDiff, Divergence | None, StepComparison]:
    found = diff_runs(one, other, runner=build_performer(fault), **options)
    assert found.replayed is not None, found.unavailable_reason
    return found, found.first_divergence, found.replayed


def test_a_run_and_its_copy_are_the_same_bit_for_bit(plain: Path, tmp_path: Path) -> None:
    found, parted, step = of(plain, copy_run(plain, tmp_path / "copy"), step=5)
    assert (parted, found.exit_code, found.settings, found.layout) == (None, 0, (), ())
    parts = (step.parameters_before, step.outputs, step.gradients, step.parameters_after)
    assert all(
        each is not None and each.num_tensors >= 21 and each.largest.relative == 0 for each in parts if each.largest
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "float64"),
    [({"strategy": "ddp"}, False), ({"pp_size": 2}, False), ({"nproc": 4, "tp_size": 2}, True)],
    ids=["ddp", "pipeline", "tensor parallelism"],
)
def test_layouts_agree_to_rounding_and_so_do_all_tensors_and_modules(plain, workplace, layout, float64):
    other = _trained(workplace, f"as {list(layout)[-1]}", **layout)
    found, _, step = of(plain, other, step=4, float64=float64)
    assert (found.exit_code, found.settings) == (0, ())
    assert {name for name, *_ in found.layout} == set(layout)
    assert step.has_same_rows
    assert step.outputs.num_tensors > 15
    assert (step.gradients.num_tensors, step.tolerance) == (21, 1e-9 if float64 else 1e-4)
    largest = [each.largest for each in (step.parameters_before, step.outputs, step.gradients, step.parameters_after)]
    assert not float64 or all(each is not None and each.relative < 1e-12 for each in largest)


@pytest.mark.slow
def test_layouts_that_draw_other_numbers_for_dropout_agree_without_it(workplace: Path) -> None:
    options: dict[str, Any] = {"model": {"attention_dropout": 0.2}, "strategy": "ddp"}
    one, other = (_trained(workplace, f"dropout {nproc}", nproc=nproc, **options) for nproc in (2, 4))
    _, parted, step = of(one, other)
    assert (parted.name, parted.step, parted.is_jump) == ("loss", 1, True)
    assert step.is_same


@pytest.mark.slow
def test_the_rate_that_a_resumed_run_has_frozen_is_named_with_its_step_and_the_resume(plain, workplace):
    path = write_run_file(workplace, "frozen", nproc=2, model={"attention_dropout": 0.0})
    train_run(path, kill_after=5)
    frozen = train_run(path, fault="rates freeze")
    found, parted, _ = of(plain, frozen)
    # The rate of step 5 is the one that it had reached; that of step 6 should be lower.
    assert (parted.name, parted.step) == ("learning_rate", 6)
    assert parted.one < parted.other
    assert (found.resumed_after, found.exit_code) == ((None, 4), 1)


@pytest.mark.slow
def test_gradients_that_are_scaled_otherwise_in_one_layout_are_named(workplace: Path) -> None:
    ddp = _trained(workplace, "sound", strategy="ddp")
    wrong = _trained(workplace, "scaled", "gradients are halved")
    _, parted, step = of(ddp, wrong, "gradients are halved")
    assert (parted.name, parted.step, parted.is_jump) == ("grad_norm", 1, True)
    assert (step.parameters_before.first, step.outputs.first, step.gradients.num_beyond_tolerance) == (None, None, 1)
    assert step.gradients.first.name == "model.layers.1.mlp.up_proj.weight"
    assert step.gradients.first.relative == pytest.approx(0.5, rel=1e-5)


@pytest.mark.slow
def test_the_first_module_that_computes_otherwise_is_named(plain: Path, workplace: Path) -> None:
    wrong = _trained(workplace, "activations", "activations are more")
    performs = build_performer(), build_performer("activations are more")
    found = diff_runs(plain, wrong, runner=lambda order: performs["other" in str(order.output_directory)](order))
    first = found.replayed.outputs.first
    assert (first.name, first.relative > 0.1) == ("model.layers.0.mlp", True)


def _runs(plain: Path, directory: Path, factors: list[float]) -> tuple[RecordedRun, RecordedRun]:
    """The run, and one whose losses are those times factors."""
    line = json.loads((plain / "metrics.jsonl").read_text().splitlines()[0])
    for name, chosen in (("one", [1.0] * len(factors)), ("other", factors)):
        (directory / name).mkdir(parents=True)
        shutil.copy(plain / "run.yaml", directory / name)
        lines = [{**line, "step": step, "loss": 2.0 * factor} for step, factor in enumerate(chosen, start=1)]
        (directory / name / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return RecordedRun(directory / "one"), RecordedRun(directory / "other")


def test_rounding_that_grows_is_reported_from_a_jump(plain: Path, tmp_path: Path) -> None:
    grows = [1 + 1e-7 * 1.6**step for step in range(24)]
    jumps = [1.0, 1 + 1e-7, 1 + 1e-7, 1 + 5e-5, 1 + 1e-3]

    def parted(factors: list[float], name: str, rtol: float | None = None) -> Divergence | None:
        course = compare_metrics(*_runs(plain, tmp_path / name, factors), rtol=rtol, precision="float32")
        return course.divergences[0] if course.divergences else None

    grown, jumped = parted(grows, "grows"), parted(jumps, "jumps")
    assert (grown.is_jump, grown.first_step) == (False, 1)
    assert grown.step > 10
    assert (jumped.is_jump, jumped.step, jumped.first_step) == (True, 4, 2)
    assert parted([1.0, 1 + 1e-7], "same") is None
    # With a tolerance, no jump within it is reported.
    assert parted(jumps[:-1], "within", rtol=1e-4) is None
    assert parted(grows, "sooner", rtol=1e-6).step < grown.step


def test_tensors_are_apart_by_their_scale_and_never_by_what_is_equal() -> None:
    one = torch.tensor([1.0, -4.0, math.nan, math.inf])
    found = compare_tensors("x", one, torch.tensor([1.5, -4.0, math.nan, math.inf]))
    assert (found.absolute, compare_tensors("x", one, one.clone()).relative) == (0.5, 0)
    assert compare_tensors("x", torch.tensor([1.0]), torch.tensor([math.nan])).relative > 1
    assert compare_tensors("x", torch.zeros(2), torch.zeros(3)).reason == "shape (2,) against (3,)"


def test_bad_input_is_reported(plain: Path, tmp_path: Path) -> None:
    later = _runs(plain, tmp_path, [1.0])[0].directory
    (later / "metrics.jsonl").write_text((later / "metrics.jsonl").read_text().replace('"step": 1,', '"step": 40,'))
    for text, one, other, options in (
        ("not a run directory", plain, tmp_path, {}),
        ("step 9 is not a step", plain, plain, {"step": 9}),
        ("must be above 0", plain, plain, {"rtol": 0.0}),
        ("no step is in both", plain, later, {}),
        ("no complete checkpoint before step 40", later, later, {"step": 40}),
    ):
        with pytest.raises(ConfigError, match=text):
            diff_runs(one, other, runner=build_performer(), **options)


@pytest.mark.slow
def test_the_command_prints_and_ends_with_1_where_runs_part(plain: Path, workplace: Path, tmp_path: Path) -> None:
    other = _trained(workplace, "seeded", seed=1)
    file = tmp_path / "found.json"
    done = run_command("diff", str(plain), str(other), "--json", str(file))
    assert done.returncode == 1, done.stderr
    assert "seed is 0 against 1" in done.stdout
    found = json.loads(file.read_text())
    assert found["replayed"]["step"] == found["divergences"][0]["step"]
    assert run_command("diff", str(plain), str(plain), "--no-replay").returncode == 0
