"""Find out how a model can be cut, by running it whole and in stages. The model is the same again afterwards.

[Note: what is checked] Before anything is taken apart, the model runs on a few tokens: whole, and as a chain of the
stages that it is to be cut into. Logits must be equal to the last bit. Where they are not, what crosses besides hidden
states is looked for at each cut: arguments of the block behind it that differ between a whole run and one that begins
there; then what modules before the first block return; what is not needed is left out again. Else it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.base.errors import MeshwrightError, ModelError
from meshwright.base.types import Batch
from meshwright.model.layout import ModelLayout
from meshwright.step.forward_options import with_router_logits
from meshwright.step.rope_length import without_history

from .boundary import Crossing, Path, dims_of, hidden_path, tensors_in
from .cut import Cut
from .stage_model import staged
from .stand_ins import until_left

TRIALS = ((2, 16), (3, 12), (1, 24))
"""Batch and length of the trial runs: how shapes change from one to the other shows their dims."""

HIDDEN: Path = ()
"""Stands for the place of the hidden states, which every block gets in its own way."""


class Study:
    """Runs of a whole model, and what follows from them.

    Args:
        model: with weights, wherever it is; the same again afterwards.
        layout: of the model.
        options: what its forward is called with besides the batch.

    Attributes:
        cut: with everything but the crossings.

    Raises:
        ModelError: it cannot be cut, with the reason.
    """

    def __init__(self, model: nn.Module, layout: ModelLayout, options: Mapping[str, Any]) -> None:
        self._model, self._options = model, options
        with evaluating(model), _naming(model):
            self._trials = [_tried(model, layout, trial_batch(model, *size), options) for size in TRIALS]
            self.cut = self._outline(layout)

    def _outline(self, layout: ModelLayout) -> Cut:
        first = self._trials[0]
        if any(trial.blocks != first.blocks for trial in self._trials):
            raise ModelError("which blocks run depends on the batch.")
        model = self._model
        return Cut(
            blocks=first.blocks,
            outside={module: frozenset(positions) for module, positions in first.outside.items()},
            outputs=dict(self._outputs()),
            kept=frozenset(
                module
                for module in first.outside
                # A frozen embedding or head, or one within an adapter, is too large to be held by all.
                if not any(f"{module}.".startswith(f"{each}.") for each in (layout.embedding, layout.head))
                and not any(p.requires_grad for p in model.get_submodule(module).parameters())
            ),
            loose=tuple(_loose(model, first.blocks)),
            widths=first.widths,
        )

    def _outputs(self) -> Iterator[tuple[str, Any]]:
        for module, output in self._trials[0].outputs.items():
            others = [trial.outputs.get(module) for trial in self._trials]
            shapes = [other.shape for other in others if other is not None]
            # Only modules that run before a block matter, and not all can be foretold.
            if len(shapes) == len(TRIALS):
                try:
                    yield module, (dims_of(shapes, TRIALS), output.dtype)
                except ModelError:
                    continue

    def run_with_router_logits(self) -> Any:
        """What the whole model returns for a few tokens, (2, 16), when it is asked for the logits of its routers."""
        with evaluating(self._model):
            return self._model(**self._trials[0].batch, **with_router_logits(self._options))

    def cut_at(self, starts: Sequence[int]) -> Cut:
        """The cut, with what crosses the boundaries before these blocks.

        Args:
            starts: indices of the first blocks of all stages but the first, ascending.

        Raises:
            ModelError: it cannot be cut there, with the reason.
        """
        with evaluating(self._model), _naming(self._model):
            alone = {start: (self._crossing(start, HIDDEN),) for start in starts}
            cut = replace(self.cut, crossings=alone)
            error = self._refusal(cut)
            if error is None:
                return cut
            early = [name for name, positions in self.cut.outside.items() if positions == {0}]
            for names in ([], [name for name in early if name in self.cut.outputs]):
                found = self._with_more(cut, names)
                if found is not None:
                    return found
            raise error

    def _with_more(self, cut: Cut, early: Sequence[str]) -> Cut | None:
        """The cut with what else must cross, with and without what modules before the first block return."""
        found = self._completed(cut, early)
        if found is None:
            return None
        for name in early:
            fewer = [each for each in early if each != name]
            less = self._completed(cut, fewer)
            if less is not None:
                found, early = less, fewer
        for start, crossings in found.crossings.items():
            for each in crossings:
                if each.source and not isinstance(each.source, str):
                    less = self._without(found, start, each)
                    found = less if self._refusal(less) is None else found
        return found

    def _without(self, cut: Cut, start: int, crossing: Crossing) -> Cut:
        rest = tuple(each for each in cut.crossings[start] if each != crossing)
        return replace(cut, crossings={**cut.crossings, start: rest})

    def _completed(self, cut: Cut, early: Sequence[str]) -> Cut | None:
        """With all arguments that would differ; None if that is not enough."""
        crossings = {}
        for start, hidden in cut.crossings.items():
            modules = tuple(self._crossing(start, name) for name in early)
            alone = replace(cut, crossings={start: (*hidden, *modules)}, in_place=True)
            try:
                differing = [self._crossing(start, path) for path in self._differing(alone, start)]
            except ModelError:
                return None
            crossings[start] = (*hidden, *differing, *modules)
        complete = replace(cut, crossings=crossings, in_place=True)
        return complete if self._refusal(complete) is None else None

    def _crossing(self, start: int, source: Path | str) -> Crossing:
        tensors = [trial.crossing(start, source) for trial in self._trials]
        return Crossing(source, dims_of([each.shape for each in tensors], TRIALS), tensors[0].dtype)

    def _differing(self, cut: Cut, start: int) -> list[Path]:
        """Arguments of a block that are not what they should be where the model begins with it."""
        trial, stage = self._trials[0], range(start, len(cut.blocks))
        boundary = cut.boundary(stage)
        seen: list[dict[Path, Tensor]] = []

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            seen.append(_arguments(args, kwargs))

        with staged(self._model, cut, stage, boundary):
            first = self._model.get_submodule(cut.blocks[start])
            hook = first.register_forward_pre_hook(note, prepend=True, with_kwargs=True)
            boundary.start(trial.batch, [trial.crossing(start, each.source) for each in boundary.entering])
            try:
                trial.run()
            except Exception as error:
                # Arguments are seen before what is missing is missed.
                if not seen:
                    raise ModelError(_reason(error)) from error
            finally:
                hook.remove()
                boundary.end()
        whole = trial.inputs[start]
        return [path for path, tensor in whole.items() if path and not _same(seen[0].get(path), tensor)]

    def _refusal(self, cut: Cut) -> ModelError | None:
        """Why the chain of stages does not do what the whole model does."""
        trial, model = self._trials[0], self._model
        starts = [0, *cut.crossings, len(cut.blocks)]
        received: Any = ()
        for start, stop in pairwise(starts):
            stage = range(start, stop)
            boundary = cut.boundary(stage)
            at = f"cut before {cut.blocks[start]}" if start else f"cut before {cut.blocks[stop % len(cut.blocks)]}"
            try:
                with staged(model, cut, stage, boundary):
                    boundary.start(trial.batch, received)
                    forward = trial.run if stop == len(cut.blocks) else until_left(trial.run)
                    received = forward()
            except Exception as error:
                failed = ModelError(f"{at}, it fails ({_reason(error)}).")
                failed.__cause__ = error
                return failed
            finally:
                boundary.end()
        if not torch.equal(received, trial.logits):
            return ModelError(
                f"cut before {' and '.join(cut.blocks[start] for start in cut.crossings)}, its logits change, so it "
                f"passes on more than goes through its blocks."
            )
        return None


@contextmanager
def _naming(model: nn.Module) -> Iterator[None]:
    """Name the model in what is refused."""
    try:
        yield
    except ModelError as error:
        name = type(model).__name__
        raise ModelError(f"{name} cannot be divided into stages: {error} Set pp_size=1.") from error


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode of the model, without gradients, for a while; it takes the mode that it had."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), without_history(model):
            yield
    finally:
        model.train(training)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _same(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.dtype == other.dtype and torch.equal(one, other)


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Path, Tensor]:
    """Copies of all tensors that a block is given; the hidden states under HIDDEN."""
    place = hidden_path(args, kwargs)
    given = dict(tensors_in((args, kwargs)))
    # The block may get them under several names.
    copies = {path for path, tensor in given.items() if tensor is given[place] and len(path) == len(place)}
    rest = {path: tensor.detach().clone() for path, tensor in given.items() if path not in copies}
    return {HIDDEN: given[place].detach().clone(), **rest}


def trial_batch(model: nn.Module, batch: int, length: int) -> Batch:
    """Some tokens: `input_ids`, int64, (batch, length), where the model is."""
    vocab = getattr(getattr(model, "config", None), "vocab_size", None) or 2
    ids = torch.arange(batch * length).view(batch, length) % max(1, vocab - 1)
    return {"input_ids": ids.to(next(model.parameters()).device)}


class _Trial:
    """A run of a whole model: what happened in it."""

    def __init__(self, model: nn.Module, layout: ModelLayout, batch: Batch, options: Mapping[str, Any]) -> None:
        self.inputs: list[dict[Path, Tensor]] = []
        """Of each block, in the order in which they ran."""
        self.widths: dict[str, int | None] = {}
        self.outside: dict[str, set[int]] = {}
        self.outputs: dict[str, Tensor] = {}
        self.batch = batch
        self.run: Callable[[], Tensor] = lambda: model(**batch, **options).logits
        blocks = {model.get_submodule(name): name for name in layout.blocks}
        with ExitStack() as hooks:
            for name, module in _outside(model, layout.blocks):
                self.outside[name] = set()
                hooks.callback(module.register_forward_hook(self._note_outside(name)).remove)
            for block, name in blocks.items():
                hooks.callback(block.register_forward_pre_hook(self._note_input, with_kwargs=True).remove)
                hooks.callback(block.register_forward_hook(self._note_output(name)).remove)
            self.logits = self.run()
        self.blocks = tuple(self.widths)
        if len(self.blocks) != len(self.inputs) or not self.blocks:
            raise ModelError(f"its {len(self.blocks)} blocks run {len(self.inputs)} times, and not once each.")
        for name, _ in _outside(model, self.blocks):
            # Of blocks that lie idle, such as those of another modality.
            self.outside.setdefault(name, self._position_of(name, layout))

    def _position_of(self, module: str, layout: ModelLayout) -> set[int]:
        """Beside the blocks of its own stack, for a block that did not run."""
        for stack in layout.stacks:
            index = next((i for i, block in enumerate(stack) if f"{module}.".startswith(f"{block}.")), None)
            ran = [self.blocks.index(block) + 1 for block in stack[:index] if block in self.blocks]
            if index is not None and ran:
                return {ran[-1]}
        return set()

    def crossing(self, start: int, source: Path | str) -> Tensor:
        """The tensor that is to cross before a block.

        Raises:
            ModelError: there is none.
        """
        tensor = self.outputs.get(source) if isinstance(source, str) else self.inputs[start].get(source)
        if tensor is None:
            raise ModelError("what crosses depends on the batch.")
        return tensor.clone()

    def _note_outside(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.outside[name].add(len(self.inputs))
            if isinstance(output, Tensor):
                self.outputs.setdefault(name, output.detach().clone())

        return hook

    def _note_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inputs.append(_arguments(args, kwargs))

    def _note_output(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.widths[name] = len(output) if isinstance(output, tuple) else None

        return hook


def _tried(model: nn.Module, layout: ModelLayout, batch: Batch, options: Mapping[str, Any]) -> _Trial:
    """A run of a whole model, whose own code may fail."""
    try:
        return _Trial(model, layout, batch, options)
    except (MeshwrightError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        shape = tuple(batch["input_ids"].shape)
        raise ModelError(f"it fails with input_ids {shape} ({_reason(error)}).") from error


def _outside(model: nn.Module, blocks: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """Modules with parameters that are in no block and contain none; what a container holds belongs to who has it."""
    inside = tuple(f"{block}." for block in blocks)
    taken: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if not name or f"{name}.".startswith((*inside, *taken)) or any(b.startswith(f"{name}.") for b in blocks):
            continue
        reads = any(isinstance(each, nn.ParameterDict | nn.ParameterList) and len(each) for each in module.children())
        if reads or any(True for _ in module.parameters(recurse=False)):
            taken = (*taken, f"{name}.") if reads else taken
            yield name, module


def _loose(model: nn.Module, blocks: Sequence[str]) -> Iterator[str]:
    """Parameters of modules that contain the blocks."""
    for name, module in model.named_modules():
        if not name or any(block.startswith(f"{name}.") for block in blocks):
            for leaf, _ in module.named_parameters(recurse=False):
                yield f"{name}.{leaf}" if name else leaf
