"""Train the same case under a strategy and under `single`, and compare.

In float64, correct code agrees to about 1e-12, and real bugs cause differences of about 1e-3. In float32 the two ranges
overlap. Cases therefore run in float64, with a tolerance of 1e-9. The full weights of every rank are compared, since
copies can diverge.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from meshwright.plugin import (
    Mesh,
    MeshSizes,
    OptimizerFactory,
    StrategyManager,
    build_scheduler,
    count_tokens,
    open_world,
    optimizer_factory,
    resolve,
)

from .case import Case, Difference, Outcome, rank_microbatches
from .models import attach_adapter, build_case_model
from .workers import pool

Config = Mapping[str, Any]


def build_manager(
    strategy: str,
    config: Config,
    sizes: Config,
    case: Case,
    *,
    seed: int = 0,
    device: str = "cpu",
    wrapper_config: Config | None = None,
) -> StrategyManager:
    """Return the manager of `strategy` with the case's model, initialized with `seed`, and its optimizer.

    Call it on every rank. The other arguments are as in `compare`.
    """
    manager, optimizer = build_manager_and_optimizer(
        strategy, config, sizes, case, seed=seed, device=device, wrapper_config=wrapper_config
    )
    if case.schedule is not None:
        scheduler = build_scheduler(case.schedule, optimizer, case.steps)
        # The schedule steps with the optimizer, so that training in parts gives the same result.
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return manager


def build_manager_and_optimizer(
    strategy: str,
    config: Config,
    sizes: Config,
    case: Case,
    *,
    seed: int = 0,
    device: str = "cpu",
    wrapper_config: Config | None = None,
) -> tuple[StrategyManager, Optimizer]:
    """Return the manager as `build_manager` does, and its optimizer, without a schedule."""
    world = open_world(device)
    stack, degrees = resolve(strategy, MeshSizes(**sizes), world.size, config=config, wrapper_config=wrapper_config)
    manager = stack.build(Mesh(degrees, world))
    dtype = getattr(torch, case.dtype)
    model = build_case_model(case.model_type, tied=case.tied, seed=seed, dtype=dtype, layers=case.layers)
    if case.adapter is not None:
        model = attach_adapter(model, case.adapter, seed=seed)
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in case.frozen):
            parameter.requires_grad_(False)
        if any(fnmatchcase(name, pattern) for pattern in case.float32_parameters):
            parameter.data = parameter.data.float()
    manager.parallelize(model)
    return manager, manager.build_optimizer(_build_optimizer_factory(case))


def _build_optimizer_factory(case: Case) -> OptimizerFactory:
    """Return the factory of the case's optimizer, with the groups of `case.group_settings` if there are any."""
    if not case.group_settings:
        return optimizer_factory(case.optimizer)
    cls = getattr(torch.optim, case.optimizer.name)

    def factory(named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> Optimizer:
        groups: list[dict[str, Any]] = [
            {"params": [], "lr": lr, "weight_decay": decay} for _, lr, decay in case.group_settings
        ]
        rest: dict[str, Any] = {"params": [], "lr": case.optimizer.lr, "weight_decay": case.optimizer.weight_decay}
        for name, parameter in named_parameters:
            matching = (
                group for group, (each, *_) in zip(groups, case.group_settings, strict=True) if fnmatchcase(name, each)
            )
            next(matching, rest)["params"].append(parameter)
        return cls([group for group in (*groups, rest) if group["params"]], **case.optimizer.options)

    return factory


def train_steps(
    manager: StrategyManager, case: Case, steps: range, before_clip: Callable[[], None] = lambda: None
) -> tuple[list[float], list[float], list[float]]:
    """Train some steps, and return losses, norms and evaluation losses. Calls `before_clip` before each clipping."""
    losses, norms, eval_losses = [], [], []
    for step in steps:
        microbatches = rank_microbatches(case, step, manager.mesh.data_rank, manager.mesh.data_size)
        num_tokens = count_tokens(microbatches, manager.mesh)
        losses.append(float(manager.forward_backward(microbatches, num_tokens=num_tokens)))
        before_clip()
        norms.append(float(manager.clip_grad_norm(case.max_norm, case.norm_type)))
        manager.optimizer_step()
        if case.unshard_after:
            _check_iter_parameters(manager)
        if case.eval_after:
            eval_losses.append(float(manager.eval_loss(microbatches, num_tokens=num_tokens)))
    return losses, norms, eval_losses


def full_weights(manager: StrategyManager) -> dict[str, Tensor]:
    """Return all full parameters of the model, including other stages', under all of their names. Collective."""
    with manager.unshard() as parts:
        named = [each for part in parts for each in part.named_parameters(remove_duplicate=False)]
        found = {name: parameter.detach().clone() for name, parameter in named}
    if manager.mesh.degrees.pp == 1:
        return found
    stages: list[dict[str, Tensor]] = [{}] * manager.mesh.degrees.pp
    dist.all_gather_object(stages, found, group=manager.mesh.group("pp"))
    return {name: weight for stage in stages for name, weight in stage.items()}


def _check_iter_parameters(manager: StrategyManager) -> None:
    """Raise AssertionError unless `iter_parameters` yields the names and exact values of `unshard`. Collective."""
    given = dict(manager.iter_parameters(bucket_bytes=1 << 15))
    expected = [name for part in manager.model_parts for name, _ in part.named_parameters()]
    # A rank of a pipeline knows only the names of its own stages.
    if manager.mesh.degrees.pp == 1 and list(given) != expected:
        raise AssertionError(f"iter_parameters yields {list(given)} instead of {expected}")
    for name, full in full_weights(manager).items():
        # A tied parameter is yielded under one name.
        candidates = [given[name]] if name in given else given.values()
        if not any(
            each.dtype == full.dtype and torch.equal(_view_as_bytes(each), _view_as_bytes(full)) for each in candidates
        ):
            raise AssertionError(f"iter_parameters yields another value of {name} than unshard")


def _view_as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def train_case(
    strategy: str, config: Config, sizes: Config, case: Case, device: str = "cpu", wrapper_config: Config | None = None
) -> Outcome:
    """Train all steps of the case on this rank. A task for `WorkerPool.run`."""
    manager = build_manager(strategy, config, sizes, case, device=device, wrapper_config=wrapper_config)
    return Outcome(*train_steps(manager, case, range(case.steps)), full_weights(manager))


def train_part(
    strategy: str,
    config: Config,
    sizes: Config,
    case: Case,
    steps: range,
    state: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> tuple[Outcome, dict[str, Any]]:
    """Train some steps of the case on this rank, from the full state that an earlier part returned.

    Return the outcome and the full state. A task for `WorkerPool.run`."""
    # Each part has another seed, so that values that are not loaded cause differences.
    manager = build_manager(strategy, config, sizes, case, seed=steps.start, device=device)
    if state is not None:
        # Train another step first, so that there is optimizer state to replace.
        train_steps(manager, case, range(99, 100))
        first = manager.mesh.rank == 0
        manager.load_state_dict(state if first else {"model": {}, "optimizer": {}}, full=True)
    found = train_steps(manager, case, steps)
    return Outcome(*found, full_weights(manager)), manager.state_dict(full=True)


@functools.lru_cache(maxsize=256)
def run_reference(case: Case, device: str = "cpu", microbatches: int = 1) -> Outcome:
    """Return the outcome of the case under `single` on one rank, with this number of microbatches per step."""
    return pool(1).run(train_case, "single", {}, {}, case.on_one_rank(microbatches), device, device=device)[0]


def compare(
    strategy: str,
    case: Case,
    *,
    world_size: int,
    config: Config | None = None,
    sizes: Config | None = None,
    wrapper_config: Config | None = None,
) -> Difference:
    """Train `case` under `strategy` on `world_size` ranks and under `single`.

    Args:
        strategy: name of a strategy whose plugin is installed, or registered on each rank.
        case: model, data, optimizer and number of steps.
        world_size: ranks, each a process on this machine's CPU.
        config: options of the strategy.
        sizes: of `MeshSizes`, such as `{"tp_size": 2}`.
        wrapper_config: options of strategies around it, by name.

    Returns:
        The largest differences of any rank.

    Raises:
        RankError: a rank failed.
        AssertionError: names or shapes of parameters differ from those of the reference.
    """
    outcomes = pool(world_size).run(train_case, strategy, config or {}, sizes or {}, case, "cpu", wrapper_config)
    return find_max_difference(outcomes, run_reference(case))


def find_max_difference(outcomes: list[Outcome], expected: Outcome) -> Difference:
    """Return the largest difference of any rank's outcome from the expected one."""
    for outcome in outcomes:
        if outcome.weights.keys() != expected.weights.keys():
            raise AssertionError(f"parameters differ: {outcome.weights.keys() ^ expected.weights.keys()}")
        for name, weight in expected.weights.items():
            if outcome.weights[name].shape != weight.shape:
                raise AssertionError(f"{name} has shape {outcome.weights[name].shape}, not {weight.shape}")
    return Difference(
        loss=max(_max_abs_difference(outcome.losses, expected.losses) for outcome in outcomes),
        norm=max(_max_abs_difference(outcome.norms, expected.norms) for outcome in outcomes),
        eval_loss=max(_max_abs_difference(outcome.eval_losses, expected.eval_losses) for outcome in outcomes),
        weight=max(
            float((outcome.weights[name] - weight).abs().max())
            for outcome in outcomes
            for name, weight in expected.weights.items()
        ),
    )


def assert_parity(
    strategy: str,
    case: Case,
    *,
    world_size: int,
    config: Config | None = None,
    sizes: Config | None = None,
    wrapper_config: Config | None = None,
    tolerance: float | None = None,
) -> None:
    """Raise AssertionError unless the differences of `compare` are within the tolerance.

    Args:
        tolerance: absolute tolerance of losses [nats], norms and weights; None for the case's, 1e-9 in float64. For
            the other arguments see `compare`.

    Raises:
        AssertionError: a difference is too large, or NaN.
        RankError: a rank failed.
    """
    tolerance = case.tolerance if tolerance is None else tolerance
    found = compare(strategy, case, world_size=world_size, config=config, sizes=sizes, wrapper_config=wrapper_config)
    # A NaN is not above any tolerance.
    if not found.worst <= tolerance:
        raise AssertionError(f"{strategy} on {world_size} ranks differs from single: {found} > {tolerance}")


def _max_abs_difference(values: list[float], expected: list[float]) -> float:
    if len(values) != len(expected):
        return math.inf
    return max(
        (abs(a - b) if a == a and b == b else math.nan for a, b in zip(values, expected, strict=True)), default=0.0
    )
