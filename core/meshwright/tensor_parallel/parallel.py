"""Tensor parallelism for any model: parameters as DTensors, computation on plain local tensors.

Every parameter becomes a DTensor on the `tp` axis, sharded where the plan says so and else replicated, so that norms,
optimizers, state and the sharding of data-parallel strategies see one kind of parameter. During forward, each module
finds plain tensors in their place, this rank's parts; what is communicated is written around the modules that the plan
names. Nothing of the model's own code changes.

[Note: local parameters] A strategy that gathers parameters (fully_shard) puts DTensors on the `tp` axis into the
modules just before their forward. `localize` replaces those, and no others, while the module runs, and lets autograd
give the gradients back as DTensors. Blocks and the model are localized here; a strategy that gathers other modules by
themselves localizes them too.

[Note: one copy] Layers that read the same tensor (query, key and value) share one `Copy` of it, so that their
gradients are summed locally before the one all-reduce.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.distributed.tensor.placement_types import Placement

from .._compat import all_reduce, is_sharded
from ..errors import ModelError, StrategyError
from ..layout import ModelLayout, model_layout
from ..loss import token_loss_sum
from .collectives import Copy, Gather, GatherForParts, Split, chunk_sizes
from .heads import check_heads, text_config
from .loss import sharded_token_loss_sum
from .plan import StyleName, find_plan
from .sequence import find_parts
from .styles import PACKED_PARTS, STYLES, Style

# Operations between head and loss that treat every entry of the vocabulary alike, as autograd names them.
_ELEMENTWISE = ("ToCopyBackward0", "MulBackward0", "DivBackward0", "TanhBackward0", "AliasBackward0")


@dataclass(frozen=True, eq=False)
class _Cut:
    """How a module sees one of its parameters.

    Attributes:
        partial: this rank's gradient covers a part of the computation.
        rows: the rows that are used of a replicated parameter; int64.
    """

    partial: bool = False
    rows: Tensor | None = None


_WHOLE = _Cut()


@dataclass(frozen=True)
class _Sequence:
    """The shape of the stream that is sharded at the moment: B sequences of S positions on all ranks together."""

    batch: int
    length: int
    part: int


class TensorParallel:
    """The tensor parallelism of one model; see the module's notes.

    Args:
        model: before any sharding, with equal weights on all ranks of the axis.
        layout: of the model.
        mesh: the `tp` axis, one dim of a root mesh.
        plan: see `meshwright.tensor_parallel.plan.find_plan`.
        sequence_parallel: shard the positions between the parallel parts of blocks.

    Raises:
        ConfigError: the plan names what does not exist.
        ModelError: the model does not fit the plan or the number of ranks. Both before any collective and before the
            model is changed.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        mesh: DeviceMesh,
        *,
        plan: Mapping[str, StyleName] | str | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        self.mesh = mesh
        self.group = mesh.get_group()
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        self.active = True
        self.sequence_parallel = sequence_parallel
        self._model = model
        self._layout = layout
        self._plan = find_plan(model, layout, plan, sequence_parallel=sequence_parallel)
        self._shared_heads = check_heads(model, self._plan, self.size, self.rank)
        self._placements = self._find_placements()
        self._parts = find_parts(model, layout, self._plan) if sequence_parallel else None
        self._cuts: dict[nn.Module, dict[str, _Cut]] = {}
        self._torch_modules: set[nn.Module] = set()
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._sequence: _Sequence | None = None
        self._scattering: set[nn.Module] = set()
        head = self._plan.modules.get(layout.head) if layout.head else None
        gathers = ("colwise_gather_output", "colwise_rep")
        self._head = model.get_submodule(layout.head) if layout.head and head in gathers else None
        self._keeps_logits = False
        self._logits: Tensor | None = None
        self._loss_parallel: bool | None = None if self._head is not None else False
        self.text_config = text_config(model)

    # -- set up

    def apply(self) -> None:
        """Shard the parameters in place and put the communication around the modules."""
        self._apply_torch_styles()
        self._distribute()
        modules = dict(self._model.named_modules())
        for name in self._plan.modules:
            style = self._plan.style(name)
            if style is not None and style.run is not None:
                self._wrap(modules[name], functools.partial(self._run_style, style, modules[name]))
        for shared in self._shared_heads:
            attention = modules[shared.attention]
            self._wrap(attention, functools.partial(self._run_with_groups, attention, shared.groups))
        if self._parts is not None:
            self._scattering = {modules[name] for name in self._parts.scattering}
            for name in self._parts.regions:
                self._wrap(modules[name], functools.partial(self._run_region, name))
            for name in self._parts.blocks:
                run = functools.partial(self._run_block, name in self._parts.first, name in self._parts.last)
                self._wrap(modules[name], run)
        # A block may serve several layers.
        for module in dict.fromkeys([*(modules[name] for name in self._layout.blocks), self._model]):
            self.localize(module)

    def localize(self, module: nn.Module) -> None:
        """Let a module and what is in it compute on local tensors; see [Note: local parameters]."""
        slots = [
            (each, name)
            for each in module.modules()
            if each not in self._torch_modules
            for name, _ in each.named_parameters(recurse=False)
        ]

        def run(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with self._local_parameters(slots):
                return forward(*args, **kwargs)

        self._wrap(module, run)

    def packed_dim(self, parameter: Tensor) -> int | None:
        """The dim along which a parameter holds packed parts that are sharded each; None for all others.

        A strategy must not shard that dim further: torch puts the parts together in a wrong order.
        """
        placement = parameter.placements[-1] if isinstance(parameter, DTensor) else None
        if placement is None or placement.is_shard() or not is_sharded(placement):
            return None
        dim: int = placement.dim
        return dim

    # -- use

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Whole plain parameters in the modules, which then compute without communication.

        For parameters that a strategy has gathered over its own axes. Collective.
        """
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        made: dict[int, nn.Parameter] = {}
        self.active = False
        hooks = [_taken_hooks(module) for module in self._torch_modules]
        try:
            for module in self._model.modules():
                for name, parameter in module._parameters.items():
                    if parameter is None or not self._is_gathered(parameter):
                        continue
                    if id(parameter) not in made:
                        full = parameter.detach().full_tensor()
                        made[id(parameter)] = nn.Parameter(full, requires_grad=parameter.requires_grad)
                    replaced.append((module, name, parameter))
            for module, name, parameter in replaced:
                module._parameters[name] = made[id(parameter)]
            yield
        finally:
            for module, name, parameter in replaced:
                module._parameters[name] = parameter
            for restore in hooks:
                restore()
            self.active = True

    def token_loss_sum(self, compute_logits: Callable[[], Tensor], labels_BS: Tensor) -> Tensor:
        """`meshwright.loss.token_loss_sum` of what the model answers, with sharded logits where that is right.

        It is where the head is sharded along the vocabulary and what follows it treats all entries alike, which the
        first call finds out.
        """
        if self._loss_parallel is None and not torch.is_grad_enabled():
            return token_loss_sum(compute_logits(), labels_BS)
        if self._loss_parallel is not False:
            self._keeps_logits = True
            try:
                logits_BSL = compute_logits()
            finally:
                self._keeps_logits = False
            if self._loss_parallel is None:
                self._loss_parallel = self._follows_head(logits_BSL)
            self._logits = None
            if self._loss_parallel:
                sizes = chunk_sizes(self._vocabulary, self.size)
                return sharded_token_loss_sum(logits_BSL, labels_BS, sum(sizes[: self.rank]), self.group)
        return token_loss_sum(compute_logits(), labels_BS)

    def sum_partial_gradients(self) -> None:
        """Sum the gradients of which each rank has a part, for strategies that do not reduce DTensors themselves.

        After the last microbatch of a step. Collective.
        """
        for parameter in self._model.parameters():
            grad = parameter.grad
            if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
                parameter.grad = grad.redistribute(placements=parameter.placements)

    def differing_gradients(self) -> list[str]:
        """Replicated parameters whose gradient is not the same on all ranks of the axis; equal on them.

        There are none unless the plan is wrong: it leaves out a parameter that meets sharded activations, whose
        gradient must be summed. Collective along the axis.
        """
        names, norms = [], []
        for name, parameter in self._model.named_parameters():
            grad = parameter.grad
            if isinstance(grad, DTensor) and not is_sharded(grad.placements[-1]):
                local = grad.to_local()
                names.append(name)
                norms.append(local.double().norm())
        if not names:
            return []
        stacked = torch.stack(norms)
        high, low = all_reduce(torch.stack([stacked, -stacked]), "max", self.group)
        # The ranks compute the same numbers from the same numbers; half-precision kernels may still differ a little.
        differs = (high + low).abs() > 1e-2 * high
        return [name for name, differ in zip(names, differs.tolist(), strict=True) if differ]

    @property
    def sequence_multiple(self) -> int:
        """What the length of a sequence must be a multiple of."""
        return self.size if self.sequence_parallel else 1

    # -- for the styles

    def copy(self, tensor: Tensor) -> Tensor:
        """`Copy` of a tensor; see [Note: one copy]."""
        for seen, known in self._copies:
            if seen is tensor:
                return known
        copied: Tensor = Copy.apply(tensor, self.group)
        self._copies.append((tensor, copied))
        return copied

    def keeps_sharded(self, module: nn.Module) -> bool:
        """Whether a layer that gathers its output should not, since it is the head and the loss takes shards."""
        return self._keeps_logits and module is self._head

    def note_logits(self, logits: Tensor) -> None:
        """Tell what the head has answered."""
        self._logits = logits

    def scatters(self, module: nn.Module, output: Tensor) -> bool:
        """Whether a row-parallel layer's sum is scattered along the sequence."""
        stream = self._sequence
        return stream is not None and module in self._scattering and output.shape[:-1] == (stream.batch, stream.length)

    # -- around forward

    def _wrap(self, module: nn.Module, run: Callable[..., Any]) -> None:
        """Replace `module.forward` by `run(forward, args, kwargs)` while tensor parallelism is active."""
        forward = module.forward

        @functools.wraps(forward)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return run(forward, args, kwargs) if self.active else forward(*args, **kwargs)

        module.forward = wrapped

    def _run_style(self, style: Style, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        assert style.run is not None
        return style.run(self, module, forward, args, kwargs)

    def _run_with_groups(
        self, attention: nn.Module, groups: int, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        whole = attention.num_key_value_groups
        attention.num_key_value_groups = groups
        try:
            return forward(*args, **kwargs)
        finally:
            attention.num_key_value_groups = whole

    def _run_block(self, is_first: bool, is_last: bool, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A block on this rank's positions."""
        if is_first:
            args, kwargs = _replace_first(args, kwargs, lambda hidden: Split.apply(hidden, 1, self.group))
        hidden = args[0] if args else kwargs["hidden_states"]
        batch, part = hidden.shape[:2]
        outer, self._sequence = self._sequence, _Sequence(batch, part * self.size, part)
        try:
            output = forward(*args, **kwargs)
            if is_last:
                output = _map_hidden(output, batch, part, self._gathered)
            return output
        finally:
            self._sequence = outer

    def _run_region(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A part of a block on all positions, and back."""
        stream = self._sequence
        if stream is None:
            return forward(*args, **kwargs)
        known = len(self._copies)
        args = tuple(_map_hidden(value, stream.batch, stream.part, self._gathered) for value in args)
        kwargs = {key: _map_hidden(value, stream.batch, stream.part, self._gathered) for key, value in kwargs.items()}
        if len(self._copies) == known:
            raise ModelError(
                f"{name} is given no hidden states of shape (B, S, features), so its positions cannot be gathered. "
                f"Set sequence_parallel=false."
            )
        output = forward(*args, **kwargs)
        return _map_hidden(output, stream.batch, stream.length, lambda value: Split.apply(value, 1, self.group))

    def _gathered(self, part: Tensor) -> Tensor:
        """The whole sequence. What uses it in parts finds its own gradient rule in the copies."""
        assert self._sequence is not None
        whole: Tensor = Gather.apply(part, 1, self._sequence.length, self.group)
        for_parts = GatherForParts.apply(part, whole.detach(), 1, self.group)
        self._copies.append((whole, for_parts))
        return whole

    @contextmanager
    def _local_parameters(self, slots: Iterable[tuple[nn.Module, str]]) -> Iterator[None]:
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        local: dict[tuple[int, _Cut], Tensor] = {}
        known = len(self._copies)
        try:
            for module, name in slots:
                parameter = module._parameters[name]
                if parameter is None or not self._is_gathered(parameter):
                    continue
                cut = self._cuts.get(module, {}).get(name, _WHOLE)
                key = (id(parameter), cut)
                if key not in local:
                    local[key] = _localized(parameter, cut)
                replaced.append((module, name, parameter))
                module._parameters[name] = local[key]
            yield
        finally:
            for module, name, parameter in replaced:
                module._parameters[name] = parameter
            del self._copies[known:]

    def _is_gathered(self, parameter: Tensor) -> bool:
        """Whether a parameter lies on the `tp` axis alone, that is, whole but for it."""
        return isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1 and parameter.device_mesh == self.mesh

    # -- parameters

    def _find_placements(self) -> dict[str, Placement]:
        """The placement of each parameter by each of its names; tied ones agree."""
        replicated = {name for shared in self._shared_heads for name in shared.rows}
        placements: dict[str, Placement] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            owner, _, own = name.rpartition(".")
            style = self._plan.parameters.get(name)
            placement: Placement = Replicate()
            if style is not None and name not in replicated:
                placement = STYLES[style].place(self._model.get_submodule(owner), own, parameter)
            self._check_packed(name, parameter, placement)
            placements[name] = placement
        for names in self._layout.tied:
            different = {str(placements[name]): name for name in names if name in placements}
            if len(different) > 1:
                told = ", ".join(f"{name} {placement}" for placement, name in different.items())
                raise ModelError(
                    f"{' and '.join(names)} are one parameter, but the plan ({self._plan.source}) shards them in "
                    f"different ways: {told}. Give them styles that agree, such as embedding_rowwise for the embedding "
                    f"and colwise_gather_output for the head, or replicate for both."
                )
        return placements

    def _check_packed(self, name: str, parameter: Tensor, placement: Placement) -> None:
        if placement.is_shard() or not is_sharded(placement):
            return
        size = parameter.shape[placement.dim]
        if size % (PACKED_PARTS * self.size):
            raise ModelError(
                f"{name} holds {PACKED_PARTS} packed parts of {size // PACKED_PARTS} features each, which "
                f"tp_size={self.size} does not divide. Choose a tp_size that does, or replicate it in a tp_plan."
            )

    def _apply_torch_styles(self) -> None:
        """Styles of torch bring their own parameters and hooks."""
        for name, style in self._plan.modules.items():
            if isinstance(style, ParallelStyle):
                module = self._model.get_submodule(name)
                parallelize_module(module, self.mesh, style, src_data_rank=None)
                self._torch_modules.update(module.modules())

    def _distribute(self) -> None:
        rows = {name: index for shared in self._shared_heads for name, index in shared.rows.items()}
        on_shard = self._parts.on_shard if self._parts is not None else frozenset()
        made: dict[int, nn.Parameter] = {}
        for name, parameter in list(self._model.named_parameters(remove_duplicate=False)):
            owner, _, own = name.rpartition(".")
            module = self._model.get_submodule(owner)
            if isinstance(parameter, DTensor):
                continue
            style = self._plan.parameters.get(name)
            partial = name in on_shard or name in rows or (style is not None and STYLES[style].partial)
            self._cuts.setdefault(module, {})[own] = _Cut(partial, rows.get(name))
            if id(parameter) not in made:
                made[id(parameter)] = _distributed(parameter, self.mesh, self._placements[name])
            module._parameters[own] = made[id(parameter)]

    @property
    def _vocabulary(self) -> int:
        assert self._head is not None
        return int(self._head.out_features)

    def _follows_head(self, logits: Tensor) -> bool:
        """Whether the logits are the head's answer, but for elementwise operations; equal on all ranks."""
        if self._logits is None or logits.shape != self._logits.shape:
            return False
        node = logits.grad_fn
        while node is not None and node is not self._logits.grad_fn:
            if node.name() not in _ELEMENTWISE:
                return False
            node = node.next_functions[0][0]
        return node is not None


def parallelize_tensors(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, StyleName] | str | None = None,
    *,
    sequence_parallel: bool = False,
) -> TensorParallel:
    """Apply tensor parallelism to a model, for hand-written loops; see `TensorParallel`.

    Args:
        mesh: the axis, 1-D, a slice of a root mesh if the model is sharded further.
    """
    if mesh.ndim != 1:
        raise StrategyError(f"tensor parallelism takes one axis of a mesh, not {mesh.ndim}. Give mesh['tp'].")
    parallel = TensorParallel(model, model_layout(model), mesh, plan=plan, sequence_parallel=sequence_parallel)
    parallel.apply()
    return parallel


def _distributed(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """The parameter as a DTensor; this rank's part alone stays in memory."""
    whole = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    own = DTensor.from_local(
        whole.to_local().clone(memory_format=torch.contiguous_format),
        mesh,
        [placement],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    made = nn.Parameter(own, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made


def _localized(parameter: DTensor, cut: _Cut) -> Tensor:
    local: Tensor = parameter.to_local(grad_placements=[Partial()] if cut.partial else None)
    return local if cut.rows is None else local[cut.rows.to(local.device)]


def _map_hidden(value: Any, batch: int, length: int, change: Callable[[Tensor], Tensor]) -> Any:
    """Change the hidden states among a value, a tensor or the members of a tuple.

    They are (batch, length, features), or (batch * length, features), which `change` gets in the longer form.
    """
    if isinstance(value, Tensor) and value.is_floating_point():
        if value.dim() == 3 and value.shape[:2] == (batch, length):
            return change(value)
        if value.dim() == 2 and value.shape[0] == batch * length:
            return change(value.unflatten(0, (batch, length))).flatten(0, 1)
    if type(value) is tuple:
        return tuple(_map_hidden(each, batch, length, change) for each in value)
    return value


def _replace_first(args: Any, kwargs: Any, change: Callable[[Tensor], Tensor]) -> tuple[Any, Any]:
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def _taken_hooks(module: nn.Module) -> Callable[[], None]:
    """Take a module's forward hooks away; returns what puts them back."""
    before, after = dict(module._forward_pre_hooks), dict(module._forward_hooks)
    module._forward_pre_hooks.clear()
    module._forward_hooks.clear()

    def restore() -> None:
        module._forward_pre_hooks.update(before)
        module._forward_hooks.update(after)

    return restore
