"""The conformance suite: our strategies pass it, planted bugs do not, and nothing is left out in silence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.kinds import DIFFERENT_IN_KIND

from meshwright import ConfigError, MeshError, UnknownStrategyError
from meshwright.cli.check_report import as_table, reasons, run_cells, summary
from meshwright.testing import Cell, Result, conformance

STRATEGIES = ["single", "ddp", "fsdp2", "megatron_fsdp", "pipeline"]


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, id=f"{name}-{cell}") for name in STRATEGIES for cell in conformance(name)]
)
def test_strategy_passes(cell: Cell) -> None:
    cell.check()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "megatron_fsdp"])
@pytest.mark.parametrize("model_type", DIFFERENT_IN_KIND)
def test_architectures_that_differ_in_kind(strategy: str, model_type: str) -> None:
    (cell,) = conformance(strategy, ranks=2, models=[model_type])
    result = cell.run()
    assert result.status == "passed", result


def _named(strategy: str, names: list[str]) -> dict[str, Result]:
    cells = {str(cell): cell for cell in conformance(strategy, plugin="planted")}
    return {name: cells[name].run() for name in names}


@pytest.mark.parametrize(
    ("strategy", "caught", "unseen"),
    [
        ("averaging", ["dp_shard=2-ragged_masks", "dp_replicate=2-ragged_masks"], ["one_rank-ragged_masks"]),
        ("divided_twice", ["dp_replicate=2-ragged_masks"], ["one_rank-ragged_masks"]),
        ("half_watched", ["dp_shard=4-norms_in_float32"], ["dp_shard=4-ragged_masks"]),
        ("local_norm", ["dp_shard=4-norm_1", "dp_shard=4-norm_inf"], ["dp_replicate=4-norm_1"]),
        ("loses_microbatches", ["dp_replicate=4-accumulation_2"], ["dp_replicate=4-ragged_masks"]),
        ("drifting_copies", ["dp_replicate=2-ragged_masks"], ["one_rank-ragged_masks"]),
        ("gives_old_weights", ["dp_replicate=4-unshard_between_steps"], ["dp_replicate=4-ragged_masks"]),
        ("aliased_groups", ["dp_replicate=2-resume"], ["dp_replicate=2-ragged_masks"]),
        ("own_schedule", ["dp_replicate=2-resume"], []),
        ("swaps_groups", ["one_rank-resume"], ["one_rank-ragged_masks"]),
        ("loses_decay", ["one_rank-resume"], ["one_rank-ragged_masks"]),
        ("loses_steps", ["one_rank-resume"], ["one_rank-ragged_masks"]),
        ("keeps_rates", ["one_rank-resume"], ["one_rank-ragged_masks"]),
        ("ignores_objectives", ["one_rank-objective"], ["dp_replicate=2-ragged_masks"]),
        ("knows_no_objectives", ["one_rank-objective"], ["one_rank-ragged_masks"]),
        ("sums_of_one_rank", ["dp_replicate=2-objective"], ["one_rank-objective"]),
        ("shuffles_statistics", ["one_rank-objective"], ["one_rank-ragged_masks"]),
        ("forgets_tp", ["tp=4-norms_by_block"], ["tp=4-tied", "dp_shard=4-norms_by_block"]),
        ("counts_tied_twice", ["dp_replicate=4-norms_by_block"], ["dp_replicate=4-tied"]),
        ("clips_for_norms", ["dp_replicate=4-norms_by_block"], ["dp_replicate=4-tied"]),
        ("joined_in_blocks", ["tp=2-objective"], ["tp=2-ragged_masks", "one_rank-objective"]),
        ("joined_without_sum", ["tp=2-objective"], ["tp=2-ragged_masks", "one_rank-objective"]),
        ("counts_all_sharers", ["tp=2-objective"], ["tp=2-ragged_masks", "one_rank-objective"]),
    ],
)
def test_planted_bug_is_caught_where_it_acts(strategy: str, caught: list[str], unseen: list[str]) -> None:
    results = _named(strategy, [*caught, *unseen])
    for name in caught:
        assert results[name].status == "failed", results[name]
        assert results[name].worst is None or results[name].worst > 1e-7
    for name in unseen:
        assert results[name].status == "passed", results[name]


@pytest.mark.parametrize(
    ("strategy", "layout", "sizes"),
    [
        ("single", "one rank", None),
        ("ddp", "dp_replicate=2", None),
        ("fsdp2", "dp_shard=2", None),
        ("megatron_fsdp", "dp_shard=2", None),
        ("pipeline", "pp=2", None),
        ("ddp", "pp=2 x dp_replicate=2", {"pp_size": 2, "dp_size": 2}),
        ("fsdp2", "pp=2 x dp_shard=2", {"pp_size": 2, "dp_size": 2}),
    ],
)
def test_every_strategy_goes_on_with_the_rates_that_it_reports(
    strategy: str, layout: str, sizes: dict[str, int] | None
) -> None:
    (cell,) = (cell for cell in conformance(strategy, sizes=sizes) if (cell.layout, cell.name) == (layout, "resume"))
    result = cell.run()
    assert result.status == "passed", result


def test_every_claimed_axis_is_tried_alone_and_in_pairs() -> None:
    layouts = {cell.layout for cell in conformance("fsdp2")}
    axes = ("dp_replicate", "dp_shard", "cp", "tp")
    alone = {f"{axis}={degree}" for axis in axes for degree in (2, 4)}
    pairs = {f"{first}=2 x {second}=2" for index, first in enumerate(axes) for second in axes[index + 1 :]}
    experts = {"ep=2", "ep=4", "ep=2 x ep_shard=2", "tp=2 x ep=4", "dp_replicate=2 x ep=2"}
    assert layouts == {"one rank", *alone, *pairs, *experts}
    names = {cell.case.model_type for cell in conformance("fsdp2") if cell.layout in experts and cell.reason is None}
    assert "llama" not in names


def test_sizes_choose_one_layout() -> None:
    cells = conformance("fsdp2", sizes={"tp_size": 2, "dp_replicate_size": 2})
    assert {(cell.layout, cell.ranks) for cell in cells} == {("dp_replicate=2 x tp=2", 4)}
    (cell,) = conformance("fsdp2", ranks=2, sizes={"tp_size": 2}, models=["qwen3"])
    assert cell.run().status == "passed"
    with pytest.raises(MeshError, match="tp_size"):
        conformance("fsdp2", sizes={"tp_size": 3})


def test_sizes_may_call_for_a_strategy_that_wraps_the_named_one() -> None:
    cells = {cell.name: cell for cell in conformance("fsdp2", sizes={"pp_size": 2, "cp_size": 2})}
    assert {cell.layout for cell in cells.values()} == {"pp=2 x cp=2"}
    assert cells["ragged masks"].case.layers == 5
    assert cells["ragged masks"].run().status == "passed"
    # The ranks of a pipeline hold the same data: there is no other data rank.
    assert cells["a rank without tokens"].run().status == "does not apply"


def test_every_option_is_tried_or_said_to_be_open() -> None:
    from meshwright_ddp import DDPConfig

    names = {cell.name.partition("=")[0]: cell for cell in conformance("ddp") if "=" in cell.name}
    assert set(names) == set(DDPConfig.model_fields)
    assert names["bucket_cap_mb"].run().status == "does not apply"
    assert "--set bucket_cap_mb=value" in names["bucket_cap_mb"].run().detail
    fixed = conformance("ddp", config={"bucket_cap_mb": 1})
    assert all(cell.config["bucket_cap_mb"] == 1 for cell in fixed)
    assert not any(cell.name.startswith("bucket_cap_mb") for cell in fixed)


def test_too_few_ranks_and_unknown_strategies_are_refused() -> None:
    with pytest.raises(ConfigError, match="ranks=1 cannot show anything"):
        conformance("ddp", ranks=1)
    with pytest.raises(UnknownStrategyError, match="Did you mean 'fsdp2'"):
        conformance("fsdp3")


def test_results_are_a_table_reasons_and_a_last_line(tmp_path: Path) -> None:
    from io import StringIO

    from rich.console import Console

    cells = [cell for cell in conformance("ddp", ranks=2) if str(cell) == "one_rank-ragged_masks"]
    cells += [cell for cell in conformance("ddp") if cell.name.startswith("bucket_cap_mb")]
    screen = Console(file=StringIO(), width=100)
    results = run_cells(cells, json_file=tmp_path / "r.json", resume=False, console=screen)
    assert summary(results) == "1 passed, 0 failed"
    assert reasons(results)[0].startswith("does not apply: dp_replicate=4-bucket_cap_mb")
    screen.print(as_table(results))
    text = screen.file.getvalue()
    assert "one rank" in text
    assert "ok" in text
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["cells"]["one_rank-ragged_masks"]["status"] == "passed"
    assert set(report["versions"]) == {"meshwright", "torch", "transformers"}


def test_a_resumed_check_does_not_run_what_is_there(tmp_path: Path) -> None:
    from rich.console import Console

    file = tmp_path / "r.json"
    cells = [cell for cell in conformance("ddp", ranks=2) if str(cell) == "one_rank-ragged_masks"]
    run_cells(cells, json_file=file, resume=False, console=Console(quiet=True))
    report = json.loads(file.read_text())
    report["cells"]["one_rank-ragged_masks"].update(status="failed", detail="from the file")
    file.write_text(json.dumps(report))
    (again,) = run_cells(cells, json_file=file, resume=True, console=Console(quiet=True))
    assert (again.status, again.detail) == ("failed", "from the file")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["ddp", "--models", "lama"], 2, "Did you mean 'llama'?"),
        (["nothing"], 2, "strategy 'nothing' is not installed"),
        (["ddp", "--ranks", "2", "--models", "routed"], 0, "1 passed, 0 failed"),
        (["ddp", "--ranks", "2", "--models", "llama", "--set", "bucket_cap=1"], 2, "Did you mean 'bucket_cap_mb'?"),
    ],
)
def test_command_line(arguments: list[str], code: int, text: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "meshwright", "check", *arguments], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == code, run.stderr
    assert text in run.stdout + run.stderr
