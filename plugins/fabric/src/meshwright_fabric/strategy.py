"""A strategy for Lightning Fabric that trains with a meshwright manager."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Unpack

import torch
from lightning.fabric.strategies import DDPStrategy
from pydantic import BaseModel
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshwright import Mesh, MeshSizes, StrategyManager, load_checkpoint, open_world, resolve, save_checkpoint
from meshwright.plugin import (
    CheckpointError,
    ConfigError,
    MeshSizeKwargs,
    StrategyError,
    TrainingError,
    decode_values,
    load_scheduler_state,
    read_manifest,
    store_base_rates,
    validate_config,
)

from ._compat import forbid_no_backward_sync
from .step_module import StepModule


class MeshStrategy(DDPStrategy):
    """Train with a meshwright strategy: model, optimizer, clipping and checkpoints are meshwright's, processes
    Lightning's.

    Args:
        strategy: name of the strategy, see `meshwright.resolve`. None: the strategy of `config`'s class, or fsdp2
            without one.
        config: options of the strategy, see `meshwright.resolve`.
        wrapper_config: options of wrapping strategies by name, see `meshwright.resolve`.
        timeout_s: timeout of collectives in seconds.
        sizes: `tp_size=2` and so on, see `meshwright.from_pretrained`.
    """

    def __init__(
        self,
        strategy: str | None = None,
        *,
        config: Mapping[str, Any] | BaseModel | None = None,
        wrapper_config: Mapping[str, Mapping[str, Any]] | None = None,
        timeout_s: float = 600.0,
        **sizes: Unpack[MeshSizeKwargs],
    ) -> None:
        # Gloo, in addition to NCCL, handles CPU tensors: small messages and checkpoints.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else None
        super().__init__(process_group_backend=backend, timeout=timedelta(seconds=timeout_s))
        forbid_no_backward_sync(self)
        name = strategy if strategy is not None or isinstance(config, BaseModel) else "fsdp2"
        self._requested = (name, validate_config(MeshSizes, sizes, where="MeshStrategy"))
        self._config, self._wrapper_config = config, wrapper_config
        self._module: StepModule | None = None
        self._name_by_parameter: dict[nn.Parameter, str] = {}
        self.global_step = 0

    @property
    def manager(self) -> StrategyManager:
        """The manager, for `unshard`, `token_stats`, `iter_parameters` and `last_sums`."""
        if self._module is None:
            raise StrategyError("MeshStrategy has no model yet: call fabric.setup(model, optimizer) first.")
        return self._manager

    def setup_environment(self) -> None:
        if self.precision.precision != "32-true":
            raise ConfigError(
                f"precision={self.precision.precision!r} has no effect under MeshStrategy. Leave it out: parameters "
                f"keep the model's dtype, and dtypes of computing and reducing are options of the strategy (config)."
            )
        super().setup_environment()
        name, sizes = self._requested
        world = open_world(self.root_device)
        stack, degrees = resolve(name, sizes, world.size, config=self._config, wrapper_config=self._wrapper_config)
        self.mesh = Mesh(degrees, world)
        self._manager = stack.build(self.mesh)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of a distributed sampler. Ranks along tp, cp and pp get the same batches."""
        return {"num_replicas": self.mesh.data_size, "rank": self.mesh.data_rank}

    # -- model and optimizer

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing, since the strategy moves the model's shards to the device."""

    def setup_module(self, module: nn.Module) -> StepModule:
        named_before = list(module.named_parameters())
        self._manager.parallelize(module)
        parts = [pair for part in self._manager.model_parts for pair in part.named_parameters()]
        # The optimizer may have been built from the parameters before or after sharding.
        self._name_by_parameter = {parameter: name for name, parameter in [*named_before, *parts]}
        self._module = StepModule(self._manager)
        return self._module

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        if scheduler is not None:
            raise StrategyError(_SCHEDULER_ERROR)
        return self.setup_module(module), [self.setup_optimizer(each) for each in optimizers], None

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Build an optimizer of the same class and settings over the sharded parameters."""
        manager = self.manager
        if not self._name_by_parameter:
            raise StrategyError(
                "MeshStrategy takes one optimizer, of all parameters that train, with as many groups as needed."
            )
        if optimizer.state:
            raise StrategyError(
                "the optimizer has a state already, which would be lost: fabric.setup makes it again, of sharded "
                "parameters. Set up a new one, and then load a checkpoint (fabric.load)."
            )
        if any("initial_lr" in group for group in optimizer.param_groups):
            raise StrategyError(_SCHEDULER_ERROR)
        options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        group_by_name = {}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter not in self._name_by_parameter:
                    raise StrategyError("the optimizer has a parameter that is not of the model that was set up.")
                group_by_name[self._name_by_parameter[parameter]] = number
        cls: Callable[..., Optimizer] = type(optimizer)
        # Some defaults are not arguments, such as AdamW's decoupled_weight_decay; groups have all of them.
        defaults = {key: value for key, value in optimizer.defaults.items() if key in signature(cls).parameters}

        def factory(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
            groups: list[dict[str, Any]] = [{**each, "params": []} for each in options]
            for name, parameter in named:
                if name not in group_by_name:
                    raise StrategyError(
                        f"the optimizer lacks {name}, which is trained. Give it all, or requires_grad_(False)."
                    )
                groups[group_by_name[name]]["params"].append(parameter)
            return cls([group for group in groups if group["params"]], **defaults)

        sharded_optimizer = manager.build_optimizer(factory)
        self._name_by_parameter = {}
        return sharded_optimizer

    # -- a step

    def optimizer_step(self, optimizer: Any, **options: Any) -> None:
        module = self._require_own_optimizer(optimizer)
        if options:
            raise StrategyError(f"optimizer.step({', '.join(options)}=...) is not taken by MeshStrategy: call step().")
        if module.is_backward_pending:
            raise StrategyError("optimizer.step() before fabric.backward(loss) of the last call of the model.")
        self.manager.optimizer_step()
        self.global_step += 1

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        self._require_own_optimizer(optimizer)
        norm = self.manager.clip_grad_norm(max_norm, float(norm_type))
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise TrainingError(f"the norm of the gradients is {float(norm)}. Lower the rate, or look at the batch.")
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        raise StrategyError(f"clip_val={clip_val} is not taken by MeshStrategy: use max_norm, or leave clipping out.")

    def _require_own_optimizer(self, optimizer: Any) -> StepModule:
        if self._module is None or optimizer is not self.manager.optimizer:
            raise StrategyError("this is not the optimizer that fabric.setup has returned, which steps the model.")
        return self._module

    # -- checkpoints

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Save a meshwright checkpoint, a directory for any layout. `state` may have other JSON-serializable values."""
        if storage_options is not None or filter:
            raise CheckpointError("storage_options and filter are not taken by MeshStrategy: leave them out.")
        extra = self._select_extra_state(state)
        for value in extra.values():
            if isinstance(value, LRScheduler):
                store_base_rates(value)
        extra = {name: _to_state(value) for name, value in extra.items()}
        save_checkpoint(self.manager, Path(path), step=self.global_step, extra=extra)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: Any = None
    ) -> dict[str, Any]:
        extra = self._select_extra_state(state)
        run_on_all_ranks = self.mesh.world.run_on_all_ranks
        stored = decode_values(run_on_all_ranks(lambda: read_manifest(Path(path))).extra)
        missing = sorted(extra.keys() - stored.keys())
        if missing and strict:
            raise CheckpointError(f"the checkpoint {path} has no {', '.join(missing)}; it has {sorted(stored)}.")
        manifest = load_checkpoint(self.manager, Path(path))
        for name in sorted(extra.keys() & stored.keys()):
            value, saved = extra[name], stored.pop(name)
            if isinstance(value, LRScheduler):
                run_on_all_ranks(partial(load_scheduler_state, value, saved))
            elif hasattr(value, "load_state_dict"):
                value.load_state_dict(saved)
            else:
                state[name] = saved
        self.global_step = manifest.step
        return stored

    def _select_extra_state(self, state: Any) -> dict[str, Any]:
        """Return the values of `state` without model and optimizer; raise CheckpointError if either is missing."""
        manager = self.manager
        required = {"the model": self._module, "the optimizer": manager.optimizer}
        state_dict = state if isinstance(state, dict) else {}
        missing = [name for name, each in required.items() if all(each is not value for value in state_dict.values())]
        if missing:
            raise CheckpointError(
                f"a checkpoint has its model and optimizer, and {' and '.join(missing)} is missing."
                f' Give {{"model": model, "optimizer": optimizer, ...}}.'
            )
        return {
            name: value for name, value in state_dict.items() if all(value is not each for each in required.values())
        }


_SCHEDULER_ERROR = (
    "the schedule was made for an optimizer that is replaced by fabric.setup, since its parameters are. Make it from "
    "the optimizer that fabric.setup returns: scheduler = LambdaLR(optimizer, ...)."
)


def _to_state(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value
