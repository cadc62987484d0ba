"""Tensor parallelism for any model: parameters are DTensors, computation uses plain local tensors.

Every parameter becomes a DTensor on the `tp` axis, sharded where the plan says so and replicated otherwise. So norms,
optimizers, state and data-parallel strategies handle one type of parameter. During forward, modules see local tensors
instead, and the modules that the plan names are wrapped in communication. The model's own code is unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..._compat.peft import describe_lora_layer
from ..._compat.torch import all_reduce, is_sharded, queue_after_backward
from ...base.errors import ModelError, StrategyError
from ...model.forward_order import WrapOrder
from ...model.layout import ModelLayout
from ...step.axis import Axis
from ...strategy.hooks import StyleSpec
from ...strategy.registry import model_layout
from ...tensors.norms import compute_tensor_norms
from ...tensors.ops import temporary_attribute
from ...tensors.state import DTENSOR_LAYOUT, ShardLayout
from .. import ForwardMethod, reraise_as_model_error, wrap_forward_if
from .collectives import Copy
from .placements import (
    LocalParameters,
    ParameterSharding,
    ParameterSlot,
    find_parameter_views,
    find_placements,
    find_shared_heads,
)
from .plan_sources import find_plan, get_text_config, replicate_small_layers
from .sequence_parallel import ResidualStream, plan_sequence_parallel
from .tp_plan import find_adapter_styles, replace_by_wrappers, shard_adapter_input, strip_base_layer


class TensorParallel(Axis):
    """Tensor parallelism of one model.

    Args:
        model: the unsharded model, with equal weights on all ranks of the axis.
        layout: the model's layout.
        mesh: the `tp` axis, one dim of a root mesh.
        plan: see `meshwright.parallel.tensor.plan_sources.find_plan`.
        sequence_parallel: shard the positions between the tensor-parallel layers of blocks. Torch styles in the plan
            whose layouts shard positions enable it, too.
        use_plain_tensors: make parameters plain local tensors, for strategies that do not accept DTensors. Gradients of
            replicated parameters are then full.
        excluded: modules whose parameters are sharded by another axis, and are DTensors when `apply` is called.

    Attributes:
        shardings: sharding of each parameter, by each of its names.

    Raises:
        ConfigError, ModelError: the plan does not match the model or the number of ranks. The model is unchanged then.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        mesh: DeviceMesh,
        *,
        plan: Mapping[str, StyleSpec] | str | None = None,
        sequence_parallel: bool = False,
        use_plain_tensors: bool = False,
        excluded: Sequence[str] = (),
    ) -> None:
        self.mesh, self.group, self.size, self.rank = mesh, mesh.get_group(), mesh.size(), mesh.get_local_rank()
        self.is_active, self.text_config = True, get_text_config(model)
        self._model, self._layout, self._use_plain_tensors = model, layout, use_plain_tensors
        self._has_run = self._in_step = False
        self._plan = find_plan(model, layout, plan, sequence_parallel=sequence_parallel)
        for name in excluded:
            self._plan.replicate(strip_base_layer(name), model)
        sequence_parallel = sequence_parallel or self._plan.uses_sequence_parallel
        replicate_small_layers(self._plan, model, self.size)
        self._plan.parameter_styles.update(find_adapter_styles(model, self._plan.parameter_styles, excluded))
        self._shared_heads = find_shared_heads(model, self._plan, self.size, self.rank)
        placements = find_placements(model, layout, self._plan, self._shared_heads, self.size)
        shapes = {name: p.shape for name, p in model.named_parameters(remove_duplicate=False)}
        self.shardings = {name: ParameterSharding(mesh, placements[name], shape) for name, shape in shapes.items()}
        sp_plan = plan_sequence_parallel(model, layout, self._plan) if sequence_parallel else None
        self._views = find_parameter_views(self._plan, self._shared_heads, sp_plan)
        # Replicated tensors and their copies for sharded layers, kept while the module that made them runs.
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._local_parameters = LocalParameters(model, mesh, use_plain_tensors=use_plain_tensors)
        self._blocks: dict[nn.Module, list[ParameterSlot]] = {}
        self._residual_stream = (
            ResidualStream(model, sp_plan, self._copies, self.group) if sp_plan is not None else None
        )
        head = self._plan.get_style_names(layout.head, model) if layout.head else []
        self.shards_vocabulary = any(style in ("colwise_gather_output", "colwise_rep") for style in head)

    # -- set up

    def apply(self, separate_modules: Iterable[str] = ()) -> None:
        """Shard the parameters in place, and wrap the modules in communication.

        Args:
            separate_modules: modules that a strategy gathers separately, besides blocks and the model. With plain
                tensors: all modules that it gathers at once.
        """
        self._local_parameters.distribute(self.shardings, self._views)
        modules = dict(self._model.named_modules())
        for name in self._plan.module_styles:
            style = self._plan.get_style(name)
            if style is not None and style.run_forward is not None:
                self._wrap(modules[name], functools.partial(style.run_forward, self, modules[name]))
        for name, module in modules.items():
            adapter = describe_lora_layer(module)
            if adapter is not None and any(
                self.shardings[f"{name}.{each}"].is_sharded for each in adapter.input_params
            ):
                shard_adapter_input(self, adapter, lambda: self.is_active)
        for shared in self._shared_heads:
            attention = modules[shared.attention]
            self._wrap(attention, functools.partial(_run_with_groups, attention, shared.queries_per_kv_head))
        if self._residual_stream is not None:
            for name in self._residual_stream.plan.regions:
                self._wrap(modules[name], functools.partial(self._residual_stream.run_region, name))
            for name in self._residual_stream.plan.blocks:
                self._wrap(modules[name], functools.partial(self._residual_stream.run_block, name))
        separate = {self._model.get_submodule(name) for name in separate_modules}
        blocks = {self._model.get_submodule(name) for name in self._layout.blocks}
        if self._use_plain_tensors:
            # A module that is gathered just before its forward must keep its parameters until then.
            gathered = {module for each in separate for module in each.modules()}
            separate |= replace_by_wrappers(self._model, self._local_parameters.viewed_modules) - gathered
        # Submodules come first.
        for module in reversed(list(self._model.modules())):
            if module in blocks:
                self._blocks[module] = self._local_parameters.claim(module)
            elif module in separate:
                self._localize(module, self._local_parameters.claim(module))
        for block, slots in self._blocks.items():
            self._localize(block, slots)
        self._localize(self._model, self._local_parameters.claim(self._model))
        if self._plan.is_user_provided:
            self._wrap(self._model, self._run_explained)

    def localize_blocks(self) -> None:
        """Wrap blocks again, outside of wrappers that must see local tensors; see `meshwright.model.forward_order`."""
        for block, slots in self._blocks.items():
            self._localize(block, slots, WrapOrder.LOCAL)

    def _localize(self, module: nn.Module, slots: list[ParameterSlot], layer: WrapOrder = WrapOrder.TENSOR) -> None:
        def run(forward: ForwardMethod, /, *args: Any, **kwargs: Any) -> Any:
            num_copies = len(self._copies)
            try:
                with self._local_parameters.localized(slots):
                    return forward(*args, **kwargs)
            finally:
                del self._copies[num_copies:]

        self._wrap(module, run, layer)

    def _run_explained(self, forward: ForwardMethod, /, *args: Any, **kwargs: Any) -> Any:
        is_first, self._has_run = not self._has_run, True

        def format_reason(reason: str) -> str:
            return (
                f"{type(self._model).__name__} cannot run with its tensor-parallel plan ({self._plan.source}): "
                f"{reason}. A colwise layer leaves each rank a part of its features, which a rowwise layer must take: "
                f"give styles to both, or colwise_gather_output and rowwise_split_input."
            )

        with reraise_as_model_error(format_reason, is_first=is_first):
            return forward(*args, **kwargs)

    def _wrap(self, module: nn.Module, run: ForwardMethod, layer: WrapOrder = WrapOrder.TENSOR) -> None:
        wrap_forward_if(module, layer, run, lambda: self.is_active)

    # -- use

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Put full plain parameters into the modules, which then compute without communication. Collective.

        Use it for parameters that a strategy has gathered over its own axes.
        """
        with self._local_parameters.unsharded(), temporary_attribute(self, "is_active", False):
            yield

    def check_logits(self, shape: Sequence[int], targets_BS: Tensor) -> None:
        if self._residual_stream is not None and shape[1] * self.size == targets_BS.shape[1]:
            raise ModelError(
                f"{type(self._model).__name__} did not run "
                f"{', '.join(sorted(self._residual_stream.plan.exit_blocks))}, at whose "
                f"exit the sequence is gathered. Set sequence_parallel=false."
            )

    def reduce_gradients(self, parameters: Iterable[nn.Parameter] = ()) -> None:
        """All-reduce partial gradients that a strategy has not reduced itself."""
        for parameter in () if self._use_plain_tensors else self._model.parameters():
            grad = parameter.grad
            if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
                parameter.grad = grad.redistribute(placements=parameter.placements)

    def step_context(self) -> AbstractContextManager[None]:
        return temporary_attribute(self, "_in_step", True)

    def check_first_backward(self, module: nn.Module) -> None:
        """Raise `find_gradient_error`, if any, at the end of the first backward of a hand-written training loop."""

        def check_gradients() -> None:
            # Called once per output.
            is_reduced = any(self._is_replicated(name, p.grad) for name, p in self._model.named_parameters())
            # Within a step, the manager makes this check at the end of its first step.
            if (
                handles
                and is_reduced
                and not self._in_step
                and (error := self.find_gradient_error(DTENSOR_LAYOUT)) is not None
            ):
                raise error
            if handles and (is_reduced or self._in_step):
                handles.pop().remove()

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            values = output.values() if isinstance(output, Mapping) else output
            for each in values if not isinstance(values, Tensor) else (values,):
                if isinstance(each, Tensor) and each.requires_grad:
                    each.register_hook(lambda grad: queue_after_backward(check_gradients))

        handles = [module.register_forward_hook(hook)]

    def find_gradient_error(self, shard_layout: ShardLayout) -> StrategyError | None:
        """Return an error if replicated parameters have gradients that differ between ranks. Collective.

        They differ only if the plan misses a parameter that is used with sharded activations.
        """
        named = [(name, p) for name, p in self._model.named_parameters() if self._is_replicated(name, p.grad)]
        if not named:
            return None
        norms = compute_tensor_norms([p.grad for _, p in named], [shard_layout.get_shard_groups(p) for _, p in named])
        high, low = all_reduce(torch.stack([norms, -norms]), "max", self.group)
        # Half-precision kernels may cause small differences.
        differs = (high + low).abs() > 1e-2 * high
        names = [name for (name, _), differ in zip(named, differs.tolist(), strict=True) if differ]
        if not names:
            return None
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return StrategyError(
            f"the tensor-parallel plan replicates {listed}, whose gradients differ between the ranks of tp, so it "
            f"meets sharded activations. Give it the style replicated_with_grad_allreduce in tp_plan; nothing was "
            f"trained."
        )

    def _is_replicated(self, name: str, grad: Tensor | None) -> bool:
        if self._use_plain_tensors:
            return grad is not None and not self.shardings[name].is_sharded
        return isinstance(grad, DTensor) and not is_sharded(grad.placements[-1])

    @property
    def sequence_multiple(self) -> int:
        return self.size if self._residual_stream is not None else 1

    # -- interface for styles

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a replicated tensor as input for sharded layers; all layers that read it share one `Copy`.

        So gradients from query, key and value are summed locally before a single all-reduce.
        """
        for seen, copied in self._copies:
            if seen is tensor:
                return copied
        self._copies.append((tensor, Copy.apply(tensor, self.group)))
        return self._copies[-1][1]

    def is_scattered(self, module: nn.Module, output: Tensor) -> bool:
        return self._residual_stream is not None and self._residual_stream.is_scattered(module, output)


def apply_tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, StyleSpec] | str | None = None,
    *,
    sequence_parallel: bool = False,
    separate_modules: Iterable[str] = (),
) -> TensorParallel:
    """Apply tensor parallelism to a model in a hand-written training loop; see `TensorParallel` and its `apply`.

    Args:
        mesh: 1-D; a slice of a root mesh if the model is sharded further.
    """
    if mesh.ndim != 1:
        raise StrategyError(f"tensor parallelism takes one axis of a mesh, not {mesh.ndim}. Give mesh['tp'].")
    tensor_parallel = TensorParallel(model, model_layout(model), mesh, plan=plan, sequence_parallel=sequence_parallel)
    tensor_parallel.apply(separate_modules)
    return tensor_parallel


def _run_with_groups(attention: nn.Module, groups: int, forward: ForwardMethod, /, *args: Any, **kwargs: Any) -> Any:
    with temporary_attribute(attention, "num_key_value_groups", groups):
        return forward(*args, **kwargs)
