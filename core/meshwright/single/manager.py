"""The manager of `single`, which shards and reduces nothing."""

from __future__ import annotations

import torch
from torch import nn

from ..manager.data_parallel import DataParallelManager
from ..mesh.mesh import Mesh
from ..model.recompute import checkpoint_blocks
from ..tensors.norms import HighPrecisionAccumulator
from .config import SingleConfig


class SingleManager(DataParallelManager):
    config: SingleConfig
    supports_pipeline = True

    def __init__(self, config: SingleConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        self._accumulator = (
            HighPrecisionAccumulator(getattr(torch, config.reduce_dtype)) if config.reduce_dtype else None
        )

    def shard(self, model: nn.Module) -> nn.Module:
        model.to(self.mesh.device)
        self.checkpointed_blocks = checkpoint_blocks(model, self.layout, self.config.activation_checkpointing)
        return model

    def after_backward(self, *, is_last: bool) -> None:
        if self._accumulator is not None:
            self._accumulator.accumulate(self.iter_trainable())
            if is_last:
                self._accumulator.flush()
