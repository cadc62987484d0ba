"""Reduce buckets as backward produces their gradients, and report missing or non-finite gradients.

[Note: order of reductions] Ranks may use different parameters (experts chosen by the data), but must issue the same
collectives in the same order. So a bucket waits for the buckets before it, as in torch's DDP.
Source: the semantics of Megatron-Core's DistributedDataParallel; Li et al. 2020, arXiv:2006.15704, for the order.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.plugin import GradientReport, MeshwrightError, NonFiniteError, StrategyError, TrainingError, World, warn

from .buckets import Bucket, GradSlot
from .config import DistributedDataParallelConfig

NUM_REFERENCE_NORMS = 100
"""Number of initial norms that set the reference for large norms."""
LARGE_NORM_FACTOR = 10.0
"""A norm is large if it is at least this many times the largest reference norm."""


class GradChecker:
    """Check each bucket's gradients on this rank before they are reduced.

    Norms stay on their device until the host reads the step's report. So backward does not synchronize, and all ranks
    stop together.
    """

    def __init__(self, *, check_nonfinite: bool, check_large: bool) -> None:
        self._checks_nonfinite = check_nonfinite
        self._checks_large = check_large
        self._recorded_norms: list[tuple[int, Sequence[str], Tensor]] = []
        self._num_reference_norms = 0
        self._largest_reference_norm = 0.0

    def record_norms(self, bucket: int, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """Record the 2-norms of a bucket's gradients before scaling and reduction."""
        if self._checks_nonfinite or self._checks_large:
            self._recorded_norms.append(
                (bucket, names, torch.stack([torch.linalg.vector_norm(each) for each in gradients]))
            )

    def reset(self) -> None:
        self._recorded_norms = []

    def recorded_norms(self) -> Tensor | None:
        """Return all norms recorded since the last `find_error`, 1-D on their device; None if there are none."""
        return torch.cat([norms for _, _, norms in self._recorded_norms]) if self._recorded_norms else None

    def has_error(self) -> Tensor | bool | None:
        """Return whether `find_error` will return an error, on the gradients' device; None: it never will."""
        norms = self.recorded_norms()
        if not self._checks_nonfinite:
            return None
        return False if norms is None else ~norms.isfinite().all()

    def find_error(self, norms: Sequence[float]) -> TrainingError | None:
        """Return the error of the recorded buckets, if any, given `norms` on the host. Warn about large norms."""
        recorded, self._recorded_norms = self._recorded_norms, []
        start = 0
        for bucket, names, tensor in recorded:
            bucket_norms = norms[start : start + tensor.numel()]
            start += len(bucket_norms)
            if not all(map(math.isfinite, bucket_norms)):
                if self._checks_nonfinite:
                    return _nonfinite_error(bucket, names, bucket_norms)
            elif self._checks_large:
                self._check_large_norm(math.hypot(*bucket_norms), bucket, names)
        return None

    def _check_large_norm(self, norm: float, bucket: int, names: Sequence[str]) -> None:
        if self._num_reference_norms < NUM_REFERENCE_NORMS:
            self._num_reference_norms += 1
            self._largest_reference_norm = max(self._largest_reference_norm, norm)
        elif norm >= LARGE_NORM_FACTOR * self._largest_reference_norm:
            warn(
                f"check_for_large_grads: the gradients of bucket {bucket} ({names[-1]} to {names[0]}) have norm "
                f"{norm:.3g} on this rank before the data-parallel collective, at least {LARGE_NORM_FACTOR:g} times "
                f"the largest of the first {NUM_REFERENCE_NORMS} norms ({self._largest_reference_norm:.3g}).",
                stacklevel=2,
            )


def _nonfinite_error(bucket: int, names: Sequence[str], norms: Sequence[float]) -> NonFiniteError:
    nonfinite = [name for name, norm in zip(names, norms, strict=True) if not math.isfinite(norm)]
    kind = "NaN" if any(map(math.isnan, norms)) else "Inf"
    listed = ", ".join(nonfinite[:3]) + (f" and {len(nonfinite) - 3} more" if len(nonfinite) > 3 else "")
    return NonFiniteError(
        f"the gradient norm of bucket {bucket} is {kind} before the data-parallel collective "
        f"(check_for_nan_in_grad), from {listed}. Lower the learning rate, clip "
        f"gradients, or look at the data of this step; nothing was stepped."
    )


class BucketGradSync:
    """Take gradients from `.grad` with hooks on the parameters, and reduce them over the data-parallel ranks."""

    def __init__(self, buckets: Sequence[Bucket], config: DistributedDataParallelConfig, world: World) -> None:
        self._buckets = buckets
        self._slot_by_parameter = {slot.parameter: (bucket, slot) for bucket in buckets for slot in bucket.slots}
        self._overlap = config.overlap_grad_reduce
        self._reduces_one_at_a_time = config.reduce_scatter_with_fp32_accumulation
        self._world = world
        self._checker = GradChecker(
            check_nonfinite=config.check_for_nan_in_grad, check_large=config.check_for_large_grads
        )
        self._is_last = True
        self.begin_step()
        # Weak, since Python's garbage collector does not traverse hooks, and buckets hold process groups.
        on_grad = weakref.WeakMethod(self.accumulate_grad)
        for parameter in self._slot_by_parameter:
            parameter.register_post_accumulate_grad_hook(partial(_call_weak_method, on_grad))

    def begin_step(self) -> None:
        """Discard the gradients in the buffers and reset counters. The first gradient after `finish` also does this."""
        self._accumulated_slots: set[GradSlot] = set()
        self._checker.reset()
        self._next_bucket = 0
        self._error: MeshwrightError | None = None
        self.is_finished = False
        for bucket in self._buckets:
            bucket.begin_step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._is_last = False
        try:
            yield
        finally:
            self._is_last = True

    def accumulate_grad(self, parameter: nn.Parameter) -> None:
        """Move a parameter's `.grad` into its buffer, and dispatch buckets that become ready."""
        bucket, slot = self._slot_by_parameter[parameter]
        gradient = parameter.grad
        if gradient is None:
            return
        if self.is_finished:
            self.begin_step()
        # The first gradient of a step overwrites the buffer, so it need not be zeroed.
        if slot in self._accumulated_slots:
            slot.accumulation.add_(gradient)
        else:
            slot.accumulation.copy_(gradient)
            self._accumulated_slots.add(slot)
        parameter.grad = None
        if not (self._is_last and self._overlap):
            return
        bucket.record_grad(slot)
        if bucket.is_dispatched:
            self._error = self._error or StrategyError(
                f"{slot.name} got another gradient after its bucket had been reduced: it gets more of them than "
                f"in the first step. Set overlap_grad_reduce=false."
            )
        while self._next_bucket < len(self._buckets) and not self._buckets[self._next_bucket].num_missing:
            self._dispatch()

    def dispatch_all(self) -> None:
        if not self.is_finished:
            while self._next_bucket < len(self._buckets):
                self._dispatch()

    def finish(self, *, force_all_reduce: bool, allow_unused: bool) -> None:
        """Reduce all remaining buckets, with zeros for parameters that no rank has used. Collective.

        Args:
            allow_unused: parameters may have no gradient in this step, since backward is known to have ended.
        """
        if self._overlap and not allow_unused:
            self._world.raise_on_all_ranks(self._find_unready_bucket())
        while self._next_bucket < len(self._buckets):
            self._dispatch(force_all_reduce=force_all_reduce)
        # Issue all of them first, so that the collectives over instances overlap.
        for bucket in self._buckets:
            bucket.reduction.start_inter_instance()
        for bucket in self._buckets:
            bucket.finish_step()
        self.is_finished = True

    def build_report(self, optimizer_parameter: Callable[[nn.Parameter], nn.Parameter]) -> GradientReport:
        """Return the step's report of this rank; `optimizer_parameter` maps a parameter to its trained counterpart."""
        error, has_error = self._error, self._checker.has_error()
        if self._overlap:
            has_error = True if error is not None else has_error if has_error is not None else False
        return GradientReport(
            trained=[[optimizer_parameter(parameter)] for parameter in self._slot_by_parameter],
            is_used=[slot in self._accumulated_slots for _, slot in self._slot_by_parameter.values()],
            has_error=has_error,
            error_values=self._checker.recorded_norms(),
            build_error=lambda norms: self._checker.find_error(norms) if error is None else error,
            on_error=self.begin_step,
        )

    def _dispatch(self, *, force_all_reduce: bool = False) -> None:
        bucket = self._buckets[self._next_bucket]
        if self._reduces_one_at_a_time and self._next_bucket:
            # Only one bucket's receive buffer is allocated at a time.
            self._buckets[self._next_bucket - 1].reduction.wait()
        for slot in bucket.slots:
            if slot not in self._accumulated_slots:
                slot.grad_view.zero_()
            elif slot.accumulation is not slot.grad_view:
                slot.grad_view.copy_(slot.accumulation)
        self._checker.record_norms(
            self._next_bucket, [s.name for s in bucket.slots], [s.grad_view for s in bucket.slots]
        )
        bucket.reduction.start(force_all_reduce=force_all_reduce)
        bucket.is_dispatched = True
        self._next_bucket += 1

    def _find_unready_bucket(self) -> StrategyError | None:
        for index, bucket in enumerate(self._buckets):
            if bucket.expected_num_grads is not None and not bucket.is_dispatched:
                ready = sum(bucket.num_grads[slot] > 0 for slot in bucket.slots)
                return StrategyError(
                    f"bucket {index} cannot be finished: {ready} of {len(bucket.slots)} parameters have their "
                    f"gradient. Call finish_grad_sync after the last microbatch's backward, outside of no_sync; with "
                    f"allow_unused=True if the others are unused in this step."
                )
        return None


def _call_weak_method(method: weakref.WeakMethod[Any], parameter: nn.Parameter) -> None:
    function = method()
    if function is not None:
        function(parameter)
