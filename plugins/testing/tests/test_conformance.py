"""The conformance suite: our strategies pass it, planted bugs do not, and no claim is left out silently."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.commands import invoke_in_process
from support.model_types import REPRESENTATIVE_MODEL_TYPES

from meshwright import ConfigError, MeshError
from meshwright.mesh.sizes import CLAIMABLE_AXES
from meshwright.testing import Cell, Result
from meshwright_testing import conformance
from meshwright_testing.check_report import format_reasons, format_summary, run_cells

STRATEGIES = ["single", "ddp", "fsdp2", "megatron_fsdp", "pipeline"]
SMALLEST = {f"{axis}=2" for axis in CLAIMABLE_AXES}
HARDEST = ("all at once", "objective")
"""Cases that have most in one: steps in parts with accumulation, uneven shares and groups; and what models return."""
QUICK = {("ddp", "dp_replicate=2-ragged_masks")}
KINDS = {("ddp", "mamba2"), ("fsdp2", "gemma3_text"), ("fsdp2", "deepseek_v3"), ("megatron_fsdp", "qwen3_moe")}


def _cells() -> list[Any]:
    """Each strategy's cells: the hardest of each axis are slow, all others but a quick one are of the zoo."""
    found = []
    for name in STRATEGIES:
        for cell in conformance(name):
            is_hard = cell.name in HARDEST and (cell.layout in SMALLEST or name == "single")
            marks = [] if (name, str(cell)) in QUICK else [pytest.mark.slow if is_hard else pytest.mark.zoo]
            found.append(pytest.param(cell, id=f"{name}-{cell}", marks=marks))
    return found


@pytest.mark.parametrize("cell", _cells())
def test_strategy_passes(cell: Cell) -> None:
    cell.check()


@pytest.mark.parametrize(
    ("strategy", "model_type"),
    [
        pytest.param(*pair, marks=pytest.mark.slow if pair in KINDS else pytest.mark.zoo)
        for pair in itertools.product(("ddp", "fsdp2", "megatron_fsdp"), REPRESENTATIVE_MODEL_TYPES)
    ],
)
def test_architectures_that_differ_in_kind(strategy: str, model_type: str) -> None:
    (cell,) = conformance(strategy, ranks=2, models=[model_type])
    cell.check()


@pytest.mark.slow
def test_a_wrapped_strategy_resumes_with_the_rates_that_it_reports() -> None:
    cells = {cell.name: cell for cell in conformance("fsdp2", sizes={"pp_size": 2, "dp_size": 2})}
    assert {cell.layout for cell in cells.values()} == {"pp=2 x dp_shard=2"}
    assert cells["resume"].case.layers == 5
    cells["resume"].check()


def _bug(strategy: str, caught: list[str], unseen: list[str], *, is_slow: bool = True) -> Any:
    return pytest.param(strategy, caught, unseen, id=strategy, marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.parametrize(
    ("strategy", "caught", "unseen"),
    [
        _bug(
            "averages_gradients", ["dp_shard=2-ragged_masks", "dp_replicate=2-ragged_masks"], ["one_rank-ragged_masks"]
        ),
        _bug("divides_twice", ["dp_replicate=2-ragged_masks"], ["one_rank-ragged_masks"]),
        _bug("watches_first_module_only", ["dp_shard=4-norms_in_float32"], ["dp_shard=4-ragged_masks"]),
        _bug("clips_by_local_norm", ["dp_shard=4-norm_1", "dp_shard=4-norm_inf"], ["dp_replicate=4-norm_1"]),
        _bug("loses_microbatches", ["dp_replicate=4-accumulation_2"], ["dp_replicate=4-ragged_masks"]),
        _bug("drifting_replicas", ["dp_replicate=2-ragged_masks"], ["one_rank-ragged_masks"], is_slow=False),
        _bug("yields_stale_weights", ["dp_replicate=4-unshard_between_steps"], ["dp_replicate=4-ragged_masks"]),
        _bug("aliased_groups", ["dp_replicate=2-resume"], ["dp_replicate=2-ragged_masks"]),
        _bug("keeps_private_schedule", ["dp_replicate=2-resume"], []),
        _bug("swaps_groups", ["one_rank-resume"], ["one_rank-ragged_masks"]),
        _bug("loses_decay", ["one_rank-resume"], ["one_rank-ragged_masks"]),
        _bug("loses_steps", ["one_rank-resume"], ["one_rank-ragged_masks"]),
        _bug("keeps_rates", ["one_rank-resume"], ["one_rank-ragged_masks"], is_slow=False),
        _bug("ignores_objectives", ["one_rank-objective"], ["dp_replicate=2-ragged_masks"]),
        _bug("lacks_objectives", ["one_rank-objective"], ["one_rank-ragged_masks"]),
        _bug("reports_local_sums", ["dp_replicate=2-objective"], ["one_rank-objective"]),
        _bug("shuffles_statistics", ["one_rank-objective"], ["one_rank-ragged_masks"]),
        _bug("ignores_tensor_parallel_norms", ["tp=4-norms_by_block"], ["tp=4-tied", "dp_shard=4-norms_by_block"]),
        _bug("counts_tied_twice", ["dp_replicate=4-norms_by_block"], ["dp_replicate=4-tied"]),
        _bug("clips_for_norms", ["dp_replicate=4-norms_by_block"], ["dp_replicate=4-tied"]),
        _bug("gathers_in_blocks", ["tp=2-objective"], ["tp=2-ragged_masks", "one_rank-objective"]),
        _bug("gathers_without_gradient_sum", ["tp=2-objective"], ["tp=2-ragged_masks", "one_rank-objective"]),
        _bug("ignores_replicas", ["tp=2-objective"], ["tp=2-ragged_masks", "one_rank-objective"]),
    ],
)
@pytest.mark.usefixtures("registry_of_its_own")
def test_planted_bug_is_caught_where_it_acts(strategy: str, caught: list[str], unseen: list[str]) -> None:
    cells = {str(cell): cell for cell in conformance(strategy, plugin="support.buggy_strategies")}
    results = {name: cells[name].run() for name in (*caught, *unseen)}
    for name, result in results.items():
        assert result.status == ("failed" if name in caught else "passed"), result
        assert name in unseen or result.worst is None or result.worst > 1e-7


def test_every_claimed_axis_is_tried_alone_and_in_pairs() -> None:
    cells = conformance("fsdp2")
    axes = ("dp_replicate", "dp_shard", "cp", "tp")
    alone = {f"{axis}={degree}" for axis in axes for degree in (2, 4)}
    pairs = {f"{first}=2 x {second}=2" for index, first in enumerate(axes) for second in axes[index + 1 :]}
    experts = {"ep=2", "ep=4", "ep=2 x ep_shard=2", "tp=2 x ep=4", "dp_replicate=2 x ep=2"}
    assert {cell.layout for cell in cells} == {"one rank", *alone, *pairs, *experts}
    assert "llama" not in {
        cell.case.model_type for cell in cells if cell.layout in experts and cell.skip_reason is None
    }


def test_sizes_choose_one_layout_which_a_wrapping_strategy_may_shard() -> None:
    cells = conformance("fsdp2", sizes={"tp_size": 2, "dp_replicate_size": 2})
    assert {(cell.layout, cell.ranks) for cell in cells} == {("dp_replicate=2 x tp=2", 4)}
    wrapped = {cell.name: cell for cell in conformance("fsdp2", sizes={"pp_size": 2, "cp_size": 2})}
    assert {cell.layout for cell in wrapped.values()} == {"pp=2 x cp=2"}
    # The ranks of a pipeline hold the same data: there is no other data rank.
    assert wrapped["a rank without tokens"].run().status == "does not apply"
    with pytest.raises(MeshError, match="tp_size"):
        conformance("fsdp2", sizes={"tp_size": 3})
    with pytest.raises(ConfigError, match="ranks=1 is too few to test a strategy"):
        conformance("ddp", ranks=1)


def test_every_option_is_tried_or_said_to_be_open() -> None:
    from meshwright_ddp import DDPConfig

    names = {cell.name.partition("=")[0]: cell for cell in conformance("ddp") if "=" in cell.name}
    assert set(names) == set(DDPConfig.model_fields)
    assert names["bucket_cap_mb"].run().status == "does not apply"
    assert "--set bucket_cap_mb=value" in names["bucket_cap_mb"].run().detail
    fixed = conformance("ddp", config={"bucket_cap_mb": 1})
    assert all(cell.config["bucket_cap_mb"] == 1 for cell in fixed)
    assert not any(cell.name.startswith("bucket_cap_mb") for cell in fixed)


def test_results_are_reasons_and_a_last_line_and_a_resumed_check_keeps_them(tmp_path: Path) -> None:
    file, quiet = tmp_path / "r.json", Console(quiet=True)
    cells = [cell for cell in conformance("ddp", ranks=2) if str(cell) == "one_rank-ragged_masks"]
    cells += [cell for cell in conformance("ddp") if cell.name.startswith("bucket_cap_mb")]
    results = run_cells(cells, json_file=file, resume=False, console=quiet)
    assert format_summary(results) == "1 passed, 0 failed"
    assert format_reasons(results)[0].startswith("does not apply: dp_replicate=4-bucket_cap_mb")
    report = json.loads(file.read_text())
    assert report["cells"]["one_rank-ragged_masks"]["status"] == "passed"
    report["cells"]["one_rank-ragged_masks"].update(status="failed", detail="from the file")
    file.write_text(json.dumps(report))
    again: list[Result] = run_cells(cells[:1], json_file=file, resume=True, console=quiet)
    assert [(each.status, each.detail) for each in again] == [("failed", "from the file")]


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
    found, reported = invoke_in_process("check", *arguments)
    assert (found, text in reported) == (code, True), reported
