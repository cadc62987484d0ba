"""torch's DistributedDataParallel, with hooks that sum.

Source: Li et al. 2020, arXiv:2006.15704; torch.nn.parallel.DistributedDataParallel.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.plugin import Mesh, StrategyError, WideSums

from ._compat import buffer_option
from .config import DDPConfig
from .hooks import compressing_hook, sum_hook, wide_sum_hook


class TorchEngine:
    """Wraps a whole model in torch's DistributedDataParallel.

    Args:
        model: on the mesh's device, equal on all ranks.
        config: options of the engine `torch`.
        mesh: gradients are summed over its axis `dp_replicate`.

    Attributes:
        module: the wrapped model.

    Raises:
        ConfigError: PowerSGDState refuses its options; on all ranks alike, before the model is wrapped.
    """

    def __init__(self, model: nn.Module, config: DDPConfig, mesh: Mesh) -> None:
        self._model = model
        self._sums = WideSums(getattr(torch, config.reduce_dtype)) if config.reduce_dtype else None
        self._may_leave_out = config.find_unused_parameters or config.static_graph
        group = mesh.group("dp_replicate")
        # Made first: its options may be refused. DDP averages by default; [Note: the gradient rule] wants the sum.
        if config.comm_hook is not None:
            state, hook = compressing_hook(config.comm_hook, config.comm_hook_options, group)
        else:
            state, hook = None, sum_hook(group) if self._sums is None else wide_sum_hook(group, self._sums)
        self.module = DistributedDataParallel(
            model,
            device_ids=None if mesh.device.type == "cpu" else [mesh.device.index],
            process_group=group,
            # `copy_from_first_rank` has made the copies equal.
            init_sync=False,
            bucket_cap_mb=config.bucket_cap_mb,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            find_unused_parameters=config.find_unused_parameters,
            static_graph=config.static_graph,
            **buffer_option(config.broadcast_buffers),
        )
        self.module.register_comm_hook(state, hook)

    def sync_gradients(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return a context for a forward and its backward, which reduces gradients only if it is the step's last.

        Raises:
            StrategyError: several microbatches with `static_graph`; on all ranks alike.
        """
        if is_last:
            return nullcontext()
        if self.module.static_graph:
            raise StrategyError(
                "static_graph=true does not go with several microbatches in a step: torch's DistributedDataParallel "
                "fails when the first backward is not followed by a reduction. Give one microbatch, or set "
                "static_graph=false."
            )
        return self.module.no_sync()

    def after_backward(self, *, is_last: bool) -> None:
        """Keep what waits for later microbatches in `reduce_dtype`; after the last one, look for unused parameters.

        Raises:
            StrategyError: a trainable parameter has no gradient, and no option allows for it.
        """
        if is_last and not self._may_leave_out:
            # DDP has not reduced the bucket of a parameter without gradient, and the other ranks wait for it, so this
            # cannot be reported on all ranks first.
            unused = [name for name, p in self._model.named_parameters() if p.requires_grad and p.grad is None]
            if unused:
                raise StrategyError(
                    f"trainable parameters got no gradient in this step, among them {unused[0]}. "
                    f"Set find_unused_parameters=true, or freeze them."
                )
        # The last microbatch's gradients join the waiting sums in the hook.
        if self._sums is not None and not is_last:
            self._sums.take(parameter for parameter in self._model.parameters() if parameter.requires_grad)
