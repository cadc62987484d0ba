"""Expert parallelism for any model with stacked experts: each rank of `ep` holds a subset of the experts.

A strategy calls `ExpertParallel.apply` before it shards the model further. It then shards the modules of
`module_names` over the expert mesh ([Note: axis, dim, degree] in `meshwright.mesh.sizes`), and all other modules as
usual. `apply` turns the experts' parameters into DTensors, sharded along dim 0 over the axis `ep`; the strategy shards
them further over `ep_shard`. Token dispatch wraps the forward of the expert modules, which stays the model's own and
runs with this rank's experts. A rank's experts process the tokens of all ranks along `ep`, so their gradients are
already summed over `ep`. The strategy reduces them over `ep_shard` and `dp_replicate`.

Stacked experts are detected by structure: a module with `num_experts`, and with parameters whose first dim has that
size. Its forward takes hidden states (T, D), expert indices (T, K) and routing weights (T, K), like the experts of
transformers. Other experts are rejected.

Counts are exchanged before rows, so nothing is padded or dropped. A rank without rows still takes part in the
exchange. Rows are sorted by expert. Routing weights stay with the sender, since they scale the experts' output.

Shapes: T tokens on this rank, K experts per token, D features, E experts in total, L = E / ep of them on this rank. R
rows on this rank: a row is the copy of a token for one of its experts, (D,).
Source: Lepikhin et al. 2020, arXiv:2006.16668, section 3; without capacity, like Gale et al. 2022, arXiv:2211.15841.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from .._compat.peft import add_lora_delta, find_parameter_wrappers, to_base_name
from .._compat.torch import all_to_all, get_own_parameters
from ..base.errors import ModelError
from ..mesh.mesh import Mesh
from ..mesh.sizes import format_divisors
from ..model.forward_order import WrapOrder
from ..step.axis import Axis
from ..tensors.ops import copy_to_host, temporary_attribute, temporary_parameters
from . import ForwardMethod, wrap_forward_if
from .tensor.collectives import AllToAll, Gather, Split
from .tensor.placements import LocalParameters, ParameterSharding

_DISPATCH_STYLES = ("ep_dispatch_experts", "moe_tp_experts")
"""Names of the dispatch style in a model's own plan; "moe_tp_experts" is that of transformers 5.17."""


@dataclass(frozen=True)
class ExpertModule:
    """A module of stacked experts."""

    name: str
    num_experts: int


def find_experts(model: nn.Module) -> list[ExpertModule]:
    """Return the modules of stacked experts, in the order of the model."""
    return [ExpertModule(name, module.num_experts) for name, module in model.named_modules() if _is_experts(module)]


def check_expert_parallel(model: nn.Module, ep_size: int) -> None:
    """Raise ModelError, on all ranks, if a full model's experts cannot be divided over `ep_size` ranks."""
    if ep_size == 1:
        return
    experts = find_experts(model)
    unsupported = _find_planned_experts(model) - {to_base_name(each.name) for each in experts}
    if unsupported or not experts:
        verb = f"{sorted(unsupported)[0]} is not of" if unsupported else "has none of"
        raise ModelError(
            f"ep_size={ep_size} divides experts over ranks, but {type(model).__name__} {verb} the kind that can be: a "
            f"module with num_experts, parameters with as many entries along their first dim, and a forward of hidden "
            f"states, indices and weights. Use ep_size=1."
        )
    for each in experts:
        if each.num_experts % ep_size:
            raise ModelError(
                f"ep_size={ep_size} does not divide the {each.num_experts} experts of {each.name}. "
                f"Use one of {format_divisors(each.num_experts)} for ep_size."
            )
        _check_expert_parameters(model, each, ep_size)


def _check_expert_parameters(model: nn.Module, experts: ExpertModule, ep_size: int) -> None:
    """Reject experts with parameters that are shared or not stacked."""
    own_names = {name for name, _ in model.get_submodule(experts.name).named_parameters(prefix=experts.name)}
    by_identity: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_identity.setdefault(id(parameter), []).append(name)
    for names in by_identity.values():
        if own_names.intersection(names) and len(names) > 1:
            raise ModelError(
                f"{' and '.join(names)} are one parameter, which cannot be divided over ep_size={ep_size} ranks. "
                f"Untie them, or use ep_size=1."
            )
    for name in sorted(own_names):
        if "." in name.removeprefix(f"{experts.name}."):
            raise ModelError(
                f"{experts.name} has {name} besides its stacked parameters, which all of its experts share, so it "
                f"cannot be divided over ep_size={ep_size} ranks. Use ep_size=1."
            )


def _is_experts(module: nn.Module) -> bool:
    count, own = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    if type(count) is not int or count < 2 or not any(parameter.dim() == 3 for parameter in own):
        return False
    return all(p.dim() > 1 and p.shape[0] == count for p in own) and len(get_argument_names(module)) == 3


def get_argument_names(module: nn.Module) -> list[str]:
    """Return the argument names of a module's forward."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, each in inspect.signature(module.forward).parameters.items() if each.kind in kinds]


def _find_planned_experts(model: nn.Module) -> set[str]:
    """Return the modules named by the model's own expert-parallel plan, by their names in the base model."""
    config_plan: dict[str, str] = getattr(getattr(model, "config", None), "base_model_ep_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    # transformers 5.17 has no plan for the full model.
    plan = getattr(model, "ep_plan", None) or {f"{prefix}.{name}": style for name, style in config_plan.items()}
    patterns = [name for name, style in plan.items() if style in _DISPATCH_STYLES]
    regexes = [re.compile(re.escape(name).replace(r"\*", r"\d+")) for name in patterns]
    names = {to_base_name(name) for name, _ in model.named_modules()}
    return {name for name in names if any(each.fullmatch(name) for each in regexes)}


# -- dispatch


class ExpertParallel(Axis):
    """Expert parallelism of one model, or of one of its pipeline stages, which may have no experts.

    Args:
        model: the unsharded model; `check_expert_parallel` must have accepted it.
        mesh: a mesh with more than one rank on `ep`.

    Attributes:
        module_names: names of the expert modules.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._model, self._experts = model, find_experts(model)
        self.module_names = tuple(each.name for each in self._experts)
        self.mesh = mesh.expert_mesh["ep"]
        self.size, self._group = self.mesh.size(), self.mesh.get_group()
        # All ranks of tp hold the same tokens.
        self._tp_group = mesh.group("tp") if mesh.degrees.tp > 1 else None
        self._local_parameters: list[LocalParameters] = []
        self._is_active = True

    def apply(self) -> None:
        """Shard the parameters in place, and wrap the modules' forward in token dispatch. No communication."""
        for each in self._experts:
            module = self._model.get_submodule(each.name)
            parameters = LocalParameters(module, self.mesh)
            named = module.named_parameters(recurse=False)
            parameters.distribute({name: ParameterSharding(self.mesh, Shard(0), p.shape) for name, p in named}, {})
            self._local_parameters.append(parameters)
            adapters = find_parameter_wrappers(self._model, module)
            self._wrap(module, each, parameters, adapters)
            for adapter in adapters:
                # The adapter's delta is added to this rank's experts instead, see `_local_experts`.
                run = functools.partial(_run_base_layer, adapter)
                wrap_forward_if(adapter, WrapOrder.EXPERTS, run, lambda: self._is_active)

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Return a context in which the modules hold all experts and compute without communication. Collective.

        Use it for parameters that a strategy has gathered over its own axes.
        """
        with ExitStack() as stack, temporary_attribute(self, "_is_active", False):
            for parameters in self._local_parameters:
                stack.enter_context(parameters.unsharded())
            yield

    def _wrap(
        self, module: nn.Module, experts: ExpertModule, parameters: LocalParameters, adapters: Sequence[nn.Module]
    ) -> None:
        slots, names = parameters.claim(module), get_argument_names(module)
        num_local_experts = experts.num_experts // self.size
        first_expert = self.mesh.get_local_rank() * num_local_experts

        def run(forward: ForwardMethod, /, *args: Any, **kwargs: Any) -> Any:
            arguments = {**dict(zip(names, args, strict=False)), **kwargs}
            with parameters.localized(slots), _local_experts(module, adapters, first_expert, num_local_experts):
                return self._run_dispatched(experts, forward, *(arguments[name] for name in names))

        wrap_forward_if(module, WrapOrder.EXPERTS, run, lambda: self._is_active)

    def _run_dispatched(
        self, experts: ExpertModule, forward: Any, hidden: Tensor, index_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        inputs = [hidden.reshape(-1, hidden.shape[-1]), index_TK, weights_TK]
        _check_shapes(experts, *inputs)
        num_tokens, group = inputs[0].shape[0], self._tp_group
        if group is not None:
            inputs = [Split.apply(each, 0, group) for each in inputs]
        output = dispatch_tokens(forward, *inputs, num_experts=experts.num_experts, group=self._group)
        if group is not None:
            output = Gather.apply(output, 0, num_tokens, group)
        # Avoid a view where possible: the hooks of sharding do not see in-place writes to a view.
        return output if output.shape == hidden.shape else output.view(hidden.shape)


def _run_base_layer(adapter: nn.Module, forward: ForwardMethod, /, *args: Any, **kwargs: Any) -> Any:
    return adapter.base_layer(*args, **kwargs)


@contextmanager
def _local_experts(module: nn.Module, adapters: Sequence[nn.Module], first: int, count: int) -> Iterator[None]:
    """Make a module hold the `count` experts that start at `first`, with adapters' deltas added to their parameters.

    Adapters are replicated. A rank's adapter gradients cover its own experts and all tokens routed to them, so the sum
    over ranks is the full gradient.
    """
    own = get_own_parameters(module)
    adapted: dict[str, Tensor] = {}
    for name, adapter in ((each.parameter_name, each) for each in adapters):
        adapted[name] = add_lora_delta(adapter, adapted.get(name, own[name]), first)
    replacements = ((module, name, tensor) for name, tensor in adapted.items())
    with temporary_parameters(replacements), temporary_attribute(module, "num_experts", count):
        yield


def _check_shapes(experts: ExpertModule, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> None:
    is_valid = index_TK.dim() == 2 and index_TK.shape == weights_TK.shape and index_TK.shape[0] == hidden_TD.shape[0]
    if not is_valid or index_TK.is_floating_point():
        raise ModelError(
            f"{experts.name} is given hidden states of shape {tuple(hidden_TD.shape)}, indices {tuple(index_TK.shape)} "
            f"and weights {tuple(weights_TK.shape)}, not (T, D), (T, K) and (T, K). Use ep_size=1."
        )


def dispatch_tokens(
    experts: ForwardMethod,
    hidden_TD: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    *,
    num_experts: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """Run experts that are distributed over the ranks of `group` on this rank's tokens. Return (T, D).

    Args:
        experts: forward of this rank's experts: rows (R, D), indices (R, 1) below L and weights (R, 1) to rows (R, D).
        index_TK: int64. Entries outside of [0, num_experts) select no expert and contribute nothing.
    """
    num_tokens, num_choices = index_TK.shape
    ranks = dist.get_world_size(group)
    # Entries without an expert are sorted to the end.
    ids = torch.where((index_TK >= 0) & (index_TK < num_experts), index_TK, num_experts).flatten()
    order = torch.argsort(ids, stable=True)
    # Not `bincount`, which synchronizes with the device.
    sent_E = ids.new_zeros(num_experts + 1).scatter_add_(0, ids, torch.ones_like(ids))[:num_experts]
    sent_RL = sent_E.view(ranks, num_experts // ranks)
    received_RL = all_to_all(sent_RL, group)
    # The only synchronization per layer: the collective needs the row counts on the host.
    send_counts, receive_counts = copy_to_host(torch.stack([sent_RL.sum(1), received_RL.sum(1)])).tolist()
    order = order[: sum(send_counts)]

    rows: Tensor = AllToAll.apply(hidden_TD[order // num_choices], send_counts, receive_counts, group)
    expert_ids = torch.arange(num_experts // ranks, device=ids.device).repeat(ranks)
    expert_ids = expert_ids.repeat_interleave(received_RL.flatten(), output_size=sum(receive_counts))
    returned = AllToAll.apply(_run_local_experts(experts, rows, expert_ids), receive_counts, send_counts, group)

    unsorted = returned.new_zeros(num_tokens * num_choices, returned.shape[1]).index_copy(0, order, returned)
    weighted = unsorted.view(num_tokens, num_choices, -1) * weights_TK[..., None]
    return weighted.sum(1).to(hidden_TD.dtype)


def _run_local_experts(experts: ForwardMethod, rows: Tensor, local: Tensor) -> Tensor:
    """Run the experts on rows, with routing weights of one."""
    if rows.shape[0]:
        return experts(rows, local[:, None], rows.new_ones(rows.shape[0], 1))
    # Run a dummy row and drop its output: parameters get zero gradients, like unused experts under `single`, and
    # backward reaches the collectives.
    row = rows.sum(0, keepdim=True)
    return experts(row, local.new_zeros(1, 1), row.new_ones(1, 1))[:0]
