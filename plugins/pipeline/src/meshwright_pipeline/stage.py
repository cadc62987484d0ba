"""Cut a model at the inputs of blocks, with its own forward on every stage.

[Note: one forward] Each stage runs the forward of the whole model, so that positions, masks, rotary tables and whatever
else a model computes are its own code on every stage, and nothing here knows a model. What a stage does not hold is
replaced by stand-ins without parameters:

- what runs before the first block gives zeros of the right shape, on which the model's arithmetic falls;
- blocks before the stage give back their input; the input of the stage's first block is then replaced by what the
  stage before has sent;
- the block behind the stage ends the forward, and its input is what the stage sends.

Cutting at inputs, not outputs, leaves to the sender what a model does between two blocks.

[Note: what is checked] Before anything is taken apart, the model runs on a few tokens, once whole and once for each cut
with stand-ins for all that comes before. Logits must be equal to the last bit: a model that carries state beside the
hidden states is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.contract import Batch
from meshwright.errors import ModelError
from meshwright.layout import ModelLayout

Dims = tuple[str | int, ...]
"""A shape: "B" and "S" are batch and length, "BS" their product."""

TRIALS = ((2, 16), (3, 12))
"""Batch and length of the trial runs: how shapes change from one to the other tells their dims."""


@dataclass(frozen=True)
class Cut:
    """What trial runs of a whole model have shown.

    Attributes:
        blocks: names, in the order in which they run.
        hidden: dims and dtype of what crosses a boundary.
        outside: for each module outside of the blocks that has parameters of its own, after how many blocks it runs;
            nothing for those that do not run.
        early: dims and dtype of the outputs of those that run before the first block.
        kept: those without a parameter that trains, such as tables of positions; every stage holds them.
        loose: names of parameters of modules that contain the blocks; the first stage holds them.
        widths: for each block, the length of the tuple that it returns; None where it returns a tensor.
    """

    blocks: tuple[str, ...]
    hidden: tuple[Dims, torch.dtype]
    outside: Mapping[str, frozenset[int]]
    early: Mapping[str, tuple[Dims, torch.dtype]]
    kept: frozenset[str]
    loose: tuple[str, ...]
    widths: Mapping[str, int | None]

    def runs_in(self, module: str, stage: range) -> bool:
        """Whether a stage runs a module outside of the blocks on real values, and so must hold it."""
        if module in self.kept:
            return True
        positions = self.outside[module] or {0}
        return any(stage.start < each <= stage.stop or each == stage.start == 0 for each in positions)


def shape_of(dims: Dims, batch: int, length: int) -> tuple[int, ...]:
    """The shape for a batch and a length."""
    sizes = {"B": batch, "S": length, "BS": batch * length}
    return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in dims)


class Boundary:
    """Between a stage's model and what runs it: set before each forward."""

    def __init__(self) -> None:
        self.received: Tensor | None = None
        self.size = (0, 0)
        """Batch and length of the microbatch."""

    def hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward pre-hook of the stage's first block: what was received takes the place of its hidden states."""
        if self.received is None:
            return None
        old, new = hidden_of(args, kwargs), self.received
        changed = {name: new if value is old else value for name, value in kwargs.items()}
        return tuple(new if value is old else value for value in args), changed


class Left(Exception):
    """Ends the forward of a stage at the block behind it; holds what the stage sends."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _StandIn(nn.Module):
    """Holds no parameter; answers what a model reads of the module that it replaces."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        # In a tuple, so that it is no submodule.
        self._original = (original,)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"][0], name)


class _Zeros(_StandIn):
    """For what runs before the first block."""

    def __init__(self, original: nn.Module, boundary: Boundary, dims: Dims, dtype: torch.dtype) -> None:
        super().__init__(original)
        self._boundary, self._dims, self._dtype = boundary, dims, dtype

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        received = self._boundary.received
        device = received.device if received is not None else None
        return torch.zeros(shape_of(self._dims, *self._boundary.size), dtype=self._dtype, device=device)


class _Through(_StandIn):
    """For blocks before the stage."""

    def __init__(self, original: nn.Module, width: int | None) -> None:
        super().__init__(original)
        self._width = width

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = hidden_of(args, kwargs)
        return hidden if self._width is None else (hidden, *[None] * (self._width - 1))


class _End(_StandIn):
    """For the block behind the stage."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise Left(hidden_of(args, kwargs))


class _Nothing(_StandIn):
    """For what a stage never reaches."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ModelError("a stage of the pipeline called a module that it does not hold.")


def hidden_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The hidden states among the arguments of a block.

    Raises:
        ModelError: there are none.
    """
    for value in (*args, kwargs.get("hidden_states"), *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise ModelError("a block is called without hidden states.")


# -- taking a model apart


def take_stage(model: nn.Module, cut: Cut, stage: range, boundary: Boundary) -> None:
    """Leave of a whole model what one stage holds; in place.

    Args:
        model: whole; a stage that is not the last then returns the hidden states that it sends.
        cut: of the model.
        stage: indices of its blocks.
        boundary: which the stand-ins will read.
    """
    for name, stand_in in _stand_ins(model, cut, stage, boundary).items():
        original = model.get_submodule(name)
        model.set_submodule(name, stand_in)
        original.to("meta")
    if stage.start > 0:
        for name in cut.loose:
            module, _, leaf = name.rpartition(".")
            _zero_parameter(model.get_submodule(module), leaf)
    if stage.stop < len(cut.blocks):
        model.forward = _until_left(model.forward)


def _zero_parameter(module: nn.Module, name: str) -> nn.Parameter:
    """Put zeros in the place of a parameter, and return it."""
    parameter = module._parameters.pop(name)
    if parameter is None:
        raise ModelError(f"{name} is no parameter.")
    module.register_buffer(name, torch.zeros_like(parameter), persistent=False)
    return parameter


def _until_left(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def stage_forward(*args: Any, **kwargs: Any) -> Tensor:
        try:
            forward(*args, **kwargs)
        except Left as left:
            return left.hidden
        raise ModelError("the forward of a stage of the pipeline ended before the stage did.")

    return stage_forward


def _stand_ins(model: nn.Module, cut: Cut, stage: range, boundary: Boundary) -> dict[str, _StandIn]:
    """For each module that a stage does not hold, what takes its place."""
    found: dict[str, _StandIn] = {}
    for index, name in enumerate(cut.blocks):
        block = model.get_submodule(name)
        if index < stage.start:
            found[name] = _Through(block, cut.widths[name])
        elif index >= stage.stop:
            found[name] = _End(block) if index == stage.stop else _Nothing(block)
    for name in cut.outside:
        if not cut.runs_in(name, stage):
            module = model.get_submodule(name)
            is_early = stage.start > 0 and name in cut.early
            found[name] = _Zeros(module, boundary, *cut.early[name]) if is_early else _Nothing(module)
    return found


# -- the trial


def study(model: nn.Module, layout: ModelLayout, options: Mapping[str, Any]) -> Cut:
    """Run a whole model on a few tokens and see how it can be cut; see [Note: what is checked].

    Args:
        model: with its weights, wherever it is.
        layout: of the model.
        options: what its forward is called with besides the batch.

    Raises:
        ModelError: it cannot be cut at every block, with the reason.
    """
    name = type(model).__name__
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            one, other = (_Trial(model, layout, _batch(model, *size), options) for size in TRIALS)
            if one.blocks != other.blocks:
                raise ModelError("which blocks run depends on the batch.")
            cut = Cut(
                blocks=one.blocks,
                hidden=(_dims(one.inputs[0].shape, other.inputs[0].shape), one.inputs[0].dtype),
                outside={module: frozenset(positions) for module, positions in one.outside.items()},
                early={
                    module: (_dims(output.shape, other.early[module].shape), output.dtype)
                    for module, output in one.early.items()
                    if module in other.early
                },
                kept=frozenset(
                    module
                    for module in one.outside
                    if module not in (layout.embedding, layout.head)
                    and not any(p.requires_grad for p in model.get_submodule(module).parameters(recurse=False))
                ),
                loose=tuple(_loose(model, one.blocks)),
                widths=one.widths,
            )
            for index in range(1, len(one.blocks)):
                one.check(cut, index)
    except ModelError as error:
        raise ModelError(f"{name} cannot be divided into stages: {error} Set pp_size=1.") from error
    finally:
        model.train(training)
    return cut


def _batch(model: nn.Module, batch: int, length: int) -> Batch:
    vocab = getattr(getattr(model, "config", None), "vocab_size", None) or 2
    ids = torch.arange(batch * length).view(batch, length) % max(1, vocab - 1)
    return {"input_ids": ids.to(next(model.parameters()).device)}


def _dims(one: torch.Size, other: torch.Size) -> Dims:
    (batch, length), (batch2, length2) = TRIALS
    known = {(batch, batch2): "B", (length, length2): "S", (batch * length, batch2 * length2): "BS"}
    if len(one) == len(other):
        dims = [known.get((a, b), a if a == b else None) for a, b in zip(one, other, strict=True)]
        if None not in dims:
            return tuple(dim for dim in dims if dim is not None)
    raise ModelError(
        f"hidden states have the shapes {tuple(one)} and {tuple(other)} for batches of {TRIALS[0]} and {TRIALS[1]} "
        f"tokens, which cannot be foretold for others."
    )


class _Trial:
    """A run of a whole model: what happened in it."""

    def __init__(self, model: nn.Module, layout: ModelLayout, batch: Batch, options: Mapping[str, Any]) -> None:
        self.inputs: list[Tensor] = []
        self.widths: dict[str, int | None] = {}
        self.outside: dict[str, set[int]] = {}
        self.early: dict[str, Tensor] = {}
        self._model = model
        self._size = (batch["input_ids"].shape[0], batch["input_ids"].shape[1])
        self._run: Callable[[], Tensor] = lambda: model(**batch, **options).logits
        blocks = {model.get_submodule(name): name for name in layout.blocks}
        with ExitStack() as hooks:
            for name, module in _outside(model, layout.blocks):
                self.outside[name] = set()
                hooks.callback(module.register_forward_hook(self._note_outside(name)).remove)
            for block, name in blocks.items():
                hooks.callback(block.register_forward_pre_hook(self._note_input, with_kwargs=True).remove)
                hooks.callback(block.register_forward_hook(self._note_output(name)).remove)
            self._logits = self._run()
        self.blocks = self._stack(layout)
        for name, _ in _outside(model, self.blocks):
            # Of stacks that lie idle.
            self.outside.setdefault(name, set())

    def _stack(self, layout: ModelLayout) -> tuple[str, ...]:
        """The one stack whose blocks have run; others, of another modality, may lie idle."""
        run = [stack for stack in layout.stacks if not self.widths.keys().isdisjoint(stack)]
        if len(run) != 1:
            raise ModelError(f"its blocks are in {len(run)} stacks that run, not 1.")
        if tuple(self.widths) != run[0] or len(self.inputs) != len(run[0]):
            raise ModelError("its blocks do not run once each, in the order in which they stand.")
        return run[0]

    def _note_outside(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.outside[name].add(len(self.inputs))
            if not self.inputs and isinstance(output, Tensor):
                self.early.setdefault(name, output)

        return hook

    def _note_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inputs.append(hidden_of(args, kwargs).clone())

    def _note_output(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.widths[name] = len(output) if isinstance(output, tuple) else None

        return hook

    def check(self, cut: Cut, index: int) -> None:
        """Run the model as a stage from block `index` to the end."""
        boundary = Boundary()
        boundary.received, boundary.size = self.inputs[index], self._size
        first = self._model.get_submodule(cut.blocks[index])
        hook = first.register_forward_pre_hook(boundary.hook, with_kwargs=True)
        stand_ins = _stand_ins(self._model, cut, range(index, len(cut.blocks)), boundary)
        try:
            with _swapped(self._model, stand_ins), _zeroed(self._model, cut.loose):
                logits = self._run()
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            raise ModelError(f"cut before {cut.blocks[index]}, it fails ({type(error).__name__}: {reason}).") from error
        finally:
            hook.remove()
        if not torch.equal(logits, self._logits):
            raise ModelError(
                f"cut before {cut.blocks[index]}, its logits change, so its blocks pass on more than hidden states."
            )


def _outside(model: nn.Module, blocks: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """Modules with parameters of their own that are in no block and contain none."""
    inside = tuple(f"{block}." for block in blocks)
    for name, module in model.named_modules():
        if f"{name}.".startswith(inside) or not any(True for _ in module.parameters(recurse=False)):
            continue
        if name and not any(block.startswith(f"{name}.") for block in blocks):
            yield name, module


def _loose(model: nn.Module, blocks: Sequence[str]) -> Iterator[str]:
    """Parameters of modules that contain the blocks."""
    for name, module in model.named_modules():
        if not name or any(block.startswith(f"{name}.") for block in blocks):
            for leaf, _ in module.named_parameters(recurse=False):
                yield f"{name}.{leaf}" if name else leaf


@contextmanager
def _zeroed(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    parameters = {}
    try:
        for name in names:
            module, _, leaf = name.rpartition(".")
            parameters[name] = _zero_parameter(model.get_submodule(module), leaf)
        yield
    finally:
        for name, parameter in parameters.items():
            module, _, leaf = name.rpartition(".")
            delattr(model.get_submodule(module), leaf)
            model.get_submodule(module).register_parameter(leaf, parameter)


@contextmanager
def _swapped(model: nn.Module, others: Mapping[str, nn.Module]) -> Iterator[None]:
    originals = {name: model.get_submodule(name) for name in others}
    try:
        for name, module in others.items():
            model.set_submodule(name, module)
        yield
    finally:
        # Backwards, for those that lie within others.
        for name, module in reversed(originals.items()):
            model.set_submodule(name, module)
