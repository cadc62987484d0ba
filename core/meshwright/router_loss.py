"""The auxiliary loss that balances routers, with statistics of all ranks.

Shapes: T tokens of a microbatch on this rank, E experts, K of which each token takes.

[Note: the router loss] Of one microbatch it is E x sum over experts of f x p, where f is the part of all choices that
an expert gets, times K, and p its mean probability, both over all tokens and layers. That is no sum over tokens: means
of ranks' losses would be another loss. So the microbatches with the same index on all ranks count as one, f and the
number of tokens are summed over ranks, and each rank adds its tokens' share of p: the shares sum to the loss of one
process that sees all these tokens. A step adds the mean over its microbatches, times `router_aux_loss_coef`.
Source: Fedus et al. 2021, arXiv:2101.03961, equations (4) to (6), as transformers computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import ModelError


class RouterLoss:
    """The router loss of one model, whose configuration has output_router_logits=True.

    Args:
        config: of the model.

    Raises:
        ModelError: it lacks the loss's coefficient, or the number of experts of a token.
    """

    def __init__(self, config: Any) -> None:
        text = config.get_text_config()
        coefficient, choices = getattr(text, "router_aux_loss_coef", None), getattr(text, "num_experts_per_tok", None)
        if coefficient is None or choices is None:
            raise ModelError(
                f"config.output_router_logits=True asks for a router loss, but the {text.model_type} configuration has "
                f"no router_aux_loss_coef and num_experts_per_tok. Set it to False to train on the token loss alone."
            )
        self._coefficient, self._choices = float(coefficient), int(choices)

    def share(self, outputs: Any, mask: Tensor | None, *, group: dist.ProcessGroup, microbatches: int) -> Tensor:
        """This rank's share of a microbatch's part of the loss, scalar. Collective.

        Args:
            outputs: of the model's forward.
            mask: its attention mask, where it has one.
            group: the ranks that see different tokens.
            microbatches: of the step.
        """
        chosen_E, probable_E, tokens = self._sums(outputs.router_logits, mask)
        every = torch.cat([chosen_E, tokens[None]])
        dist.all_reduce(every, group=group)
        return self._loss(every[:-1], probable_E, every[-1]) * (self._coefficient / microbatches)

    def check(self, outputs: Any, mask: Tensor | None) -> None:
        """Refuse a model whose own router loss is another. No communication.

        Raises:
            ModelError: tells both values.
        """
        own = getattr(outputs, "aux_loss", None)
        logits = getattr(outputs, "router_logits", None)
        if not isinstance(own, Tensor) or not isinstance(logits, tuple) or not all(each.dim() == 2 for each in logits):
            raise ModelError(
                "config.output_router_logits=True, but the model does not return the logits of its routers, (T, E) for "
                "each layer, and a router loss. Set it to False to train on the token loss alone."
            )
        chosen_E, probable_E, tokens = self._sums(logits, mask)
        if not tokens:
            # The model divides by their number.
            return
        mine, theirs = self._loss(chosen_E, probable_E, tokens).item(), own.item()
        if not abs(mine - theirs) <= 1e-3 * abs(theirs):
            raise ModelError(
                f"config.output_router_logits=True: the model's router loss is {theirs:.6g}, where [Note: the router "
                f"loss] gives {mine:.6g}, so its statistics over ranks are not known. Set it to False to train on the "
                f"token loss alone."
            )

    def _sums(self, logits: Sequence[Tensor], mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Choices and summed probabilities of each expert, (E,), and the number of tokens, over all layers."""
        dtype = torch.promote_types(logits[0].dtype, torch.float32)
        weights_T = logits[0].new_ones(logits[0].shape[0], dtype=dtype) if mask is None else mask.flatten().to(dtype)
        chosen_E = probable_E = tokens = weights_T.new_zeros(())
        for logits_TE in logits:
            probabilities_TE = logits_TE.softmax(-1)
            _, index_TK = probabilities_TE.topk(self._choices, dim=-1)
            choices_TE = torch.zeros_like(probabilities_TE, dtype=dtype).scatter_(1, index_TK, 1.0)
            chosen_E = chosen_E + weights_T @ choices_TE
            probable_E = probable_E + weights_T @ probabilities_TE.to(dtype)
            tokens = tokens + weights_T.sum()
        return chosen_E, probable_E, tokens

    def _loss(self, chosen_E: Tensor, probable_E: Tensor, tokens: Tensor) -> Tensor:
        # Ranks without any token have none to divide by.
        tokens = tokens.clamp(min=1.0)
        return (chosen_E / tokens * (probable_E / tokens)).sum() * chosen_E.shape[0]
