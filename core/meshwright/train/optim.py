"""Optimizers and learning-rate schedules from a run file.

Any optimizer of torch.optim, with weight decay by parameter name; any schedule of transformers.get_scheduler that
follows from the step number alone.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..base.errors import ConfigError, nearest
from ..strategy.contract import OptimizerFactory
from .arguments import check_arguments
from .run_file import OptimizerConfig, ScheduleConfig


def optimizer_factory(config: OptimizerConfig) -> OptimizerFactory:
    """Return a factory for `StrategyManager.build_optimizer`.

    Raises:
        ConfigError: no such optimizer, an argument that it does not take, or one that needs a closure.
    """
    cls = _optimizer_class(config)
    # The groups say who is decayed; an optimizer's own default (0.01 for AdamW) must not decay the others.
    decay = {"weight_decay": 0.0} if "weight_decay" in inspect.signature(cls).parameters else {}

    def factory(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        named = list(named_parameters)
        groups = decay_groups(named, config.weight_decay, config.no_decay)
        options = {**config.options, **fused_where_it_pays(cls, config.options, [p for _, p in named])}
        try:
            return cls(groups, lr=config.lr, **decay, **options)
        except Exception as error:
            # Each optimizer checks its arguments in its own way.
            raise ConfigError(f"optimizer {config.name!r} refuses its parameters or options: {error}") from error

    return factory


def fused_where_it_pays(
    cls: type[Optimizer], options: Mapping[str, Any], parameters: Sequence[nn.Parameter]
) -> dict[str, Any]:
    """The option that lets an optimizer step all parameters of an accelerator in one kernel, where it can.

    Torch itself would take DTensors one after the other, in a dozen kernels each, and others together with temporary
    tensors as large as all of them. On a CPU there are no launches to be saved, and steps stay as they are.

    Args:
        options: that are given; who chooses an implementation gets it.
        parameters: to be stepped.
    """
    told = {"fused", "foreach", "capturable", "differentiable"} & options.keys()
    kinds = {(parameter.device, parameter.dtype) for parameter in parameters}
    if told or not kinds or any(device.type == "cpu" for device, _ in kinds):
        return {}
    return {"fused": True} if all(can_fuse(cls, device, dtype) for device, dtype in kinds) else {}


def can_fuse(cls: type[Optimizer], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has a fused step of an optimizer for tensors of a kind: a tensor of one element tells."""
    if "fused" not in inspect.signature(cls).parameters:
        return False
    parameter = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))
    parameter.grad = torch.zeros_like(parameter)
    make: Callable[..., Optimizer] = cls
    try:
        make([parameter], fused=True).step()
    except RuntimeError:
        return False
    return True


def try_optimization(optimizer: OptimizerConfig, schedule: ScheduleConfig, steps: int, *, device: torch.device) -> None:
    """Make and step both for a stand-in, so that their errors come before anything is started.

    Args:
        steps: of the run.
        device: of the run; the stand-in is on the CPU.

    Raises:
        ConfigError: the optimizer or the schedule cannot be used as configured.
    """
    if device.type != "cpu":
        # Refused on a CPU alone; each rank tries it with its own device.
        known = {key: value for key, value in optimizer.options.items() if key != "capturable"}
        optimizer = optimizer.model_copy(update={"options": known})
    stand_in = [("weight", nn.Parameter(torch.ones(2, 2))), ("bias", nn.Parameter(torch.ones(2)))]
    made = optimizer_factory(optimizer)(stand_in)
    try:
        for _ in range(2):
            for _, parameter in stand_in:
                parameter.grad = torch.ones_like(parameter)
            made.step()
    except Exception as error:
        raise ConfigError(
            f"optimizer {optimizer.name!r} cannot step with lr={optimizer.lr} and options {optimizer.options}: "
            f"{reason(error)}. Change them, or use another optimizer."
        ) from error
    if not all(bool(parameter.isfinite().all()) for _, parameter in stand_in):
        raise ConfigError(
            f"optimizer {optimizer.name!r} with lr={optimizer.lr} and options {optimizer.options} makes parameters "
            f"infinite or NaN in its first two steps. Lower the rate, or change the options."
        )
    _check_rates(schedule, build_scheduler(schedule, made, steps), steps)


def _check_rates(config: ScheduleConfig, scheduler: LRScheduler, steps: int) -> None:
    """Refuse a schedule that has no usable rate at its ends, or at some steps between them."""
    sampled = {*range(0, steps, max(1, steps // 64)), 1, config.warmup_steps, steps - 1, steps}
    for step in sorted(sampled):
        try:
            rates = [base * factor(step) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
            usable = all(math.isfinite(rate) and rate >= 0 for rate in rates)
        except Exception as error:
            raise ConfigError(
                f"schedule {config.name!r} with options {config.options} has no rate after step {step} of {steps}: "
                f"{reason(error)}. Change the options."
            ) from error
        if not usable:
            raise ConfigError(
                f"schedule {config.name!r} with options {config.options} gives the rates {rates} after step {step} of "
                f"{steps}, which must be finite and not below 0. Change the options."
            )


def decay_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float, no_decay: Iterable[str]
) -> list[dict[str, Any]]:
    """Split parameters into those that are decayed and those whose name a pattern of `no_decay` matches.

    Without decay there is one group and no `weight_decay` key, so that optimizers which know none work too.
    """
    named = list(named_parameters)
    if not weight_decay:
        return [{"params": [parameter for _, parameter in named]}]
    patterns = list(no_decay)
    kept = [parameter for name, parameter in named if any(fnmatchcase(name, pattern) for pattern in patterns)]
    exempt = {id(parameter) for parameter in kept}
    decayed = [parameter for _, parameter in named if id(parameter) not in exempt]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def split_by_mesh(optimizer: Optimizer) -> None:
    """Let no parameter group that is stepped as a whole (`foreach`, `fused`) hold DTensors of several meshes, which
    torch cannot stack. In place; groups keep their settings."""
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        meshes: dict[Any, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            is_whole = group.get("foreach") or group.get("fused")
            mesh = parameter.device_mesh if is_whole and isinstance(parameter, DTensor) else None
            meshes.setdefault(mesh, []).append(parameter)
        groups += [{**group, "params": parameters} for parameters in meshes.values()]
    optimizer.param_groups[:] = groups


def build_scheduler(config: ScheduleConfig, optimizer: Optimizer, steps: int) -> LRScheduler:
    """Make the learning-rate schedule over `steps` optimizer steps.

    Raises:
        ConfigError: no such schedule, a missing or unknown argument, or a schedule that follows a metric.
    """
    from transformers import SchedulerType, get_scheduler

    # These two are driven by a metric at each step, not by the step number.
    known = sorted(each.value for each in SchedulerType if each.value not in ("reduce_lr_on_plateau", "greedy"))
    if config.name not in known:
        raise ConfigError(f"schedule {config.name!r} is not one of {', '.join(known)}.{nearest(config.name, known)}")
    _check_schedule_is_heeded(config)
    try:
        return get_scheduler(
            config.name,
            optimizer,
            num_warmup_steps=config.warmup_steps,
            num_training_steps=steps,
            scheduler_specific_kwargs=dict(config.options),
        )
    except Exception as error:
        # Each schedule checks its options in its own way, or at its first value.
        raise ConfigError(f"schedule {config.name!r} refuses its options {config.options}: {error}") from error


def set_schedule(scheduler: LRScheduler, step: int) -> None:
    """Put a schedule of `build_scheduler`, and the rates of its optimizer, where they are after so many steps."""
    state = scheduler.state_dict()
    rates = [base * factor(step) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    scheduler.load_state_dict({**state, "last_epoch": step, "_step_count": step + 1, "_last_lr": rates})


def _check_schedule_is_heeded(config: ScheduleConfig) -> None:
    """Refuse what get_scheduler would drop without a word."""
    if config.name == "constant" and config.warmup_steps:
        raise ConfigError(
            f"schedule 'constant' knows no warm-up, but schedule.warmup_steps={config.warmup_steps}. "
            f"Set schedule.name=constant_with_warmup, or warmup_steps=0."
        )
    if config.name in ("constant", "constant_with_warmup") and config.options:
        raise ConfigError(
            f"schedule {config.name!r} takes no options, but schedule.options holds {', '.join(config.options)}. "
            f"Remove them, or use another schedule."
        )
    for name, value in config.options.items():
        # None of the schedules has a switch, and their arithmetic makes zero of what is not finite.
        if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
            raise ConfigError(f"schedule.options.{name}={value!r} is no finite number. Change it, or leave it out.")


def _optimizer_class(config: OptimizerConfig) -> type[Optimizer]:
    known: dict[str, type[Optimizer]] = {
        name: cls
        for name, cls in vars(torch.optim).items()
        if inspect.isclass(cls) and issubclass(cls, Optimizer) and cls is not Optimizer
    }
    cls = known.get(config.name)
    if cls is None:
        raise ConfigError(
            f"optimizer {config.name!r} is not in torch.optim.{nearest(config.name, known)} "
            f"Known: {', '.join(sorted(known))}."
        )
    if needs_closure(cls):
        raise ConfigError(f"optimizer {config.name!r} needs a closure that runs the model again; use another one.")
    arguments = [name for name in inspect.signature(cls).parameters if name not in ("self", "params")]
    given = {**config.options, **({"weight_decay": config.weight_decay} if config.weight_decay else {})}
    for name in given:
        if name not in arguments:
            raise ConfigError(
                f"optimizer {config.name!r} takes no argument {name!r}.{nearest(name, arguments)} "
                f"It takes: {', '.join(arguments)}."
            )
    for name in ("lr", "weight_decay"):
        if name in config.options:
            raise ConfigError(f"optimizer.options holds {name!r}, which has a key of its own: set optimizer.{name}.")
    check_arguments(cls, config.options, where="optimizer.options")
    return cls


def needs_closure(cls: type[Optimizer]) -> bool:
    """Whether steps need a function that runs the model again."""
    closure = inspect.signature(cls.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def reason(error: Exception) -> str:
    """An error of an optimizer or schedule in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".:")
