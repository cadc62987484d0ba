"""What is expected of candidates that are not traced, by those that are.

[Note: the estimate] The logarithms of four numbers of a candidate are taken as sums over its features: its
strategy's, those of its degrees, and so on. They are the seconds of one device for a token; the bytes that it holds
between steps for each of the model's parameters; and at the peak the bytes of activations, and of the rest. What each
feature adds is expected to be near what is written in the tables of priors here, and is learned from traces: Bayesian
linear regression, whose standard deviation tells how well a candidate is known (C. M. Bishop, Pattern Recognition and
Machine Learning, section 3.3). None of these numbers is ever told as a candidate's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .candidates import Candidate

Prior = tuple[float, float]
"""Mean and standard deviation."""
NOISE = 0.07
"""What features do not tell, as a part."""
SECONDS: Mapping[str, Prior] = {
    "all": (0, 10),
    "family": (0, 0.3),
    "recomputed False": (0, 0.05),
    "recomputed selective": (0.07, 0.07),
    "recomputed full": (0.25, 0.1),
    "one microbatch": (0, 0.1),
    "few rows": (0.1, 0.1),
    "log2 tp": (0.05, 0.05),
    "log2 cp": (0.1, 0.05),
    "log2 ep": (0.05, 0.1),
    "log2 pp": (0.03, 0.03),
    "log2 shards": (0.03, 0.03),
    "hybrid": (0, 0.1),
}
HELD: Mapping[str, Prior] = {
    "all": (2.7, 0.3),
    "family": (0, 0.2),
    "log2 pp": (-0.69, 0.05),
    "log2 tp": (-0.69, 0.1),
    "log2 ep": (0, 0.1),
    "family, log2 shards": (-0.69, 0.2),
    "family, log2 copies": (0, 0.3),
}
ACTIVATIONS: Mapping[str, Prior] = {
    "all": (0, 10),
    "family": (0, 0.1),
    "recomputed False": (0, 0.05),
    "recomputed selective": (-0.4, 0.3),
    "recomputed full": (-2, 0.5),
    "one microbatch": (0, 0.05),
    "log2 rows": (0.69, 0.05),
    "log2 tp": (-0.6, 0.1),
    "log2 cp": (-0.6, 0.1),
    "log2 ep": (0, 0.1),
    "log2 pp": (0, 0.05),
    "log2 shards": (0, 0.02),
    "hybrid": (0, 0.02),
}
REST: Mapping[str, Prior] = {
    "all": (0, 10),
    "family": (0, 0.5),
    "recomputed False": (0, 0.05),
    "recomputed selective": (0, 0.2),
    "recomputed full": (0, 0.2),
    "one microbatch": (-0.3, 0.5),
    "log2 rows": (0.2, 0.2),
    "log2 tp": (-0.6, 0.1),
    "log2 cp": (-0.1, 0.2),
    "log2 ep": (-0.3, 0.3),
    "log2 pp": (-0.3, 0.3),
    "log2 shards": (0, 0.02),
    "hybrid": (0, 0.1),
}
_ELSE: Prior = (0, 0.07)
"""A single value of what has a logarithm: how far it is off the line."""


@dataclass
class Estimate:
    """One number of all candidates; see [Note: the estimate].

    Attributes:
        features: of each candidate.
        beside: of each candidate, what is known without them.
        known: logarithms of those that are traced.
    """

    priors: Mapping[str, Prior]
    features: Sequence[Mapping[str, float]]
    beside: Tensor
    known: dict[int, float] = field(default_factory=dict)
    _matrix: Tensor = field(init=False)
    _names: list[str] = field(init=False)
    _told: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        self._names = sorted({name for each in self.features for name in each})
        place = {name: at for at, name in enumerate(self._names)}
        rows = [row for row, each in enumerate(self.features) for _ in each]
        columns = [place[name] for each in self.features for name in each]
        values = torch.tensor([value for each in self.features for value in each.values()], dtype=torch.float64)
        shape = (len(self.features), len(self._names))
        found = torch.sparse_coo_tensor(torch.tensor([rows, columns]), values, shape, check_invariants=True)
        self._matrix = found.to_dense()

    def learn(self, number: int, value: float) -> None:
        """Take the logarithm of a candidate."""
        self.known[number], self._told = value, None

    def all(self) -> tuple[Tensor, Tensor]:
        """Expected logarithms, and their standard deviations.

        Returns:
            float64, one for each candidate.
        """
        if self._told is None:
            self._told = self._with({})
        return self._told

    def all_as_expected(self, numbers: Iterable[int]) -> tuple[Tensor, Tensor]:
        """As `all`, if some candidates were what is expected of them."""
        mean, _ = self.all()
        more = {number: float(mean[number]) for number in numbers}
        return self._with(more) if more else self.all()

    def _with(self, more: Mapping[int, float]) -> tuple[Tensor, Tensor]:
        given = {**self.known, **more}
        priors = torch.tensor([self._prior(name) for name in self._names], dtype=torch.float64)
        mean, deviation = priors.T
        seen = self._matrix[list(given)]
        precision = torch.diag(deviation**-2) + seen.T @ seen / NOISE**2
        target = torch.tensor([*given.values()], dtype=torch.float64) - self.beside[list(given)] - seen @ mean
        spread = torch.linalg.inv(precision)
        weights = mean + spread @ (seen.T @ target) / NOISE**2
        variance = ((self._matrix @ spread) * self._matrix).sum(1)
        return self.beside + self._matrix @ weights, variance.clamp_min(0).sqrt()

    def _prior(self, name: str) -> Prior:
        kind = name.partition(":")[0]
        return self.priors.get(name, self.priors.get(kind, _ELSE))


def of_work(candidates: Iterable[Candidate]) -> list[dict[str, float]]:
    """Features of what is computed and held for it."""
    found = []
    for each in candidates:
        degrees = each.degrees
        sizes = {"rows": each.rows, "tp": degrees.tp, "cp": degrees.cp, "ep": degrees.ep, "pp": degrees.pp}
        features = {"all": 1.0, f"family: {each.family}": 1.0, f"recomputed {each.recomputation}": 1.0}
        for name, size in sizes.items():
            if size > 1:
                features |= {f"log2 {name}": math.log2(size), f"{name} {size}": 1.0}
        features["few rows"] = 1 / each.rows
        if each.microbatches == 1:
            features["one microbatch"] = 1.0
        if degrees.dp_shard > 1:
            features["log2 shards"] = math.log2(degrees.dp_shard)
        if degrees.dp_shard > 1 and degrees.dp_replicate > 1:
            features["hybrid"] = 1.0
        found.append(features)
    return found


def of_state(candidates: Iterable[Candidate]) -> list[dict[str, float]]:
    """Features of what is held between steps."""
    found = []
    for each in candidates:
        degrees = each.degrees
        features = {"all": 1.0, f"family: {each.family}": 1.0}
        sizes = {"log2 pp": degrees.pp, "log2 tp": degrees.tp, "log2 ep": degrees.ep}
        sizes[f"family, log2 shards: {each.family}"] = degrees.dp_shard * degrees.cp
        sizes[f"family, log2 copies: {each.family}"] = degrees.dp_replicate
        found.append(features | {name: math.log2(size) for name, size in sizes.items() if size > 1})
    return found
