"""Replay a step with the preflight, model and loop of its run, and compare it with the recorded metrics."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from meshwright.plugin import (
    BAD_STEPS_KEY,
    BadStepDetector,
    Batch,
    CheckpointError,
    ConfigError,
    Loop,
    Mesh,
    RollbackRequested,
    StepResult,
    StrategyManager,
    World,
    create_console,
    is_launched,
    open_world,
    read_manifest,
    train_step,
)
from meshwright_run.changed_settings import find_changed_settings
from meshwright_run.data.progress import CONSOLE
from meshwright_run.launch.rank_process import heartbeat, run_guarded
from meshwright_run.loop_setup import build_data_shard, build_loop, load_initial_weights
from meshwright_run.preflight import PreparedRun, build_run_model, download_model, preflight
from meshwright_run.resume import ResumePoint

from .rank_comparison import AllRanksSampler, PeerSampler, compare_ranks
from .request import (
    RESULT_FILE,
    TOLERANCES,
    RecordedRun,
    ReplayRequest,
    ReplayRunner,
    build_request,
    collect_values,
    find_precision,
    resolve_degrees,
    scratch_directory,
    to_single_process,
)
from .tensors import OutputRecorder, RecordingOptimizerFactory, save_gradients, save_parameters


@dataclass(frozen=True)
class ReplayedValue:
    """A value of a step, as recorded and as replayed."""

    name: str
    recorded: float | None
    replayed: float | None

    @property
    def is_same(self) -> bool:
        return _is_same(self.recorded, self.replayed)

    @property
    def relative_difference(self) -> float:
        return relative_difference(self.recorded, self.replayed)


def _is_same(one: float | None, other: float | None) -> bool:
    return one == other or (one is not None and other is not None and math.isnan(one) and math.isnan(other))


def relative_difference(one: float | None, other: float | None) -> float:
    """Return |a - b| / max(|a|, |b|); infinite if they differ and one is missing or not finite."""
    if _is_same(one, other):
        return 0.0
    if one is None or other is None or not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))


@dataclass(frozen=True)
class ReplayResult:
    """Result of replaying a step."""

    run: str
    step: int
    strategy: str
    mesh: str
    start: tuple[int, str]  # number of completed steps, and the checkpoint; "": the start of the run
    values: tuple[ReplayedValue, ...]
    tolerance: float  # relative; 0: values must be bitwise equal
    precision: str
    rank_comparison: Mapping[str, Any] | None = None
    compared_rank: int | None = None
    note: str = ""

    @property
    def is_same(self) -> bool:
        return all(
            each.relative_difference <= self.tolerance if self.tolerance else each.is_same for each in self.values
        )

    @property
    def has_consistent_ranks(self) -> bool:
        """Whether the share of every data rank has one result, whichever rank computes it."""
        return self.rank_comparison is None or not (
            self.rank_comparison["mismatches"] or self.rank_comparison["inconsistent_ranks"]
        )

    @property
    def exit_code(self) -> int:
        return 0 if self.is_same and self.has_consistent_ranks else 1

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        step, checkpoint = values.pop("start")
        compared_rank = values.pop("compared_rank")
        return {
            **values,
            "from": {"step": step, "checkpoint": checkpoint or None},
            "values": {
                each.name: {"recorded": each.recorded, "replayed": each.replayed, "is_same": each.is_same}
                for each in self.values
            },
            "is_same": self.is_same,
            "compared_rank": compared_rank,
        }


def replay_step(
    directory: Path,
    step: int,
    *,
    single: bool = False,
    compare_rank: int | None = None,
    show_traceback: bool = False,
    runner: ReplayRunner | None = None,
) -> ReplayResult:
    """Replay a step of a run from the newest checkpoint before it; nothing is written to the run's directory."""
    if single and compare_rank is not None:
        raise ConfigError("--single uses one process, and --compare-rank needs several. Give only one of them.")
    if single and is_launched():
        raise ConfigError("--single uses one process, but a launcher has started this one. Start it without.")
    run = RecordedRun(directory)
    world_size = int(os.environ["WORLD_SIZE"]) if is_launched() and not single else None
    with scratch_directory() as out:
        request = build_request(run, step, out, world_size=world_size)
        degrees = resolve_degrees(request.config, request.world_size)
        note = ""
        if single:
            request = to_single_process(request)
            if any(getattr(degrees, axis) > 1 for axis in ("tp", "pp", "cp")):
                note = "With dropout, ranks that share a batch use other random numbers than one process."
        if compare_rank is not None:
            request, note = _prepare_rank_comparison(request, compare_rank, degrees.dp)
        results = (runner or partial(run_request, show_traceback=show_traceback))(request)
    replayed = results["values"]
    recorded = collect_values(run.get_result(step))
    precision = find_precision(run.get_config(step) if single else request.config)
    return ReplayResult(
        run=str(directory),
        step=step,
        strategy=results["strategy"],
        mesh=results["mesh"],
        start=(request.start.completed_steps, str(request.start.checkpoint or "")),
        values=tuple(ReplayedValue(name, recorded.get(name), replayed.get(name)) for name in {**recorded, **replayed}),
        tolerance=TOLERANCES[precision] if single or note else 0.0,
        precision=precision,
        rank_comparison=results.get("rank_comparison"),
        compared_rank=compare_rank,
        note=note,
    )


def _prepare_rank_comparison(request: ReplayRequest, rank: int, data_size: int) -> tuple[ReplayRequest, str]:
    """Return the request that compares the work of ranks, and a note if it disables compilation."""
    if data_size == 1:
        raise ConfigError(
            f"--compare-rank {rank}: the run has one data rank, and no other that could repeat its work. "
            f"Leave it out: a replay that reproduces metrics.jsonl shows as much."
        )
    if not 0 <= rank < data_size:
        raise ConfigError(f"--compare-rank {rank} is not a data rank of the run. Give one of 0 to {data_size - 1}.")
    options = request.config.strategy_config
    if not options.get("enable_compile"):
        return replace(request, compares_ranks=True), ""
    config = request.config.model_copy(update={"strategy_config": {**options, "enable_compile": False}})
    note = "Unlike in the run, blocks are not compiled: compiled blocks do not call the hooks of their modules."
    return replace(request, config=config, compares_ranks=True), note


if TYPE_CHECKING:
    from torch.distributed import Store


def replay_on_rank(store: Store | None, request: ReplayRequest) -> None:
    """Replay the steps of a request on this rank, and append the results to it; rank 0 also writes them to a file."""
    config = request.config
    if config.threads_per_rank != "auto":
        torch.set_num_threads(config.threads_per_rank)
    timeout_s = config.timeout_s
    with heartbeat(timeout_s), open_world(config.device, store=store, timeout_s=timeout_s) as world:
        commit = download_model(config.model, world)
        plan = world.run_on_all_ranks(lambda: preflight(config, world.size, commit=commit))
        plan = replace(plan, datasets=replace(plan.datasets, eval_sets={}))  # no evaluation
        results = _replay_steps(request, plan, world)
        if world.rank == 0:
            (request.output_directory / RESULT_FILE).write_text(json.dumps(results), encoding="utf-8")
        # A rank that exits early would close connections that others may still need.
        world.reduce_ints([0])
    request.results.append(results)


def _replay_steps(request: ReplayRequest, plan: PreparedRun, world: World) -> dict[str, Any]:
    setup = _build_setup(request, plan, _find_source(request, plan, world), world)
    manager, loop = setup.manager, setup.loop
    results: dict[str, Any] = {"strategy": str(plan.strategy_stack), "mesh": str(plan.degrees)}
    bad_steps = BadStepDetector(loop.on_bad_step, (loop.resume_state or {}).get(BAD_STEPS_KEY))
    with ExitStack() as contexts:
        if setup.all_ranks_sampler is not None:
            contexts.enter_context(setup.all_ranks_sampler.seed_per_rank(manager.model_parts[0]))
        for step in range(loop.start_step, request.step):
            is_last = step == request.step - 1
            # After a rollback to this step, the run skipped batches.
            bad_steps.num_skipped_batches += sum(
                each.skipped_batches for each in request.rollbacks if each.to_step == step
            )
            if is_last and setup.peer_sampler is not None:
                results["rank_comparison"] = compare_ranks(
                    manager, loop, step + bad_steps.num_skipped_batches, setup.peer_sampler
                )
            result = (_run_and_save_step if is_last and request.saves_tensors else _run_step)(
                request, setup, step, bad_steps
            )
    return {**results, "values": collect_values(result)}


@dataclass(frozen=True)
class _ReplaySetup:
    """What replays the steps. `all_ranks_sampler`: for one process; `peer_sampler`: for ranks that repeat each other's
    work."""

    manager: StrategyManager
    loop: Loop
    optimizers: RecordingOptimizerFactory
    all_ranks_sampler: AllRanksSampler | None
    peer_sampler: PeerSampler | None


def _run_step(
    request: ReplayRequest, setup: _ReplaySetup, step: int, bad_steps: BadStepDetector, **options: Any
) -> StepResult:
    """Run a step as `fit` does."""
    loop = options.pop("loop", setup.loop)
    try:
        return train_step(setup.manager, loop, step, bad_step_detector=bad_steps, **options)
    except RollbackRequested as rollback:
        raise ConfigError(
            f"step {rollback.bad.step} causes a rollback: {rollback.bad.reason}. According to events.jsonl the run had "
            f"none, so later steps cannot be replayed from this checkpoint. Give a step after a newer checkpoint."
        ) from None


def _run_and_save_step(
    request: ReplayRequest, setup: _ReplaySetup, step: int, bad_steps: BadStepDetector
) -> StepResult:
    """Run the last step, and save the tensors that are compared. Collective."""
    manager, batches = setup.manager, setup.loop.batches
    if not callable(batches):
        raise ConfigError("a replay needs the batches of any step; those of this loop are an iterable.")
    microbatches: list[Batch] = []

    def read_batches(number: int) -> Any:
        microbatches[:] = batches(number)
        return microbatches[:]

    def save_unclipped(stage: str) -> None:
        if stage == "whole":
            save_gradients(manager, setup.optimizers, request.output_directory / "gradients")

    save_parameters(manager, request.output_directory / "before")
    with OutputRecorder(manager) as outputs:
        result = _run_step(
            request, setup, step, bad_steps, loop=replace(setup.loop, batches=read_batches), on_gradients=save_unclipped
        )
    save_parameters(manager, request.output_directory / "after")
    outputs.save(request.output_directory, microbatches)
    return result


def _build_setup(request: ReplayRequest, plan: PreparedRun, source: ResumePoint | None, world: World) -> _ReplaySetup:
    """Build the manager and the loop of a run, as `meshwright train` does. Collective."""
    config, mesh = request.config, Mesh(plan.degrees, world)
    manager = plan.strategy_stack.build(mesh)
    model, weights = world.run_on_all_ranks(
        lambda: build_run_model(config.model, plan.model, plan.model_config, seed=config.seed)
    )
    manager.parallelize(model, weights)
    del model, weights
    plan = load_initial_weights(manager, plan, source, create_console(quiet=True))
    optimizers = RecordingOptimizerFactory(config.optimizer)
    shard = all_ranks_sampler = peer_sampler = None
    if request.original_layout is not None:
        degrees = resolve_degrees(*request.original_layout)
        shard = build_data_shard(degrees, plan.micro_batch_size, 0)
        all_ranks_sampler = AllRanksSampler(plan, degrees.dp, config.seed)
    elif request.compares_ranks:
        peer_sampler = PeerSampler(mesh, config.seed)
    draw = all_ranks_sampler or peer_sampler
    loop = build_loop(manager, plan, source, factory=optimizers, shard=shard, draw_batches=draw)
    return _ReplaySetup(manager, loop, optimizers, all_ranks_sampler, peer_sampler)


def _find_source(request: ReplayRequest, plan: PreparedRun, world: World) -> ResumePoint | None:
    directory = request.start.checkpoint
    if directory is None:
        return None
    manifest = world.run_on_all_ranks(lambda: read_manifest(directory))
    saved = (manifest.extra.get("identity") or {}).get("model") or {}
    # Undo the changes of the replay; see [Note: what is changed] in `request`.
    model = {**plan.identity["model"], **{key: saved[key] for key in request.changed_keys if key in saved}}
    identity = {**plan.identity, "model": model}
    changed = world.run_on_all_ranks(
        lambda: find_changed_settings(directory, manifest, identity, request.config, plan.num_steps)
    )
    if manifest.step >= request.step:
        raise CheckpointError(f"{directory} is from step {manifest.step}, which is not before step {request.step}.")
    return ResumePoint(
        directory, manifest, resumed_from=None, changed_settings=changed, keep_until_step=-1, metrics_storage=None
    )


def run_request(request: ReplayRequest, *, show_traceback: bool = False) -> dict[str, Any]:
    """Run a request on new ranks, or as a rank of the launcher, and return the results."""
    if is_launched():
        code = run_guarded(replay_on_rank, (request,), show_traceback=show_traceback)
    else:
        from meshwright_run.launch.local import launch_ranks

        with CONSOLE.status(f"replaying step {request.step}"):
            code = launch_ranks(replay_on_rank, (request,), nproc=request.world_size, show_traceback=show_traceback)
    if code:
        raise SystemExit(code)
    if request.results:
        return request.results[-1]
    results: dict[str, Any] = json.loads((request.output_directory / RESULT_FILE).read_text(encoding="utf-8"))
    return results
