"""Accelerator for trainers on a mesh, in which a process is a data rank.

Trainers use their accelerator to count processes, distribute batches and gather metrics, and assume that each process
has its own batch. On a mesh, ranks that differ in pp, cp or tp share a batch, so together they act as one process.
Source: accelerate.Accelerator, whose interface this implements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from meshwright.plugin import Mesh


class MeshAccelerator:
    """Wrapper of a trainer's accelerator, in which a process is a data rank. Other attributes are the accelerator's."""

    def __init__(self, accelerator: Any, mesh: Mesh) -> None:
        self._accelerator, self._mesh = accelerator, mesh
        self.num_processes, self.process_index = mesh.data_size, mesh.data_rank
        self.even_batches = True
        """Whether all data ranks get the same number of batches, by repeating some."""
        self.has_batch: list[bool] | None = None
        """In evaluation, whether each data rank has a batch, of any number of rows. None: all have, of equal sizes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def prepare(self, *objects: Any, **_: Any) -> Any:
        """Replace each data loader with one of this data rank's batches. Other objects are returned unchanged."""
        prepared = tuple(self._shard_loader(each) if isinstance(each, DataLoader) else each for each in objects)
        return prepared if len(prepared) > 1 else prepared[0]

    def _shard_loader(self, loader: DataLoader[Any]) -> Any:
        config = self._accelerator.dataloader_config
        stream, count, place = loader.dataset, self.num_processes, self.process_index
        if isinstance(stream, IterableDataset) and not self.even_batches and getattr(stream, "n_shards", 0) < count:
            # Accelerate would pad the last batches with rows of the first.
            loader = copy(loader)
            loader.__dict__["dataset"] = StreamShard(stream, loader.batch_size or 1, count, place)
            count, place = 1, 0
        return prepare_data_loader(
            loader,
            self._accelerator.device,
            num_processes=count,
            process_index=place,
            split_batches=config.split_batches,
            put_on_device=True,
            # Synchronize the sampler's generator over all ranks, since ranks that share a batch need the same order.
            rng_types=["generator"],
            dispatch_batches=False,
            even_batches=self.even_batches and config.even_batches,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
        )

    def prepare_model(self, model: Any, device_placement: bool | None = None, **_: Any) -> Any:
        return model.to(self._accelerator.device) if device_placement else model

    def no_sync(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def gather(self, values: Any) -> Any:
        """Concatenate nested tensors of all data ranks along dim 0; scalars become (data ranks,). Collective."""
        return recursively_apply(self._gather_tensor, values)

    def _gather_tensor(self, value: Tensor) -> Tensor:
        mine = (value[None] if value.dim() == 0 else value).contiguous()
        if self.num_processes == 1:
            return mine.clone()
        if self.has_batch is None:
            return torch.cat(self._all_gather(mine))
        lengths = [int(each) for each in self._all_gather(torch.tensor(len(mine), device=mine.device))]
        padded = mine.new_zeros((max(lengths), *mine.shape[1:]))
        padded[: len(mine)] = mine
        parts = zip(self._all_gather(padded), lengths, self.has_batch, strict=True)
        return torch.cat([part[:length] for part, length, is_present in parts if is_present])

    def _all_gather(self, mine: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(mine) for _ in range(self.num_processes)]
        dist.all_gather(parts, mine, group=self._mesh.group("dp"))
        return parts

    def gather_objects(self, value: Any) -> list[Any]:
        """Return an object of the first rank of each data rank, in order of data ranks. Collective over all ranks."""
        mesh = self._mesh
        reported: list[Any] = [None] * mesh.world.size
        mine = (mesh.data_rank, value) if mesh.is_data_leader else None
        dist.all_gather_object(reported, mine, group=mesh.world.group)
        return [each for _, each in sorted(filter(None, reported), key=lambda pair: pair[0])]

    def gather_for_metrics(self, values: Any, use_gather_object: bool = False) -> Any:
        """Call `gather`. No rows are evaluated twice, so none must be dropped; see `MeshTrainerMixin`."""
        return self.gather(values)

    def reduce(self, values: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        divisor = self.num_processes if reduction == "mean" else 1

        def reduced(value: Tensor) -> Tensor:
            total = self._gather_tensor(value[None]).sum(0) * scale
            return total / divisor if divisor > 1 else total

        return values if reduction == "none" else recursively_apply(reduced, values)

    def pad_across_processes(self, values: Tensor, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Tensor:
        """Pad a tensor along `dim` to the maximum length over all data ranks. Collective."""
        if self.num_processes == 1 or dim >= values.dim():
            return values
        length = int(self.gather(torch.tensor(values.shape[dim], device=values.device)).max())
        shape = list(values.shape)
        shape[dim] = length
        padded = values.new_full(shape, pad_index)
        start = length - values.shape[dim] if pad_first else 0
        padded.narrow(dim, start, values.shape[dim]).copy_(values)
        return padded


class StreamShard(IterableDataset[Any]):
    """Rows of a stream for one data rank. Batches are distributed in turn, and none is repeated."""

    def __init__(self, stream: Iterable[Any], batch_size: int, count: int, index: int) -> None:
        self._stream, self._batch_size, self._count, self._index = stream, batch_size, count, index

    def __iter__(self) -> Iterator[Any]:
        return (row for at, row in enumerate(self._stream) if at // self._batch_size % self._count == self._index)


class LocalAccelerator:
    """Stand-in for an accelerator inside an objective, which must not communicate: each rank sees only its values."""

    def __init__(self, accelerator: Any, num_processes: int) -> None:
        self._accelerator, self.num_processes = accelerator, num_processes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, values: Any, *_: Any, **__: Any) -> Any:
        return recursively_apply(lambda value: value[None] if value.dim() == 0 else value, values)

    gather_for_metrics = gather

    def reduce(self, values: Any, *_: Any, **__: Any) -> Any:
        return values
