"""Shard transformer blocks with FSDP2.

Each block is one all-gather unit; the root holds what is left (embedding, head, norms). Units come from the model's
structure, so this file names no model class.
Source: Zhao et al. 2023, arXiv:2304.11277; torch.distributed.fsdp.fully_shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from meshwright.data_parallel import DataParallelManager
from meshwright.mesh import Mesh

from ._compat import reduce_unused_parameters
from .config import FSDP2Config
from .units import find_units
from .usage import Usage


class FSDP2Manager(DataParallelManager):
    """Fully sharded data parallelism, and HSDP where dp_replicate is above 1; see `DataParallelManager`."""

    config: FSDP2Config

    def __init__(self, config: FSDP2Config, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        self._reshards: dict[FSDPModule, bool] = {}

    def shard(self, model: nn.Module) -> nn.Module:
        found = find_units(model, self.layout)
        for unit in found:
            self._shard_unit([model.get_submodule(name) for name in unit.names], is_last=unit.is_last)
        first = [(unit.names[0], model.get_submodule(unit.names[0])) for unit in found]
        self._usage = Usage(model, first, zeros_for_unused=self._zeros_for_unused)
        return model

    def _shard_unit(self, modules: list[nn.Module], *, is_last: bool) -> None:
        reshard = self.config.reshard_after_forward
        if reshard is None:
            reshard = not is_last
        reduce_dtype = getattr(torch, self.config.reduce_dtype) if self.config.reduce_dtype else None
        # One module under several names is gathered for each of its forwards; several modules, from the first
        # forward to the last.
        distinct = list(dict.fromkeys(modules))
        unit = fully_shard(
            distinct[0] if len(distinct) == 1 else distinct,
            mesh=self._fsdp_mesh,
            reshard_after_forward=reshard,
            mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
        )
        # Modules of one unit share its state.
        unit = unit[0] if isinstance(unit, list) else unit
        # [Note: the gradient rule]: plain sums. A factor of 1 also keeps clear of a division that torch applies twice
        # on groups of one rank.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        self._zeros_for_unused = reduce_unused_parameters(unit)
        self._reshards[unit] = reshard

    @property
    def _fsdp_mesh(self) -> DeviceMesh:
        if self.mesh.degrees.dp_replicate > 1:
            return self.mesh["dp_replicate", "dp_shard"]
        return self.mesh["dp_shard"]

    @contextmanager
    def sync_gradients(self, *, is_last: bool) -> Iterator[None]:
        root = next(reversed(self._reshards))
        root.set_is_last_backward(is_last)
        root.set_requires_gradient_sync(is_last or not self.config.defer_fsdp_grad_sync)
        yield

    def check_gradients(self) -> None:
        self._usage.settle(self.mesh.world)

    @contextmanager
    def unshard(self) -> Iterator[Sequence[nn.Module]]:
        self._require_model()
        for unit in self._reshards:
            # A forward inside the context must not free what it holds.
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        try:
            yield [self.model]
        finally:
            for unit, reshard in self._reshards.items():
                unit.set_reshard_after_forward(reshard, recurse=False)
                unit.reshard()
