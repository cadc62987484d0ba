"""Determine how to split a model, by running it in full and in stages. The model is restored afterwards.

[Note: what is checked] Before the model is changed, it runs on a few tokens: in full, and as the chain of its future
stages. Both logits must be bitwise equal. If they are not, further tensors must cross the boundaries. Candidates are
arguments of the block after a boundary that differ between the full run and a run that starts at this block, and
outputs of modules before the first block. Those that turn out to be unnecessary are dropped. If no set of tensors makes
the logits equal, the model is rejected.
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
    """Trial runs of a full model, which must have weights, and its `partition`, still without boundary tensors."""

    def __init__(self, model: nn.Module, layout: ModelLayout, options: Mapping[str, Any]) -> None:
        self._model, self._options = model, options
        with self._trial_context():
            self._trial_runs = [
                TrialRun.run_checked(model, layout, build_trial_batch(model, *size), options) for size in TRIAL_SHAPES
            ]
            self.partition = self._build_partition(layout)

    @contextmanager
    def _trial_context(self) -> Iterator[None]:
        try:
            with eval_mode(self._model):
                yield
        except ModelError as error:
            name = type(self._model).__name__
            raise ModelError(f"{name} cannot be divided into stages: {error} Set pp_size=1.") from error

    def _build_partition(self, layout: ModelLayout) -> ModelPartition:
        first, model = self._trial_runs[0], self._model
        if any(trial.blocks != first.blocks for trial in self._trial_runs):
            raise ModelError("the blocks that run depend on the batch.")
        return ModelPartition(
            blocks=first.blocks,
            outside_modules={module: frozenset(positions) for module, positions in first.outside_positions.items()},
            outside_outputs=dict(self._infer_output_dims()),
            replicated_modules=frozenset(
                module
                for module in first.outside_positions
                # A frozen embedding or head, or one inside an adapter, is too large to replicate on all stages.
                if not any(f"{module}.".startswith(f"{each}.") for each in (layout.embedding, layout.head))
                and not any(p.requires_grad for p in model.get_submodule(module).parameters())
            ),
            container_parameters=tuple(
                f"{name}.{leaf}" if name else leaf
                for name, module in model.named_modules()
                if not name or any(block.startswith(f"{name}.") for block in first.blocks)
                for leaf, _ in module.named_parameters(recurse=False)
            ),
            output_lengths=first.output_lengths,
        )

    def _infer_output_dims(self) -> Iterator[tuple[str, Any]]:
        for module, output in self._trial_runs[0].outside_outputs.items():
            shapes = [
                trial.outside_outputs[module].shape for trial in self._trial_runs if module in trial.outside_outputs
            ]
            # Only modules that run before a block matter, and not all shapes can be predicted.
            if len(shapes) == len(TRIAL_SHAPES):
                try:
                    yield module, (infer_dims(shapes, TRIAL_SHAPES), output.dtype)
                except ModelError:
                    continue

    def run_with_router_logits(self) -> Any:
        """Return the outputs of the full model for a few tokens, (2, 16), with the logits of its routers."""
        with eval_mode(self._model):
            return self._model(**self._trial_runs[0].batch, **enable_router_logits(self._options))

    def partition_at(self, starts: Sequence[int]) -> ModelPartition:
        """Return the partition with its boundary tensors.

        `starts` are the indices of the first blocks of all stages but the first, ascending."""
        with self._trial_context():
            cut = replace(
                self.partition,
                boundary_tensors={start: (self._build_boundary_tensor(start, HIDDEN_STATES_PATH),) for start in starts},
            )
            error = self._find_error(cut)
            if error is None:
                return cut
            early = [name for name, positions in self.partition.outside_modules.items() if positions == {0}]
            for names in ([], [name for name in early if name in self.partition.outside_outputs]):
                found = self._add_boundary_tensors(cut, names)
                if found is not None:
                    return found
            raise error

    def _add_boundary_tensors(self, cut: ModelPartition, early: Sequence[str]) -> ModelPartition | None:
        """Return the partition with further boundary tensors; None if the logits still differ.

        `early` are modules before the first block whose outputs may cross."""
        found = self._add_differing_arguments(cut, early)
        if found is None:
            return None
        for name in early:
            fewer = [each for each in early if each != name]
            less = self._add_differing_arguments(cut, fewer)
            if less is not None:
                found, early = less, fewer
        for start, crossings in found.boundary_tensors.items():
            for each in crossings:
                if each.source and not isinstance(each.source, str):
                    rest = tuple(other for other in found.boundary_tensors[start] if other != each)
                    less = replace(found, boundary_tensors={**found.boundary_tensors, start: rest})
                    found = less if self._find_error(less) is None else found
        return found

    def _add_differing_arguments(self, cut: ModelPartition, early: Sequence[str]) -> ModelPartition | None:
        """Return the partition with all differing arguments as boundary tensors; None if that is not enough."""
        crossings = {}
        for start, hidden in cut.boundary_tensors.items():
            modules = tuple(self._build_boundary_tensor(start, name) for name in early)
            alone = replace(cut, boundary_tensors={start: (*hidden, *modules)}, writes_in_place=True)
            try:
                differing = [
                    self._build_boundary_tensor(start, path) for path in self._find_differing_arguments(alone, start)
                ]
            except ModelError:
                return None
            crossings[start] = (*hidden, *differing, *modules)
        complete = replace(cut, boundary_tensors=crossings, writes_in_place=True)
        return complete if self._find_error(complete) is None else None

    def _build_boundary_tensor(self, start: int, source: TensorPath | str) -> BoundaryTensor:
        tensors = [trial.get_boundary_tensor(start, source) for trial in self._trial_runs]
        return BoundaryTensor(source, infer_dims([each.shape for each in tensors], TRIAL_SHAPES), tensors[0].dtype)

    def _find_differing_arguments(self, cut: ModelPartition, start: int) -> list[TensorPath]:
        """Return the arguments of a block that differ from the full run if the model starts at this block."""
        trial, stage = self._trial_runs[0], range(start, len(cut.blocks))
        boundary = cut.build_boundary(stage)
        seen: list[dict[TensorPath, Tensor]] = []

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            seen.append(clone_tensor_arguments(args, kwargs))

        with temporary_stage(self._model, cut, stage, boundary):
            first = self._model.get_submodule(cut.blocks[start])
            hook = first.register_forward_pre_hook(note, prepend=True, with_kwargs=True)
            boundary.begin_forward(
                trial.batch, [trial.get_boundary_tensor(start, each.source) for each in boundary.inputs]
            )
            try:
                trial.run()
            except Exception as error:
                # The arguments are recorded before missing tensors cause an error.
                if not seen:
                    raise ModelError(format_exception(error)) from error
            finally:
                hook.remove()
                boundary.end_forward()

        def differs(path: TensorPath, tensor: Tensor) -> bool:
            found = seen[0].get(path)
            return found is None or found.dtype != tensor.dtype or not torch.equal(found, tensor)

        return [path for path, tensor in trial.block_inputs[start].items() if path and differs(path, tensor)]

    def _find_error(self, cut: ModelPartition) -> ModelError | None:
        """Return the error of a chain of stages that fails or has other logits than the full model, or None."""
        trial = self._trial_runs[0]
        received: Any = ()
        for start, stop in pairwise([0, *cut.boundary_tensors, len(cut.blocks)]):
            stage = range(start, stop)
            boundary = cut.build_boundary(stage)
            try:
                with temporary_stage(self._model, cut, stage, boundary):
                    boundary.begin_forward(trial.batch, received)
                    forward = trial.run if stop == len(cut.blocks) else stop_at_stage_end(trial.run)
                    received = forward()
            except Exception as error:
                at = cut.blocks[start or stop % len(cut.blocks)]
                failed = ModelError(f"it fails when cut before {at} ({format_exception(error)}).")
                failed.__cause__ = error
                return failed
            finally:
                boundary.end_forward()
        if not torch.equal(received, trial.logits):
            return ModelError(
                f"its logits change when cut before {' and '.join(cut.blocks[start] for start in cut.boundary_tensors)}"
                ", so it passes on more tensors than go through its blocks."
            )
        return None
