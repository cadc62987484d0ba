"""Checks of each bucket's gradients on this rank, before they are reduced.

Norms stay on their device until the host reads what is to be known of the step, so that nothing waits for them in
backward, and no rank stops alone: all ranks hear of a defect together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.base.errors import NotFiniteError, TrainingError
from meshwright.files.terminal import warn

LEARNED = 100
"""Norms that only set the largest one to be expected."""
LARGE = 10.0
"""A norm is large from so many times the largest that was learned."""


class GradientChecks:
    """Looks at buckets as they are dispatched. It changes no gradient and communicates nothing.

    Args:
        nonfinite: a NaN or Inf is an error.
        large: warn of 2-norms of at least `LARGE` times the largest of the first `LEARNED` (of all buckets together).
    """

    def __init__(self, *, nonfinite: bool, large: bool) -> None:
        self._nonfinite = nonfinite
        self._large = large
        self._seen: list[tuple[int, Sequence[str], Tensor]] = []
        self.looks = nonfinite or large
        self._learned = 0
        self._largest = 0.0

    def look(self, bucket: int, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """Note the 2-norms of a bucket's gradients, which are not scaled or reduced yet. Waits for no device.

        Args:
            bucket: its number, for reports.
            names: of its parameters.
            gradients: of the same parameters, of any shapes.
        """
        if self.looks:
            self._seen.append((bucket, names, torch.stack([torch.linalg.vector_norm(each) for each in gradients])))

    def forget(self) -> None:
        """What has been noted is of a step that was left."""
        self._seen = []

    def norms(self) -> Tensor | None:
        """All norms noted since the last verdict, on their device, for `verdict`; None where nothing is looked at."""
        return torch.cat([norms for _, _, norms in self._seen]) if self._seen else None

    def is_wrong(self) -> Tensor | bool | None:
        """Whether `verdict` will find an error, on the device of the gradients; None: it never does."""
        norms = self.norms()
        if not self._nonfinite:
            return None
        return False if norms is None else ~norms.isfinite().all()

    def verdict(self, norms: Sequence[float]) -> TrainingError | None:
        """What is wrong with the buckets seen since the last verdict; None: nothing. Warns of large norms.

        Args:
            norms: the values of `norms`, on the host.
        """
        seen, self._seen = self._seen, []
        start = 0
        for bucket, names, tensor in seen:
            mine = norms[start : start + tensor.numel()]
            start += len(mine)
            if not all(map(math.isfinite, mine)):
                if self._nonfinite:
                    return _nonfinite(bucket, names, mine)
            elif self._large:
                self._judge(math.hypot(*mine), bucket, names)
        return None

    def _judge(self, norm: float, bucket: int, names: Sequence[str]) -> None:
        if self._learned < LEARNED:
            self._learned += 1
            self._largest = max(self._largest, norm)
        elif norm >= LARGE * self._largest:
            warn(
                f"check_for_large_grads: the gradients of bucket {bucket} ({names[-1]} to {names[0]}) have norm "
                f"{norm:.3g} on this rank before the data-parallel collective, at least {LARGE:g} times the largest "
                f"of the first {LEARNED} norms ({self._largest:.3g}).",
                stacklevel=2,
            )


def _nonfinite(bucket: int, names: Sequence[str], norms: Sequence[float]) -> NotFiniteError:
    culprits = [name for name, norm in zip(names, norms, strict=True) if not math.isfinite(norm)]
    kind = "NaN" if any(map(math.isnan, norms)) else "Inf"
    told = ", ".join(culprits[:3]) + (f" and {len(culprits) - 3} more" if len(culprits) > 3 else "")
    return NotFiniteError(
        f"the gradient norm of bucket {bucket} is {kind} before the data-parallel collective "
        f"(check_for_nan_in_grad), from {told}. Lower the learning rate, clip "
        f"gradients, or look at the data of this step; nothing was stepped."
    )
