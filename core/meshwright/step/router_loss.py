"""The auxiliary load-balancing loss of routers, with statistics over all ranks.

Shapes: T tokens of a microbatch on this rank, E experts, of which each token is routed to K.

[Note: the router loss] For one microbatch, the loss is E x sum over experts of f x p. f is an expert's fraction of all
choices, times K; p is its mean probability; both are over all tokens and layers. Microbatches with the same index on
all ranks count as one: f and the number of tokens are summed over ranks, and each rank adds its tokens' share of p. A
step adds the mean over its microbatches, times `router_aux_loss_coef`. Source: Fedus et al. 2021, arXiv:2101.03961,
equations (4) to (6), as transformers computes it.

[Note: recorded logits] A rank with only some positions or layers runs with output_router_logits=False, and forward
hooks record the outputs of its routers. Routers are found by running the model on a few tokens: they are the modules
that return the same tensor objects as the model's `router_logits`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..base.errors import ModelError
from ..tensors.ops import temporary_attribute


class RouterLoss:
    """The router loss of a model with output_router_logits=True."""

    def __init__(self, config: Any) -> None:
        text = config.get_text_config()
        coefficient, choices = getattr(text, "router_aux_loss_coef", None), getattr(text, "num_experts_per_tok", None)
        if coefficient is None or choices is None:
            raise ModelError(
                f"config.output_router_logits=True asks for a router loss, but the {text.model_type} configuration has "
                f"no router_aux_loss_coef and num_experts_per_tok. Set it to False to train on the token loss alone."
            )
        self._coefficient, self._num_experts_per_token = float(coefficient), int(choices)

    def compute_local_loss(self, statistics: Tensor, *, group: dist.ProcessGroup, num_microbatches: int) -> Tensor:
        """Return this rank's share of a microbatch's loss, scalar. Collective over ranks with different tokens."""
        chosen_E, probable_E, tokens = _unpack_statistics(statistics)
        totals = torch.cat([chosen_E, tokens[None]]).detach()
        dist.all_reduce(totals, group=group)
        return self._compute_loss(totals[:-1], probable_E, totals[-1]) * (self._coefficient / num_microbatches)

    def check(self, outputs: Any, mask: Tensor | None) -> None:
        """Raise ModelError if the model's own router loss differs from this one. No communication."""
        own = getattr(outputs, "aux_loss", None)
        logits = getattr(outputs, "router_logits", None)
        if not isinstance(own, Tensor) or not isinstance(logits, tuple) or not all(each.dim() == 2 for each in logits):
            raise ModelError(
                "config.output_router_logits=True, but the model does not return the logits of its routers, (T, E) for "
                "each layer, and a router loss. Set it to False to train on the token loss alone."
            )
        chosen_E, probable_E, tokens = _unpack_statistics(self.compute_statistics(logits, mask))
        if not tokens:
            # The model's own loss divides by 0.
            return
        expected, theirs = self._compute_loss(chosen_E, probable_E, tokens).item(), own.item()
        if not abs(expected - theirs) <= 1e-3 * abs(theirs):
            raise ModelError(
                f"config.output_router_logits=True: the model's router loss is {theirs:.6g}, where [Note: the router "
                f"loss] gives {expected:.6g}, so its statistics over ranks are not known. "
                f"Set it to False to train on the token loss alone."
            )

    def compute_statistics(self, logits: Sequence[Tensor], mask: Tensor | None) -> Tensor:
        """Return each expert's choices and probabilities and the number of unmasked tokens, over layers; (2 E + 1,)."""
        dtype = torch.promote_types(logits[0].dtype, torch.float32)
        weights_T = logits[0].new_ones(logits[0].shape[0], dtype=dtype) if mask is None else mask.flatten().to(dtype)
        chosen_E = probable_E = tokens = weights_T.new_zeros(())
        for logits_TE in logits:
            probabilities_TE = logits_TE.softmax(-1)
            _, index_TK = probabilities_TE.topk(self._num_experts_per_token, dim=-1)
            choices_TE = torch.zeros_like(probabilities_TE, dtype=dtype).scatter_(1, index_TK, 1.0)
            chosen_E = chosen_E + weights_T @ choices_TE
            probable_E = probable_E + weights_T @ probabilities_TE.to(dtype)
            tokens = tokens + weights_T.sum()
        return torch.cat([chosen_E, probable_E, tokens[None]])

    def _compute_loss(self, chosen_E: Tensor, probable_E: Tensor, tokens: Tensor) -> Tensor:
        # Avoid dividing by 0 on ranks without tokens.
        tokens = tokens.clamp(min=1.0)
        return (chosen_E / tokens * (probable_E / tokens)).sum() * chosen_E.shape[0]


def _unpack_statistics(sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return sums[: len(sums) // 2], sums[len(sums) // 2 : -1], sums[-1]


@dataclass(frozen=True)
class RouterModules:
    """The modules that route tokens.

    `logits_index`: for each module, the index of the logits in its output; None if they are the output.
    """

    logits_index: Mapping[str, int | None]
    num_experts: int

    def register_hooks(self, model: nn.Module) -> RouterLogitsRecorder:
        recorder = RouterLogitsRecorder()
        for name, module in model.named_modules():
            if name in self.logits_index:
                module.register_forward_hook(functools.partial(recorder.on_forward, self.logits_index[name]))
        return recorder


class RouterLogitsRecorder:
    """Record the logits of routers during a forward; see [Note: recorded logits]."""

    _current: list[Tensor] | None = None

    @contextmanager
    def record(self) -> Iterator[list[Tensor]]:
        """Yield the list to which the logits of one forward are appended. Recomputation in backward appends nothing."""
        logits: list[Tensor] = []
        with temporary_attribute(self, "_current", logits):
            yield logits

    def on_forward(self, index: int | None, module: nn.Module, args: Any, output: Any) -> None:
        if self._current is not None:
            self._current.append(output if index is None else output[index])


def find_routers(model: nn.Module, loss: RouterLoss, run: Callable[[], Any]) -> RouterModules:
    """Find the routers of a model. `run` runs it on a few unmasked tokens, with output_router_logits=True."""
    # Keep the tensors alive, so that no other tensor reuses their ids.
    outputs_by_id: dict[int, tuple[str, int | None, Tensor]] = {}

    def record(name: str, module: nn.Module, args: Any, output: Any) -> None:
        for index, tensor in enumerate(output) if isinstance(output, tuple) else [(None, output)]:
            if isinstance(tensor, Tensor) and tensor.dim() == 2:
                outputs_by_id.setdefault(id(tensor), (name, index, tensor))

    with ExitStack() as hooks, torch.no_grad():
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_hook(functools.partial(record, name)).remove)
        outputs = run()
    loss.check(outputs, None)
    logits = outputs.router_logits
    routers = [outputs_by_id[id(each)][:2] for each in logits if id(each) in outputs_by_id]
    if len(set(routers)) < len(logits):
        raise ModelError(
            "config.output_router_logits=True, but the logits of the routers are not what modules of the model return, "
            "one for each, so a rank that runs a part of it cannot tell them. Set it to False to train on the token "
            "loss alone, or pp_size=1 and cp_size=1."
        )
    return RouterModules(dict(routers), logits[0].shape[1])
