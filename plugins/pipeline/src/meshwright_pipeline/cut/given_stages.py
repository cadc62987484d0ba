"""Stages that the user has made: how they are called, and that they can be. Nothing of them is changed.

[Note: given stages] With patch_inner_model=false and patch_causal_lm_model=false each rank gives `parallelize` its own
stage, which is trained as it is. The first is called as `stage(input_ids=..., ...)`, the others as
`stage(inputs_embeds=hidden, ...)`, with what else the batch holds besides labels. All but the last return hidden
states, one tensor of floating point; the last returns an object with `logits`, (B, S, V). Names of parameters differ
from stage to stage, as the parts of one model have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.base.errors import ModelError
from meshwright.base.types import Batch
from meshwright.mesh.mesh import Mesh

from .boundary import Boundary, Crossing, dims_of
from .trial_runs import TRIALS, evaluating, trial_batch

Shapes = list[tuple[tuple[int, ...], torch.dtype]]
"""Of hidden states, in each trial run."""


def with_hidden(batch: Batch, hidden: Tensor) -> dict[str, Tensor]:
    """The batch as a stage that is not the first gets it: with hidden states (B, S, ...) in the place of tokens."""
    return {name: tensor for name, tensor in batch.items() if name != "input_ids"} | {"inputs_embeds": hidden}


def try_stages(model: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Boundary:
    """Run the stages of all ranks one after the other on a few tokens. Collective, once.

    Args:
        model: this rank's stage.
        mesh: of all ranks.
        options: what its forward is called with besides the batch.

    Returns:
        What crosses this stage's boundaries.

    Raises:
        ModelError: a stage cannot be called as it must be, or does not return what it must; on all ranks.
    """
    mine, last = mesh.axis_rank("pp"), mesh.degrees.pp - 1
    entering: Shapes = []
    boundary = Boundary()
    for rank in range(last + 1):
        leaving: Shapes = []
        error = None
        if rank == mine:
            try:
                leaving = _run(model, options, entering, is_first=rank == 0, is_last=rank == last)
                boundary = Boundary(_crossings(entering), _crossings(leaving))
            except ModelError as caught:
                error = ModelError(f"stage {rank} of the pipeline, given with patch_inner_model=false: {caught}")
        mesh.world.raise_together(error)
        box = [leaving]
        dist.broadcast_object_list(box, group=mesh.group("pp"), group_src=rank)
        (entering,) = box
    return boundary


def _crossings(shapes: Shapes) -> list[Crossing]:
    return [Crossing((), dims_of([shape for shape, _ in shapes], TRIALS), shapes[0][1])] if shapes else []


def _run(model: nn.Module, options: Mapping[str, Any], entering: Shapes, *, is_first: bool, is_last: bool) -> Shapes:
    device = next(model.parameters()).device
    found: Shapes = []
    for index, (count, length) in enumerate(TRIALS):
        batch = trial_batch(model, count, length)
        if not is_first:
            shape, dtype = entering[index]
            batch = with_hidden(batch, torch.zeros(shape, dtype=dtype, device=device))
        try:
            with evaluating(model):
                output = model(**batch, **options)
        except Exception as error:
            text = f"it cannot be called with {', '.join(batch)} ({type(error).__name__}: {error})."
            raise ModelError(text) from error
        if is_last:
            logits = getattr(output, "logits", None)
            if not isinstance(logits, Tensor) or tuple(logits.shape[:2]) != (count, length) or logits.dim() != 3:
                raise ModelError(f"the last must return an object with logits (B, S, V), not {_described(output)}.")
        elif not (isinstance(output, Tensor) and output.is_floating_point()):
            raise ModelError(f"it must return hidden states, one tensor of floating point, not {_described(output)}.")
        else:
            found.append((tuple(output.shape), output.dtype))
    return found


def _described(output: Any) -> str:
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    shape = f" of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else ""
    return f"{type(output).__name__}{shape}"
