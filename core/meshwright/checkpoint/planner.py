"""What torch.distributed.checkpoint writes and reads, in terms of pieces.

Tensors are stored as rectangles of whole tensors, so that any layout can read what any other has written.
Source: the planners of torch.distributed.checkpoint, which are made to be replaced.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorStorageMetadata,
    WriteItem,
)
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ..pieces import Piece, Sharded


class PieceSavePlanner(SavePlanner):
    """Writes all pieces of a mapping from names to `Sharded`, on each rank its own; none is on two ranks."""

    def set_up_planner(
        self, state_dict: Mapping[str, Sharded], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self._tensors = {
            (name, piece.offsets): piece.tensor for name, sharded in state_dict.items() for piece in sharded.pieces
        }
        self._items = [_write_item(name, s, piece) for name, s in state_dict.items() for piece in s.pieces]

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        offsets = write_item.index.offset
        return self._tensors[write_item.index.fqn, tuple(offsets) if offsets is not None else ()]


class PieceLoadPlanner(LoadPlanner):
    """Reads into all pieces of a mapping from names to `Sharded`, which the checkpoint has in the same shapes."""

    def set_up_planner(
        self, state_dict: Mapping[str, Sharded], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._state = state_dict
        self._stored = metadata.state_dict_metadata if metadata is not None else {}

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, sharded in self._state.items():
            stored = self._stored[name]
            if isinstance(stored, TensorStorageMetadata):
                items += create_read_items_for_chunk_list(name, stored, [_chunk(piece) for piece in sharded.pieces])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise NotImplementedError("checkpoints hold tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        piece = self._state[index.fqn].pieces[index.index or 0]
        part = (slice(o, o + s) for o, s in zip(read_item.dest_offsets, read_item.lengths, strict=True))
        return piece.tensor[tuple(part)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))


def _write_item(name: str, sharded: Sharded, piece: Piece) -> WriteItem:
    data = TensorWriteData(_chunk(piece), TensorProperties(dtype=sharded.dtype), sharded.shape)
    return WriteItem(MetadataIndex(name, torch.Size(piece.offsets)), WriteItemType.SHARD, tensor_data=data)
