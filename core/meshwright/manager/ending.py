"""What ranks tell each other when the gradients of a step are there: the loss, what was used, and what is wrong.

[Note: one wait] All of it is summed over ranks on the device, in one all-reduce, and stays there: the host reads it
once, together with whatever else it wants to know of the step (`StrategyManager.read`), or, if nobody has asked before,
when the optimizer steps. Until then a parameter that no rank has used has a gradient of zeros, which adds nothing to a
norm. Where a rank has used all of its parameters, and nothing can be wrong, it need not look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..base.errors import MeshwrightError
from ..mesh.world import World


@dataclass(frozen=True)
class Findings:
    """What one rank has seen in the gradients of a step.

    Attributes:
        trained: what the optimizer trains here of each parameter: one tensor, several copies, or none; as many
            parameters, in the same order, on all ranks that sum what they have found.
        used: whether this rank has used each parameter in the step.
        is_wrong: whether this rank has found something wrong; a scalar on the device where the host need not know yet.
            None: no rank can have. All ranks give None, or none does.
        values: floating point, 1-D, on the device: what `error` is to be told of it.
        error: given these values on the host, what is wrong, or None; it may warn.
        void: called where a rank has found something wrong, so that the step can be left; None: gradients are dropped.
    """

    trained: Sequence[Sequence[nn.Parameter]] = ()
    used: Sequence[bool] = ()
    is_wrong: Tensor | bool | None = None
    values: Tensor | None = None
    error: Callable[[Sequence[float]], MeshwrightError | None] = lambda values: None
    void: Callable[[], None] | None = None

    @property
    def uses_all(self) -> bool:
        """Whether this rank has used all parameters that it trains."""
        return all(is_used or not each for each, is_used in zip(self.trained, self.used, strict=True))

    def unused(self, used: Sequence[float] | None = None) -> Iterator[nn.Parameter]:
        """What is trained of parameters that are not used, by this rank or as `used` says."""
        for each, is_used in zip(self.trained, self.used if used is None else used, strict=True):
            if not is_used:
                yield from each

    def leave(self) -> None:
        """Drop the gradients."""
        for each in self.trained:
            for parameter in each:
                parameter.grad = None
        if self.void is not None:
            self.void()

    def tell(self, world: World) -> None:
        """Settle at once, by a message of the control plane: for loops by hand, in which nothing else is told.

        Waits for the device of the values. Collective.

        Raises:
            MeshwrightError: of any rank, on all.
        """
        error = self.error(self.values.tolist() if self.values is not None else ())
        (wrong,), used = world.exchange([int(error is not None)], [int(each) for each in self.used])
        if wrong:
            self.leave()
            world.raise_any(error)
        for parameter in self.unused(used):
            parameter.grad = None


class Ending:
    """The end of one step on this rank; see [Note: one wait].

    Args:
        parts: of what this rank trains, one for each stage of a pipeline.
        shared: of what several stages train, the same parameters on all of them.
    """

    def __init__(self, parts: Sequence[Findings] = (), shared: Findings | None = None) -> None:
        self._parts, self._shared = parts, shared or Findings()
        self._sums: Tensor | None = None

    @property
    def can_be_wrong(self) -> bool:
        """Whether any rank can have found something wrong."""
        return any(part.is_wrong is not None for part in self._parts)

    @property
    def _own_used(self) -> list[float]:
        """What this rank has used, as it is summed."""
        return [float(is_used) for part in (self._shared, *self._parts) for is_used in part.used]

    def add_up(
        self,
        losses: Sequence[Tensor],
        device: torch.device,
        *,
        further: Tensor | None = None,
        over: dist.ProcessGroup,
        alike: dist.ProcessGroup | None = None,
        stages: dist.ProcessGroup | None = None,
    ) -> Tensor:
        """The loss of the step, from the shares of its microbatches. Collective.

        Args:
            losses: scalars; none, where other ranks have them.
            device: of this rank.
            further: sums beside, 1-D, float64, likewise; zeros where other ranks have them.
            over: ranks that have other tokens.
            alike: ranks that have the same tokens and other parts of the model.
            stages: ranks that have other stages.

        Returns:
            float64, so that sums do not depend on how microbatches are spread over ranks; the loss and then the further
            sums, 1-D; equal on all.
        """
        count = 1 + (0 if further is None else further.numel())
        wrong = [part.is_wrong for part in self._parts if part.is_wrong is not None]
        known = float(sum(each for each in wrong if isinstance(each, bool)))
        sums = torch.tensor([0.0] * count + [known, *self._own_used], dtype=torch.float64).to(device, non_blocking=True)
        if losses:
            sums[0] += torch.stack(list(losses)).sum(dtype=torch.float64)
        if further is not None:
            sums[1:count] += further
        for each in wrong:
            if isinstance(each, Tensor):
                sums[count] += each
        dist.all_reduce(sums, group=over)
        if alike is not None and self.can_be_wrong:
            dist.all_reduce(sums[count : count + 1], group=alike)
        if stages is not None:
            dist.all_reduce(sums[: count + 1 + len(self._shared.used)], group=stages)
        self._sums = sums[count:]
        return sums[:count]

    def settle(self, world: World, also: Sequence[Tensor] = ()) -> list[float]:
        """Drop the gradients of what no rank has used, once; waits for the device where there is something to know.

        Args:
            world: the ranks of the step.
            also: scalars that are to be read, too.

        Returns:
            The values of `also`.

        Raises:
            MeshwrightError: what a rank has found wrong, on all ranks; no gradient is left.
        """
        sums, self._sums = self._sums, None
        uses_all = all(part.uses_all for part in (self._shared, *self._parts))
        asks = self.can_be_wrong or any(part.values is not None for part in self._parts)
        if sums is None or (uses_all and not asks):
            return _read([each.detach().reshape(1) for each in also]) if also else []
        own = [part.values for part in self._parts if part.values is not None]
        read = _read([each.detach().reshape(1) for each in also] + [sums, *own])
        values, wrong, used = read[: len(also)], read[len(also)], read[len(also) + 1 : len(also) + sums.numel()]
        told = read[len(also) + sums.numel() :]
        if world.is_planned:
            # The sums have no values, since losses are among them.
            used = self._own_used
        errors = []
        for part in self._parts:
            count = part.values.numel() if part.values is not None else 0
            errors.append(part.error(told[:count]))
            told = told[count:]
        if wrong:
            for part in (self._shared, *self._parts):
                part.leave()
            world.raise_any(next((error for error in errors if error is not None), None))
        # What another stage has used has its gradient here, too.
        shared = {parameter for each in self._shared.trained for parameter in each}
        for part in (self._shared, *self._parts):
            mine, used = used[: len(part.used)], used[len(part.used) :]
            for parameter in part.unused(mine):
                if part is self._shared or parameter not in shared:
                    parameter.grad = None
        return values


def _read(tensors: Sequence[Tensor]) -> list[float]:
    """The values of 1-D tensors, with one wait for the device."""
    device = tensors[0].device
    values: list[float] = torch.cat([each.to(device, torch.float64) for each in tensors]).tolist()
    return values
