"""When a step's buckets are reduced, and what becomes of the gradients that are missing or wrong.

The bookkeeping of one step after the other. It knows no model and no forward (see `bucketed`), nor how a bucket travels
(see `reduction`).

[Note: order of reductions] Ranks may use different parameters (experts chosen by the data), but must issue the same
collectives in the same order; so a bucket waits for those before it, as in torch's DDP.
Source: the semantics of Megatron-Core's DistributedDataParallel; Li et al. 2020, arXiv:2006.15704, for the order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from meshwright.base.errors import MeshwrightError, StrategyError
from meshwright.manager.ending import Findings
from meshwright.mesh.world import World

from .buckets import Bucket, Slot
from .config import DistributedDataParallelConfig
from .gradient_checks import GradientChecks


class GradientSync:
    """Takes gradients as backward yields them, and reduces them over ranks.

    Args:
        buckets: of `make_buckets`. Their parameters get hooks, which take what is in `.grad`.
        config: when buckets are reduced, and what of them is checked.
        world: the ranks that must agree, those of other stages left out.

    Attributes:
        is_finished: whether `finish` has been called since the last gradient.
    """

    def __init__(self, buckets: Sequence[Bucket], config: DistributedDataParallelConfig, world: World) -> None:
        self._buckets = buckets
        self._slots = [slot for bucket in buckets for slot in bucket.slots]
        self._overlap = config.overlap_grad_reduce
        self._one_at_a_time = config.reduce_scatter_with_fp32_accumulation
        self._world = world
        self._checks = GradientChecks(nonfinite=config.check_for_nan_in_grad, large=config.check_for_large_grads)
        self._is_last = True
        self.begin_step()
        for bucket in buckets:
            for slot in bucket.slots:
                slot.parameter.register_post_accumulate_grad_hook(_hook(self, bucket, slot))

    def begin_step(self) -> None:
        """What the buffers hold is void, and nothing has been counted.

        A gradient that comes after `finish` begins a step, too.
        """
        self._added: set[Slot] = set()
        self._checks.forget()
        self._next = 0
        self._defect: MeshwrightError | None = None
        self.is_finished = False
        for bucket in self._buckets:
            bucket.begin()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Gradients of what runs here add up; a later microbatch is the last."""
        self._is_last = False
        try:
            yield
        finally:
            self._is_last = True

    def take_gradient(self, bucket: Bucket, slot: Slot) -> None:
        """Add what backward has left in a parameter's `.grad`; dispatch buckets that are ready with it.

        Args:
            bucket: the one that holds the parameter.
            slot: the parameter's place in it. Its `.grad`, in the parameter's shape and dtype, is None afterwards.
        """
        parameter = slot.parameter
        gradient = parameter.grad
        if gradient is None:
            return
        if self.is_finished:
            self.begin_step()
        # The first gradient of a step needs no zeros to be added to.
        if slot in self._added:
            slot.local.add_(gradient)
        else:
            slot.local.copy_(gradient)
            self._added.add(slot)
        parameter.grad = None
        if not (self._is_last and self._overlap):
            return
        bucket.count(slot)
        if bucket.is_dispatched:
            self._defect = self._defect or StrategyError(
                f"{slot.name} got another gradient after its bucket had been reduced: it gets more of them than "
                f"in the first step. Set overlap_grad_reduce=false."
            )
        while self._next < len(self._buckets) and self._buckets[self._next].is_ready:
            self._dispatch()

    def start(self) -> None:
        """Issue the reductions of all buckets that are left, whether ready or not. Collective."""
        if not self.is_finished:
            while self._next < len(self._buckets):
                self._dispatch()

    def finish(self, *, force_all_reduce: bool, allow_unused: bool) -> None:
        """Reduce what has not been reduced; the buffers hold zeros for what no rank has used. Collective.

        Args:
            force_all_reduce: reduce whole buckets to every rank also with the distributed optimizer.
            allow_unused: parameters may have no gradient in this step, since backward is known to have ended.

        Raises:
            StrategyError: with overlap, a bucket is not ready (on all ranks).
        """
        if self._overlap and not allow_unused:
            self._world.raise_together(self._unfinished())
        while self._next < len(self._buckets):
            self._dispatch(force_all_reduce=force_all_reduce)
        # All of them first, so that collectives over instances travel together.
        for bucket in self._buckets:
            bucket.reduction.proceed()
        for bucket in self._buckets:
            bucket.finish()
        self.is_finished = True

    def findings(self, trained: Callable[[nn.Parameter], nn.Parameter]) -> Findings:
        """What this rank has seen in the gradients of the step that `finish` has ended.

        Args:
            trained: what the optimizer trains of a parameter.
        """
        defect, is_wrong = self._defect, self._checks.is_wrong()
        if self._overlap:
            is_wrong = True if defect is not None else is_wrong if is_wrong is not None else False
        return Findings(
            trained=[[trained(slot.parameter)] for slot in self._slots],
            used=[slot in self._added for slot in self._slots],
            is_wrong=is_wrong,
            values=self._checks.norms(),
            error=lambda norms: self._checks.verdict(norms) if defect is None else defect,
            void=self.begin_step,
        )

    def _dispatch(self, *, force_all_reduce: bool = False) -> None:
        """Issue the next bucket's collective; see [Note: order of reductions]."""
        bucket = self._buckets[self._next]
        if self._one_at_a_time and self._next:
            # One bucket's pieces are held at a time.
            self._buckets[self._next - 1].reduction.wait()
        for slot in bucket.slots:
            if slot not in self._added:
                slot.gradient.zero_()
            elif slot.local is not slot.gradient:
                slot.gradient.copy_(slot.local)
        self._checks.look(self._next, [s.name for s in bucket.slots], [s.gradient for s in bucket.slots])
        bucket.reduction.start(force_all_reduce=force_all_reduce)
        bucket.is_dispatched = True
        self._next += 1

    def _unfinished(self) -> StrategyError | None:
        for index, bucket in enumerate(self._buckets):
            if bucket.reference is not None and not bucket.is_dispatched:
                ready = sum(bucket.counts[slot] > 0 for slot in bucket.slots)
                return StrategyError(
                    f"bucket {index} cannot be finished: {ready} of {len(bucket.slots)} parameters have their "
                    f"gradient. Call finish_grad_sync after the last microbatch's backward, outside of no_sync; with "
                    f"allow_unused=True if the others are unused in this step."
                )
        return None


def _hook(sync: GradientSync, bucket: Bucket, slot: Slot) -> Callable[[nn.Parameter], None]:
    """What a parameter calls when it has got a gradient.

    It holds nothing alive: Python's garbage collector cannot see through a parameter's hooks, and buckets hold process
    groups.
    """
    sync_reference, bucket_reference, slot_reference = weakref.ref(sync), weakref.ref(bucket), weakref.ref(slot)

    def on_gradient(parameter: nn.Parameter) -> None:
        sync, bucket, slot = sync_reference(), bucket_reference(), slot_reference()
        if sync is not None and bucket is not None and slot is not None:
            sync.take_gradient(bucket, slot)

    return on_gradient
