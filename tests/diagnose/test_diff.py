"""Two runs are compared: where they part first, by number, tensor and module, and whether rounding has done it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.commands import command, write_run
from test_replay import performing, run_file, trained

from meshwright.base.errors import ConfigError
from meshwright.replay.diff import Diff, diff
from meshwright.replay.parted import Parted, course_of
from meshwright.replay.record import Recorded
from meshwright.replay.tensors import apart
from meshwright.replay.told import compared

STEPS = 6


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("diff")
    write_run(directory)
    return directory


def _file(workplace: Path, name: str, **changes: Any) -> Path:
    model = {"attention_dropout": 0.0, **changes.pop("model", {})}
    return run_file(workplace, name, **{"nproc": 2, "model": model, **changes})


@pytest.fixture(scope="module")
def plain(workplace: Path) -> Path:
    return trained(_file(workplace, "plain"))


@pytest.fixture(scope="module")
def wide(workplace: Path) -> Path:
    return trained(_file(workplace, "wide", nproc=4, tp_size=2))


def told(found: Diff) -> str:
    console = Console(width=10_000)
    with console.capture() as capture:
        console.print(compared(found), highlight=False)
    return capture.get()


def of(one: Path, other: Path, fault: str = "none", **options: Any) -> Diff:
    return diff(one, other, perform=performing(fault), **options)


# -- runs that agree


def test_a_run_and_its_copy_are_the_same_bit_for_bit(plain: Path, workplace: Path) -> None:
    copy = workplace / "copy"
    shutil.copytree(plain, copy, dirs_exist_ok=True)
    found = of(plain, copy, step=5)
    assert (found.parted, found.exit_code, found.settings, found.layout) == (None, 0, (), ())
    step = found.replayed
    assert step is not None
    parts = (step.before, step.outputs, step.gradients, step.after)
    assert all(each is not None and each.count >= 21 and each.largest.relative == 0 for each in parts if each.largest)
    assert "losses and norms bit for bit" in told(found)


@pytest.mark.parametrize("layout", [{"strategy": "ddp"}, {"pp_size": 2}], ids=["ddp", "pipeline"])
def test_layouts_agree_to_rounding_and_so_do_all_tensors_and_modules(
    plain: Path, workplace: Path, layout: dict[str, Any]
) -> None:
    other = trained(_file(workplace, f"as {next(iter(layout))}", **layout))
    found = of(plain, other, step=4)
    assert found.exit_code == 0, told(found)
    assert found.settings == ()
    assert [name for name, *_ in found.layout] == list(layout)
    step = found.replayed
    assert step is not None
    assert step.same_rows
    assert step.outputs is not None
    assert step.outputs.count > 15
    assert step.gradients.count == 21


def test_tensor_parallelism_agrees_in_float64_to_1e9(plain: Path, wide: Path) -> None:
    found = of(plain, wide, step=4, float64=True)
    step = found.replayed
    assert step is not None
    assert step.tolerance == 1e-9
    assert step.outputs is not None
    assert step.outputs.count > 15
    for each in (step.before, step.outputs, step.gradients, step.after):
        assert each.largest is not None
        assert each.largest.relative < 1e-12
    assert found.exit_code == 0, told(found)


def test_layouts_that_draw_other_numbers_for_dropout_agree_without_it(workplace: Path) -> None:
    model = {"attention_dropout": 0.2}
    one, other = (
        trained(_file(workplace, f"dropout {nproc}", model=model, strategy="ddp", nproc=nproc)) for nproc in (2, 4)
    )
    found = of(one, other)
    assert found.parted is not None
    assert (found.parted.name, found.parted.step, found.parted.is_jump) == ("loss", 1, True)
    assert found.replayed is not None
    assert found.replayed.is_same
    assert "what parted the runs is dropout" in told(found)


# -- runs that part


def test_the_rate_that_a_resumed_run_has_frozen_is_named_with_its_step_and_the_resume(
    plain: Path, workplace: Path
) -> None:
    path = _file(workplace, "frozen")
    trained(path, kill_after=5)
    frozen = trained(path, fault="rates freeze")
    found = of(plain, frozen)
    assert found.parted is not None
    # The rate of step 5 is the one that it had reached; that of step 6 should be lower.
    assert (found.parted.name, found.parted.step) == ("learning_rate", 6)
    assert found.parted.one is not None
    assert found.parted.other is not None
    assert found.parted.one < found.parted.other
    assert found.resumed == (None, 4)
    text = told(found)
    assert f"Learning rates part at step 6: {found.parted.one} against {found.parted.other}" in text
    assert "the schedule or its resume differs" in text
    assert f"{frozen} went on after step 4 (events.jsonl)" in text
    assert found.exit_code == 1


def test_another_rate_is_named_before_what_follows_from_it(plain: Path, workplace: Path) -> None:
    other = trained(_file(workplace, "rate", optimizer={"lr": 0.01}))
    found = of(plain, other)
    assert found.parted is not None
    assert (found.parted.name, found.parted.step) == ("learning_rate", 2)
    assert {each.name for each in found.course.parted[1:]} >= {"loss", "grad_norm"}
    assert [name for name, *_ in found.settings] == ["optimizer.lr"]
    step = found.replayed
    assert step is not None
    assert step.before.first is None
    assert step.gradients.first is None
    assert step.after.first is not None
    assert "rates, clipping or the optimizer" in told(found)


def test_other_data_are_told_by_the_rows_of_the_step(plain: Path, workplace: Path) -> None:
    other = trained(_file(workplace, "seed", data={"seq_len": 12}))
    found = of(plain, other, step=1)
    assert found.parted is not None
    assert found.parted.name == "num_tokens"
    assert found.replayed is not None
    assert not found.replayed.same_rows
    assert "The two steps had other data" in told(found)


def test_gradients_that_are_scaled_otherwise_in_one_layout_are_named(plain: Path, workplace: Path) -> None:
    ddp = trained(_file(workplace, "sound", strategy="ddp"))
    wrong = trained(_file(workplace, "scaled"), fault="gradients are halved")
    found = of(ddp, wrong, "gradients are halved")
    assert found.parted is not None
    assert (found.parted.name, found.parted.step, found.parted.is_jump) == ("grad_norm", 1, True)
    step = found.replayed
    assert step is not None
    assert step.outputs is not None
    assert (step.before.first, step.outputs.first) == (None, None)
    assert step.gradients.first is not None
    assert step.gradients.first.name == "model.layers.1.mlp.up_proj.weight"
    assert math.isclose(step.gradients.first.relative, 0.5, rel_tol=1e-5)
    assert step.gradients.beyond == 1
    assert "backward, or how gradients are summed" in told(found)


def test_the_first_module_that_computes_otherwise_is_named(plain: Path, workplace: Path) -> None:
    wrong = trained(_file(workplace, "activations"), fault="activations are more")
    shown = performing(), performing("activations are more")

    def perform(order: Any) -> dict[str, Any]:
        return shown["other" in str(order.out)](order)

    found = diff(plain, wrong, perform=perform)
    step = found.replayed
    assert step is not None
    assert step.outputs is not None
    assert step.outputs.first is not None
    assert step.outputs.first.name == "model.layers.0.mlp"
    assert step.outputs.first.relative > 0.1
    assert "model.layers.0.mlp is the first to compute otherwise" in told(found)


# -- rounding, or a jump


def _runs(plain: Path, directory: Path, factors: list[float]) -> tuple[Recorded, Recorded]:
    """The run, and one whose losses are those times factors."""
    other = directory / "other"
    other.mkdir(parents=True)
    lines = [json.loads(line) for line in (plain / "metrics.jsonl").read_text().splitlines()]
    shutil.copy(plain / "run.yaml", other)
    long = [{**lines[0], "step": number, "loss": 2.0} for number in range(1, len(factors) + 1)]
    (directory / "one").mkdir()
    shutil.copy(plain / "run.yaml", directory / "one")
    for name, chosen in (("one", [1.0] * len(factors)), ("other", factors)):
        text = "".join(
            json.dumps({**line, "loss": line["loss"] * factor}) + "\n"
            for line, factor in zip(long, chosen, strict=True)
        )
        (directory / name / "metrics.jsonl").write_text(text)
    return Recorded(directory / "one"), Recorded(other)


def test_rounding_that_grows_is_told_from_a_jump(plain: Path, tmp_path: Path) -> None:
    grows = [1 + 1e-7 * 1.6**step for step in range(24)]
    jumps = [1.0, 1 + 1e-7, 1 + 1e-7, 1 + 5e-5, 1 + 1e-3]

    def parted(factors: list[float], name: str, rtol: float | None = None) -> Parted | None:
        course = course_of(*_runs(plain, tmp_path / name, factors), rtol=rtol, precision="float32")
        return course.parted[0] if course.parted else None

    grown, jumped = parted(grows, "grows"), parted(jumps, "jumps")
    assert grown is not None
    assert (grown.is_jump, grown.first) == (False, 1)
    assert grown.step > 10
    assert jumped is not None
    assert (jumped.is_jump, jumped.step, jumped.first) == (True, 4, 2)
    assert parted([1.0, 1 + 1e-7], "same") is None
    # Who says how far they may be apart is not told of jumps within it.
    assert parted(jumps[:-1], "within", rtol=1e-4) is None
    sooner = parted(grows, "sooner", rtol=1e-6)
    assert sooner is not None
    assert sooner.step < grown.step


def test_grown_rounding_is_told_with_what_to_do(plain: Path, tmp_path: Path) -> None:
    one, other = _runs(plain, tmp_path, [1 + 1e-7 * 1.6**step for step in range(24)])
    text = told(diff(one.directory, other.directory, replays=False))
    assert "It is rounding that has grown: apart since step 1" in text
    assert "--float64" in text


# -- what is compared, and what cannot be


def test_tensors_are_apart_by_their_scale_and_never_by_what_is_equal() -> None:
    one = torch.tensor([1.0, -4.0, math.nan, math.inf])
    found = apart("x", one, torch.tensor([1.5, -4.0, math.nan, math.inf]))
    assert found.absolute == 0.5
    assert apart("x", one, one.clone()).relative == 0
    assert apart("x", torch.tensor([1.0]), torch.tensor([math.nan])).relative > 1
    assert apart("x", torch.zeros(2), torch.zeros(3)).why == "shape (2,) against (3,)"


def test_bad_input_is_told(plain: Path, workplace: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no directory of a run"):
        of(plain, tmp_path)
    with pytest.raises(ConfigError, match="step 9 is none"):
        of(plain, plain, step=9)
    with pytest.raises(ConfigError, match="must be above 0"):
        of(plain, plain, rtol=0.0)
    later = tmp_path / "later"
    later.mkdir()
    shutil.copy(plain / "run.yaml", later)
    line = json.loads((plain / "metrics.jsonl").read_text().splitlines()[0])
    (later / "metrics.jsonl").write_text(json.dumps({**line, "step": 40}) + "\n")
    with pytest.raises(ConfigError, match="no step is in both"):
        of(plain, later)
    with pytest.raises(ConfigError, match="no whole checkpoint before step 40"):
        of(later, later, step=40)


def test_the_command_tells_and_ends_with_1_where_runs_part(plain: Path, workplace: Path, tmp_path: Path) -> None:
    other = trained(_file(workplace, "seeded", seed=1))
    file = tmp_path / "found.json"
    done = command("diff", str(plain), str(other), "--json", str(file))
    assert done.returncode == 1, done.stderr
    assert "seed is 0 against 1" in done.stdout
    found = json.loads(file.read_text())
    assert found["parted"][0]["name"] in ("loss", "grad_norm")
    assert found["replayed"]["step"] == found["parted"][0]["step"]
    same = command("diff", str(plain), str(plain), "--no-replay")
    assert same.returncode == 0
    assert "They agree" in same.stdout
    assert command("diff", str(plain), str(tmp_path)).returncode == 2
