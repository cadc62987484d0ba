"""Do a step of a run again, and hold it against what was written."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.plugin import ConfigError, started_by_launcher

from .order import TOLERANCES, Order, Perform, degrees_of, on_one_process, order_of, precision_of, scratch
from .record import Recorded, plain_of


@dataclass(frozen=True)
class Value:
    """A number of a step, as it was written and as it has come again."""

    name: str
    written: float | None
    replayed: float | None

    @property
    def is_same(self) -> bool:
        """Whether both are the same bit for bit."""
        return _is_same(self.written, self.replayed)

    @property
    def apart(self) -> float:
        return relative(self.written, self.replayed)


def _is_same(one: float | None, other: float | None) -> bool:
    return one == other or (one is not None and other is not None and math.isnan(one) and math.isnan(other))


def relative(one: float | None, other: float | None) -> float:
    """Return |a - b| / max(|a|, |b|); infinite where one is missing, or is not finite."""
    if _is_same(one, other):
        return 0.0
    if one is None or other is None or not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))


@dataclass(frozen=True)
class Replayed:
    """A step that was done again.

    Attributes:
        beginning: how many steps were done before, and the checkpoint; "": the beginning of the run.
        tolerance: relative, of its values; 0: bit for bit.
        shares: what `peers.judged` has found, where the work of data rank `asked` was compared.
    """

    run: str
    step: int
    strategy: str
    mesh: str
    beginning: tuple[int, str]
    values: tuple[Value, ...]
    tolerance: float
    precision: str
    shares: Mapping[str, Any] | None = None
    asked: int | None = None
    note: str = ""

    @property
    def is_same(self) -> bool:
        return all(each.apart <= self.tolerance if self.tolerance else each.is_same for each in self.values)

    @property
    def is_sound(self) -> bool:
        """Whether no share of a rank has come out in two ways."""
        return self.shares is None or not (self.shares["shares"] or self.shares["unsteady"])

    @property
    def exit_code(self) -> int:
        return 0 if self.is_same and self.is_sound else 1

    def as_values(self) -> dict[str, Any]:
        """Return values of JSON."""
        values = asdict(self)
        step, checkpoint = values.pop("beginning")
        asked = values.pop("asked")
        return {
            **values,
            "from": {"step": step, "checkpoint": checkpoint or None},
            "values": {
                each.name: {"written": each.written, "replayed": each.replayed, "is_same": each.is_same}
                for each in self.values
            },
            "is_same": self.is_same,
            "compared_rank": asked,
        }


def replay(
    directory: Path,
    step: int,
    *,
    single: bool = False,
    compare_rank: int | None = None,
    show_traceback: bool = False,
    perform: Perform | None = None,
) -> Replayed:
    """Do a step of a run again, from the newest checkpoint before it; nothing is written in its directory.

    `single`: on one process; `compare_rank`: a data rank whose work is also done by another; `perform`: has the ranks
    do it, in place of `performed`.
    """
    if single and compare_rank is not None:
        raise ConfigError("--single has one process, and no other to compare a rank with. Leave one of both out.")
    if single and started_by_launcher():
        raise ConfigError("--single is one process, and a launcher has started this one. Start it without.")
    run = Recorded(directory)
    given = int(os.environ["WORLD_SIZE"]) if started_by_launcher() and not single else None
    with scratch() as out:
        order = order_of(run, step, out, world_size=given)
        degrees = degrees_of(order.config, order.world_size)
        note = ""
        if single:
            order = on_one_process(order)
            if any(getattr(degrees, axis) > 1 for axis in ("tp", "pp", "cp")):
                note = "With dropout, ranks that share a batch draw other numbers than one process does."
        if compare_rank is not None:
            order, note = _comparing(order, compare_rank, degrees.dp)
        from .rank import performed

        found = (perform or partial(performed, show_traceback=show_traceback))(order)
    replayed = found["values"]
    written = plain_of(run.result(step))
    precision = precision_of(run.config_of(step) if single else order.config)
    return Replayed(
        run=str(directory),
        step=step,
        strategy=found["strategy"],
        mesh=found["mesh"],
        beginning=(order.beginning.step, str(order.beginning.checkpoint or "")),
        values=tuple(Value(name, written.get(name), replayed.get(name)) for name in {**written, **replayed}),
        tolerance=TOLERANCES[precision] if single or note else 0.0,
        precision=precision,
        shares=found.get("shares"),
        asked=compare_rank,
        note=note,
    )


def _comparing(order: Order, rank: int, data_size: int) -> tuple[Order, str]:
    """The order to compare the work of ranks, and a note where their blocks are no longer compiled."""
    if data_size == 1:
        raise ConfigError(
            f"--compare-rank {rank}: the run has one data rank, and no other to do its work again. "
            f"Leave it out: a replay that comes to the numbers of metrics.jsonl tells as much."
        )
    if not 0 <= rank < data_size:
        raise ConfigError(f"--compare-rank {rank} is none of the data ranks of the run, 0 to {data_size - 1}.")
    options = order.config.strategy_config
    if not options.get("enable_compile"):
        return replace(order, compares=True), ""
    config = order.config.model_copy(update={"strategy_config": {**options, "enable_compile": False}})
    note = "Blocks are not compiled here, as they were in the run: compiled ones call no hooks within them."
    return replace(order, config=config, compares=True), note
