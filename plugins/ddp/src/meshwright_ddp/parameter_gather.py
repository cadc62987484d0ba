"""Gather updated parameters from their owners, before the forward of the modules that use them.

[Note: order of gathers] Ranks may call modules in different orders (experts chosen by the data), but must issue the
same collectives in the same order. So gathers start in the order of forward, and what no module has asked for is
gathered at the end of forward.

A module's forward pre-hook waits for the buckets of its own parameters. For modules that are never called, the nearest
enclosing module that is called waits; the first forward shows which that is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from meshwright.plugin import all_gather_single


class BucketGather:
    """Fills one bucket of parameter values from its owners, in place.

    Args:
        values: the bucket, 1-D, of a size that the group's ranks divide; each rank has updated its own part.
        group: the sharding group.

    Attributes:
        is_stale: whether parts of other ranks are older than their owners'.
    """

    def __init__(self, values: Tensor, group: dist.ProcessGroup) -> None:
        size = values.numel() // dist.get_world_size(group)
        self._values = values
        self._own = values.narrow(0, dist.get_rank(group) * size, size)
        self._group = group
        self._work: Any = None
        self.is_stale = False

    def start(self) -> None:
        """Issue the collective, if it is needed and not under way."""
        if self.is_stale and self._work is None:
            self._work = all_gather_single(self._values, self._own, group=self._group, async_op=True)

    def wait(self) -> None:
        """Wait for a collective that is under way (on CUDA: on the current stream)."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self.is_stale = False


class ParameterGather:
    """Gathers all buckets of a model.

    Args:
        model: whose modules wait for their parameters.
        gathers: in the order in which they start; see [Note: order of gathers].
        place: index of each parameter's gather.
        overlap: gather in forward, each bucket while modules of the one before run; else right after each update.
        align: start all gathers together when a step begins, before a pipeline stage has its first microbatch.
    """

    def __init__(
        self,
        model: nn.Module,
        gathers: Sequence[BucketGather],
        place: Mapping[nn.Parameter, int],
        *,
        overlap: bool,
        align: bool,
    ) -> None:
        self._model = model
        self._gathers = gathers
        self._overlap = overlap
        self._align = align
        self._needs: dict[nn.Module, set[int]] = {}
        self._called: set[nn.Module] = set()
        self._is_learning = True
        self._started = len(gathers)
        if overlap:
            for module in model.modules():
                own = module.parameters(recurse=False)
                self._needs[module] = {place[parameter] for parameter in own if parameter in place}
                module.register_forward_pre_hook(self._before)

    def parameters_changed(self) -> None:
        """Mark all buckets stale: each rank has updated what it owns."""
        for gather in self._gathers:
            # Under way where the last forward was left by an error.
            gather.wait()
            gather.is_stale = True
        self._started = 0
        if not self._overlap:
            self.gather_all()

    def gather_all(self) -> None:
        """Gather all parameters now. Collective."""
        self._start(len(self._gathers))
        for gather in self._gathers:
            gather.wait()

    def begin(self) -> None:
        """Begin a step or a forward of the model. Collective."""
        if self._align:
            self._start(len(self._gathers))

    def after_forward(self) -> None:
        """End a forward of the model. Collective."""
        self.gather_all()
        if self._overlap and self._is_learning:
            self._is_learning = False
            self._learn(self._model, self._model, frozenset())
            self._called.clear()

    def _before(self, module: nn.Module, args: Any) -> None:
        if self._is_learning:
            self._called.add(module)
        for index in sorted(self._needs[module]):
            if self._gathers[index].is_stale:
                self._start(index + 1)
                self._gathers[index].wait()
                # The next one travels while this module and its neighbours run.
                self._start(index + 2)

    def _start(self, count: int) -> None:
        while self._started < min(count, len(self._gathers)):
            self._gathers[self._started].start()
            self._started += 1

    def _learn(self, module: nn.Module, nearest: nn.Module, seen: frozenset[nn.Module]) -> None:
        if module in self._called:
            nearest = module
        else:
            self._needs[nearest] |= self._needs[module]
        for child in module.children():
            if child not in seen:
                self._learn(child, nearest, seen | {module})
