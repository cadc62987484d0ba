"""One rank's side of a replay: the run's own plan, model and loop, from where it begins up to a step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..base.errors import CheckpointError, ConfigError
from ..base.types import Batch
from ..checkpoint import read_manifest
from ..data import Place
from ..events.step import StepResult
from ..files.terminal import new_console
from ..launch.open_world import open_world
from ..launch.rank import signs_of_life
from ..mesh.mesh import Mesh
from ..mesh.world import World
from ..strategy.contract import StrategyManager
from ..train.loop.bad_steps import BAD_STEPS, BadSteps, Rewinds
from ..train.loop.options import Loop
from ..train.loop.step import train_step
from ..train.run.assembly import begin_with_weights, loop_of, place_of
from ..train.run.preflight import Plan, plan_run
from ..train.run.resume import Source, changes
from ..train.run.run_model import fetch_model, make_model
from .gradients import NotedOptimizers, save_gradients, save_parameters
from .order import Order, degrees_of
from .outputs import Outputs
from .peers import Shared, compare_shares
from .record import as_values
from .single import AllShares

if TYPE_CHECKING:
    from torch.distributed import Store

RESULT = "result.json"


def replay_rank(store: Store | None, order: Order) -> None:
    """What each rank does."""
    config = order.config
    if config.threads_per_rank != "auto":
        torch.set_num_threads(config.threads_per_rank)
    timeout_s = config.timeout_s
    with signs_of_life(timeout_s), open_world(config.device, store=store, timeout_s=timeout_s) as world:
        commit = fetch_model(config.model, world)
        plan = world.together(lambda: plan_run(config, world.size, commit=commit))
        # Nothing is evaluated.
        plan = replace(plan, rows=replace(plan.rows, held_out={}))
        found = _replayed(order, plan, world)
        if world.rank == 0:
            (order.out / RESULT).write_text(json.dumps(found), encoding="utf-8")
        # Who leaves first would take connections with it that others may still need.
        world.reduce_ints([0])
    order.found.append(found)


def _replayed(order: Order, plan: Plan, world: World) -> dict[str, Any]:
    """What the steps have come to. Collective."""
    source = _source(order, plan, world)
    setting = _begun(order, plan, source, world)
    manager, loop = setting.manager, setting.loop
    results: list[StepResult] = []
    found: dict[str, Any] = {
        "strategy": str(plan.stack),
        "mesh": str(plan.degrees),
        "from": loop.start,
        "model": {key: value for key, value in plan.model_config.to_dict().items() if isinstance(value, float)},
    }
    last = order.step - 1
    bad_steps = BadSteps(loop.on_bad_step, (loop.state or {}).get(BAD_STEPS))
    with ExitStack() as held:
        if setting.shares is not None:
            held.enter_context(setting.shares.drawing(manager.model_parts[0]))
        for step in range(loop.start, order.step):
            # Where the run went back to, it has left out batches.
            bad_steps.left_out += sum(each.batches for each in order.went_back if each.to == step)
            if step == last and setting.shared is not None:
                found["shares"] = compare_shares(manager, loop, step + bad_steps.left_out, setting.shared)
            if step == last and order.keeps:
                results.append(_kept(order, setting, step, bad_steps))
            else:
                results.append(_done(manager, loop, step, bad_steps))
    return {**found, "results": [as_values(each) for each in results]}


def _done(manager: StrategyManager, loop: Loop, step: int, bad_steps: BadSteps, **options: Any) -> StepResult:
    """A step, as `fit` makes it.

    Raises:
        ConfigError: it takes the run back, and events.jsonl has nothing of it.
    """
    try:
        return train_step(manager, loop, step, bad_steps=bad_steps, **options)
    except Rewinds as rewinds:
        raise ConfigError(
            f"step {rewinds.bad.step} takes the run back: {rewinds.bad.reason}. By events.jsonl it did not, so steps "
            f"from there on cannot be done again from here. Give a step behind a checkpoint that was saved later."
        ) from None


def _kept(order: Order, setting: _Setting, step: int, bad_steps: BadSteps) -> StepResult:
    """The last step, with what is compared of it left in files. Collective."""
    manager, loop = setting.manager, setting.loop
    batches = loop.batches
    if not callable(batches):
        raise ConfigError("a run file draws by the step.")
    drawn: list[Batch] = []

    def drawing(number: int) -> Any:
        drawn[:] = batches(number)
        return drawn[:]

    save_parameters(manager, order.out / "before")
    outputs = Outputs(manager)
    with outputs:
        result = _done(
            manager,
            replace(loop, batches=drawing),
            step,
            bad_steps,
            look=lambda moment: (
                save_gradients(manager, setting.optimizers, order.out / "gradients") if moment == "whole" else None
            ),
        )
    save_parameters(manager, order.out / "after")
    outputs.save(order.out, drawn)
    return result


@dataclass(frozen=True)
class _Setting:
    """What the steps are done with.

    Attributes:
        shares: in one process, the work of all data ranks.
        shared: where the work of data ranks is exchanged, which this rank has.
    """

    manager: StrategyManager
    loop: Loop
    optimizers: NotedOptimizers
    shares: AllShares | None
    shared: Shared | None


def _begun(order: Order, plan: Plan, source: Source | None, world: World) -> _Setting:
    """The run's manager and loop, as `train.run` makes them. Collective."""
    config, mesh = order.config, Mesh(plan.degrees, world)
    manager = plan.stack.build(mesh)
    model, weights = world.together(lambda: make_model(config.model, plan.model, plan.model_config, seed=config.seed))
    manager.parallelize(model, weights)
    del model, weights
    plan = begin_with_weights(manager, config, plan, source, new_console(quiet=True))
    optimizers = NotedOptimizers(config.optimizer)
    place: Place | None = None
    draw: Any = None
    shares = shared = None
    if order.layout is not None:
        degrees = degrees_of(*order.layout)
        place = place_of(degrees, plan.micro_batch_size, 0)
        draw = shares = AllShares(plan, degrees.dp, config.seed)
    elif order.compares:
        draw = shared = Shared(mesh, config.seed)
    loop = loop_of(manager, config, plan, source, factory=optimizers, place=place, draw=draw)
    return _Setting(manager, loop, optimizers, shares, shared)


def _source(order: Order, plan: Plan, world: World) -> Source | None:
    """The checkpoint that is begun with.

    Raises:
        CheckpointError: it is of another run; on all ranks.
    """
    directory = order.beginning.checkpoint
    if directory is None:
        return None
    manifest = world.together(lambda: read_manifest(directory))
    saved = manifest.extra.get("identity") or {}
    identity = {**plan.identity, "model": _as_saved(plan.identity["model"], saved.get("model") or {}, order.changed)}
    told = world.together(lambda: changes(directory, manifest, identity, order.config, plan.steps))
    if manifest.step >= order.step:
        raise CheckpointError(f"{directory} is of step {manifest.step}, which is not before step {order.step}.")
    return Source(directory, manifest, named=None, changed=told, keeps=-1, metrics=None)


def _as_saved(model: Mapping[str, Any], saved: Mapping[str, Any], changed: tuple[str, ...]) -> dict[str, Any]:
    """The identity of a model, with what a replay has changed as it was; see [Note: what is changed] in `order`."""
    return {**model, **{key: saved[key] for key in changed if key in saved}}
