"""Strategies with one bug each, as real ones have had them; see plugins/testing/tests/test_conformance.py."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel
from support.rows_axis import RowsAxis, RowsManager
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from meshwright import Batch, StrategyConfig, StrategySpec, hookimpl
from meshwright.base.types import OptimizerFactory, TokenStatistic
from meshwright.manager.gradients import Gradients
from meshwright.tensors.chunks import ChunkedTensor
from meshwright.tensors.norms import ShardGroups, clip_grads_with_norm, compute_grad_norm
from meshwright.tensors.state import OptimizerState, ShardedState, TensorMeta
from meshwright_ddp import DDPConfig
from meshwright_ddp.manager import DDPManager
from meshwright_fsdp2 import FSDP2Config
from meshwright_fsdp2.manager import FSDP2Manager
from meshwright_fsdp2.sharding import ParameterUsage


class AveragesGradients(FSDP2Manager):
    """Leaves torch's average over ranks in place, where gradients must be summed."""

    def shard(self, model: nn.Module) -> nn.Module:
        module = super().shard(model)
        for unit in self._sharding.unit_modules:
            unit.set_force_sum_reduction_for_comms(False)
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                group.gradient_divide_factor = None
        return module


class DividesTwice(FSDP2Manager):
    """Multiplies the loss and lets torch divide again, which it does twice on shard groups of one rank."""

    def shard(self, model: nn.Module) -> nn.Module:
        module = super().shard(model)
        for unit in self._sharding.unit_modules:
            unit.set_gradient_divide_factor(float(self.mesh.degrees.dp))
        return module

    def forward_backward(self, microbatches: Sequence[Batch], *, num_tokens: Tensor, **options: Any) -> Tensor:
        # A count that is too low makes a loss that is too high.
        size = self.mesh.degrees.dp
        return super().forward_backward(microbatches, num_tokens=num_tokens / size, **options) / size


class WatchesFirstModuleOnly(FSDP2Manager):
    """Watches the first module of each unit alone, and takes the parameters of the others for unused."""

    def shard(self, model: nn.Module) -> nn.Module:
        module = super().shard(model)
        first = [unit.names[0] for unit, _ in self._sharding.units]
        self._usage = ParameterUsage(model, [(name, model.get_submodule(name)) for name in first])
        return module


class ClipsByLocalNorm(FSDP2Manager):
    """Clips by the norm of this rank's shards."""

    def clip_grad_norm(self, max_norm: float | None, norm_type: float = 2.0) -> Tensor:
        gradients = [p.grad.to_local() for p in self.iter_trainable() if p.grad is not None]
        norm = compute_grad_norm(gradients, norm_type)
        if max_norm is not None:
            clip_grads_with_norm(gradients, norm, max_norm)
        return norm


class LosesMicrobatches(DDPManager):
    """Reduces the gradient of the last microbatch only."""

    def after_backward(self, *, is_last: bool) -> None:
        super().after_backward(is_last=is_last)
        if not is_last:
            for parameter in self.iter_trainable():
                parameter.grad = None


class DriftingReplicas(DDPManager):
    """One rank's copy goes its own way by a little."""

    def optimizer_step(self) -> None:
        super().optimizer_step()
        if dist.get_rank() == 1:
            with torch.no_grad():
                next(self.iter_trainable()).mul_(1 + 1e-6)


class _AliasOptimizer(Optimizer):
    """Steps another optimizer, whose groups it has from the start on."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([dict(group) for group in inner.param_groups], inner.defaults)
        self.param_groups = inner.param_groups
        self._inner = inner

    def step(self, closure: Any = None) -> None:
        self._inner.step()


class AliasedGroups(DDPManager):
    """Gives schedules groups that loading replaces."""

    def build_optimizer(self, factory: OptimizerFactory) -> Optimizer:
        return _AliasOptimizer(super().build_optimizer(factory))


class SpoilsLoadedState(DDPManager):
    """Loads right, and then spoils groups of parameters or the state of the optimizer."""

    @contextmanager
    def load_sharded_state(self, optimizer: OptimizerState[TensorMeta] | None) -> Iterator[ShardedState]:
        with super().load_sharded_state(optimizer) as target:
            yield target
        for group in self.optimizer.param_groups:
            self.spoil_group(group)
        for values in self.optimizer.state.values():
            self.spoil_state(values)

    def spoil_group(self, group: dict[str, Any]) -> None: ...

    def spoil_state(self, values: dict[str, Any]) -> None: ...


class LosesDecay(SpoilsLoadedState):
    """Does not decay weights after loading."""

    def spoil_group(self, group: dict[str, Any]) -> None:
        group["weight_decay"] = 0.0


class LosesSteps(SpoilsLoadedState):
    """Counts the steps of Adam again after loading."""

    def spoil_state(self, values: dict[str, Any]) -> None:
        values["step"].zero_()


class KeepsRates(SpoilsLoadedState):
    """Makes the first step after loading with the rate of the schedule's start."""

    def spoil_group(self, group: dict[str, Any]) -> None:
        group["lr"] = group["initial_lr"]


class SwapsGroups(DDPManager):
    """Loads the settings of parameter groups in the wrong order."""

    @contextmanager
    def load_sharded_state(self, optimizer: OptimizerState[TensorMeta] | None) -> Iterator[ShardedState]:
        if optimizer is not None:
            names = [group["params"] for group in optimizer.groups]
            pairs = zip(optimizer.groups, reversed(names), strict=True)
            optimizer.groups = [{**group, "params": other} for group, other in pairs]
        with super().load_sharded_state(optimizer) as target:
            yield target


class KeepsPrivateSchedule(DDPManager):
    """Follows a schedule of its own, which is in no checkpoint."""

    def build_optimizer(self, factory: OptimizerFactory) -> Optimizer:
        optimizer = super().build_optimizer(factory)
        self._own = LambdaLR(optimizer, lambda step: min(step, (11 - step) / 10))
        # The same rates as those of the schedule that is given, as long as nothing is loaded.
        optimizer.register_step_pre_hook(self._set)
        return optimizer

    def _set(self, *_: Any) -> None:
        for group, rate in zip(self.optimizer.param_groups, self._own.get_last_lr(), strict=True):
            group["lr"] = rate

    def optimizer_step(self) -> None:
        super().optimizer_step()
        self._own.step()


class YieldsStaleWeights(DDPManager):
    """Gives what the model had at first, as an engine would see that is fed with copies."""

    def parameter_chunks(self) -> dict[str, ChunkedTensor | None]:
        if not hasattr(self, "_first"):
            pieces = super().parameter_chunks().items()
            self._first: dict[str, ChunkedTensor | None] = {
                name: held and replace(held, chunks=tuple(replace(p, tensor=p.tensor.clone()) for p in held.chunks))
                for name, held in pieces
            }
        return self._first


class IgnoresObjectives(DDPManager):
    """Trains the token loss, whatever it is asked for."""

    def forward_backward(self, microbatches: Sequence[Batch], *, num_tokens: Tensor, **_: Any) -> Tensor:
        plain = [{name: batch[name] for name in ("input_ids", "labels")} for batch in microbatches]
        return super().forward_backward(plain, num_tokens=torch.tensor(int(num_tokens)))


class LacksObjectives(DDPManager):
    """As a manager that was written before there were objectives."""

    def forward_backward(self, microbatches: Sequence[Batch], *, num_tokens: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward_backward(microbatches, num_tokens=num_tokens)


class ReportsLocalSums(DDPManager):
    """Tells the further sums of this rank alone."""

    def forward_backward(self, microbatches: Sequence[Batch], **options: Any) -> Tensor:
        loss = super().forward_backward(microbatches, **options)
        rows = sum((each["labels"][:, 1:] >= 0).any(1).sum() for each in microbatches)
        self._own = {"rows": torch.tensor(float(rows))}
        return loss

    @property
    def last_sums(self) -> Mapping[str, Tensor]:
        return {**super().last_sums, **self._own} if super().last_sums else {}


class ShufflesStatistics(DDPManager):
    """Tells statistics of tokens in another order than that of the batch."""

    def token_stats(self, microbatches: Sequence[Batch], names: Sequence[TokenStatistic]) -> list[dict[str, Tensor]]:
        return super().token_stats(microbatches, names)[::-1]


class IgnoresTensorParallelNorms(FSDP2Manager):
    """Takes norms by block over the ranks of the data alone."""

    def gradient_norms(self) -> dict[str, float]:
        own, along_tp = self.gradients, self.mesh.group("tp")

        class Local(Gradients):
            def get_shard_groups(self, parameter: nn.Parameter) -> ShardGroups:
                return tuple(each for each in own.get_shard_groups(parameter) if each is not along_tp)

        self.gradients = Local(self.iter_trainable, self.shard_layout, self.mesh, use_float64=False)
        try:
            return super().gradient_norms()
        finally:
            self.gradients = own


class CountsTiedTwice(DDPManager):
    """Tells the norm of a weight that embedding and head share under both."""

    def gradient_norms(self) -> dict[str, float]:
        norms = super().gradient_norms()
        return {**norms, "head": norms["embedding"]} if self.layout.tied else norms


class ClipsForNorms(DDPManager):
    """Leaves gradients that are not those from before."""

    def gradient_norms(self) -> dict[str, float]:
        self.gradients.clip(self.gradients.compute_total_norm(2.0), 0.5)
        return super().gradient_norms()


class GathersInBlocks(RowsAxis):
    """Puts the rows of a rank together, which are every n-th of the microbatch."""

    def gather(self, part: Tensor) -> Tensor:
        whole = super().gather(part)
        return torch.cat([whole[rank :: self._size] for rank in range(self._size)])


class GathersWithoutGradientSum(RowsAxis):
    """Gives each rank the gradient of its own sum alone."""

    def gather(self, part: Tensor) -> Tensor:
        whole = super().gather(part.detach())
        if not part.is_floating_point():
            return whole
        places = torch.arange(self._rank, len(whole), self._size)
        return whole.index_add(0, places, part - part.detach())


class IgnoresReplicas(RowsAxis):
    """Adds up what all of its ranks have computed of the same."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.replicas = 1


SHARDED_AXES = frozenset({"dp_replicate", "dp_shard"})
REPLICATED_AXES = frozenset({"dp_replicate"})
ROW_AXES = frozenset({"tp"})
FSDP2_BUGS = (AveragesGradients, DividesTwice, WatchesFirstModuleOnly, ClipsByLocalNorm)
DDP_BUGS = (
    *(
        LosesMicrobatches,
        DriftingReplicas,
        AliasedGroups,
        LosesDecay,
        LosesSteps,
        KeepsRates,
        SwapsGroups,
        KeepsPrivateSchedule,
    ),
    *(YieldsStaleWeights, IgnoresObjectives, LacksObjectives, ReportsLocalSums, ShufflesStatistics, CountsTiedTwice),
    ClipsForNorms,
)


def _build_spec(kind: type, axes: frozenset[str], config_cls: type[BaseModel], build: Any = None) -> StrategySpec:
    """Under the name of the class, such as "loses_decay"."""
    name = re.sub(r"\B(?=[A-Z])", "_", kind.__name__).lower()
    return StrategySpec(name, kind.__doc__ or "", axes, config_cls, build or kind)


@hookimpl
def register_strategies() -> list[StrategySpec]:
    rows = (GathersInBlocks, GathersWithoutGradientSum, IgnoresReplicas)
    return [
        *(_build_spec(kind, SHARDED_AXES, FSDP2Config) for kind in FSDP2_BUGS),
        *(_build_spec(kind, REPLICATED_AXES, DDPConfig) for kind in DDP_BUGS),
        _build_spec(IgnoresTensorParallelNorms, SHARDED_AXES | ROW_AXES, FSDP2Config),
        *(_build_spec(axis, ROW_AXES, StrategyConfig, type("", (RowsManager,), {"axis": axis})) for axis in rows),
    ]
