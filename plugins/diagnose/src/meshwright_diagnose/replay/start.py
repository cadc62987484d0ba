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

from .order import (
    RESULT,
    TOLERANCES,
    Order,
    Perform,
    Recorded,
    degrees_of,
    on_one_process,
    order_of,
    plain_of,
    precision_of,
    scratch,
)
from .peers import AllShares, Shared, compare_shares
from .tensors import NotedOptimizers, Outputs, save_gradients, save_parameters


@dataclass(frozen=True)
class Value:
    """A number of a step, as it was written and as it has come again."""

    name: str
    written: float | None
    replayed: float | None

    @property
    def is_same(self) -> bool:
        return _is_same(self.written, self.replayed)

    @property
    def apart(self) -> float:
        return relative(self.written, self.replayed)


def _is_same(one: float | None, other: float | None) -> bool:
    return one == other or (one is not None and other is not None and math.isnan(one) and math.isnan(other))


def relative(one: float | None, other: float | None) -> float:
    """Return |a - b| / max(|a|, |b|); infinite where one is missing, or is not finite."""
    if _is_same(one, other):
        return 0.0
    if one is None or other is None or not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))


@dataclass(frozen=True)
class Replayed:
    """A step that was done again."""

    run: str
    step: int
    strategy: str
    mesh: str
    beginning: tuple[int, str]  # how many steps were done before, and the checkpoint; "": the beginning of the run
    values: tuple[Value, ...]
    tolerance: float  # relative, of its values; 0: bit for bit
    precision: str
    shares: Mapping[str, Any] | None = None
    asked: int | None = None
    note: str = ""

    @property
    def is_same(self) -> bool:
        return all(each.apart <= self.tolerance if self.tolerance else each.is_same for each in self.values)

    @property
    def is_sound(self) -> bool:
        """Whether no share of a rank has come out in two ways."""
        return self.shares is None or not (self.shares["shares"] or self.shares["unsteady"])

    @property
    def exit_code(self) -> int:
        return 0 if self.is_same and self.is_sound else 1

    def as_values(self) -> dict[str, Any]:
        values = asdict(self)
        step, checkpoint = values.pop("beginning")
        asked = values.pop("asked")
        return {
            **values,
            "from": {"step": step, "checkpoint": checkpoint or None},
            "values": {
                each.name: {"written": each.written, "replayed": each.replayed, "is_same": each.is_same}
                for each in self.values
            },
            "is_same": self.is_same,
            "compared_rank": asked,
        }


def replay(
    directory: Path,
    step: int,
    *,
    single: bool = False,
    compare_rank: int | None = None,
    show_traceback: bool = False,
    perform: Perform | None = None,
) -> Replayed:
    """Do a step of a run again, from the newest checkpoint before it; nothing is written in its directory."""
    if single and compare_rank is not None:
        raise ConfigError("--single has one process, and no other to compare a rank with. Leave one of both out.")
    if single and started_by_launcher():
        raise ConfigError("--single is one process, and a launcher has started this one. Start it without.")
    run = Recorded(directory)
    given = int(os.environ["WORLD_SIZE"]) if started_by_launcher() and not single else None
    with scratch() as out:
        order = order_of(run, step, out, world_size=given)
        degrees = degrees_of(order.config, order.world_size)
        note = ""
        if single:
            order = on_one_process(order)
            if any(getattr(degrees, axis) > 1 for axis in ("tp", "pp", "cp")):
                note = "With dropout, ranks that share a batch draw other numbers than one process does."
        if compare_rank is not None:
            order, note = _comparing(order, compare_rank, degrees.dp)
        found = (perform or partial(performed, show_traceback=show_traceback))(order)
    replayed = found["values"]
    written = plain_of(run.result(step))
    precision = precision_of(run.config_of(step) if single else order.config)
    return Replayed(
        run=str(directory),
        step=step,
        strategy=found["strategy"],
        mesh=found["mesh"],
        beginning=(order.beginning.step, str(order.beginning.checkpoint or "")),
        values=tuple(Value(name, written.get(name), replayed.get(name)) for name in {**written, **replayed}),
        tolerance=TOLERANCES[precision] if single or note else 0.0,
        precision=precision,
        shares=found.get("shares"),
        asked=compare_rank,
        note=note,
    )


def _comparing(order: Order, rank: int, data_size: int) -> tuple[Order, str]:
    """The order to compare the work of ranks, and a note where their blocks are no longer compiled."""
    if data_size == 1:
        raise ConfigError(
            f"--compare-rank {rank}: the run has one data rank, and no other to do its work again. "
            f"Leave it out: a replay that comes to the numbers of metrics.jsonl tells as much."
        )
    if not 0 <= rank < data_size:
        raise ConfigError(f"--compare-rank {rank} is none of the data ranks of the run, 0 to {data_size - 1}.")
    options = order.config.strategy_config
    if not options.get("enable_compile"):
        return replace(order, compares=True), ""
    config = order.config.model_copy(update={"strategy_config": {**options, "enable_compile": False}})
    note = "Blocks are not compiled here, as they were in the run: compiled ones call no hooks within them."
    return replace(order, config=config, compares=True), note


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
        plan = replace(plan, rows=replace(plan.rows, held_out={}))  # nothing is evaluated
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
    plan = begin_with_weights(manager, plan, source, new_console(quiet=True))
    optimizers = NotedOptimizers(config.optimizer)
    place = all_shares = shared = None
    if order.layout is not None:
        degrees = degrees_of(*order.layout)
        place = place_of(degrees, plan.micro_batch_size, 0)
        all_shares = AllShares(plan, degrees.dp, config.seed)
    elif order.compares:
        shared = Shared(mesh, config.seed)
    draw = all_shares or shared
    loop = loop_of(manager, plan, source, factory=optimizers, place=place, draw=draw)
    return _Setting(manager, loop, optimizers, all_shares, shared)


def _source(order: Order, plan: Plan, world: World) -> Source | None:
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
