"""Optimizers and learning-rate schedules from configs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..base.errors import ConfigError, StrategyError, suggest_match
from ..base.types import OptimizerFactory
from ..files.class_paths import import_class_from_path
from .config import OptimizerConfig, ScheduleConfig
from .groups import (
    ChainedOptimizer,
    ParamTraits,
    assign_groups,
    describe_params_by_name,
    format_exception_line,
    get_members,
    matches_pattern,
    needs_closure,
    split_by_decay,
)


@dataclass(frozen=True)
class _GroupSettings:
    """Optimizer settings of one group; `key` is the group's key in the run file."""

    key: str
    cls: type[Optimizer]
    lr: float
    weight_decay: float
    no_decay: tuple[str, ...] | None
    options: Mapping[str, Any]

    def build(self, named: Sequence[tuple[str, nn.Parameter]], trained: Mapping[str, ParamTraits]) -> Optimizer:
        cls, name = cast("Callable[..., Optimizer]", self.cls), self.cls.__name__
        # The groups set weight decay; an optimizer's default (0.01 for AdamW) must not apply to the other parameters.
        decay = {"weight_decay": 0.0} if "weight_decay" in inspect.signature(cls).parameters else {}

        def decays(name: str) -> bool:
            if self.no_decay is None:
                return trained[name].is_decayed
            return not any(matches_pattern(name, pattern) for pattern in self.no_decay)

        groups = split_by_decay(named, self.weight_decay, decays)
        options = {**self.options, **choose_fused(self.cls, self.options, [p for _, p in named])}
        try:
            return cls(groups, lr=self.lr, **decay, **options)
        except Exception as error:
            # Each optimizer checks its arguments in its own way.
            if any(parameter.dim() != trained[key].num_dims for key, parameter in named):
                raise StrategyError(
                    f"{self.key}: {name} refuses the pieces of parameters that it has under this strategy: "
                    f"{format_exception_line(error)}. Use AdamW, Adam, SGD, Adagrad or another optimizer that treats "
                    "every element alike, or a strategy or options under which it has whole parameters (fsdp2, or ddp "
                    "without use_distributed_optimizer)."
                ) from error
            prefix = "" if self.key == "optimizer" else f"{self.key}: "
            raise ConfigError(f"{prefix}optimizer {name!r} refuses its parameters or options: {error}") from error

    def try_steps(self, named_parameters: Sequence[tuple[str, nn.Parameter]], device: torch.device) -> Optimizer:
        """Build the optimizer for copies of parameters, and step it twice on the CPU; ConfigError if that fails."""
        # Drop options that only a CPU rejects. Each rank checks them on its own device.
        dropped = {"capturable"} if device.type != "cpu" else set()
        settings = replace(self, options={key: value for key, value in self.options.items() if key not in dropped})
        named = [(name, nn.Parameter(parameter.detach().clone())) for name, parameter in named_parameters]
        optimizer = settings.build(named, describe_params_by_name(named))
        prefix, how = f"{self.key}: optimizer {self.cls.__name__!r}", f"with lr={self.lr} and options {self.options}"
        try:
            for _ in range(2):
                for _, parameter in named:
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
        except Exception as error:
            text = f"{prefix} cannot step {how}: {format_exception_line(error)}. Change them, or use another optimizer."
            raise ConfigError(text) from error
        if not all(bool(parameter.isfinite().all()) for _, parameter in named):
            raise ConfigError(
                f"{prefix} {how} makes parameters infinite or NaN in its first two steps. "
                f"Lower the rate, or change the options."
            )
        return optimizer


class ConfiguredOptimizer:
    """The factory of `optimizer_factory`. Groups with `matrices_only` need `bind_to_model`."""

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config
        self._settings = _resolve_settings(config)

    def __call__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        named = list(named_parameters)
        for number, group in enumerate(self._config.groups):
            if group.matrices_only:
                raise ConfigError(
                    f"optimizer.groups[{number}].matrices_only needs the model, whose blocks show which parameters "
                    f"are matrices, and this factory got no model. Pass it to manager.build_optimizer as it is, not "
                    "within "
                    f"another function; or name the matrices by match."
                )
        return self.bind_to_model(describe_params_by_name(named))(named)

    def bind_to_model(self, trained: Mapping[str, ParamTraits]) -> OptimizerFactory:
        numbers = assign_groups(self._config, trained)

        def factory(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
            named = list(named_parameters)
            optimizers = []
            for number, settings in enumerate(self._settings):
                mine = [each for each in named if numbers[each[0]] == number]
                # Without any parameters, build the last optimizer, which raises an error.
                if mine or (not named and number == len(self._settings) - 1):
                    optimizers.append(settings.build(mine, trained))
            return optimizers[0] if len(optimizers) == 1 else ChainedOptimizer(optimizers)

        return factory


def optimizer_factory(config: OptimizerConfig) -> OptimizerFactory:
    """Return a factory for `StrategyManager.build_optimizer`; ConfigError for an unknown optimizer or options."""
    return ConfiguredOptimizer(config)


def _resolve_settings(config: OptimizerConfig) -> list[_GroupSettings]:
    """Return the settings of each group, with defaults of the top level, and last those of all other parameters."""
    excluded = None if config.no_decay is None else tuple(config.no_decay)
    cls, resolved = resolve_optimizer_class(config.name, "optimizer.name"), []
    for number, group in enumerate(config.groups):
        where, name = f"optimizer.groups[{number}]", group.name or config.name
        own = resolve_optimizer_class(name, f"{where}.name")
        options = {**config.options, **group.options} if own is cls else group.options
        # A group's own weight decay applies to all of its parameters.
        is_set = group.weight_decay is not None
        decay, no_decay = (group.weight_decay or 0.0, ()) if is_set else (config.weight_decay, excluded)
        _check_options(own, name, options, decay, where)
        resolved.append(
            _GroupSettings(where, own, config.lr if group.lr is None else group.lr, decay, no_decay, options)
        )
    _check_options(cls, config.name, config.options, config.weight_decay, "optimizer")
    return [*resolved, _GroupSettings("optimizer", cls, config.lr, config.weight_decay, excluded, config.options)]


def choose_fused(
    cls: type[Optimizer], options: Mapping[str, Any], parameters: Sequence[nn.Parameter]
) -> dict[str, Any]:
    """Return `{"fused": True}` if the optimizer has a fused step for these accelerator tensors, else an empty dict.

    torch's default steps DTensors one at a time, with a dozen kernels each, and other tensors with temporary tensors as
    large as all of them. On a CPU, fusing saves no launches. An implementation that `options` selects is kept.
    """
    kinds = {(parameter.device, parameter.dtype) for parameter in parameters}
    is_unset = {"fused", "foreach", "capturable", "differentiable"}.isdisjoint(options) and bool(kinds)
    is_useful = is_unset and all(device.type != "cpu" and has_fused_step(cls, device, dtype) for device, dtype in kinds)
    return {"fused": True} if is_useful else {}


def has_fused_step(cls: type[Optimizer], device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether an optimizer has a fused step for such tensors, by stepping one element."""
    if "fused" not in inspect.signature(cls).parameters:
        return False
    parameter, make = nn.Parameter(torch.zeros(1, device=device, dtype=dtype)), cast("Callable[..., Optimizer]", cls)
    parameter.grad = torch.zeros_like(parameter)
    with suppress(RuntimeError):
        make([parameter], fused=True).step()
        return True
    return False


def probe_optimizer(
    optimizer: OptimizerConfig, schedule: ScheduleConfig, num_steps: int, *, device: torch.device
) -> None:
    """Build and step the optimizer and schedule for tiny parameters, to raise ConfigError before ranks start."""
    # With several optimizers, one may accept only matrices.
    shapes = {"weight": (2, 2)} if optimizer.groups else {"weight": (2, 2), "bias": (2,)}
    parameters = [(name, nn.Parameter(torch.ones(shape))) for name, shape in shapes.items()]
    for settings in _resolve_settings(optimizer):
        check_schedule_rates(
            schedule, build_scheduler(schedule, settings.try_steps(parameters, device), num_steps), num_steps
        )


def split_groups_by_mesh(optimizer: Optimizer) -> None:
    """Split fused and foreach groups in place by the mesh of their DTensors: torch cannot combine several meshes."""
    for member in get_members(optimizer):
        groups: list[dict[str, Any]] = []
        for group in member.param_groups:
            meshes: dict[Any, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                is_batched = group.get("foreach") or group.get("fused")
                mesh = parameter.device_mesh if is_batched and isinstance(parameter, DTensor) else None
                meshes.setdefault(mesh, []).append(parameter)
            groups += [{**group, "params": parameters} for parameters in meshes.values()]
        member.param_groups[:] = groups


def resolve_optimizer_class(name: str, where: str) -> type[Optimizer]:
    """Return the optimizer class by its name in torch.optim, or by an allowed import path; ConfigError otherwise."""
    classes = {name: each for name, each in vars(torch.optim).items() if inspect.isclass(each)}
    known = {name: cls for name, cls in classes.items() if issubclass(cls, Optimizer) and cls is not Optimizer}
    if "." not in name and name not in known:
        raise ConfigError(
            f"optimizer {name!r} is not in torch.optim.{suggest_match(name, known)} Known: {', '.join(sorted(known))}. "
            f"Name one of your own by its import path, such as 'my_package.Lion'."
        )
    cls: type[Optimizer] = known[name] if name in known else import_class_from_path(name)
    if not issubclass(cls, Optimizer):
        raise ConfigError(f"{where}={name!r} is no optimizer. Name a subclass of torch.optim.Optimizer.")
    if needs_closure(cls):
        raise ConfigError(f"optimizer {name!r} needs a closure that runs the model again; use another one.")
    return cls


def _check_options(cls: type[Optimizer], name: str, options: Mapping[str, Any], decay: float, where: str) -> None:
    parameters = inspect.signature(cls).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    arguments = [each for each in parameters if each not in ("self", "params")]
    for key in ["lr", *options, *(["weight_decay"] if decay else [])]:
        if key not in arguments and not takes_any:
            raise ConfigError(
                f"optimizer {name!r} takes no argument {key!r}.{suggest_match(key, arguments)} "
                f"It takes: {', '.join(arguments)}."
            )
    for key in ("lr", "weight_decay"):
        if key in options:
            raise ConfigError(f"{where}.options holds {key!r}, which has a key of its own: set {where}.{key}.")
    check_argument_types(cls, options, where=f"{where}.options")


_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)


def check_argument_types(function: Callable[..., Any], values: Mapping[str, Any], *, where: str) -> None:
    """Raise ConfigError for values that do not match an argument's annotation or default: "no" would be true."""
    hints = get_type_hints(function.__init__ if inspect.isclass(function) else function)
    parameters = inspect.signature(function).parameters
    for name, value in values.items():
        # A default of 0 often means 0.0.
        default = type(parameters[name].default) if name in parameters else object
        wanted = hints.get(name, {bool: bool, int: float, float: float}.get(default, Any))
        try:
            TypeAdapter(wanted, config=_STRICT).validate_python(_to_tuples(value))
        except ValidationError as error:
            message = "; or ".join(dict.fromkeys(finding["msg"] for finding in error.errors()))
            # Run files have lists, not tuples.
            message = message.replace("Tuple", "List").replace("tuple", "list")
            raise ConfigError(f"{where}.{name}: {message} (got {value!r:.200})") from None


def _to_tuples(value: Any) -> Any:
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value


def build_scheduler(config: ScheduleConfig, optimizer: Optimizer, num_steps: int) -> LRScheduler:
    """Return the learning-rate scheduler of an optimizer for `num_steps` steps; ConfigError for invalid options."""
    from transformers import SchedulerType, get_scheduler

    # These two are driven by a metric at each step, not by the step number.
    known = sorted(each.value for each in SchedulerType if each.value not in ("reduce_lr_on_plateau", "greedy"))
    if config.name not in known:
        raise ConfigError(
            f"schedule {config.name!r} is not one of {', '.join(known)}.{suggest_match(config.name, known)}"
        )
    _check_schedule_options(config)
    try:
        return get_scheduler(
            config.name,
            optimizer,
            num_warmup_steps=config.warmup_steps,
            num_training_steps=num_steps,
            scheduler_specific_kwargs=dict(config.options),
        )
    except Exception as error:
        # Each schedule checks its options in its own way, some of them on the first step.
        raise ConfigError(f"schedule {config.name!r} refuses its options {config.options}: {error}") from error


def set_scheduler_step(scheduler: LRScheduler, step: int) -> None:
    """Set a scheduler of `build_scheduler`, and the learning rates of its optimizer, to their state after `step`."""
    state, rates = scheduler.state_dict(), _compute_rates(scheduler, step)
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    scheduler.load_state_dict({**state, "last_epoch": step, "_step_count": step + 1, "_last_lr": rates})


def _compute_rates(scheduler: LRScheduler, step: int) -> list[float]:
    return [base * factor(step) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]


def _check_schedule_options(config: ScheduleConfig) -> None:
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
        # No schedule has a boolean option, and their arithmetic turns non-finite values into 0.
        if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
            raise ConfigError(f"schedule.options.{name}={value!r} is no finite number. Change it, or leave it out.")


def check_schedule_rates(config: ScheduleConfig, scheduler: LRScheduler, num_steps: int) -> None:
    description = f"schedule {config.name!r} with options {config.options}"
    for step in sorted(
        {*range(0, num_steps, max(1, num_steps // 64)), 1, config.warmup_steps, num_steps - 1, num_steps}
    ):
        after = f"after step {step} of {num_steps}"
        try:
            rates = _compute_rates(scheduler, step)
            is_usable = all(math.isfinite(rate) and rate >= 0 for rate in rates)
        except Exception as error:
            raise ConfigError(
                f"{description} has no rate {after}: {format_exception_line(error)}. Change the options."
            ) from error
        if not is_usable:
            raise ConfigError(
                f"{description} gives the rates {rates} {after}, which must be finite and not below 0. "
                f"Change the options."
            )
