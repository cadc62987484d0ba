"""Do a step of a run again, with its own plan, model and loop, and compare it with what was written."""

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
from meshwright_run.data.progress import CONSOLE
from meshwright_run.launch.rank_process import heartbeat, run_guarded
from meshwright_run.loop_setup import build_data_shard, build_loop, load_initial_weights
from meshwright_run.preflight import PreparedRun, build_run_model, download_model, preflight
from meshwright_run.resume import ResumePoint, find_changed_settings

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
    """A number of a step, as it was written and as it has come again."""

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
    """Return |a - b| / max(|a|, |b|); infinite where one is missing, or is not finite."""
    if _is_same(one, other):
        return 0.0
    if one is None or other is None or not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))


@dataclass(frozen=True)
class ReplayResult:
    """A step that was done again."""

    run: str
    step: int
    strategy: str
    mesh: str
    start: tuple[int, str]  # how many steps were done before, and the checkpoint; "": the beginning of the run
    values: tuple[ReplayedValue, ...]
    tolerance: float  # relative, of its values; 0: bit for bit
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
        """Whether no share of a rank has come out in two ways."""
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
    """Do a step of a run again, from the newest checkpoint before it; nothing is written in its directory."""
    if single and compare_rank is not None:
        raise ConfigError("--single has one process, and no other to compare a rank with. Leave one of both out.")
    if single and is_launched():
        raise ConfigError("--single is one process, and a launcher has started this one. Start it without.")
    run = RecordedRun(directory)
    given = int(os.environ["WORLD_SIZE"]) if is_launched() and not single else None
    with scratch_directory() as out:
        order = build_request(run, step, out, world_size=given)
        degrees = resolve_degrees(order.config, order.world_size)
        note = ""
        if single:
            order = to_single_process(order)
            if any(getattr(degrees, axis) > 1 for axis in ("tp", "pp", "cp")):
                note = "With dropout, ranks that share a batch draw other numbers than one process does."
        if compare_rank is not None:
            order, note = _prepare_rank_comparison(order, compare_rank, degrees.dp)
        found = (runner or partial(run_request, show_traceback=show_traceback))(order)
    replayed = found["values"]
    written = collect_values(run.get_result(step))
    precision = find_precision(run.get_config(step) if single else order.config)
    return ReplayResult(
        run=str(directory),
        step=step,
        strategy=found["strategy"],
        mesh=found["mesh"],
        start=(order.start.completed_steps, str(order.start.checkpoint or "")),
        values=tuple(ReplayedValue(name, written.get(name), replayed.get(name)) for name in {**written, **replayed}),
        tolerance=TOLERANCES[precision] if single or note else 0.0,
        precision=precision,
        rank_comparison=found.get("rank_comparison"),
        compared_rank=compare_rank,
        note=note,
    )


def _prepare_rank_comparison(request: ReplayRequest, rank: int, data_size: int) -> tuple[ReplayRequest, str]:
    """The order to compare the work of ranks, and a note where their blocks are no longer compiled."""
    if data_size == 1:
        raise ConfigError(
            f"--compare-rank {rank}: the run has one data rank, and no other to do its work again. "
            f"Leave it out: a replay that comes to the numbers of metrics.jsonl tells as much."
        )
    if not 0 <= rank < data_size:
        raise ConfigError(f"--compare-rank {rank} is none of the data ranks of the run, 0 to {data_size - 1}.")
    options = request.config.strategy_config
    if not options.get("enable_compile"):
        return replace(request, compares_ranks=True), ""
    config = request.config.model_copy(update={"strategy_config": {**options, "enable_compile": False}})
    note = "Blocks are not compiled here, as they were in the run: compiled ones call no hooks within them."
    return replace(request, config=config, compares_ranks=True), note


if TYPE_CHECKING:
    from torch.distributed import Store


def replay_on_rank(store: Store | None, request: ReplayRequest) -> None:
    """Do the steps of an order on this rank, and leave what was found in it and, on the first rank, in a file."""
    config = request.config
    if config.threads_per_rank != "auto":
        torch.set_num_threads(config.threads_per_rank)
    timeout_s = config.timeout_s
    with heartbeat(timeout_s), open_world(config.device, store=store, timeout_s=timeout_s) as world:
        commit = download_model(config.model, world)
        plan = world.run_on_all_ranks(lambda: preflight(config, world.size, commit=commit))
        plan = replace(plan, datasets=replace(plan.datasets, eval_sets={}))  # nothing is evaluated
        found = _replay_steps(request, plan, world)
        if world.rank == 0:
            (request.output_directory / RESULT_FILE).write_text(json.dumps(found), encoding="utf-8")
        # A rank that leaves first would take connections with it that others may still need.
        world.reduce_ints([0])
    request.results.append(found)


def _replay_steps(request: ReplayRequest, plan: PreparedRun, world: World) -> dict[str, Any]:
    setting = _build_setup(request, plan, _find_source(request, plan, world), world)
    manager, loop = setting.manager, setting.loop
    found: dict[str, Any] = {"strategy": str(plan.strategy_stack), "mesh": str(plan.degrees)}
    bad_steps = BadStepDetector(loop.on_bad_step, (loop.resume_state or {}).get(BAD_STEPS_KEY))
    with ExitStack() as held:
        if setting.all_ranks_sampler is not None:
            held.enter_context(setting.all_ranks_sampler.seed_per_rank(manager.model_parts[0]))
        for step in range(loop.start_step, request.step):
            is_last = step == request.step - 1
            # From where the run went back to, it has left out batches.
            bad_steps.num_skipped_batches += sum(
                each.skipped_batches for each in request.rollbacks if each.to_step == step
            )
            if is_last and setting.peer_sampler is not None:
                found["rank_comparison"] = compare_ranks(
                    manager, loop, step + bad_steps.num_skipped_batches, setting.peer_sampler
                )
            result = (_run_and_save_step if is_last and request.saves_tensors else _run_step)(
                request, setting, step, bad_steps
            )
    return {**found, "values": collect_values(result)}


@dataclass(frozen=True)
class _ReplaySetup:
    """What the steps are done with; `all_ranks_sampler` in one process, and `shared` where data ranks exchange their
    work."""

    manager: StrategyManager
    loop: Loop
    optimizers: RecordingOptimizerFactory
    all_ranks_sampler: AllRanksSampler | None
    peer_sampler: PeerSampler | None


def _run_step(
    request: ReplayRequest, setup: _ReplaySetup, step: int, bad_steps: BadStepDetector, **options: Any
) -> StepResult:
    """Do a step, as `fit` does."""
    loop = options.pop("loop", setup.loop)
    try:
        return train_step(setup.manager, loop, step, bad_step_detector=bad_steps, **options)
    except RollbackRequested as rewinds:
        raise ConfigError(
            f"step {rewinds.bad.step} takes the run back: {rewinds.bad.reason}. By events.jsonl it did not, so steps "
            f"from there on cannot be done again from here. Give a step behind a checkpoint that was saved later."
        ) from None


def _run_and_save_step(
    request: ReplayRequest, setup: _ReplaySetup, step: int, bad_steps: BadStepDetector
) -> StepResult:
    """Do the last step, and keep in files what is compared of it. Collective."""
    manager, batches = setup.manager, setup.loop.batches
    if not callable(batches):
        raise ConfigError("a run file draws by the step.")
    drawn: list[Batch] = []

    def drawing(number: int) -> Any:
        drawn[:] = batches(number)
        return drawn[:]

    def look(moment: str) -> None:
        if moment == "whole":
            save_gradients(manager, setup.optimizers, request.output_directory / "gradients")

    save_parameters(manager, request.output_directory / "before")
    with OutputRecorder(manager) as outputs:
        result = _run_step(
            request, setup, step, bad_steps, loop=replace(setup.loop, batches=drawing), on_gradients=look
        )
    save_parameters(manager, request.output_directory / "after")
    outputs.save(request.output_directory, drawn)
    return result


def _build_setup(request: ReplayRequest, plan: PreparedRun, source: ResumePoint | None, world: World) -> _ReplaySetup:
    """The run's manager and loop, as `train.run` makes them. Collective."""
    config, mesh = request.config, Mesh(plan.degrees, world)
    manager = plan.strategy_stack.build(mesh)
    model, weights = world.run_on_all_ranks(
        lambda: build_run_model(config.model, plan.model, plan.model_config, seed=config.seed)
    )
    manager.parallelize(model, weights)
    del model, weights
    plan = load_initial_weights(manager, plan, source, create_console(quiet=True))
    optimizers = RecordingOptimizerFactory(config.optimizer)
    place = all_shares = shared = None
    if request.original_layout is not None:
        degrees = resolve_degrees(*request.original_layout)
        place = build_data_shard(degrees, plan.micro_batch_size, 0)
        all_shares = AllRanksSampler(plan, degrees.dp, config.seed)
    elif request.compares_ranks:
        shared = PeerSampler(mesh, config.seed)
    draw = all_shares or shared
    loop = build_loop(manager, plan, source, factory=optimizers, shard=place, draw_batches=draw)
    return _ReplaySetup(manager, loop, optimizers, all_shares, shared)


def _find_source(request: ReplayRequest, plan: PreparedRun, world: World) -> ResumePoint | None:
    directory = request.start.checkpoint
    if directory is None:
        return None
    manifest = world.run_on_all_ranks(lambda: read_manifest(directory))
    saved = (manifest.extra.get("identity") or {}).get("model") or {}
    # What the replay has changed is as it was; see [Note: what is changed] in `order`.
    model = {**plan.identity["model"], **{key: saved[key] for key in request.changed_keys if key in saved}}
    identity = {**plan.identity, "model": model}
    changed = world.run_on_all_ranks(
        lambda: find_changed_settings(directory, manifest, identity, request.config, plan.num_steps)
    )
    if manifest.step >= request.step:
        raise CheckpointError(f"{directory} is of step {manifest.step}, which is not before step {request.step}.")
    return ResumePoint(
        directory, manifest, resumed_from=None, changed_settings=changed, keep_until_step=-1, metrics_storage=None
    )


def run_request(request: ReplayRequest, *, show_traceback: bool = False) -> dict[str, Any]:
    """Start the ranks, or join those that a launcher has started, and return what they have found."""
    if is_launched():
        code = run_guarded(replay_on_rank, (request,), show_traceback=show_traceback)
    else:
        from meshwright_run.launch.local import launch_ranks

        with CONSOLE.status(f"step {request.step} again"):
            code = launch_ranks(replay_on_rank, (request,), nproc=request.world_size, show_traceback=show_traceback)
    if code:
        raise SystemExit(code)
    if request.results:
        return request.results[-1]
    found: dict[str, Any] = json.loads((request.output_directory / RESULT_FILE).read_text(encoding="utf-8"))
    return found
