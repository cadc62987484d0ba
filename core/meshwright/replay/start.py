"""Start the ranks of a replay, or join those that a launcher has started, and tell what they have found."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from ..base.errors import ConfigError
from ..data.progress import CONSOLE
from ..launch.environment import started_by_launcher
from ..launch.rank import guarded
from ..train.run.run_file import RunConfig
from .order import TOLERANCES, Order, degrees_of, on_one_process, order_of, precision_of
from .record import Recorded, plain_of

Perform: TypeAlias = Callable[[Order], dict[str, Any]]


@dataclass(frozen=True)
class Value:
    """A number of a step, as it was written and as it has come again."""

    name: str
    written: float | None
    replayed: float | None

    @property
    def is_same(self) -> bool:
        """Bit for bit."""
        return self.written == self.replayed or (_is_nan(self.written) and _is_nan(self.replayed))

    @property
    def apart(self) -> float:
        """|a - b| / max(|a|, |b|); infinite where one is missing, or is not finite."""
        return relative(self.written, self.replayed)


def relative(one: float | None, other: float | None) -> float:
    if one == other or (_is_nan(one) and _is_nan(other)):
        return 0.0
    if one is None or other is None or not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))


def _is_nan(value: float | None) -> bool:
    return value is not None and math.isnan(value)


@dataclass(frozen=True)
class Replayed:
    """A step that was done again.

    Attributes:
        run, step, strategy, mesh: of it.
        beginning: what it began with, and after how many steps.
        values: of the step.
        tolerance: within which they are to agree, relatively; 0: bit for bit.
        precision: the dtype of the run's numbers.
        shares: what `peers.judged` has found, where the work of ranks was compared.
        asked: the data rank that was asked for.
        note: what is to be known beside.
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
        if self.tolerance:
            return all(each.apart <= self.tolerance for each in self.values)
        return all(each.is_same for each in self.values)

    @property
    def is_sound(self) -> bool:
        """Whether no share of a rank has come out in two ways."""
        return self.shares is None or not (self.shares["shares"] or self.shares["unsteady"])

    @property
    def exit_code(self) -> int:
        return 0 if self.is_same and self.is_sound else 1

    def as_values(self) -> dict[str, Any]:
        """Values of JSON."""
        return {
            "run": self.run,
            "step": self.step,
            "strategy": self.strategy,
            "mesh": self.mesh,
            "from": {"step": self.beginning[0], "checkpoint": self.beginning[1] or None},
            "values": {
                each.name: {"written": each.written, "replayed": each.replayed, "is_same": each.is_same}
                for each in self.values
            },
            "tolerance": self.tolerance,
            "precision": self.precision,
            "is_same": self.is_same,
            "compared_rank": self.asked,
            "shares": None if self.shares is None else dict(self.shares),
            "note": self.note,
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
    """Do a step of a run again, from the newest checkpoint before it.

    Args:
        directory: output_dir of the run; nothing is written there.
        step: from 1.
        single: on one process, whatever the run's layout was.
        compare_rank: a data rank whose work is to be done by another, too.
        perform: has the ranks do it, and gives what they have found; None: they are started here.

    Raises:
        ConfigError: there is no such step, nothing to begin with, or no such rank.
        SystemExit: a rank has failed, and has said why.
    """
    if single:
        _check_single(compare_rank)
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
            _check_rank(compare_rank, degrees.dp)
            uncompiled = _uncompiled(order)
            if uncompiled is not order.config:
                note = "Blocks are not compiled here, as they were in the run: compiled ones call no hooks within them."
            order = replace(order, config=uncompiled, compares=True)
        found = perform(order) if perform is not None else performed(order, show_traceback=show_traceback)
    told = found["results"][-1]["values"]
    written = plain_of(run.result(step))
    names = [*written, *(name for name in told if name not in written)]
    precision = precision_of(order.config if not single else run.config_of(step))
    path = order.beginning.checkpoint
    return Replayed(
        run=str(directory),
        step=step,
        strategy=found["strategy"],
        mesh=found["mesh"],
        beginning=(order.beginning.step, "" if path is None else str(path)),
        values=tuple(Value(name, written.get(name), told.get(name)) for name in names),
        tolerance=TOLERANCES[precision] if single or note else 0.0,
        precision=precision,
        shares=found.get("shares"),
        asked=compare_rank,
        note=note,
    )


def _check_single(compare_rank: int | None) -> None:
    if compare_rank is not None:
        raise ConfigError("--single has one process, and no other to compare a rank with. Leave one of both out.")
    if started_by_launcher():
        raise ConfigError("--single is one process, and a launcher has started this one. Start it without.")


def _check_rank(rank: int, data_size: int) -> None:
    if data_size == 1:
        raise ConfigError(
            f"--compare-rank {rank}: the run has one data rank, and no other to do its work again. "
            f"Leave it out: a replay that comes to the numbers of metrics.jsonl tells as much."
        )
    if not 0 <= rank < data_size:
        raise ConfigError(f"--compare-rank {rank} is none of the data ranks of the run, 0 to {data_size - 1}.")


def _uncompiled(order: Order) -> RunConfig:
    """Compiled blocks call no hooks of what is within them."""
    options = order.config.strategy_config
    if not options.get("enable_compile"):
        return order.config
    return order.config.model_copy(update={"strategy_config": {**options, "enable_compile": False}})


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory for what a replay writes, which is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="meshwright-replay-") as directory:
        yield Path(directory)


def performed(order: Order, *, show_traceback: bool = False) -> dict[str, Any]:
    """Have the ranks do it; what they have found.

    Raises:
        SystemExit: one has failed, and has said why.
    """
    from .rank import RESULT, replay_rank

    if started_by_launcher():
        code = guarded(replay_rank, (order,), show_traceback=show_traceback)
    else:
        from ..launch.local import launch

        with CONSOLE.status(f"step {order.step} again"):
            code = launch(replay_rank, (order,), nproc=order.world_size, show_traceback=show_traceback)
    if code:
        raise SystemExit(code)
    if order.found:
        return order.found[-1]
    found: dict[str, Any] = json.loads((order.out / RESULT).read_text(encoding="utf-8"))
    return found
