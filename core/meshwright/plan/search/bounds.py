"""What is known of candidates before they are planned: the least seconds that a step takes, and bytes that it holds.

See [Note: the search] in `search`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...mesh.sizes import Degrees
from .candidates import CHECKPOINTING, Candidate, Space
from .measure import Glance

_WIDTHS = {"bfloat16": 2, "float32": 4, "float64": 8}


@dataclass
class Known:
    """What glances have told, and the bounds that follow."""

    space: Space
    glances: dict[tuple[Any, ...], dict[Degrees, Glance]] = field(default_factory=dict)
    refused: dict[tuple[Any, ...], str] = field(default_factory=dict)
    too_large: dict[tuple[Any, ...], int] = field(default_factory=dict)
    forecasts: dict[tuple[Any, ...], tuple[float, float]] = field(default_factory=dict)
    _seen: dict[str, list[tuple[Candidate, Glance]]] = field(default_factory=dict)
    _same_rows: dict[tuple[Any, ...], dict[tuple[int, ...], float]] = field(default_factory=dict)
    _any_rows: dict[tuple[Any, ...], dict[tuple[int, ...], float]] = field(default_factory=dict)

    def learn(self, candidate: Candidate, found: Glance) -> None:
        """Keep what a glance at a candidate without a pipeline has told."""
        self.glances.setdefault(candidate.unit, {})[candidate.degrees] = found
        self._seen.setdefault(candidate.family, []).append((candidate, found))
        split = candidate.degrees.tp * candidate.degrees.cp
        family, recomputation, rows, *axes = candidate.unit
        place = (_work(recomputation), *axes)
        for known, key, line in (
            (self._same_rows, (family, rows), found.compute),
            (self._any_rows, (family,), found.ideal),
            (self._any_rows, (), found.ideal),
        ):
            seconds = line.at(self.space.layers) * split / rows
            of_key = known.setdefault(key, {})
            of_key[place] = min(seconds, of_key.get(place, seconds))

    def seconds(self, candidate: Candidate) -> float:
        """A step of it takes no less."""
        degrees, layers = candidate.degrees, self.space.layers
        own = self.glances.get(candidate.unit, {})
        if degrees in own:
            glance = own[degrees]
            return glance.step.at(layers) + (candidate.microbatches - candidate.glanced) * glance.compute.at(layers)
        alone = min((each.compute.at(layers) for each in own.values()), default=0.0)
        share = candidate.microbatches * max(alone, self._inherited(candidate)) / degrees.pp
        waiting, _ = self.forecast(candidate)
        return share / (1 - waiting)

    def bytes(self, candidate: Candidate) -> float:
        """It holds no less at its peak."""
        degrees, layers = candidate.degrees, self.space.layers
        _, live = self.forecast(candidate)
        least = 0.0
        for seen, glance in self._seen.get(candidate.family, []):
            at, rows = seen.degrees, seen.rows
            divides = degrees.tp % at.tp == 0 and degrees.cp % at.cp == 0 and degrees.ep == at.ep
            shards_more = at.dp_shard >= degrees.dp_shard and at.dp >= degrees.dp
            holds_less = rows <= candidate.rows and _work(seen.recomputation) >= _work(candidate.recomputation)
            if divides and shards_more and holds_less:
                more = (candidate.rows / rows - 1) * glance.activations.at(layers)
                waiting = max(0.0, live - 1) * glance.activations.slope * layers
                ranks = degrees.pp * degrees.tp * degrees.cp / (at.tp * at.cp)
                least = max(least, (glance.peak.at(layers) + more + waiting) / ranks)
        return least

    def forecast(self, candidate: Candidate) -> tuple[float, float]:
        """Of a pipeline under a schedule, the share of waiting and the microbatches that are held; else 0 and 1.

        Raises:
            ConfigError: blocks or sequences do not divide so.
        """
        ask = getattr(candidate.wrapper, "forecast", None)
        if ask is None:
            return 0.0, 1.0
        key = (candidate.schedule, candidate.degrees.pp, candidate.microbatches)
        if key not in self.forecasts:
            sequences = candidate.microbatches * candidate.rows
            self.forecasts[key] = ask(layers=self.space.layers, ranks=candidate.degrees.pp, sequences=sequences)
        return self.forecasts[key]

    def held(self, candidate: Candidate) -> float:
        """Its parameters, divided by all axes that divide such."""
        degrees, size = candidate.degrees, self.space.size
        width = _WIDTHS.get(candidate.values.get("model.dtype", ""), size.bytes_per_element)
        return size.parameters * width / (degrees.pp * degrees.dp_shard * degrees.cp * degrees.tp)

    def _inherited(self, candidate: Candidate) -> float:
        """A microbatch's computation, where the model is divided less."""
        family, recomputation, rows, tp, cp, ep = candidate.unit
        work, best = _work(recomputation), 0.0
        # A strategy of which nothing is known computes the model as another does.
        of_any = self._any_rows.get((family,), self._any_rows.get((), {}))
        for known in (self._same_rows.get((family, rows), {}), of_any):
            for at, seconds in known.items():
                if at[0] <= work and tp % at[1] == 0 and cp % at[2] == 0 and ep % at[3] == 0:
                    best = max(best, seconds)
        return best * rows / (tp * cp)

    def refuse(self, candidate: Candidate, reason: str, *, of_batch: bool) -> None:
        """Keep that it was refused, and with it those alike, whatever their batch unless that was the reason."""
        self.refused[_refusal_keys(candidate)[of_batch]] = reason

    def refusal(self, candidate: Candidate) -> str | None:
        """Why it, or one like it, was refused."""
        return next((self.refused[key] for key in _refusal_keys(candidate) if key in self.refused), None)


def _work(recomputation: Any) -> int:
    """Who computes again computes more."""
    return CHECKPOINTING.index(recomputation) if recomputation in CHECKPOINTING else 0


def _refusal_keys(candidate: Candidate) -> list[tuple[Any, ...]]:
    degrees = candidate.degrees
    are_above_one = (degrees.pp > 1, degrees.dp_replicate > 1, degrees.dp_shard > 1)
    alike = (candidate.family, degrees.tp, degrees.cp, degrees.ep, *are_above_one)
    return [alike, (*alike, candidate.recomputation, candidate.rows, degrees, candidate.schedule)]
