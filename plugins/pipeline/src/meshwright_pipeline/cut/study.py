"""Find out how a model can be cut, by running it whole and in stages. The model is the same again afterwards.

[Note: what is checked] Before anything is taken apart, the model runs on a few tokens: whole, and as a chain of the
stages that it is to be cut into. Logits must be equal to the last bit. Where they are not, what crosses besides hidden
states is looked for at each cut: arguments of the block behind it that differ between a whole run and one that begins
there; then what modules before the first block return; what is not needed is left out again. Else it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.plugin import ModelError, ModelLayout, enable_router_logits

from .boundary import BoundaryTensor, ModelPartition, TensorPath, infer_dims
from .stage_model import stop_at_stage_end, temporary_stage
from .trial_runs import (
    HIDDEN_STATES_PATH,
    TRIAL_SHAPES,
    TrialRun,
    build_trial_batch,
    clone_tensor_arguments,
    eval_mode,
    format_exception,
)


class PartitionAnalyzer:
    """Runs of a whole model, which must have weights, and `cut`, what follows from them: all but the crossings."""

    def __init__(self, model: nn.Module, layout: ModelLayout, options: Mapping[str, Any]) -> None:
        self._model, self._options = model, options
        with self._running():
            self._trials = [
                TrialRun.of(model, layout, build_trial_batch(model, *size), options) for size in TRIAL_SHAPES
            ]
            self.cut = self._outline(layout)

    @contextmanager
    def _running(self) -> Iterator[None]:
        try:
            with eval_mode(self._model):
                yield
        except ModelError as error:
            name = type(self._model).__name__
            raise ModelError(f"{name} cannot be divided into stages: {error} Set pp_size=1.") from error

    def _outline(self, layout: ModelLayout) -> ModelPartition:
        first, model = self._trials[0], self._model
        if any(trial.blocks != first.blocks for trial in self._trials):
            raise ModelError("which blocks run depends on the batch.")
        return ModelPartition(
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
            loose=tuple(
                f"{name}.{leaf}" if name else leaf
                for name, module in model.named_modules()
                if not name or any(block.startswith(f"{name}.") for block in first.blocks)
                for leaf, _ in module.named_parameters(recurse=False)
            ),
            widths=first.widths,
        )

    def _outputs(self) -> Iterator[tuple[str, Any]]:
        for module, output in self._trials[0].outputs.items():
            shapes = [trial.outputs[module].shape for trial in self._trials if module in trial.outputs]
            # Only modules that run before a block matter, and not all can be foretold.
            if len(shapes) == len(TRIAL_SHAPES):
                try:
                    yield module, (infer_dims(shapes, TRIAL_SHAPES), output.dtype)
                except ModelError:
                    continue

    def run_with_router_logits(self) -> Any:
        """What the whole model returns for a few tokens, (2, 16), when it is asked for the logits of its routers."""
        with eval_mode(self._model):
            return self._model(**self._trials[0].batch, **enable_router_logits(self._options))

    def cut_at(self, starts: Sequence[int]) -> ModelPartition:
        """The cut, with what crosses the boundaries before the first blocks of all stages but the first, ascending."""
        with self._running():
            cut = replace(self.cut, crossings={start: (self._crossing(start, HIDDEN_STATES_PATH),) for start in starts})
            error = self._refusal(cut)
            if error is None:
                return cut
            early = [name for name, positions in self.cut.outside.items() if positions == {0}]
            for names in ([], [name for name in early if name in self.cut.outputs]):
                found = self._with_more(cut, names)
                if found is not None:
                    return found
            raise error

    def _with_more(self, cut: ModelPartition, early: Sequence[str]) -> ModelPartition | None:
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
                    rest = tuple(other for other in found.crossings[start] if other != each)
                    less = replace(found, crossings={**found.crossings, start: rest})
                    found = less if self._refusal(less) is None else found
        return found

    def _completed(self, cut: ModelPartition, early: Sequence[str]) -> ModelPartition | None:
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

    def _crossing(self, start: int, source: TensorPath | str) -> BoundaryTensor:
        tensors = [trial.crossing(start, source) for trial in self._trials]
        return BoundaryTensor(source, infer_dims([each.shape for each in tensors], TRIAL_SHAPES), tensors[0].dtype)

    def _differing(self, cut: ModelPartition, start: int) -> list[TensorPath]:
        """Arguments of a block that are not what they should be where the model begins with it."""
        trial, stage = self._trials[0], range(start, len(cut.blocks))
        boundary = cut.boundary(stage)
        seen: list[dict[TensorPath, Tensor]] = []

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            seen.append(clone_tensor_arguments(args, kwargs))

        with temporary_stage(self._model, cut, stage, boundary):
            first = self._model.get_submodule(cut.blocks[start])
            hook = first.register_forward_pre_hook(note, prepend=True, with_kwargs=True)
            boundary.start(trial.batch, [trial.crossing(start, each.source) for each in boundary.entering])
            try:
                trial.run()
            except Exception as error:
                # Arguments are seen before what is missing is missed.
                if not seen:
                    raise ModelError(format_exception(error)) from error
            finally:
                hook.remove()
                boundary.end()

        def differs(path: TensorPath, tensor: Tensor) -> bool:
            found = seen[0].get(path)
            return found is None or found.dtype != tensor.dtype or not torch.equal(found, tensor)

        return [path for path, tensor in trial.inputs[start].items() if path and differs(path, tensor)]

    def _refusal(self, cut: ModelPartition) -> ModelError | None:
        """Why the chain of stages does not do what the whole model does."""
        trial = self._trials[0]
        received: Any = ()
        for start, stop in pairwise([0, *cut.crossings, len(cut.blocks)]):
            stage = range(start, stop)
            boundary = cut.boundary(stage)
            try:
                with temporary_stage(self._model, cut, stage, boundary):
                    boundary.start(trial.batch, received)
                    forward = trial.run if stop == len(cut.blocks) else stop_at_stage_end(trial.run)
                    received = forward()
            except Exception as error:
                at = cut.blocks[start or stop % len(cut.blocks)]
                failed = ModelError(f"cut before {at}, it fails ({format_exception(error)}).")
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
