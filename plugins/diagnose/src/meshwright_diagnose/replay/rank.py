"""One rank's side of a replay: the run's own plan, model and loop, from where it begins up to a step."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from meshwright.plugin import (
    BAD_STEPS,
    BadSteps,
    Batch,
    CheckpointError,
    ConfigError,
    Loop,
    Mesh,
    Rewinds,
    StepResult,
    StrategyManager,
    World,
    new_console,
    open_world,
    read_manifest,
    started_by_launcher,
    train_step,
)
from meshwright_run.assembly import begin_with_weights, loop_of, place_of
from meshwright_run.data.progress import CONSOLE
from meshwright_run.launch.rank import guarded, signs_of_life
from meshwright_run.preflight import Plan, fetch_model, make_model, plan_run
from meshwright_run.resume import Source, changes

from .order import RESULT, Order, degrees_of
from .peers import AllShares, Shared, compare_shares
from .record import plain_of
from .tensors import NotedOptimizers, Outputs, save_gradients, save_parameters

if TYPE_CHECKING:
    from torch.distributed import Store


def replay_rank(store: Store | None, order: Order) -> None:
    """Do the steps of an order on this rank, and leave what was found in it and, on the first rank, in a file."""
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
        # A rank that leaves first would take connections with it that others may still need.
        world.reduce_ints([0])
    order.found.append(found)


def _replayed(order: Order, plan: Plan, world: World) -> dict[str, Any]:
    setting = _begun(order, plan, _source(order, plan, world), world)
    manager, loop = setting.manager, setting.loop
    found: dict[str, Any] = {"strategy": str(plan.stack), "mesh": str(plan.degrees)}
    bad_steps = BadSteps(loop.on_bad_step, (loop.state or {}).get(BAD_STEPS))
    with ExitStack() as held:
        if setting.all_shares is not None:
            held.enter_context(setting.all_shares.drawing(manager.model_parts[0]))
        for step in range(loop.start, order.step):
            is_last = step == order.step - 1
            # From where the run went back to, it has left out batches.
            bad_steps.left_out += sum(each.batches for each in order.went_back if each.to == step)
            if is_last and setting.shared is not None:
                found["shares"] = compare_shares(manager, loop, step + bad_steps.left_out, setting.shared)
            result = (_kept if is_last and order.keeps else _done)(order, setting, step, bad_steps)
    return {**found, "values": plain_of(result)}


@dataclass(frozen=True)
class _Setting:
    """What the steps are done with; `all_shares` in one process, and `shared` where data ranks exchange their work."""

    manager: StrategyManager
    loop: Loop
    optimizers: NotedOptimizers
    all_shares: AllShares | None
    shared: Shared | None


def _done(order: Order, setting: _Setting, step: int, bad_steps: BadSteps, **options: Any) -> StepResult:
    """Do a step, as `fit` does."""
    loop = options.pop("loop", setting.loop)
    try:
        return train_step(setting.manager, loop, step, bad_steps=bad_steps, **options)
    except Rewinds as rewinds:
        raise ConfigError(
            f"step {rewinds.bad.step} takes the run back: {rewinds.bad.reason}. By events.jsonl it did not, so steps "
            f"from there on cannot be done again from here. Give a step behind a checkpoint that was saved later."
        ) from None


def _kept(order: Order, setting: _Setting, step: int, bad_steps: BadSteps) -> StepResult:
    """Do the last step, and keep in files what is compared of it. Collective."""
    manager, batches = setting.manager, setting.loop.batches
    if not callable(batches):
        raise ConfigError("a run file draws by the step.")
    drawn: list[Batch] = []

    def drawing(number: int) -> Any:
        drawn[:] = batches(number)
        return drawn[:]

    def look(moment: str) -> None:
        if moment == "whole":
            save_gradients(manager, setting.optimizers, order.out / "gradients")

    save_parameters(manager, order.out / "before")
    with Outputs(manager) as outputs:
        result = _done(order, setting, step, bad_steps, loop=replace(setting.loop, batches=drawing), look=look)
    save_parameters(manager, order.out / "after")
    outputs.save(order.out, drawn)
    return result


def _begun(order: Order, plan: Plan, source: Source | None, world: World) -> _Setting:
    """The run's manager and loop, as `train.run` makes them. Collective."""
    config, mesh = order.config, Mesh(plan.degrees, world)
    manager = plan.stack.build(mesh)
    model, weights = world.together(lambda: make_model(config.model, plan.model, plan.model_config, seed=config.seed))
    manager.parallelize(model, weights)
    del model, weights
    plan = begin_with_weights(manager, config, plan, source, new_console(quiet=True))
    optimizers = NotedOptimizers(config.optimizer)
    place = all_shares = shared = None
    if order.layout is not None:
        degrees = degrees_of(*order.layout)
        place = place_of(degrees, plan.micro_batch_size, 0)
        all_shares = AllShares(plan, degrees.dp, config.seed)
    elif order.compares:
        shared = Shared(mesh, config.seed)
    draw = all_shares or shared
    loop = loop_of(manager, config, plan, source, factory=optimizers, place=place, draw=draw)
    return _Setting(manager, loop, optimizers, all_shares, shared)


def _source(order: Order, plan: Plan, world: World) -> Source | None:
    """The checkpoint that is begun with."""
    directory = order.beginning.checkpoint
    if directory is None:
        return None
    manifest = world.together(lambda: read_manifest(directory))
    saved = (manifest.extra.get("identity") or {}).get("model") or {}
    # What the replay has changed is as it was; see [Note: what is changed] in `order`.
    model = {**plan.identity["model"], **{key: saved[key] for key in order.changed if key in saved}}
    identity = {**plan.identity, "model": model}
    changed = world.together(lambda: changes(directory, manifest, identity, order.config, plan.steps))
    if manifest.step >= order.step:
        raise CheckpointError(f"{directory} is of step {manifest.step}, which is not before step {order.step}.")
    return Source(directory, manifest, named=None, changed=changed, keeps=-1, metrics=None)


def performed(order: Order, *, show_traceback: bool = False) -> dict[str, Any]:
    """Start the ranks, or join those that a launcher has started, and return what they have found."""
    if started_by_launcher():
        code = guarded(replay_rank, (order,), show_traceback=show_traceback)
    else:
        from meshwright_run.launch.local import launch

        with CONSOLE.status(f"step {order.step} again"):
            code = launch(replay_rank, (order,), nproc=order.world_size, show_traceback=show_traceback)
    if code:
        raise SystemExit(code)
    if order.found:
        return order.found[-1]
    found: dict[str, Any] = json.loads((order.out / RESULT).read_text(encoding="utf-8"))
    return found
