"""What ranks tell each other at the end of a step: the loss, which parameters were used, and what is wrong.

[Note: one wait] One all-reduce sums all of it on the device. The host reads the result once, together with what else it
wants to know of the step (`StrategyManager.read`), or when the optimizer steps; not at all if this rank has used all of
its parameters and nothing can be wrong. Until then a parameter that no rank has used has a gradient of zeros.
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
    """What one rank has found in the gradients of a step.

    Attributes:
        trained: for each parameter, what the optimizer trains of it here: one tensor, several copies, or none. The same
            parameters in the same order on all ranks that sum their findings.
        used: whether this rank has used each parameter in the step.
        is_wrong: whether this rank has found something wrong; a scalar on the device if the host need not know yet.
            None, on all ranks: nothing can be wrong.
        values: floating point, 1-D, on the device: argument of `error`.
        error: returns what is wrong, given these values on the host, or None; it may warn.
        void: called if a rank has found something wrong, after gradients were dropped.
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
        """Iterate over what is trained of unused parameters, of this rank's or those that `used` says."""
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
        """Settle at once, by a message of the control plane, for loops by hand. Waits for the device. Collective.

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
        parts: findings in what this rank trains, one for each stage of a pipeline.
        shared: findings in the parameters that several stages train.
    """

    def __init__(self, parts: Sequence[Findings] = (), shared: Findings | None = None) -> None:
        self._parts, self._shared = parts, shared or Findings()
        self._all = (self._shared, *parts)
        self._sums: Tensor | None = None

    @property
    def can_be_wrong(self) -> bool:
        """Whether any rank can have found something wrong."""
        return any(part.is_wrong is not None for part in self._parts)

    @property
    def _own_used(self) -> list[float]:
        """What this rank has used, in the order in which it is summed."""
        return [float(is_used) for part in self._all for is_used in part.used]

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
        """Return the loss of a step and its further sums, added up together with the findings. Collective.

        float64, 1-D, equal on all ranks, so that sums do not depend on how microbatches are spread over ranks.

        Args:
            losses: shares of microbatches, scalars; none, like `further`, if other ranks have them.
            over, alike, stages: ranks with other tokens; with the same tokens and other parts of the model; with other
                stages.
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
        """Drop, once, the gradients that no rank has used; wait for the device if there is something to know.

        Returns the values of `also`, scalars to read at the same time.

        Raises:
            MeshwrightError: what a rank has found wrong, on all ranks; no gradient is left.
        """
        sums, self._sums = self._sums, None
        asks = self.can_be_wrong or any(part.values is not None for part in self._parts)
        if sums is None or (not asks and all(part.uses_all for part in self._all)):
            return _read([each.detach().reshape(1) for each in also]) if also else []
        own = [part.values for part in self._parts if part.values is not None]
        read = iter(_read([each.detach().reshape(1) for each in also] + [sums, *own]))
        values, wrong = [next(read) for _ in also], next(read)
        used = [next(read) for _ in range(sums.numel() - 1)]
        # In a planned world the sums have no values, since losses are among them.
        used = world.select(used, self._own_used)
        errors = [
            part.error([next(read) for _ in range(part.values.numel())] if part.values is not None else ())
            for part in self._parts
        ]
        if wrong:
            for part in self._all:
                part.leave()
            world.raise_any(next((error for error in errors if error is not None), None))
        # A parameter that another stage has used has its gradient here, too.
        shared = {parameter for each in self._shared.trained for parameter in each}
        for part in self._all:
            mine, used = used[: len(part.used)], used[len(part.used) :]
            for parameter in part.unused(mine):
                if part is self._shared or parameter not in shared:
                    parameter.grad = None
        return values


def _read(tensors: Sequence[Tensor]) -> list[float]:
    """Read 1-D tensors with one wait for the device."""
    device = tensors[0].device
    values: list[float] = torch.cat([each.to(device, torch.float64) for each in tensors]).tolist()
    return values
