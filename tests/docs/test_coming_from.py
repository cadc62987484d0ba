"""docs/coming-from is true: scripts run, and theirs and ours print the same losses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "coming-from"
HANDWRITTEN = ("accelerate", "lightning", "trainer", "trl")
MEAN_OF_MEANS = ("accelerate", "lightning")
"""Pages of those that divide each microbatch's loss by its own labels."""
NEAR = {"trainer": (1e-6, 1e-11), "trl": (1e-5, 1e-6)}
"""How near theirs and ours are, and ours on one rank and two, where it is not 1e-6 and 1e-11: a trainer adds up losses
in float32, and TRL reads a model in it."""
RAGGED = "labels = ids.clone()", "labels = ids.clone()\n{indent}labels[: number % 13] = -100"
OWN_LOSS = {
    "accelerate": ("loss = model(**batch).loss", "loss = exact(model, batch)"),
    "lightning": ("loss = self.model(**batch).loss", "loss = exact(self.model, batch)"),
    "trainer": ("    callbacks=[Show()],", "    callbacks=[Show()],\n    compute_loss_func=from_logits,"),
}
EXACT = """

def exact(model, batch):
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten())


def from_logits(outputs, labels, num_items_in_batch):
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def row("""


def page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text(encoding="utf-8")


def block(name: str, heading: str, language: str) -> str:
    """The only block of code under a heading."""
    section = page(name).split(f"## {heading}\n")[1].split("\n## ")[0]
    (found,) = re.findall(rf"```{language}\n(.*?)```", section, flags=re.DOTALL)
    return str(found)


def ragged(script: str) -> str:
    plain, other = RAGGED
    indent = re.search(rf"^( *){re.escape(plain)}", script, flags=re.MULTILINE)
    assert indent is not None
    return script.replace(plain, other.format(indent=indent[1]))


@cache
def output(script: str, ranks: int) -> str:
    """What a script prints."""
    with tempfile.TemporaryDirectory(prefix="meshwright-") as directory:
        (Path(directory) / "train.py").write_text(script, encoding="utf-8")
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *(torchrun if ranks > 1 else []), "train.py"]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def printed(script: str, ranks: int, steps: int = 6) -> list[list[float]]:
    """The numbers of each line that a script prints for a step: loss, and norm if it has it."""
    lines = [line for line in output(script, ranks).splitlines() if line.startswith("step ")]
    found = [list(map(float, re.findall(r"(?:loss|norm) ([\d.]+)", line))) for line in lines]
    assert len(found) == steps, output(script, ranks)
    return found


def assert_equal(found: list[list[float]], expected: list[list[float]], tolerance: float) -> None:
    assert found == [pytest.approx(each, abs=tolerance, rel=0) for each in expected]


# -- scripts


SOME = [name if name == "trainer" else pytest.param(name, marks=pytest.mark.zoo) for name in HANDWRITTEN]


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_our_script_prints_the_same_on_one_rank_and_two(name: str) -> None:
    ours = block(name, "Ours", "python")
    assert_equal(printed(ours, 2), printed(ours, 1), NEAR.get(name, (1e-6, 1e-11))[1])


@pytest.mark.zoo
@pytest.mark.parametrize("axis", ["tp", "cp", "pp"])
@pytest.mark.parametrize("name", ["accelerate", "trainer", "trl"])
def test_our_script_prints_the_same_under_another_layout(name: str, axis: str) -> None:
    other = ours = block(name, "Ours", "python")
    changes = [("mw.MeshSizes()", f"mw.MeshSizes({axis}_size=2)")]
    if name != "accelerate":
        changes = [('int(os.environ.get("WORLD_SIZE", 1))', "1"), ('"fsdp2"}', f'"fsdp2", "{axis}_size": 2}}')]
    for old, new in changes:
        assert other.count(old) == 1
        other = other.replace(old, new)
    assert_equal(printed(other, 2), printed(ours, 1), NEAR.get(name, (1e-9,))[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_their_script_prints_what_ours_does(name: str) -> None:
    pytest.importorskip("transformers" if name == "trainer" else name)
    theirs, ours = block(name, "Their script", "python"), block(name, "Ours", "python")
    assert_equal(printed(theirs, 1), printed(ours, 1), NEAR.get(name, (1e-6, 1e-11))[0])
    if name not in OWN_LOSS:
        return
    model_loss, own = OWN_LOSS[name]
    assert theirs.count(model_loss) == 1
    exact = printed(theirs.replace(model_loss, own).replace("\n\ndef row(", EXACT), 1)
    wanted = printed(ours, 1)
    if name in NEAR:
        # The norms, which no trainer adds up.
        exact, wanted = ([each[1:] for each in found] for found in (exact, wanted))
    assert_equal(exact, wanted, 1e-9)


@pytest.mark.zoo
def test_trainer_and_ours_part_where_they_evaluate_ragged_rows() -> None:
    text = page("trainer").split("**Where they part.**")[1].split("##")[0]
    theirs, ours = (ragged(block("trainer", heading, "python")) for heading in ("Their script", "Ours"))
    assert_equal(printed(ours, 1), printed(theirs, 1), 1e-6)
    assert_equal(printed(ours, 2), printed(ours, 1), 1e-11)
    evaluated = [
        re.findall(r"evaluated: (\S+)", output(script, ranks)) for script, ranks in ((theirs, 1), (ours, 1), (ours, 2))
    ]
    assert [each for (each,) in evaluated] == [*re.findall(r"\d\.\d{6}", text), evaluated[1][0]]
    assert evaluated[0] != evaluated[1]


@pytest.mark.zoo
def test_the_trainer_of_completions_continues_where_the_script_of_trl_ends() -> None:
    script = block("trl", "Ours", "python") + block("trl", "GRPO", "python")
    found = printed(script, 2, steps=9)
    assert found[:6] == printed(block("trl", "Ours", "python"), 2)
    assert all(norm > 0 for _, norm in found[6:])


@pytest.mark.zoo
@pytest.mark.parametrize("name", MEAN_OF_MEANS)
def test_with_ragged_rows_both_print_what_the_page_says(name: str) -> None:
    pytest.importorskip(name)
    said = re.findall(r"\d\.\d{6}", page(name).split("**Where they part.**")[1].split("##")[0])
    theirs = printed(ragged(block(name, "Their script", "python")), 1)[0]
    ours = printed(ragged(block(name, "Ours", "python")), 1)[0]
    assert abs(theirs[0] - ours[0]) > 1e-4
    pairs = zip(theirs, ours, strict=True)
    assert [f"{number:.6f}" for pair in pairs for number in pair] == said


# -- run files


def run_file(name: str, directory: Path, *changes: str) -> list[float]:
    """The losses of the run file of a page."""
    (directory / "texts").mkdir(exist_ok=True)
    for number, each in enumerate(("README", "accelerate", "lightning", "torchtitan", "automodel")):
        (directory / "texts" / f"{number}.txt").write_text(page(each), encoding="utf-8")
    (directory / "run.yaml").write_text(block(name, "Ours", "yaml"), encoding="utf-8")
    settings = [word for change in (*changes, "output_dir=out") for word in ("--set", change)]
    command = [sys.executable, "-m", "meshwright", "train", "run.yaml", *settings]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = (directory / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.zoo
@pytest.mark.parametrize("name", ["torchtitan", "automodel"])
def test_our_run_file_trains_on_two_ranks_as_on_one(name: str, tmp_path: Path) -> None:
    for each in ("one", "two"):
        (tmp_path / each).mkdir()
    two = run_file(name, tmp_path / "two")
    one = run_file(name, tmp_path / "one", "nproc=1", "tp_size=1", "strategy=single", "strategy_config={}")
    assert len(one) == 6
    # In float32.
    assert two == pytest.approx(one, rel=1e-5)
    assert one[-1] < one[0]
