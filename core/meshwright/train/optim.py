"""Optimizers from a run file: any of torch.optim or of your own, or several of them, with decay by parameter name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..base.errors import ConfigError, StrategyError, nearest
from ..files.class_paths import import_class_from_path
from ..strategy.contract import OptimizerFactory
from .arguments import check_arguments
from .decay import decay_groups, matches
from .optimizer_groups import Trained, group_numbers, known_without_model
from .optimizers import Optimizers, members_of
from .run.run_file import OptimizerConfig, ScheduleConfig
from .schedules import build_scheduler, check_schedule, reason


@dataclass(frozen=True)
class _Settings:
    """How the parameters of one group are stepped.

    Attributes:
        where: in the run file.
        cls, lr, weight_decay, options: of the optimizer.
        no_decay: patterns of names that are not decayed; None: what `decay.is_decayed` spares.
    """

    where: str
    cls: type[Optimizer]
    lr: float
    weight_decay: float
    no_decay: tuple[str, ...] | None
    options: Mapping[str, Any]

    def make(self, named: Sequence[tuple[str, nn.Parameter]], trained: Mapping[str, Trained]) -> Optimizer:
        """The optimizer of some parameters.

        Args:
            trained: what is known of them in whole.

        Raises:
            ConfigError: it refuses them, or its options.
            StrategyError: it has pieces of them, and refuses these.
        """
        cls = self.cls
        # The groups say who is decayed; an optimizer's own default (0.01 for AdamW) must not decay the others.
        decay = {"weight_decay": 0.0} if "weight_decay" in inspect.signature(cls).parameters else {}
        groups = decay_groups(named, self.weight_decay, lambda name: self._decays(name, trained))
        options = {**self.options, **fused_where_it_pays(cls, self.options, [p for _, p in named])}
        make: Callable[..., Optimizer] = cls
        try:
            return make(groups, lr=self.lr, **decay, **options)
        except Exception as error:
            # Each optimizer checks its arguments in its own way.
            if any(parameter.dim() != trained[name].dims for name, parameter in named):
                raise StrategyError(
                    f"{self.where}: {cls.__name__} refuses the pieces of parameters that it has under this strategy: "
                    f"{reason(error)}. Use AdamW, Adam, SGD, Adagrad or another optimizer that treats every element "
                    f"alike, or a strategy or options under which it has whole parameters (fsdp2, or ddp without "
                    f"use_distributed_optimizer)."
                ) from error
            told = "" if self.where == "optimizer" else f"{self.where}: "
            raise ConfigError(f"{told}optimizer {cls.__name__!r} refuses its parameters or options: {error}") from error

    def _decays(self, name: str, trained: Mapping[str, Trained]) -> bool:
        if self.no_decay is None:
            return trained[name].is_decayed
        return not any(matches(name, pattern) for pattern in self.no_decay)

    def tried(self, given: Sequence[tuple[str, nn.Parameter]], device: torch.device) -> Optimizer:
        """The optimizer of copies of some parameters, after two steps.

        Args:
            device: of the run.

        Raises:
            ConfigError: it cannot be made, cannot step, or makes values that are not finite.
        """
        # One that only a CPU refuses is left to the ranks, each of which tries it with its own device.
        left = {"capturable"} if device.type != "cpu" else set()
        settings = replace(self, options={key: value for key, value in self.options.items() if key not in left})
        named = [(name, nn.Parameter(parameter.detach().clone())) for name, parameter in given]
        made = settings.make(named, known_without_model(named))
        told = f"{self.where}: optimizer {self.cls.__name__!r}"
        try:
            for _ in range(2):
                for _, parameter in named:
                    parameter.grad = torch.ones_like(parameter)
                made.step()
        except Exception as error:
            raise ConfigError(
                f"{told} cannot step with lr={self.lr} and options {self.options}: {reason(error)}. Change them, or "
                f"use another optimizer."
            ) from error
        if not all(bool(parameter.isfinite().all()) for _, parameter in named):
            raise ConfigError(
                f"{told} with lr={self.lr} and options {self.options} makes parameters infinite or NaN in its first "
                f"two steps. Lower the rate, or change the options."
            )
        return made


class ConfiguredOptimizer:
    """The factory of `optimizer_factory`.

    Called without `for_model`, it knows of the parameters that it is given alone, and of no blocks.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config
        self._settings = _settings(config)

    def __call__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        named = list(named_parameters)
        for number, group in enumerate(self._config.groups):
            if group.matrices:
                raise ConfigError(
                    f"optimizer.groups[{number}].matrices needs the model, whose blocks tell what its matrices are, "
                    f"and this factory was told of none. Give it to manager.build_optimizer as it is, not within "
                    f"another function; or name the matrices by match."
                )
        return self.for_model(known_without_model(named))(named)

    def for_model(self, trained: Mapping[str, Trained]) -> OptimizerFactory:
        """The factory for a model of which these are trained; see `optimizer_groups.for_model`."""
        numbers = group_numbers(self._config, trained)

        def factory(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
            named = list(named_parameters)
            of_group = [[each for each in named if numbers[each[0]] == number] for number in range(len(self._settings))]
            made = [
                settings.make(mine, trained) for settings, mine in zip(self._settings, of_group, strict=True) if mine
            ]
            if not made:
                # It says itself that there is nothing.
                made = [self._settings[-1].make(named, trained)]
            return made[0] if len(made) == 1 else Optimizers(made)

        return factory


def optimizer_factory(config: OptimizerConfig) -> OptimizerFactory:
    """Return a factory for `StrategyManager.build_optimizer`.

    Args:
        config: which optimizer, its options, and its groups of parameters.

    Raises:
        ConfigError: no such optimizer, an argument that it does not take, or one that needs a closure. When it is
            called: a group that no parameter is of.
    """
    return ConfiguredOptimizer(config)


def _settings(config: OptimizerConfig) -> list[_Settings]:
    """Those of each group, and then those of the rest."""
    return [*(_of_group(config, number) for number in range(len(config.groups))), _of_rest(config)]


def _of_rest(config: OptimizerConfig) -> _Settings:
    cls = optimizer_class(config.name, "optimizer.name")
    _check_options(cls, config.name, config.options, config.weight_decay, "optimizer")
    return _Settings("optimizer", cls, config.lr, config.weight_decay, _patterns(config), config.options)


def _of_group(config: OptimizerConfig, number: int) -> _Settings:
    """What a group says, and the top level where it says nothing."""
    group, where = config.groups[number], f"optimizer.groups[{number}]"
    name = group.name or config.name
    cls = optimizer_class(name, f"{where}.name")
    is_other = cls is not optimizer_class(config.name, "optimizer.name")
    options = group.options if is_other else {**config.options, **group.options}
    # Who gives a decay for some parameters means these.
    says_decay = group.weight_decay is not None
    decay = group.weight_decay if group.weight_decay is not None else config.weight_decay
    _check_options(cls, name, options, decay, where)
    no_decay = () if says_decay else _patterns(config)
    lr = config.lr if group.lr is None else group.lr
    return _Settings(where, cls, lr, decay, no_decay, options)


def _patterns(config: OptimizerConfig) -> tuple[str, ...] | None:
    return None if config.no_decay is None else tuple(config.no_decay)


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
    stand_in = [("weight", nn.Parameter(torch.ones(2, 2)))]
    if not optimizer.groups:
        # One of several may be for matrices alone.
        stand_in.append(("bias", nn.Parameter(torch.ones(2))))
    for settings in _settings(optimizer):
        check_schedule(schedule, build_scheduler(schedule, settings.tried(stand_in, device), steps), steps)


def split_by_mesh(optimizer: Optimizer) -> None:
    """Let no parameter group that is stepped as a whole (`foreach`, `fused`) hold DTensors of several meshes, which
    torch cannot stack. In place; groups keep their settings."""
    for member in members_of(optimizer):
        groups: list[dict[str, Any]] = []
        for group in member.param_groups:
            meshes: dict[Any, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                is_whole = group.get("foreach") or group.get("fused")
                mesh = parameter.device_mesh if is_whole and isinstance(parameter, DTensor) else None
                meshes.setdefault(mesh, []).append(parameter)
            groups += [{**group, "params": parameters} for parameters in meshes.values()]
        member.param_groups[:] = groups


def optimizer_class(name: str, where: str) -> type[Optimizer]:
    """The optimizer of a name in torch.optim, or at an import path that is on the allow-list.

    Args:
        where: how to name the source in errors.

    Raises:
        ConfigError: there is none, or it needs a closure.
    """
    if "." in name:
        found = import_class_from_path(name)
        if not issubclass(found, Optimizer):
            raise ConfigError(f"{where}={name!r} is no optimizer. Name a subclass of torch.optim.Optimizer.")
    else:
        known: dict[str, type[Optimizer]] = {
            name: cls
            for name, cls in vars(torch.optim).items()
            if inspect.isclass(cls) and issubclass(cls, Optimizer) and cls is not Optimizer
        }
        if name not in known:
            raise ConfigError(
                f"optimizer {name!r} is not in torch.optim.{nearest(name, known)} Known: {', '.join(sorted(known))}. "
                f"Name one of your own by its import path, such as 'my_package.Lion'."
            )
        found = known[name]
    cls: type[Optimizer] = found
    if needs_closure(cls):
        raise ConfigError(f"optimizer {name!r} needs a closure that runs the model again; use another one.")
    return cls


def _check_options(cls: type[Optimizer], name: str, options: Mapping[str, Any], decay: float, where: str) -> None:
    """Refuse what an optimizer does not take."""
    parameters = inspect.signature(cls).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    arguments = [each for each in parameters if each not in ("self", "params")]
    for key in ["lr", *options, *(["weight_decay"] if decay else [])]:
        if key not in arguments and not takes_any:
            raise ConfigError(
                f"optimizer {name!r} takes no argument {key!r}.{nearest(key, arguments)} "
                f"It takes: {', '.join(arguments)}."
            )
    for key in ("lr", "weight_decay"):
        if key in options:
            raise ConfigError(f"{where}.options holds {key!r}, which has a key of its own: set {where}.{key}.")
    check_arguments(cls, options, where=f"{where}.options")


def needs_closure(cls: type[Optimizer]) -> bool:
    """Whether steps need a function that runs the model again."""
    closure = inspect.signature(cls.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
