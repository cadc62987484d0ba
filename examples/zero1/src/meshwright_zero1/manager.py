"""Whole parameters and gradients on every rank, optimizer state in 1/N.

torch's ZeroRedundancyOptimizer gives each parameter an owner, which alone holds its optimizer state, steps it and
broadcasts it. This module sums the gradients before that, and moves the state into and out of the common format.
Source: Rajbhandari et al. 2020, arXiv:1910.02054; torch.distributed.optim.ZeroRedundancyOptimizer.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from meshwright import DataParallelManager, StrategyError
from meshwright.plugin import (
    HighPrecisionAccumulator,
    OptimizerState,
    ShardedState,
    get_sharded_model_state,
    get_sharded_optimizer_state,
    load_sharded_optimizer,
)


class Zero1Manager(DataParallelManager):
    """ZeRO stage 1; see `DataParallelManager`."""

    def __init__(self, config, mesh):
        super().__init__(config, mesh)
        self.group = mesh.group("dp_replicate")
        self.accumulator = (
            HighPrecisionAccumulator(getattr(torch, config.reduce_dtype)) if config.reduce_dtype else None
        )
        self.zero_optimizer = None

    def shard(self, model):
        self.name_by_parameter = {parameter: name for name, parameter in model.named_parameters()}
        return model.to(self.mesh.device)

    # -- gradients

    def after_backward(self, *, is_last):
        if self.accumulator is not None:
            self.accumulator.accumulate(self.iter_trainable())
        if is_last:
            # Ranks may use different parameters; one that no rank uses keeps no gradient and is not stepped.
            self.gradients.fill_missing()
            for parameter in self.iter_trainable():
                if parameter.grad is not None:
                    parameter.grad = self.reduce_gradient(parameter)

    def reduce_gradient(self, parameter):
        """The gradient, summed over ranks (never averaged), in reduce_dtype if there is one."""
        if self.accumulator is not None:
            total = torch.zeros_like(parameter, dtype=self.accumulator.dtype)
            self.accumulator.add_pending(parameter, total)
        else:
            total = parameter.grad
        dist.all_reduce(total, group=self.group)
        return total.to(parameter.dtype)

    # -- optimizer

    def build_optimizer(self, factory):
        return super().build_optimizer(lambda named_parameters: self.build_zero_optimizer(factory(named_parameters)))

    def build_zero_optimizer(self, optimizer):
        def owned(groups, **_):
            # The factory's own optimizer, left with what this rank owns: every class works, with all its options.
            optimizer.param_groups = groups
            for parameter in set(optimizer.state).difference(*(group["params"] for group in groups)):
                del optimizer.state[parameter]  # Adagrad makes its state at once.
            return optimizer

        groups = [dict(group) for group in optimizer.param_groups]
        self.zero_optimizer = ZeroRedundancyOptimizer(groups, owned, process_group=self.group, **optimizer.defaults)
        return self.zero_optimizer

    # -- state, by name of parameter; each rank has the optimizer state of those that it owns

    def optimizer_state_dict(self, *, full):
        values = {self.name_by_parameter[p]: value for p, value in self.zero_optimizer.optim.state.items()}
        groups = [{**group, "params": self.group_parameter_names(group)} for group in self.zero_optimizer.param_groups]
        if not full:
            return {"state": values, "param_groups": groups}
        parts = [{}] * self.zero_optimizer.world_size if self.zero_optimizer.rank == 0 else None
        dist.gather_object({name: move_to_cpu(values[name]) for name in values}, parts, None, self.group, 0)
        merged = {name: value for part in parts or () for name, value in part.items()}
        return {"state": merged, "param_groups": groups} if parts else {}

    def load_optimizer_state_dict(self, saved, *, full):
        shared = self.broadcast_from_first_rank if full else lambda value: value
        self.load_group_settings(shared(saved.get("param_groups", ())))
        owned = [name for group in self.zero_optimizer.optim.param_groups for name in self.group_parameter_names(group)]
        # One parameter at a time, so that no rank holds them all.
        each = ((name, shared(saved.get("state", {}).get(name))) for name in self.name_by_parameter.values())
        values = {owned.index(name): value for name, value in each if name in owned and value is not None}
        self.zero_optimizer.optim.load_state_dict({**self.zero_optimizer.optim.state_dict(), "state": values})

    def load_group_settings(self, saved_groups):
        for group in self.zero_optimizer.param_groups:  # Its settings reach the owned parameters with the next step.
            names = self.group_parameter_names(group)
            found = [each for each in saved_groups if not set(names).isdisjoint(each["params"])]
            if len(found) != 1:
                raise StrategyError(
                    f"a parameter group meets {len(found)} groups of the optimizer state to load, not 1. Group the "
                    f"parameters as they were when the state was saved. The group holds: {', '.join(names)}."
                )
            group.update({**found[0], "params": group["params"]})

    def sharded_state(self):
        state = ShardedState(get_sharded_model_state(self.model, self.shard_layout))
        if self.zero_optimizer is not None:
            state.optimizer = get_sharded_optimizer_state(
                self.zero_optimizer.optim, self.name_by_parameter, self.shard_layout
            )
            # What is owned has its settings since the last step only.
            state.optimizer.groups = [
                {**group, "params": self.group_parameter_names(group)} for group in self.zero_optimizer.param_groups
            ]
        return state

    @contextmanager
    def load_sharded_state(self, optimizer):
        if optimizer is None:
            with super().load_sharded_state(None) as target:
                yield target
            return
        self.load_group_settings(optimizer.groups)
        owned = {name for group in self.zero_optimizer.optim.param_groups for name in self.group_parameter_names(group)}
        tensors, values = (
            {name: each for name, each in every.items() if name in owned}
            for every in (optimizer.tensors, optimizer.values)
        )
        mine = OptimizerState(tensors, values, optimizer.groups)
        with load_sharded_optimizer(
            self.zero_optimizer.optim, self.name_by_parameter, mine, self.shard_layout
        ) as target:
            yield ShardedState(get_sharded_model_state(self.model, self.shard_layout), target)

    def group_parameter_names(self, group):
        return [self.name_by_parameter[parameter] for parameter in group["params"]]

    def broadcast_from_first_rank(self, value):
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]


def move_to_cpu(values):
    return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in values.items()}
