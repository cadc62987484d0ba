"""`meshwright pipeline show`."""

from __future__ import annotations

import re

import pytest
import torch.distributed as dist
import typer
from typer.testing import CliRunner

from meshwright import ConfigError, MeshError, load_run
from meshwright_pipeline.show_command import add_commands, summarize_pipeline

RUN = """
strategy: single
nproc: 4
device: cpu
output_dir: {0}/out
model: {{model_type: llama, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 9, num_attention_heads: 2,
  num_key_value_heads: 1, max_position_embeddings: 32}}
data: {{corpus: "{0}/*.txt", cache_dir: {0}/cache, vocab_size: 300, seq_len: 16}}
steps: 2
batch_size: 8
pp_size: 4
"""


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    for index in range(2):
        words = [f"{(index + 3) * n % 17} is {'even' if n % 2 else 'odd'}" for n in range(200)]
        (directory / f"{index}.txt").write_text(", ".join(words), encoding="utf-8")
    (directory / "run.yaml").write_text(RUN.format(directory), encoding="utf-8")
    return directory / "run.yaml"


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
    view = summarize_pipeline(run)
    assert view.headline == "ZBVZeroBubble: 2 ranks, 4 stages, 4 microbatches of 2 sequences"
    assert view.schedule.placement == (0, 1, 1, 0)
    assert sum(view.costs) == pytest.approx(4)
    run = load_run(run_file, [options(layers_per_stage=3), "pp_size=3", "nproc=3"])
    assert [len(stage.blocks) for stage in summarize_pipeline(run).stages] == [3, 3, 3]
    # Each data-parallel rank has its share of the sequences.
    assert (
        summarize_pipeline(load_run(run_file, ["strategy=fsdp2", "pp_size=2", "nproc=4"])).schedule.num_microbatches
        == 4
    )
    path = tmp_path / "own.csv"
    path.write_text("0F0,0F1,,0B0,0B1\n1F0,1F1,1B0,1B1\n", encoding="utf-8")
    view = summarize_pipeline(load_run(run_file, [options(pp_schedule_csv=str(path)), "pp_size=2", "nproc=2"]))
    assert view.schedule.num_microbatches == 2
    assert "own.csv" in view.headline


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
def test_what_is_wrong_with_a_run_is_reported(assignments, error, text, app, run_file):
    result = invoke(app, run_file, *(part for each in assignments for part in ("--set", each)))
    assert isinstance(result.exception, error), result.output
    assert re.search(text, str(result.exception))


def test_a_picture_that_cannot_be_written_is_reported(app, run_file, tmp_path):
    for name in ("no/such/directory.png", "schedule.unknown"):
        result = invoke(app, run_file, "--out", tmp_path / name)
        assert isinstance(result.exception, ConfigError)
        assert "cannot be written" in str(result.exception)
