"""Plans against what happens: the same step on ranks of a planned world and on real ones, and large jobs from small."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from rich.text import Text
from support.commands import invoke_in_process
from support.plan_layouts import (
    RUN,
    PlannedLayout,
    assert_fits,
    assert_reports_match,
    build_deep_layout,
    plan_command,
    plan_deep_layout,
    render_parts,
    trace_planned_rank,
    trace_real_rank,
)
from support.tiers import mark_mostly_slow

from meshwright._compat.torch import all_to_all, compiles_attention_in_float64
from meshwright.mesh.mesh import Mesh
from meshwright.mesh.sizes import MeshSizes
from meshwright_plan import pipeline_extrapolation
from meshwright_plan import planner as planned_module
from meshwright_plan.config import load_device_spec
from meshwright_plan.extrapolation import Point, RankReport, extrapolate_report
from meshwright_plan.fake_world import fake_world, make_routing_choices
from meshwright_plan.planner import choose_representative_ranks, plan_job
from meshwright_plan.plugin import print_parts
from meshwright_plan.tables import build_summary, build_tables, describe_limit
from meshwright_plan.trace import StepTrace, TrainingJob, trace_job_steps
from meshwright_testing.workers import pool

MIXED = {"mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}
ZERO_BUBBLE = {"pp_schedule": "InterleavedZeroBubble"}
OPTIMIZER_SHARDS = {"engine": "bucketed", "use_distributed_optimizer": True}
EXACT = [
    PlannedLayout("fsdp2", 2, {"tp_size": 2}, {"sequence_parallel": True, "activation_checkpointing": "selective"}),
    PlannedLayout("ddp", 2, {}, OPTIMIZER_SHARDS),
]
SLOW = [
    PlannedLayout("fsdp2", 2),
    PlannedLayout("fsdp2", 4, {"dp_replicate_size": 2}),
    PlannedLayout("fsdp2", 2, {"cp_size": 2}),
    PlannedLayout("fsdp2", 2, {}, {"activation_checkpointing": "full"}),
    PlannedLayout("ddp", 2),
    PlannedLayout("megatron_fsdp", 2),
    PlannedLayout("fsdp2", 2, {"cp_size": 2}, {"cp_attention": "ulysses"}),
    PlannedLayout("fsdp2", 2, is_adapted=True),
    PlannedLayout("fsdp2", 2, {"pp_size": 2}, MIXED, ZERO_BUBBLE, "float32", microbatches=4),
    PlannedLayout("ddp", 4, {"pp_size": 2}),
    PlannedLayout("fsdp2", 2, {"pp_size": 2}, wrapper=ZERO_BUBBLE, microbatches=4),
    PlannedLayout("fsdp2", 2, {"ep_size": 2}, model="qwen3_moe"),
    PlannedLayout("fsdp2", 2, {}, dtype="float32", model="qwen3_moe grouped"),
    PlannedLayout("fsdp2", 2, {"pp_size": 2}, MIXED, dtype="float32", model="qwen3_moe grouped"),
]


@pytest.mark.parametrize("layout", mark_mostly_slow([*EXACT, *SLOW], *EXACT), ids=str)
def test_a_plan_is_what_real_ranks_do(layout):
    if not compiles_attention_in_float64():
        # Without memory, torch before 2.13 takes what attention in float64 on a CPU saves for float32.
        layout = replace(layout, dtype="float32")
    everywhere = pool(layout.ranks).run(trace_real_rank, layout)
    for rank in (0, layout.ranks - 1):
        real, reported = everywhere[rank], trace_planned_rank(layout, rank)
        assert (reported.collectives, reported.peak, reported.between_steps) == (
            real.collectives,
            real.peak,
            real.between_steps,
        )
        # What a step computes in the main; gloo itself runs further operators.
        products = [
            [(each.name, each.shapes, each.flops) for each in t.operations if each.flops] for t in (reported, real)
        ]
        assert products[0] == products[1]


def test_each_rank_of_a_planned_world_has_what_this_one_has():
    with fake_world(1, 4) as world:
        mine, parts = torch.arange(8), [torch.empty(8, dtype=torch.int64) for _ in range(4)]
        dist.all_gather(parts, mine)
        assert torch.stack(parts).tolist() == [mine.tolist()] * 4
        assert all_to_all(mine, dist.group.WORLD).tolist() == [2, 3] * 4
        reported: list[Any] = [None] * 4
        dist.all_gather_object(reported, {"a": 1})
        assert reported == [{"a": 1}] * 4
        assert world.reduce_sum_and_max([3], [5]) == ([12], [5])
        # What is made of parameters has no values: nothing is wrong with it.
        assert float(torch.ones(3).sum()) == 0.0
        assert torch.equal(torch.ones(3), torch.zeros(3))


def test_busy_experts_get_as_many_rows_as_is_said():
    assert make_routing_choices((64, 2), 8, 1.0).flatten().bincount().tolist() == [16] * 8
    busy = make_routing_choices((64, 2), 8, 1.75)
    assert busy.flatten().bincount(minlength=8).tolist() == [28, 28, 12, 12, 12, 12, 12, 12]
    assert all(len(set(row)) == 2 for row in busy.tolist())
    assert make_routing_choices((4, 2), 8, 99.0).tolist() == [[0, 1]] * 4


@pytest.mark.parametrize(("device", "mib"), [("h200", 64), ("b200", 64), ("a100-80gb", 16.25), ("cpu", 0)])
def test_workspaces_of_both_threads_are_planned(device, mib):
    assert load_device_spec(device).library_bytes == mib * 2**20


@pytest.mark.parametrize(
    ("sizes", "world", "ranks"),
    [({}, 8, [0, 7]), ({"tp_size": 2}, 8, [0, 7]), ({"pp_size": 8}, 32, [0, 4, 16, 24, 28, 31]), ({}, 1, [0])],
)
def test_ranks_that_stand_for_all(sizes, world, ranks):
    assert choose_representative_ranks(MeshSizes(**sizes).resolve(world, frozenset({"dp_shard", "tp", "pp"}))) == ranks


@pytest.mark.slow
def test_a_run_file_is_planned_for_more_ranks_than_there_are(tmp_path):
    settings = ("--set", "tp_size=2", "--set", "plan.failures_per_rank_hour=10")
    done = plan_command(tmp_path, "--world", "128", "--json", str(tmp_path / "plan.json"), *settings)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert [each["rank"] for each in found["ranks"]] == [0, 127]
    for key in ("peak_allocated_bytes", "peak_reserved_bytes", "persistent_bytes"):
        assert found[key] == max(each[key] for each in found["ranks"]) > 0
    assert found["tokens_per_second_per_device"] == pytest.approx(128 * 16 / found["step_seconds"] / 128)
    for each in found["ranks"]:
        assert sum(each["peak_by_owner"].values()) == each["peak_allocated_bytes"]
        assert each["peak_by_owner"]["libraries"] == each["persistent_by_owner"]["libraries"] == 2 * (32 << 20)
    assert {"dp_shard", "tp"} <= {row["group"] for row in found["collectives"]}
    assert found["failures"]["mtbf_hours"] == pytest.approx(1 / 1280)
    output = " ".join(done.output.split())
    assert "layout fsdp2 on 128 ranks: dp_shard=64 x tp=2 device" in output
    assert "one of 128 ranks fails every" in output
    assert "Recommended: checkpoint.every=" not in output
    assert max(map(len, done.output.splitlines())) <= 80
    assert 0 < found["mfu"] < 1


@pytest.mark.slow
def test_sizes_and_a_length_are_enough(tmp_path):
    file = tmp_path / "run.yaml"
    values = {"model": RUN["model"], "seq_len": 16, "batch_size": 8, "schedule": {"warmup_steps": 100}}
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    code, output = invoke_in_process("plan", file, "--world", 8, "--details")
    assert (code, "operator at the peak of ranks 0, 7: " in output) == (0, True)
    assert max(map(len, output.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in output
    # Without --world, as many ranks as `train` would start.
    code, output = invoke_in_process("plan", file, "--set", "nproc=2", "--set", "device=cpu")
    assert (code, "on 2 ranks: dp_shard=2" in output) == (0, True)
    code, output = invoke_in_process("plan", file, "--world", 8, "--set", "data.seq_len=32")
    assert (code, "differ. Leave one of them out" in output) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--world", "2", "--search-seconds", "9"], "--search-seconds needs --gpus"),
        (["--gpus", "2", "--rank", "1"], "--rank needs --world"),
        (["--world", "2", "--gpus", "2"], "not --world and --gpus"),
        (["--world", "2", "--max-nodes", "1"], "--max-nodes needs --gpus"),
        (["--gpus", "2", "--ranks", "2"], "--ranks needs --calibrate"),
        (["--world", "8", "--set", "tp_size=3"], "sizes do not fill the world"),
        (["--world", "8", "--set", "batch_size=3"], "batch_size"),
    ],
)
def test_options_that_do_not_go_together_and_wrong_run_files_are_refused(arguments, text, tmp_path):
    done = plan_command(tmp_path, *arguments)
    assert done.exit_code == 2
    assert done.output.startswith("error: ")
    assert text in done.output.lower()


LEAST = [(2, [2, 3]), (4, [2, 3]), (6, [4])]
MANY = [
    (PlannedLayout("fsdp2", 4), 3, 12, [(3, [2, 3, 4])]),
    (PlannedLayout("fsdp2", 4), 24, 2, [(2, [2]), (4, [2]), (6, [2])]),
    (PlannedLayout("ddp", 2, {}, OPTIMIZER_SHARDS), 13, 5, LEAST),
    (PlannedLayout("megatron_fsdp", 2), 13, 5, LEAST),
    (PlannedLayout("fsdp2", 2, {}, {"defer_fsdp_grad_sync": False}), 13, 5, LEAST),
    (PlannedLayout("fsdp2", 2, {"ep_size": 2}, model="qwen3_moe"), 13, 5, LEAST),
]


@pytest.fixture
def traced(monkeypatch) -> list[tuple[int, int, int, list[int]]]:
    """Ranks, stages, blocks and numbers of microbatches that a plan traces."""
    found = []

    def noting(job: TrainingJob, mesh: Mesh, counts: Sequence[int]) -> list[StepTrace]:
        found.append((mesh.rank, job.degrees.pp, len(job.build_model().model.layers), list(counts)))
        return trace_job_steps(job, mesh, counts)

    monkeypatch.setattr(planned_module, "trace_job_steps", noting)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "layers", "microbatches", "steps"), MANY, ids=str)
def test_few_blocks_and_microbatches_tell_what_many_hold_and_send(
    layout, layers, microbatches, steps, traced, monkeypatch
):
    job, device, rank = layout.build_deep_job(layers, microbatches), load_device_spec("h100-80gb"), layout.ranks - 1
    (few,) = plan_job(job, device, [rank])["ranks"]
    assert [each[2:] for each in traced] == steps
    monkeypatch.setattr(planned_module, "extrapolate_report", lambda *_: None)
    (whole,) = plan_job(job, device, [rank])["ranks"]
    assert traced[len(steps) :] == [(rank, 1, layers, [microbatches])]
    assert_reports_match(few, whole)


STEPS = [(2, 4, [3, 4]), (2, 6, [3, 4]), (2, 8, [5])]


def _shallow(count: int) -> list[Any]:
    return [(2, 4, [count]), (2, 8, [count]), (2, 12, [count])]


PIPELINES = [
    (build_deep_layout("fsdp2", 2, "1F1B", 10, 6), STEPS),
    (build_deep_layout("ddp", 2, "Interleaved1F1B", 16, 6), _shallow(6)),
    (build_deep_layout("ddp", 2, "ZBVZeroBubble", 16, 5), _shallow(5)),
    (build_deep_layout("ddp", 2, "DualPipeV", 16, 5), _shallow(5)),
    # Six stages are extrapolated from three and four.
    (build_deep_layout("ddp", 6, "1F1B", 24, 7), None),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "steps"), PIPELINES, ids=str)
def test_small_pipelines_tell_what_large_ones_hold_and_send(layout, steps, traced, monkeypatch):
    if layout.layers > 10:
        monkeypatch.setattr(pipeline_extrapolation, "SAMPLE_STAGE_DEPTHS", ((1, 2, 3),))
    reported = plan_deep_layout(layout, from_small=True)
    assert steps is None or sorted(traced) == sorted((rank, *step) for rank in range(2) for step in steps)
    assert reported is not None
    for few, every in zip(reported, plan_deep_layout(layout, from_small=False), strict=True):
        # Such small operators take less than the host needs to issue them, which hides what the schedule tells.
        assert_reports_match(few, every, seconds=0.05)


def _made(of: Callable[[int], RankReport]) -> RankReport | None:
    def found(points: Sequence[Point]) -> dict[Point, RankReport]:
        return {point: of(*point[0]) for point in points}

    return extrapolate_report(found, 126, 2)


@pytest.mark.parametrize(
    ("elsewhere", "held", "is_reported"),
    [
        # A peak that lies elsewhere in a shallow model is found where it is still so in the shallowest.
        (lambda layers: 50, lambda layers: 7 * layers, True),
        (lambda layers: 90 + layers, lambda layers: 0, True),
        (lambda layers: 300, lambda layers: 0, False),
        (lambda layers: 0, lambda layers: layers**2, False),
    ],
)
def test_what_does_not_grow_evenly_is_not_reported(elsewhere, held, is_reported):
    def report(layers: int) -> RankReport:
        phases = {"forward": 20 * layers, "optimizer": elsewhere(layers)}
        return {"peak_allocated_bytes": max(phases.values()), "peak_by_phase": phases, "persistent_bytes": held(layers)}

    made = _made(report)
    assert (made is not None) == is_reported
    assert made is None or made["peak_allocated_bytes"] == 20 * 126
    assert extrapolate_report(lambda points: {}, 12, 4) is None


@pytest.mark.parametrize(("spare", "at_126"), [({2: 9, 4: 5, 6: 7}, 7 + 120), ({2: 3, 4: 9, 6: 6}, 9)])
def test_what_is_reserved_beyond_the_peak_grows_only_where_the_largest_say_so(spare, at_126):
    def report(layers: int) -> RankReport:
        peak = 20 * layers
        sizes = {"peak_allocated_bytes": peak, "peak_reserved_bytes": peak + spare[layers]}
        return {**sizes, "peak_by_phase": {"forward": peak}}

    made = _made(report)
    assert made["peak_reserved_bytes"] - made["peak_allocated_bytes"] == at_126


def test_a_summary_says_what_limits_a_step_and_fits_60_columns_and_tables_80():
    rank = {"rank": 0, "step_seconds": 2.0, "busy_seconds": {"compute": 1.8, "dp_shard": 0.5}, "peak_operator": "mm"}
    sizes = {"peak_allocated_bytes": 3 << 30, "peak_reserved_bytes": 4 << 30, "persistent_bytes": 1 << 30}
    modules = {"model.layers.*.post_attention_layernorm": 1 << 20, "": 1 << 10}
    row = {"kind": "reduce_scatter", "group": "dp_replicate", "ranks": 8192, "dtype": "bfloat16", "calls": 32_000}
    collectives = [{**row, "bytes": 900 << 30}]
    owned = {"peak_by_owner": {"parameters": 2 << 30, "activations": 1 << 30, "other": 1 << 10}}
    report = {**rank, **sizes, **owned, "activations_by_module": modules, "collectives": collectives}
    reports = [{**report, "rank": n, "persistent_bytes": n << 20, "step_seconds": 2 + n / 100} for n in range(6)]
    plan = {"strategy": "pipeline over megatron_fsdp", "world_size": 16_384, "fits": True, "device": "H100 SXM 80 GB"}
    plan |= {**sizes, "mesh": "pp=8 x dp_replicate=4 x dp_shard=64 x tp=8", "usable_bytes": 78 << 30, "mfu": 0.4321}
    plan |= {"step_seconds": 2.05, "tokens_per_second_per_device": 12_345.6, "ranks": reports}
    plan |= {"collectives": collectives}
    assert_fits(60, [build_summary(plan)])
    assert_fits(80, build_tables(plan))
    shown = render_parts(60, [build_summary(plan)])
    assert "2.05 s: 202,270,310 tokens/s, 12,346 per device; MFU 43.2%" in " ".join(shown.split())
    assert "step" not in render_parts(60, [build_summary({**plan, "collectives": []}, has_times=False)])
    limits = {"computing": {"compute": 1.8}, "communication": {"compute": 0.5, "tp": 1.6}}
    limits |= {"the pipeline": {"compute": 0.5, "tp": 0.1}}
    for limit, busy in limits.items():
        slow = {**plan, "ranks": [{**report, "busy_seconds": busy}]}
        assert describe_limit(slow).startswith(limit)
    assert describe_limit({**slow, "mesh": "dp_shard=8"}).startswith("the host")
    assert describe_limit({**plan, "fits": False}) == "memory"


def test_a_command_to_copy_stays_one_line(capsys):
    command = "meshwright train run.yaml " + "--set tp_size=2 " * 20
    print_parts([Text(command, no_wrap=True), "word " * 40])
    first, *others = capsys.readouterr().out.splitlines()
    assert (first, len(others)) == (command, 3)
