"""`meshwright pipeline show`."""

from __future__ import annotations

import re

import pytest
import torch.distributed as dist
import typer
import yaml
from typer.testing import CliRunner

from meshwright import ConfigError, MeshError, load_run
from meshwright_pipeline.schedule.order import Kind
from meshwright_pipeline.schedule.rules import build_schedule
from meshwright_pipeline.show import LOOKS, StageView, View, add_commands, as_lines, draw, view_of


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    for index in range(2):
        words = [f"{(index + 3) * n % 17} is {'even' if n % 2 else 'odd'}" for n in range(200)]
        (directory / f"{index}.txt").write_text(", ".join(words), encoding="utf-8")
    values = {
        "strategy": "single",
        "nproc": 4,
        "device": "cpu",
        "output_dir": str(directory / "out"),
        "model": {
            "model_type": "llama",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 9,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 32,
        },
        "data": {
            "corpus": str(directory / "*.txt"),
            "cache_dir": str(directory / "cache"),
            "vocab_size": 300,
            "seq_len": 16,
        },
        "steps": 2,
        "batch_size": 8,
        "pp_size": 4,
    }
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


@pytest.fixture
def app():
    """The command line with another command beside, as the plugin adds it."""
    whole, own = typer.Typer(), typer.Typer()
    whole.command("other")(lambda: None)
    add_commands(own)
    whole.add_typer(own)
    return whole


def invoke(app, *arguments):
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, ["pipeline", "show", *map(str, arguments)])


def options(**values):
    return f"wrapper_config={{pipeline: {values}}}"


def test_a_run_is_shown_in_the_terminal_and_as_a_picture(app, run_file, tmp_path):
    result = invoke(app, run_file, "--out", tmp_path / "schedule.png")
    assert result.exit_code == 0, result.output
    assert "1F1B: 4 ranks, 4 stages, 8 microbatches of 1 sequence" in result.output
    blocks = re.findall(r"model\.layers\.(\d+)(?: to (\d+))? \((\d+)\)", result.output)
    assert [int(first) for first, _, _ in blocks] == [0, *(int(last or first) + 1 for first, last, _ in blocks[:-1])]
    assert sum(int(count) for _, _, count in blocks) == 9
    # The head is large beside these blocks.
    assert int(blocks[-1][2]) < int(blocks[1][2])
    assert "27.3% if stages were equal" in result.output  # 3 / (8 + 3)
    assert len(re.findall(r"^rank \d [FB·]+$", result.output, re.MULTILINE)) == 4
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")
    assert not dist.is_initialized()
    assert not (run_file.parent / "out").exists()


def test_schedule_and_split_follow_the_options(run_file, tmp_path):
    run = load_run(run_file, [options(pp_schedule="zbv", pp_microbatch_size=2), "pp_size=2", "nproc=2"])
    view = view_of(run)
    assert view.headline == "ZBVZeroBubble: 2 ranks, 4 stages, 4 microbatches of 2 sequences"
    assert view.schedule.placement == (0, 1, 1, 0)
    assert sum(view.costs) == pytest.approx(4)
    run = load_run(run_file, [options(layers_per_stage=3), "pp_size=3", "nproc=3"])
    assert [len(stage.blocks) for stage in view_of(run).stages] == [3, 3, 3]
    # Each data-parallel rank has its share of the sequences.
    assert view_of(load_run(run_file, ["strategy=fsdp2", "pp_size=2", "nproc=4"])).schedule.microbatches == 4
    path = tmp_path / "own.csv"
    path.write_text("0F0,0F1,,0B0,0B1\n1F0,1F1,1B0,1B1\n", encoding="utf-8")
    view = view_of(load_run(run_file, [options(pp_schedule_csv=str(path)), "pp_size=2", "nproc=2"]))
    assert view.schedule.microbatches == 2
    assert "own.csv" in view.headline


def test_parameters_of_the_stages_are_those_of_the_model(run_file):
    view = view_of(load_run(run_file))
    hidden, inner = 16, 24
    block = 2 * hidden * hidden + 2 * hidden * 8 + 3 * hidden * inner + 2 * hidden
    first, *middle, last = [stage.parameters - len(stage.blocks) * block for stage in view.stages]
    assert 257 <= first / hidden <= 300
    assert (first, middle) == (last, [0, 0])


@pytest.mark.parametrize(
    ("assignments", "error", "text"),
    [
        (["pp_size=1", "nproc=1"], ConfigError, "single has no pipeline, so there is nothing to show. Set pp_size"),
        ([options(pp_microbatch_size=3)], ConfigError, "8 sequences does not divide .* pp_microbatch_size=3"),
        (
            [options(pp_schedule="zbv"), "model.num_hidden_layers=5"],
            ConfigError,
            "8 stages, but the model has 5 blocks",
        ),
        ([options(pp_schedul="zbv")], ConfigError, "Did you mean 'pp_schedule'"),
        (["nproc=6"], MeshError, "6"),
    ],
)
def test_what_is_wrong_with_a_run_is_told(assignments, error, text, app, run_file):
    result = invoke(app, run_file, *(part for each in assignments for part in ("--set", each)))
    assert isinstance(result.exception, error), result.output
    assert re.search(text, str(result.exception))


def test_a_picture_that_cannot_be_written_is_told(app, run_file, tmp_path):
    for name in ("no/such/directory.png", "schedule.unknown"):
        result = invoke(app, run_file, "--out", tmp_path / name)
        assert isinstance(result.exception, ConfigError)
        assert "cannot be written" in str(result.exception)


# -- the drawing itself


def equal_view(name, *, ranks, chunks, microbatches):
    schedule = build_schedule(name, ranks=ranks, stages=ranks * chunks, microbatches=microbatches)
    stages = tuple(StageView((f"blocks.{index}",), 1, 1.0) for index in range(schedule.stages))
    return View(schedule, stages, 1)


def test_a_line_has_a_letter_for_each_unit_of_time_and_fits_the_width():
    lines = [str(line) for line in as_lines(equal_view("1f1b", ranks=2, chunks=1, microbatches=2), 80)]
    assert lines[:2] == ["rank 0 FF··BB·BB", "rank 1 ·FBBFBB··"]
    view = equal_view("interleaved1f1b", ranks=4, chunks=3, microbatches=16)
    for width in (1, 30, 79):
        assert all(len(line) <= max(width, len("rank 0 ") + 1) for line in as_lines(view, width)[:-1])


def test_later_stages_of_a_rank_are_in_lower_case():
    view = equal_view("zbv", ranks=2, chunks=2, microbatches=3)
    *lines, legend = [str(line) for line in as_lines(view, 80)]
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        own = view.schedule.stages_of(rank)
        for letter, stage in (("F", own[0]), ("f", own[1]), ("W", own[0]), ("w", own[1])):
            kind = Kind(letter.upper())
            count = sum(action.stage == stage and action.kind is kind for action in view.schedule.orders[rank])
            assert line.count(letter) == count
    assert "lower case" in legend


def test_a_picture_has_a_bar_for_each_action(tmp_path):
    from matplotlib.image import imread

    view = equal_view("dualpipev", ranks=3, chunks=2, microbatches=8)
    draw(view, tmp_path / "schedule.png")
    picture = imread(tmp_path / "schedule.png")[..., :3]
    for kind in view.kinds:
        colour = [int(LOOKS[kind][0][at : at + 2], 16) / 255 for at in (1, 3, 5)]
        assert (abs(picture - colour).max(axis=-1) < 1e-2).sum() > 100, kind
    assert set(view.kinds) == {Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
