"""Expert parallelism for any model with stacked experts: each rank of `ep` has some of the experts, all of each.

Parameters of experts become DTensors, sharded along their first dim on the axis `ep` of the expert mesh; the strategy
shards them further over `ep_shard`. Tokens are dispatched around the forward of the experts' modules, which is the
model's own, on this rank's experts. A rank computes its experts' tokens of all ranks along `ep`, so gradients are sums
over `ep` already; those over `ep_shard` and `dp_replicate` are the strategy's.

Counts are exchanged before rows, so nothing is padded or dropped, and a rank without rows takes part all the same. Rows
are sorted by expert; routing weights stay with the sender, since experts multiply by them last.

Shapes: T tokens on this rank, K experts of each, D features, E experts in all, L = E / ep of them on this rank. A row
is a token on its way to one of its experts: (D,).
Source: Lepikhin et al. 2020, arXiv:2006.16668, section 3; without capacity, as Gale et al. 2022, arXiv:2211.15841.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from ..._compat.peft import with_low_rank, wrappers_of_parameters
from ..._compat.torch import all_to_all, own_parameters
from ...base.errors import ModelError
from ...mesh.mesh import Mesh
from ...model.forward_order import Layer
from ...step.axis import Axis
from ...tensors.ops import on_host
from .. import Forward, wrap_forward
from ..tensor.collectives import Gather, Split
from ..tensor.local_parameters import Division, LocalParameters
from .find import Experts, argument_names, find_experts


class ExpertParallel(Axis):
    """The expert parallelism of one model, or of a pipeline stage of it, which may have no experts.

    Args:
        model: before any sharding; `check_expert_parallel` has accepted it.
        mesh: whose `ep` has more than one rank.

    Attributes:
        names: of the modules of experts.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._model = model
        self._experts = find_experts(model)
        self.names = tuple(each.name for each in self._experts)
        self.mesh = mesh.expert_mesh["ep"]
        self.size = self.mesh.size()
        self._group = self.mesh.get_group()
        # The ranks of tp have the same tokens.
        self._tp_group = mesh.group("tp") if mesh.degrees.tp > 1 else None
        self._local: list[LocalParameters] = []
        self._active = True

    def apply(self) -> None:
        """Shard the parameters in place and dispatch tokens around the modules. No communication."""
        for each in self._experts:
            module = self._model.get_submodule(each.name)
            parameters = LocalParameters(module, self.mesh)
            named = module.named_parameters(recurse=False)
            parameters.distribute({name: Division(self.mesh, Shard(0), p.shape) for name, p in named}, {})
            self._local.append(parameters)
            adapters = wrappers_of_parameters(self._model, module)
            self._wrap(module, each, parameters, adapters)
            for adapter in adapters:
                # What an adapter adds is added to this rank's experts instead.
                run = functools.partial(_call_base, adapter)
                wrap_forward(adapter, Layer.EXPERTS, run, lambda: self._active)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Put all experts into the modules, which then compute without communication. Collective.

        For parameters that a strategy has gathered over its own axes.
        """
        with ExitStack() as stack:
            for parameters in self._local:
                stack.enter_context(parameters.whole())
            self._active = False
            try:
                yield
            finally:
                self._active = True

    def _wrap(
        self, module: nn.Module, experts: Experts, parameters: LocalParameters, adapters: Sequence[nn.Module]
    ) -> None:
        slots, names = parameters.take(module), argument_names(module)
        count = experts.count // self.size
        first = self.mesh.get_local_rank() * count

        def run(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            with parameters.inside(slots), _of_rank(module, adapters, first, count):
                return self._run(experts, forward, *(given[name] for name in names))

        wrap_forward(module, Layer.EXPERTS, run, lambda: self._active)

    def _run(self, experts: Experts, forward: Any, hidden: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        hidden_TD = hidden.reshape(-1, hidden.shape[-1])
        _check_shapes(experts, hidden_TD, index_TK, weights_TK)
        tokens, group = hidden_TD.shape[0], self._tp_group
        if group is not None:
            hidden_TD, index_TK, weights_TK = (
                Split.apply(each, 0, group) for each in (hidden_TD, index_TK, weights_TK)
            )
        output = dispatched(forward, hidden_TD, index_TK, weights_TK, count=experts.count, group=self._group)
        if group is not None:
            output = Gather.apply(output, 0, tokens, group)
        # No view where it can be avoided: hooks of sharding do not see what is written into one.
        return output if output.shape == hidden.shape else output.view(hidden.shape)


def _call_base(adapter: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    return adapter.base_layer(*args, **kwargs)


@contextmanager
def _of_rank(module: nn.Module, adapters: Sequence[nn.Module], first: int, count: int) -> Iterator[None]:
    """Make a module hold `count` experts from `first` on, with what adapters add to their parameters.

    Adapters are replicated; a rank's gradients of them are those of its experts and all tokens of these, so that the
    sum over ranks is the full gradient.
    """
    own, whole = own_parameters(module), module.num_experts
    before = dict(own)
    try:
        for adapter in adapters:
            name = adapter.parameter_name
            own[name] = with_low_rank(adapter, own[name], first)
        module.num_experts = count
        yield
    finally:
        module.num_experts = whole
        own.update(before)


def _check_shapes(experts: Experts, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> None:
    """Raise ModelError, on all ranks alike and before anything is sent, if these are no arguments of experts."""
    fits = index_TK.dim() == 2 and index_TK.shape == weights_TK.shape and index_TK.shape[0] == hidden_TD.shape[0]
    if not fits or index_TK.is_floating_point():
        raise ModelError(
            f"{experts.name} is given hidden states of shape {tuple(hidden_TD.shape)}, indices {tuple(index_TK.shape)} "
            f"and weights {tuple(weights_TK.shape)}, not (T, D), (T, K) and (T, K). Use ep_size=1."
        )


class Exchange(torch.autograd.Function):
    """Send `sends[r]` rows to each rank r and receive `receives[r]`; (sum of sends, D) to (sum of receives, D)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        return all_to_all(rows, group, sends, receives)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grad, ctx.group, ctx.receives, ctx.sends), None, None, None


def dispatched(
    experts: Forward, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor, *, count: int, group: dist.ProcessGroup
) -> Tensor:
    """Compute `count` experts, shared by the ranks of `group`, on this rank's tokens.

    Args:
        experts: forward of this rank's experts: rows (R, D), index (R, 1) below L, weights (R, 1) to rows (R, D).
        index_TK: int64; entries outside of [0, count) are no expert and add nothing.

    Returns:
        (T, D), in the dtype of the hidden states.
    """
    tokens, choices = index_TK.shape
    ranks = dist.get_world_size(group)
    # What is no expert comes last.
    ids = torch.where((index_TK >= 0) & (index_TK < count), index_TK, count).flatten()
    order = torch.argsort(ids, stable=True)
    # Not `bincount`, which waits for the device.
    sent_E = ids.new_zeros(count + 1).scatter_add_(0, ids, torch.ones_like(ids))[:count]
    sent_RL = sent_E.view(ranks, count // ranks)
    received_RL = all_to_all(sent_RL, group)
    # The one synchronization of a layer: messages need their lengths on the host.
    sends, receives = on_host(torch.stack([sent_RL.sum(1), received_RL.sum(1)])).tolist()
    order = order[: sum(sends)]

    rows: Tensor = Exchange.apply(hidden_TD[order // choices], sends, receives, group)
    local = torch.arange(count // ranks, device=ids.device).repeat(ranks)
    local = local.repeat_interleave(received_RL.flatten(), output_size=sum(receives))
    back = Exchange.apply(_computed(experts, rows, local), receives, sends, group)

    placed = back.new_zeros(tokens * choices, back.shape[1]).index_copy(0, order, back)
    weighted = placed.view(tokens, choices, -1) * weights_TK[..., None]
    return weighted.sum(1).to(hidden_TD.dtype)


def _computed(experts: Forward, rows: Tensor, local: Tensor) -> Tensor:
    """Compute the experts on rows, with weights of one."""
    if rows.shape[0]:
        return experts(rows, local[:, None], rows.new_ones(rows.shape[0], 1))
    # A row of which nothing remains: parameters get zero gradients, as unused experts do under `single`, and backward
    # reaches the exchanges.
    row = rows.sum(0, keepdim=True)
    return experts(row, local.new_zeros(1, 1), row.new_ones(1, 1))[:0]
