"""Expert parallelism for any model with stacked experts: each rank of `ep` has a part of the experts, all of each.

Parameters of experts become DTensors, sharded along their first dim on the axis `ep` of the expert mesh, so that norms,
optimizers and state see them like any other; the strategy shards them further over `ep_shard`. Around the forward of
their modules tokens are dispatched; the forward itself is the model's own, on this rank's experts. Nothing else of the
model changes.

The rank that has an expert computes the tokens of all ranks along `ep`, so its gradients are sums over them already;
those over `ep_shard` and `dp_replicate` are the strategy's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from ..._compat.peft import with_low_rank, wrappers_of_parameters
from ..._compat.torch import own_parameters
from ...base.errors import ModelError
from ...mesh.mesh import Mesh
from ...model.forward_order import Layer, put_around
from ...step.axis import Axis
from ..tensor.collectives import Gather, Split
from ..tensor.division import Division
from ..tensor.local_parameters import LocalParameters
from .dispatch import dispatched
from .find import Experts, argument_names, find_experts


class ExpertParallel(Axis):
    """The expert parallelism of one model, or of a stage of it that may have no experts.

    Args:
        model: before any sharding; `check_expert_parallel` has accepted the whole of it.
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
        # Its ranks have the same tokens.
        self._tp_group = mesh.group("tp") if mesh.degrees.tp > 1 else None
        self._local: list[LocalParameters] = []
        self._active = True

    def apply(self) -> None:
        """Divide the parameters in place and dispatch tokens around the modules. No communication."""
        for each in self._experts:
            module = self._model.get_submodule(each.name)
            parameters = LocalParameters(module, self.mesh)
            named = module.named_parameters(recurse=False)
            parameters.distribute({name: Division(self.mesh, Shard(0), p.shape) for name, p in named}, {})
            self._local.append(parameters)
            adapters = wrappers_of_parameters(self._model, module)
            self._wrap(module, each, parameters, adapters)
            for adapter in adapters:
                self._pass_by(adapter)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """All experts in the modules, which then compute without communication.

        For parameters that a strategy has gathered over its own axes. Collective.
        """
        with ExitStack() as stack:
            for parameters in self._local:
                stack.enter_context(parameters.whole())
            self._active = False
            try:
                yield
            finally:
                self._active = True

    def _pass_by(self, adapter: nn.Module) -> None:
        """Let a wrapper of experts call them as they are: what it adds is added to this rank's experts."""

        def around(forward: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(forward)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                return adapter.base_layer(*args, **kwargs) if self._active else forward(*args, **kwargs)

            return wrapped

        put_around(adapter, Layer.EXPERTS, around)

    def _wrap(
        self, module: nn.Module, experts: Experts, parameters: LocalParameters, adapters: Sequence[nn.Module]
    ) -> None:
        slots, names = parameters.take(module), argument_names(module)
        first = self.mesh.get_local_rank() * (experts.count // self.size)

        def around(forward: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(forward)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                if not self._active:
                    return forward(*args, **kwargs)
                given = {**dict(zip(names, args, strict=False)), **kwargs}
                count = experts.count // self.size
                with parameters.inside(slots), _adapted(module, adapters, first), _counting(module, count):
                    return self._run(experts, forward, *(given[name] for name in names))

            return wrapped

        put_around(module, Layer.EXPERTS, around)

    def _run(self, experts: Experts, forward: Any, hidden: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        hidden_TD = hidden.reshape(-1, hidden.shape[-1])
        _check_shapes(experts, hidden_TD, index_TK, weights_TK)
        tokens = hidden_TD.shape[0]
        if self._tp_group is not None:
            hidden_TD, index_TK, weights_TK = (
                Split.apply(each, 0, self._tp_group) for each in (hidden_TD, index_TK, weights_TK)
            )
        output = dispatched(forward, hidden_TD, index_TK, weights_TK, count=experts.count, group=self._group)
        if self._tp_group is not None:
            output = _gathered(output, tokens, self._tp_group)
        # No view where it can be helped: hooks of sharding do not see what is written into one.
        return output if output.shape == hidden.shape else output.view(hidden.shape)


@contextmanager
def _adapted(module: nn.Module, adapters: Sequence[nn.Module], first: int) -> Iterator[None]:
    """The parameters of this rank's experts, from `first` on, with what adapters add.

    Adapters are whole on every rank, like what is outside of the experts; a rank's gradients of them are those of its
    experts and of all tokens that come to these, so the sum over ranks is that of all.
    """
    own = own_parameters(module)
    before = dict(own)
    try:
        for adapter in adapters:
            name = adapter.parameter_name
            own[name] = with_low_rank(adapter, own[name], first)
        yield
    finally:
        own.update(before)


@contextmanager
def _counting(module: nn.Module, count: int) -> Iterator[None]:
    """A module that has so many experts."""
    whole = module.num_experts
    module.num_experts = count
    try:
        yield
    finally:
        module.num_experts = whole


def _check_shapes(experts: Experts, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> None:
    """Refuse a forward that takes something else than experts do; on all ranks alike, before anything is sent.

    Raises:
        ModelError: names the shapes.
    """
    fits = index_TK.dim() == 2 and index_TK.shape == weights_TK.shape and index_TK.shape[0] == hidden_TD.shape[0]
    if not fits or index_TK.is_floating_point():
        raise ModelError(
            f"{experts.name} is given hidden states of shape {tuple(hidden_TD.shape)}, indices {tuple(index_TK.shape)} "
            f"and weights {tuple(weights_TK.shape)}, not (T, D), (T, K) and (T, K). Use ep_size=1."
        )


def _gathered(part: Tensor, tokens: int, group: dist.ProcessGroup) -> Tensor:
    whole: Tensor = Gather.apply(part, 0, tokens, group)
    return whole
