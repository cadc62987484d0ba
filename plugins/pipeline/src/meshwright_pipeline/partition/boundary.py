"""Partition of a model, and the tensors that cross from one stage to the next: their source, shape and destination.

[Note: boundary tensors] Hidden states always cross. Some blocks need further tensors of earlier blocks (keys and values
that later layers share, states of a router). Some models use tensors between or after the blocks that they computed
before the first block. These tensors cross every boundary too. The former are arguments of the block after the
boundary; the latter are outputs of a module before the first block. Their gradients return the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.plugin import Batch, ModelError

TensorPath = tuple[tuple[str, Any], ...]
"""Path of a tensor in (args, kwargs) of a call: steps ("item", index) into lists and tuples, ("key", key) into
mappings."""

_ARGS, _KWARGS = ("item", 0), ("item", 1)


@dataclass(frozen=True)
class SymbolicDim:
    """Size of one dim, `constant + factor * base`.

    `base` is "B", the sequences of a microbatch, "S", their length, "BS", the product, or "", which is 0."""

    base: str = ""
    factor: int = 0
    constant: int = 0

    def size(self, batch: int, length: int) -> int:
        return self.constant + self.factor * _base_sizes(batch, length)[self.base]


def _base_sizes(batch: int, length: int) -> dict[str, int]:
    return {"": 0, "B": batch, "S": length, "BS": batch * length}


def infer_dims(shapes: Sequence[Sequence[int]], batches: Sequence[tuple[int, int]]) -> tuple[SymbolicDim, ...]:
    """Return how a tensor's shape depends on the batch, from its shapes for several batches (sequences, length)."""
    if len({len(shape) for shape in shapes}) == 1:
        dims = [_infer_dim(sizes, batches) for sizes in zip(*shapes, strict=True)]
        if None not in dims:
            return tuple(dim for dim in dims if dim is not None)
    raise ModelError(
        f"a tensor that crosses has the shapes {' and '.join(str(tuple(shape)) for shape in shapes)} for batches of "
        f"{' and '.join(str(batch) for batch in batches)} tokens, so its shape for other batches is unknown."
    )


def _infer_dim(sizes: Sequence[int], batches: Sequence[tuple[int, int]]) -> SymbolicDim | None:
    if len(set(sizes)) == 1:
        return SymbolicDim(constant=sizes[0])
    for of in ("B", "S", "BS"):
        pairs = [(_base_sizes(*batch)[of], size) for batch, size in zip(batches, sizes, strict=True)]
        (low, size), (high, other) = min(pairs), max(pairs)
        factor = (other - size) // (high - low)
        dim = SymbolicDim(of, factor, size - factor * low)
        if factor > 0 and [dim.size(*batch) for batch in batches] == list(sizes):
            return dim
    return None


@dataclass(frozen=True)
class BoundaryTensor:
    """One tensor that crosses a boundary; see [Note: boundary tensors]."""

    source: TensorPath | str
    """Path among the arguments of the block after the boundary, or the name of the module that returned it."""
    dims: tuple[SymbolicDim, ...]
    dtype: torch.dtype

    def shape(self, batch: int, length: int) -> tuple[int, ...]:
        return tuple(dim.size(batch, length) for dim in self.dims)


@dataclass(frozen=True)
class ModelPartition:
    """Structure of a model, as trial runs have shown it."""

    blocks: tuple[str, ...]
    """Names, in execution order."""
    outside_modules: Mapping[str, frozenset[int]]
    """For each module with direct parameters outside the blocks: the numbers of blocks after which it runs."""
    outside_outputs: Mapping[str, tuple[tuple[SymbolicDim, ...], torch.dtype]]
    """Shape and dtype of the output, for each outside module that returns one tensor."""
    replicated_modules: frozenset[str]
    """Outside modules without trainable parameters, such as position tables; every stage holds them."""
    container_parameters: tuple[str, ...]
    """Parameters of modules that contain the blocks; the first stage holds them."""
    output_lengths: Mapping[str, int | None]
    """For each block, the length of the tuple that it returns; None if it returns a tensor."""
    boundary_tensors: Mapping[int, tuple[BoundaryTensor, ...]] = field(default_factory=dict)
    """Maps the index of the block after a boundary to the tensors that cross."""
    writes_in_place: bool = False
    """See `StageBoundary`."""

    def runs_on_stage(self, module: str, stage: range) -> bool:
        """Return whether a stage runs a module outside the blocks on real values, and so must hold it."""
        if module in self.replicated_modules:
            return True
        positions = self.outside_modules[module] or {0}
        return any(stage.start < each <= stage.stop or each == stage.start == 0 for each in positions)

    def build_boundary(self, stage: range) -> StageBoundary:
        entering, leaving = self.boundary_tensors.get(stage.start, ()), self.boundary_tensors.get(stage.stop, ())
        return StageBoundary(entering, leaving, writes_in_place=self.writes_in_place)


def find_hidden_states(args: Sequence[Any], kwargs: Mapping[str, Any]) -> TensorPath:
    """Return the path of the hidden states among the arguments of a block."""
    candidates: list[tuple[TensorPath, Any]] = [((_ARGS, ("item", index)), value) for index, value in enumerate(args)]
    names = sorted(kwargs, key=lambda name: name != "hidden_states")
    candidates += [((_KWARGS, ("key", name)), kwargs[name]) for name in names]
    for path, value in candidates:
        if isinstance(value, Tensor) and value.is_floating_point():
            return path
    raise ModelError("a block is called without hidden states.")


def iter_tensor_paths(value: Any, path: TensorPath = ()) -> Iterator[tuple[TensorPath, Tensor]]:
    """Yield all tensors in nested lists, tuples and mappings, with their paths."""
    if isinstance(value, Tensor):
        yield path, value
    elif type(value) in (list, tuple):
        for index, each in enumerate(value):
            yield from iter_tensor_paths(each, (*path, ("item", index)))
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from iter_tensor_paths(each, (*path, ("key", key)))


def get_tensor_at(value: Any, path: TensorPath) -> Tensor | None:
    for _, key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value if isinstance(value, Tensor) else None


def set_tensor_at(value: Any, path: TensorPath, tensor: Tensor) -> Any:
    """Return the value with a tensor set at a path.

    Mappings are changed in place, since later blocks read the same mapping; sequences are copied."""
    if not path:
        return tensor
    (kind, key), *rest = path
    if kind == "key":
        changed: MutableMapping[Any, Any] = {} if value is None else value
        changed[key] = set_tensor_at(changed.get(key), tuple(rest), tensor)
        return changed
    items = list(value or ())
    items += [None] * (key + 1 - len(items))
    items[key] = set_tensor_at(items[key], tuple(rest), tensor)
    return items if isinstance(value, list) else tuple(items)


class StageBoundary:
    """Tensors that a stage receives and sends, for one forward at a time.

    `inputs` cross the boundary before the stage, hidden states first, and `outputs` the one after it. With
    `writes_in_place`, received tensors are copied into the model's own, which modules outside the blocks may read too.
    """

    def __init__(
        self,
        inputs: Sequence[BoundaryTensor] = (),
        outputs: Sequence[BoundaryTensor] = (),
        *,
        writes_in_place: bool = False,
    ) -> None:
        self.inputs, self.outputs, self.writes_in_place = tuple(inputs), tuple(outputs), writes_in_place
        self.batch_shape: tuple[int, int] = (0, 0)
        """Number of sequences of the microbatch, and their length."""
        self.device = torch.device("cpu")
        self.received: tuple[Tensor, ...] = ()
        self.pre_block_outputs: dict[str, Tensor] = {}
        """Tensors that cross and were computed before the first block, by the name of their module."""

    def begin_forward(self, batch: Batch, received: Sequence[Tensor] = ()) -> None:
        """Set the microbatch and the received tensors, as in `inputs`; empty for the first stage."""
        ids = batch["input_ids"]
        batch_size, length = ids.shape
        self.batch_shape, self.device, self.received = (batch_size, length), ids.device, tuple(received)
        pairs = zip(self.inputs, self.received, strict=bool(received))
        self.pre_block_outputs = {each.source: tensor for each, tensor in pairs if isinstance(each.source, str)}

    def end_forward(self) -> None:
        self.received, self.pre_block_outputs = (), {}

    def input_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook of the stage's first block: replace arguments with the received tensors."""
        if not self.received:
            return None
        hidden = find_hidden_states(args, kwargs)
        for each, new in zip(self.inputs, self.received, strict=True):
            if isinstance(each.source, str):
                continue
            path = each.source or hidden
            old = get_tensor_at((args, kwargs), path)
            if old is not None and self.writes_in_place and old.shape == new.shape and old.dtype == new.dtype:
                old.copy_(new)
            elif old is not None and path == hidden:
                # Replace the hidden states under every name.
                args = tuple(new if value is old else value for value in args)
                kwargs = {name: new if value is old else value for name, value in kwargs.items()}
            else:
                args, kwargs = set_tensor_at((args, kwargs), path, new)
        return args, kwargs

    def collect_outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        """Return the tensors of `outputs`, in order, from the arguments of the block after the stage."""
        found = []
        for each in self.outputs:
            if isinstance(each.source, str):
                tensor = self.pre_block_outputs.get(each.source)
            else:
                tensor = get_tensor_at((args, kwargs), each.source or find_hidden_states(args, kwargs))
            if tensor is None or tuple(tensor.shape) != each.shape(*self.batch_shape):
                raise ModelError(
                    f"a stage of the pipeline sends {'nothing' if tensor is None else tuple(tensor.shape)}, but the "
                    f"next one expects {each.shape(*self.batch_shape)}. Set pp_size=1."
                )
            found.append(tensor)
        return tuple(found)
