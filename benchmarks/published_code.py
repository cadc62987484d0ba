"""What the code of published runs does otherwise than this project's, where it changes what is held or computed.

A plan is of the code that runs. So that plans of others' runs are of what those ran, jobs of torchtitan are traced with
its choices in the places of ours, as they stood at the date of the run:

- Recomputation "per op" holds the first, third, ... product of a block, attention, and what is reduced and scattered.
- Root-mean-square norms are one kernel in early runs, and several operators later.
- The loss is taken of logits in bfloat16 in early runs, and in float32 later; of logits whose entries ranks share, by
  DTensor's loss_parallel; from 2025 on it is compiled where blocks are.

Megatron-LM's models have learned positions and dropout where its arguments do not say otherwise, its loss is computed
in place, and its sequence parallelism gathers again in backward. Automodel takes the loss of logits in bfloat16.

Source: pytorch/torchtitan, parallelize_llama.py and train.py at 0413364 (2024-05), 9dec370 (2024-12) and 820504e
(2025-06); torch/distributed/tensor/parallel/loss.py; NVIDIA/Megatron-LM@d98e8a6, tests/functional_tests/test_cases;
NVIDIA-NeMo/Automodel@36044ad.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from published_automodel import is_automodel
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright._compat.torch import is_attention
from meshwright.model.forward_order import WrapOrder, wrap_forward
from meshwright.parallel.tensor.collectives import Gather
from meshwright.parallel.tensor.sequence_parallel import ResidualStream
from meshwright.step.chunked_loss import HiddenRows

IGNORED = -100
LAYERS_APART = 2
"""Of "selective layer" recomputation, every so many-th block; the published rows do not tell the number."""


@dataclass(frozen=True)
class Code:
    """Torchtitan at a date.

    Attributes:
        one_kernel_norms: else several operators.
        wide_loss: whether logits are made float32.
        compiles_loss: where blocks are compiled.
        fused_optimizer: else one operator for each step of AdamW.
    """

    one_kernel_norms: bool = False
    wide_loss: bool = True
    compiles_loss: bool = False
    fused_optimizer: bool = False


AT_FIRST = Code(one_kernel_norms=True, wide_loss=False)
LATE_2024 = Code()
FROM_2025 = Code(compiles_loss=True, fused_optimizer=True)


def code_of(row: Mapping[str, Any]) -> Code:
    """Which code a row of torchtitan ran, by its source."""
    source = str(row.get("source", ""))
    if "@0413364" in source:
        return AT_FIRST
    return LATE_2024 if "202412" in source or "2024" in source else FROM_2025


class _Positioned(nn.Embedding):
    """Learned positions beside entries."""

    def forward(self, ids_BS: Tensor) -> Tensor:
        hidden: Tensor = super().forward(ids_BS) + self.positions.weight[: ids_BS.shape[1]]  # type: ignore[operator]
        return hidden


class _Dropping(nn.Linear):
    """With dropout behind it, whose mask has a byte for each entry, as on a GPU."""

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.native_dropout(super().forward(hidden), 0.1, True)[0]


def as_megatron(model: nn.Module, row: Mapping[str, Any]) -> nn.Module:
    """A model with learned positions, where a row of Megatron-LM has them, and its dropout; in place."""
    args = row["args"]
    if args.get("position-embedding-type", "learned_absolute") == "learned_absolute":
        tokens: nn.Module = model.model.embed_tokens  # type: ignore[union-attr, assignment]
        with torch.device("meta"):
            tokens.positions = nn.Embedding(row["seq"], args["hidden-size"], dtype=torch.bfloat16)
        tokens.__class__ = _Positioned
    if drops_out(row):
        for block in model.model.layers:  # type: ignore[union-attr]
            for module in (block.self_attn.o_proj, block.mlp.c_proj):  # type: ignore[union-attr]
                module.__class__ = _Dropping
    return model


def drops_out(row: Mapping[str, Any]) -> bool:
    """Whether a run of Megatron-LM has dropout of hidden states: its default of 0.1 holds where its file has none."""
    return row["model"].startswith("gpt3_7b")


@contextmanager
def running(row: Mapping[str, Any]) -> Iterator[None]:
    """Their choices in the places of ours."""
    if is_automodel(row) or "args" in row:
        loss = _narrow_loss if is_automodel(row) else _in_place_loss
        with ExitStack() as stack:
            stack.enter_context(mock.patch("meshwright.manager.chunked_cross_entropy.sum_target_loss", loss))
            if "args" in row:
                stack.enter_context(
                    mock.patch("meshwright.manager.chunked_cross_entropy.compute_token_loss", _loss_of_rows(_InPlace))
                )
                stack.enter_context(
                    mock.patch.object(ResidualStream, "run_region", _gathering_again(ResidualStream.run_region))
                )
            yield
        return
    code, with_tp = code_of(row), row["layout"]["tp"] > 1
    is_compiled = code.compiles_loss and bool(row.get("compile"))
    with ExitStack() as stack:
        put = {"meshwright.model.recompute._make_selective_contexts": _per_op}
        if with_tp:
            put["meshwright.manager.chunked_cross_entropy.compute_token_loss"] = _loss_of_rows(
                _Fused if is_compiled else _LossParallel
            )
        elif is_compiled or not code.wide_loss:
            put["meshwright.manager.chunked_cross_entropy.sum_target_loss"] = (
                _fused_loss if is_compiled else _narrow_loss
            )
        for name, value in put.items():
            stack.enter_context(mock.patch(name, value))
        yield


def as_theirs(model: nn.Module, row: Mapping[str, Any]) -> nn.Module:
    """A model, with what its modules do otherwise; in place."""
    if code_of(row).one_kernel_norms:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                wrap_forward(module, WrapOrder.STAGE, lambda _, module=module: _one_kernel(module))
    if str(row["activation_checkpointing"]).startswith("selective_layer"):
        for block in list(model.model.layers)[LAYERS_APART - 1 :: LAYERS_APART]:  # type: ignore[union-attr, arg-type]
            wrap_forward(block, WrapOrder.RECOMPUTED, _recomputed)
    return model


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _one_kernel(module: nn.Module) -> Callable[[Tensor], Tensor]:
    # The norm of layers reads, writes and holds as much, and is one operator on every device.
    return lambda hidden: F.layer_norm(hidden, hidden.shape[-1:], module.weight)  # type: ignore[arg-type]


def _per_op() -> Any:
    counts: Counter[bool] = Counter()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(op)
        is_product = name == "aten.mm.default"
        counts[context.is_recompute] += is_product
        if is_attention(op) or "reduce_scatter" in name or (is_product and counts[context.is_recompute] % 2):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


# -- sequence parallelism


@dataclass
class _Whole:
    """A sequence that was gathered of parts, and is held as this rank's part."""

    part: Tensor
    uses: int = 0
    again: Tensor | None = None


def _gathering_again(run_region: Callable[..., Any]) -> Callable[..., Any]:
    """As Megatron's: layers hold this rank's part of what was gathered for them, and gather it again in backward."""

    def run(stream: Any, *args: Any) -> Any:
        wholes: dict[int, _Whole] = {}
        gathered = stream._gather

        def noted(part: Tensor) -> Tensor:
            whole: Tensor = gathered(part)
            wholes[whole.untyped_storage()._cdata] = _Whole(part.detach())
            return whole

        def pack(tensor: Tensor) -> Any:
            known = wholes.get(tensor.untyped_storage()._cdata)
            if known is None or tensor.numel() < known.part.numel() * stream._size:
                return tensor
            known.uses += 1
            return known, tensor.shape

        def unpack(held: Any) -> Tensor:
            if isinstance(held, Tensor):
                return held
            known, shape = held
            if known.again is None:
                known.again = Gather.apply(known.part, 1, known.part.shape[1] * stream._size, stream._group)
            found: Tensor = known.again.view(shape)
            known.uses -= 1
            known.again = known.again if known.uses else None
            return found

        stream._gather = noted
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return run_region(stream, *args)
        finally:
            del stream._gather

    return run


# -- losses; shapes: N rows, L entries of the vocabulary on this rank


def _narrow_loss(logits_BSL: Tensor, targets_BS: Tensor) -> Tensor:
    return F.cross_entropy(logits_BSL.flatten(0, 1), targets_BS.flatten(), ignore_index=IGNORED, reduction="sum")


def _fused_loss(logits_BSL: Tensor, targets_BS: Tensor) -> Tensor:
    loss: Tensor = _Fused.apply(logits_BSL.flatten(0, 1), targets_BS.flatten())
    return loss


def _in_place_loss(logits_BSL: Tensor, targets_BS: Tensor) -> Tensor:
    loss: Tensor = _InPlace.apply(logits_BSL.flatten(0, 1), targets_BS.flatten())
    return loss


def _loss_of_rows(loss: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    def taken(rows: HiddenRows, targets_N: Tensor, num_tokens: Tensor, **_: Any) -> Tensor:
        logits_NL = rows.projection.compute_logits(rows.hidden_NH, rows.tensors)
        found: Tensor = loss.apply(logits_NL, targets_N) / num_tokens
        return found

    return taken


class _Fused(torch.autograd.Function):
    """As a compiler makes it: logits are held in their dtype, and one kernel gives their gradient in it."""

    @staticmethod
    def forward(ctx: Any, logits_NL: Tensor, targets_N: Tensor) -> Tensor:
        ctx.save_for_backward(logits_NL)
        return logits_NL.amax(-1).float().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (logits_NL,) = ctx.saved_tensors
        return torch.mul(logits_NL, 1.0), None


class _LossParallel(torch.autograd.Function):
    """The operators of loss_parallel's log-softmax and its gradient, in float32; what ranks exchange is left out."""

    @staticmethod
    def forward(ctx: Any, logits_NL: Tensor, targets_N: Tensor) -> Tensor:
        wide_NL = logits_NL.float()
        shifted_NL = wide_NL - wide_NL.amax(-1, keepdim=True)
        found_NL = shifted_NL - torch.exp(shifted_NL).sum(-1, keepdim=True).log()
        ctx.save_for_backward(found_NL)
        ctx.dtype = logits_NL.dtype
        return found_NL.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (found_NL,) = ctx.saved_tensors
        chosen_NL = torch.zeros_like(found_NL)
        return ((chosen_NL + torch.exp(found_NL)) * gradient).to(ctx.dtype), None


class _InPlace(torch.autograd.Function):
    """Megatron's vocab_parallel_cross_entropy: softmax and gradient lie where logits have been, in float32."""

    @staticmethod
    def forward(ctx: Any, logits_NL: Tensor, targets_N: Tensor) -> Tensor:
        wide_NL = logits_NL.float()
        wide_NL.sub_(wide_NL.amax(-1, keepdim=True)).exp_()
        wide_NL.div_(wide_NL.sum(-1, keepdim=True))
        ctx.save_for_backward(wide_NL)
        ctx.dtype = logits_NL.dtype
        return wide_NL.sum(-1).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (wide_NL,) = ctx.saved_tensors
        return wide_NL.mul_(gradient).to(ctx.dtype), None
