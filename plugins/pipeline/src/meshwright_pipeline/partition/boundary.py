"""How a model is cut, and what crosses from one stage to the next: where it is found, its shape, where it is put.

[Note: crossings] Hidden states always cross. Some blocks take more than them from blocks before (keys and values that
later layers share, states of a router), and some models come back, between or behind blocks, to what they have computed
before the first. Such tensors cross too, each at each boundary: the former are found among the arguments of the block
behind the boundary, the latter are what a module before the first block has returned. Their gradients come back the
same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.plugin import Batch, ModelError

TensorPath = tuple[tuple[str, Any], ...]
"""Where a tensor is in (args, kwargs) of a call: steps ("item", index) into lists and tuples, ("key", key) into
mappings."""

_ARGS, _KWARGS = ("item", 0), ("item", 1)


@dataclass(frozen=True)
class SymbolicDim:
    """The size of one dim: `constant + factor * of`, where `of` is "B", the sequences of a microbatch, "S", its length,
    "BS", the product, or ""."""

    base: str = ""
    factor: int = 0
    constant: int = 0

    def size(self, batch: int, length: int) -> int:
        return self.constant + self.factor * _base_sizes(batch, length)[self.base]


def _base_sizes(batch: int, length: int) -> dict[str, int]:
    return {"": 0, "B": batch, "S": length, "BS": batch * length}


def infer_dims(shapes: Sequence[Sequence[int]], batches: Sequence[tuple[int, int]]) -> tuple[SymbolicDim, ...]:
    """How a shape follows from the batch, given the shapes of one tensor for several (sequences, length)."""
    if len({len(shape) for shape in shapes}) == 1:
        dims = [_infer_dim(sizes, batches) for sizes in zip(*shapes, strict=True)]
        if None not in dims:
            return tuple(dim for dim in dims if dim is not None)
    raise ModelError(
        f"what crosses has the shapes {' and '.join(str(tuple(shape)) for shape in shapes)} for batches of "
        f"{' and '.join(str(batch) for batch in batches)} tokens, which cannot be predicted for others."
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
    """One tensor that crosses a boundary; see [Note: crossings]."""

    source: TensorPath | str
    """Where it is among the arguments of the block behind the boundary; or the name of the module that returned it."""
    dims: tuple[SymbolicDim, ...]
    dtype: torch.dtype

    def shape(self, batch: int, length: int) -> tuple[int, ...]:
        return tuple(dim.size(batch, length) for dim in self.dims)


@dataclass(frozen=True)
class ModelPartition:
    """How a model is cut: facts that runs of it have shown."""

    blocks: tuple[str, ...]
    """In the order in which they run."""
    outside_modules: Mapping[str, frozenset[int]]
    """For each module outside of the blocks with parameters of its own: after how many blocks it runs, if at all."""
    outside_outputs: Mapping[str, tuple[tuple[SymbolicDim, ...], torch.dtype]]
    """Of those that return one tensor."""
    replicated_modules: frozenset[str]
    """Those without a parameter that trains, such as tables of positions; every stage holds them."""
    container_parameters: tuple[str, ...]
    """Parameters of modules that contain the blocks; the first stage holds them."""
    output_lengths: Mapping[str, int | None]
    """For each block, the length of the tuple that it returns; None where it returns a tensor."""
    boundary_tensors: Mapping[int, tuple[BoundaryTensor, ...]] = field(default_factory=dict)
    """By the index of the block behind the boundary."""
    writes_in_place: bool = False

    def runs_on_stage(self, module: str, stage: range) -> bool:
        """Whether a stage runs a module outside of the blocks on real values, and so must hold it."""
        if module in self.replicated_modules:
            return True
        positions = self.outside_modules[module] or {0}
        return any(stage.start < each <= stage.stop or each == stage.start == 0 for each in positions)

    def build_boundary(self, stage: range) -> StageBoundary:
        entering, leaving = self.boundary_tensors.get(stage.start, ()), self.boundary_tensors.get(stage.stop, ())
        return StageBoundary(entering, leaving, writes_in_place=self.writes_in_place)


def find_hidden_states(args: Sequence[Any], kwargs: Mapping[str, Any]) -> TensorPath:
    """Where the hidden states are among the arguments of a block."""
    places: list[tuple[TensorPath, Any]] = [((_ARGS, ("item", index)), value) for index, value in enumerate(args)]
    names = sorted(kwargs, key=lambda name: name != "hidden_states")
    places += [((_KWARGS, ("key", name)), kwargs[name]) for name in names]
    for path, value in places:
        if isinstance(value, Tensor) and value.is_floating_point():
            return path
    raise ModelError("a block is called without hidden states.")


def iter_tensor_paths(value: Any, path: TensorPath = ()) -> Iterator[tuple[TensorPath, Tensor]]:
    """All tensors in lists, tuples and mappings within each other, with their places."""
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
    """The value with a tensor at a place. Mappings are changed, as later blocks read the same; sequences are new."""
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
    """What has come into a stage, and what it keeps for the stages behind it; set before each forward.

    `inputs` crosses the boundary before the stage, the hidden states first, and `outputs` the one behind it. With
    `writes_in_place`, what was received is written into the model's own tensors, which may have other uses than blocks.
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
        """Sequences of the microbatch, and their length."""
        self.device = torch.device("cpu")
        self.received: tuple[Tensor, ...] = ()
        self.pre_block_outputs: dict[str, Tensor] = {}
        """By the name of its module: what was computed before the first block and crosses."""

    def begin_forward(self, batch: Batch, received: Sequence[Tensor] = ()) -> None:
        """Begin with a microbatch, and the tensors of `entering`; none for the first stage."""
        ids = batch["input_ids"]
        batch_size, length = ids.shape
        self.batch_shape, self.device, self.received = (batch_size, length), ids.device, tuple(received)
        pairs = zip(self.inputs, self.received, strict=bool(received))
        self.pre_block_outputs = {each.source: tensor for each, tensor in pairs if isinstance(each.source, str)}

    def end_forward(self) -> None:
        self.received, self.pre_block_outputs = (), {}

    def input_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward pre-hook of the stage's first block: what was received takes its place among the arguments."""
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
                # Under whatever names the block gets it.
                args = tuple(new if value is old else value for value in args)
                kwargs = {name: new if value is old else value for name, value in kwargs.items()}
            else:
                args, kwargs = set_tensor_at((args, kwargs), path, new)
        return args, kwargs

    def collect_outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        """What leaves, from the arguments of the block behind the stage; of the shapes of `leaving`, in their order."""
        found = []
        for each in self.outputs:
            if isinstance(each.source, str):
                tensor = self.pre_block_outputs.get(each.source)
            else:
                tensor = get_tensor_at((args, kwargs), each.source or find_hidden_states(args, kwargs))
            if tensor is None or tuple(tensor.shape) != each.shape(*self.batch_shape):
                raise ModelError(
                    f"a stage of the pipeline sends {'nothing' if tensor is None else tuple(tensor.shape)}, where the "
                    f"next expects {each.shape(*self.batch_shape)}. Set pp_size=1."
                )
            found.append(tensor)
        return tuple(found)
