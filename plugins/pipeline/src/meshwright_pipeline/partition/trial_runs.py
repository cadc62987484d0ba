"""Trial runs of a full model or of user-supplied stages on a few tokens, and values for models on the meta device.

[Note: user stages] With patch_inner_model=false and patch_causal_lm_model=false each rank passes its own stage to
`parallelize`, which trains it without changes. The first stage is called as `stage(input_ids=..., ...)`, the others as
`stage(inputs_embeds=hidden, ...)`, with the other columns of the batch except labels. All stages but the last return
hidden states, one floating-point tensor; the last returns an object with `logits`, (B, S, V). Parameter names must be
unique over all stages, as in the full model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.plugin import (
    Batch,
    Mesh,
    MeshwrightError,
    ModelError,
    ModelLayout,
    Weights,
    has_meta_tensors,
    reset_rope_length,
    set_tensor,
)

from .boundary import BoundaryTensor, StageBoundary, TensorPath, find_hidden_states, infer_dims, iter_tensor_paths

TRIAL_SHAPES = ((2, 16), (3, 12), (1, 24))
"""Batch and length of the trial runs. Changes of shapes between them show how dims depend on both."""

HIDDEN_STATES_PATH: TensorPath = ()
"""Path that stands for the hidden states, whose position among the arguments differs between blocks."""


def build_trial_batch(model: nn.Module, batch: int, length: int) -> Batch:
    """Return `input_ids`, int64, (batch, length), on the model's device."""
    vocab = getattr(getattr(model, "config", None), "vocab_size", None) or 2
    ids = torch.arange(batch * length).view(batch, length) % max(1, vocab - 1)
    return {"input_ids": ids.to(next(model.parameters()).device)}


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Context with the model in evaluation mode and without gradients. The previous mode is restored."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), reset_rope_length(model):
            yield
    finally:
        model.train(training)


def format_exception(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def clone_tensor_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[TensorPath, Tensor]:
    """Return copies of all tensor arguments of a block, with the hidden states under `HIDDEN_STATES_PATH`."""
    hidden = find_hidden_states(args, kwargs)
    tensors = dict(iter_tensor_paths((args, kwargs)))
    # The block may receive the hidden states under several names.
    copies = {path for path, tensor in tensors.items() if tensor is tensors[hidden] and len(path) == len(hidden)}
    rest = {path: tensor.detach().clone() for path, tensor in tensors.items() if path not in copies}
    return {HIDDEN_STATES_PATH: tensors[hidden].detach().clone(), **rest}


class TrialRun:
    """Forward of a full model, with the recorded inputs and outputs of its modules."""

    def __init__(self, model: nn.Module, layout: ModelLayout, batch: Batch, options: Mapping[str, Any]) -> None:
        self.block_inputs: list[dict[TensorPath, Tensor]] = []
        """Arguments of each block, in execution order."""
        self.output_lengths: dict[str, int | None] = {}
        self.outside_positions: dict[str, set[int]] = {}
        self.outside_outputs: dict[str, Tensor] = {}
        self.batch = batch
        self.run: Callable[[], Tensor] = lambda: model(**batch, **options).logits
        blocks = {model.get_submodule(name): name for name in layout.blocks}
        with ExitStack() as hooks:
            for name, module in find_outside_modules(model, layout.blocks):
                self.outside_positions[name] = set()
                hook = functools.partial(self._record_outside, name)
                hooks.callback(module.register_forward_hook(hook).remove)
            for block, name in blocks.items():
                hooks.callback(block.register_forward_pre_hook(self._record_input, with_kwargs=True).remove)
                hook = functools.partial(self._record_output, name)
                hooks.callback(block.register_forward_hook(hook).remove)
            self.logits = self.run()
        self.blocks = tuple(self.output_lengths)
        if len(self.blocks) != len(self.block_inputs) or not self.blocks:
            raise ModelError(f"its {len(self.blocks)} blocks run {len(self.block_inputs)} times instead of once each.")
        for name, _ in find_outside_modules(model, self.blocks):
            # Modules of blocks that did not run, such as those of another modality.
            self.outside_positions.setdefault(name, self._find_idle_block_position(name, layout))

    @classmethod
    def run_checked(cls, model: nn.Module, layout: ModelLayout, batch: Batch, options: Mapping[str, Any]) -> TrialRun:
        try:
            return cls(model, layout, batch, options)
        except (MeshwrightError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            shape = tuple(batch["input_ids"].shape)
            raise ModelError(f"it fails with input_ids {shape} ({format_exception(error)}).") from error

    def _find_idle_block_position(self, module: str, layout: ModelLayout) -> set[int]:
        """Return the position of a block that did not run: after the last block of its stack that ran before it."""
        for stack in layout.stacks:
            index = next((i for i, block in enumerate(stack) if f"{module}.".startswith(f"{block}.")), None)
            ran = [self.blocks.index(block) + 1 for block in stack[:index] if block in self.blocks]
            if index is not None and ran:
                return {ran[-1]}
        return set()

    def get_boundary_tensor(self, start: int, source: TensorPath | str) -> Tensor:
        """Return a copy of the tensor that crosses the boundary before a block."""
        tensor = self.outside_outputs.get(source) if isinstance(source, str) else self.block_inputs[start].get(source)
        if tensor is None:
            raise ModelError("the tensors that cross a boundary depend on the batch.")
        return tensor.clone()

    def _record_outside(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.outside_positions[name].add(len(self.block_inputs))
        if isinstance(output, Tensor):
            self.outside_outputs.setdefault(name, output.detach().clone())

    def _record_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.block_inputs.append(clone_tensor_arguments(args, kwargs))

    def _record_output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.output_lengths[name] = len(output) if isinstance(output, tuple) else None


def find_outside_modules(model: nn.Module, blocks: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with parameters that neither are in a block nor contain one.

    A module with parameter lists or dicts is yielded with all that is inside it."""
    inside = tuple(f"{block}." for block in blocks)
    taken: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if not name or f"{name}.".startswith((*inside, *taken)) or any(b.startswith(f"{name}.") for b in blocks):
            continue
        reads = any(isinstance(each, nn.ParameterDict | nn.ParameterList) and len(each) for each in module.children())
        if reads or any(True for _ in module.parameters(recurse=False)):
            taken = (*taken, f"{name}.") if reads else taken
            yield name, module


# -- user-supplied stages

HiddenShapes = list[tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of the hidden states in each trial run."""


def with_inputs_embeds(batch: Batch, hidden: Tensor) -> dict[str, Tensor]:
    """Return the batch with hidden states (B, S, ...) instead of tokens, for all stages but the first."""
    return {name: tensor for name, tensor in batch.items() if name != "input_ids"} | {"inputs_embeds": hidden}


def probe_stages(model: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> StageBoundary:
    """Run the stages of all ranks in order on a few tokens, and return the boundary of this one. Collective, once."""
    mine, last = mesh.axis_rank("pp"), mesh.degrees.pp - 1
    entering: HiddenShapes = []
    boundary = StageBoundary()
    for rank in range(last + 1):
        leaving: HiddenShapes = []
        error = None
        if rank == mine:
            try:
                leaving = _probe_stage(model, options, entering, is_first=rank == 0, is_last=rank == last)
                boundary = StageBoundary(_build_boundary_tensors(entering), _build_boundary_tensors(leaving))
            except ModelError as caught:
                error = ModelError(f"stage {rank} of the pipeline, passed with patch_inner_model=false: {caught}")
        mesh.world.raise_on_all_ranks(error)
        box = [leaving]
        dist.broadcast_object_list(box, group=mesh.group("pp"), group_src=rank)
        (entering,) = box
    return boundary


def _build_boundary_tensors(hidden_shapes: HiddenShapes) -> list[BoundaryTensor]:
    return (
        [BoundaryTensor((), infer_dims([shape for shape, _ in hidden_shapes], TRIAL_SHAPES), hidden_shapes[0][1])]
        if hidden_shapes
        else []
    )


def _probe_stage(
    model: nn.Module, options: Mapping[str, Any], entering: HiddenShapes, *, is_first: bool, is_last: bool
) -> HiddenShapes:
    device = next(model.parameters()).device
    found: HiddenShapes = []
    for index, (count, length) in enumerate(TRIAL_SHAPES):
        batch = build_trial_batch(model, count, length)
        if not is_first:
            shape, dtype = entering[index]
            batch = with_inputs_embeds(batch, torch.zeros(shape, dtype=dtype, device=device))
        try:
            with eval_mode(model):
                output = model(**batch, **options)
        except Exception as error:
            text = f"it cannot be called with {', '.join(batch)} ({type(error).__name__}: {error})."
            raise ModelError(text) from error
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        described = type(output).__name__ + (f" of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else "")
        if is_last:
            shape = tuple(logits.shape) if isinstance(logits, Tensor) and logits is not output else ()
            if len(shape) != 3 or shape[:2] != (count, length):
                raise ModelError(f"the last stage must return an object with logits (B, S, V), not {described}.")
        elif not (isinstance(output, Tensor) and output.is_floating_point()):
            raise ModelError(f"it must return hidden states, one floating-point tensor, not {described}.")
        else:
            found.append((tuple(output.shape), output.dtype))
    return found


# -- models on the meta device

MAX_FULL_NUMEL = 1 << 16
"""Parameters with at most this many elements get full memory."""
MAX_KERNEL_WIDTH = 16
"""Parameters whose last dim is at most this get full memory too, since convolutions read their weights as if they were
contiguous, beyond the end of a row."""


@contextmanager
def temporary_weights(model: nn.Module, weights: Weights | None, device: torch.device) -> Iterator[None]:
    """Context in which a model on the meta device can run, with little memory. Does nothing if the model has values.

    Trial runs only test which tensors depend on which, so the values of parameters do not matter. Each parameter is a
    view of a short row of random numbers: element (i, j, ...) is number i + j + ... of the row. Buffers are read from
    `weights`, since a model may compute positions or masks from them.
    """
    if weights is None or not has_meta_tensors(model):
        yield
        return
    generator = torch.Generator().manual_seed(0)
    lent: dict[Tensor, Tensor] = {}
    for tensor in model.parameters():
        lent[tensor] = nn.Parameter(_draw_values(tensor, generator, device), tensor.requires_grad)
    for name, tensor in model.named_buffers():
        if not tensor.is_meta:
            lent[tensor] = tensor.to(device)
        elif name in weights:
            lent[tensor] = weights.read(name, [0] * tensor.dim(), tensor.shape).to(device, copy=True)
        else:
            lent[tensor] = torch.zeros_like(tensor, device=device)
    original = {value: tensor for tensor, value in lent.items()}
    try:
        _swap_tensors(model, lent)
        yield
    finally:
        _swap_tensors(model, original)


def _swap_tensors(model: nn.Module, others: dict[Tensor, Tensor]) -> None:
    parameters, buffers = (named(remove_duplicate=False) for named in (model.named_parameters, model.named_buffers))
    for name, tensor in [*parameters, *buffers]:
        if tensor in others:
            set_tensor(model, name, others[tensor])


def _draw_values(tensor: Tensor, generator: torch.Generator, device: torch.device) -> Tensor:
    """Return random values with the shape and dtype of a parameter, scaled so that activations keep their scale."""
    is_small = tensor.numel() <= MAX_FULL_NUMEL or tensor.shape[-1] <= MAX_KERNEL_WIDTH
    row = torch.randn(tensor.shape if is_small else (sum(tensor.shape),), generator=generator)
    row = row / tensor.shape[-1] ** 0.5 if tensor.dim() > 1 else 1 + 0.1 * row
    row = row.to(device, tensor.dtype)
    return row if is_small else row.as_strided(tensor.shape, (1,) * tensor.dim())
