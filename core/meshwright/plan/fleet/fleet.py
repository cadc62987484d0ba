"""Ranks that fail, and what a run does about it: it saves, and begins again.

Times are in seconds, intervals in steps.

[Note: what fails] Each rank fails at random, at the same rate all the time, and with it the run. Some failures take the
node with all that is in its memory, and few of those another node with it that has its copies, or whose copies it has.

[Note: copies] Beside what is saved on disk, each rank may send its state to the memory of a rank on another node. Where
that is there, a run goes on from it; a disk is read where a node and its copies are lost together, be it at once or one
while the run waits for the other.

[Note: saving] A save holds the loop up while the state is copied, and is written while training goes on. It is there
when it is written. The next one waits for that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...base.errors import ConfigError

NODES = 0.78
"""Which part of the failures takes a node: that of hardware, after which a node is replaced. So many of Llama 3's were
of it (The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.4)."""
PAIRS = 0.01
"""Which part takes a node and its copies together: assumed, of nodes that share neither power nor a switch."""
HOUR = 3600.0


@dataclass(frozen=True)
class Saves:
    """Checkpoints on disk; see [Note: saving].

    Attributes:
        every: steps between them.
        hold_s: what one holds the loop up by.
        write_s: what is written beside the loop, after that.
        load_s: what it takes until all ranks have read one.
    """

    every: int
    hold_s: float
    write_s: float = 0.0
    load_s: float = 0.0


@dataclass(frozen=True)
class Copies:
    """Copies in the memory of another node; see [Note: copies].

    Attributes:
        every: steps between them; a divisor of that of the saves, which are made of what was copied last.
        hold_s, send_s, load_s: as of `Saves`; sending takes no longer than the steps between two copies.
    """

    every: int
    hold_s: float
    send_s: float = 0.0
    load_s: float = 0.0


@dataclass(frozen=True)
class Fleet:
    """A run on ranks that fail; see [Note: what fails].

    Attributes:
        step_s: of a step.
        failures_per_rank_hour: of a rank, in an hour; 0: none.
        detection_s: until a failure is noticed.
        restart_s: from then until the ranks are there again, reading left out.
        copies: None: there are none.
        node_share: which part of the failures takes the memory of a node.
        pair_share: which part takes that of a node with its copies.

    Raises:
        ConfigError: intervals and times that do not go together.
    """

    ranks: int
    ranks_per_node: int
    step_s: float
    saves: Saves
    failures_per_rank_hour: float
    detection_s: float = 0.0
    restart_s: float = 0.0
    copies: Copies | None = None
    node_share: float = NODES
    pair_share: float = PAIRS

    def __post_init__(self) -> None:
        if not 0 <= self.pair_share <= self.node_share <= 1:
            raise ConfigError(
                f"pair_share={self.pair_share} of the failures is a part of node_share={self.node_share}, and both are "
                f"from 0 to 1."
            )
        if self.copies is None:
            return
        if self.nodes < 2:
            raise ConfigError(f"{self.ranks} ranks are on one node, and copies are for another one. Leave them out.")
        if self.saves.every % self.copies.every:
            raise ConfigError(
                f"saves every {self.saves.every} steps and copies every {self.copies.every} do not meet; make the "
                f"first a multiple of the second."
            )
        if self.copies.send_s > self.copies.every * self.step_s:
            raise ConfigError(
                f"a copy takes {self.copies.send_s:.3g} s to send, and the next one comes after "
                f"{self.copies.every * self.step_s:.3g} s; copy every {math.ceil(self.copies.send_s / self.step_s)} "
                f"steps, or more."
            )

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.ranks_per_node)

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of the run."""
        rate = self.ranks * self.failures_per_rank_hour
        return HOUR / rate if rate else math.inf

    @property
    def copied_every(self) -> int:
        """Steps between states to which the run may go back."""
        return self.saves.every if self.copies is None else self.copies.every

    @property
    def wait_s(self) -> float:
        """What a save waits for the one before it to be written; the first of all for none."""
        copying = 0.0 if self.copies is None else self.copies.hold_s * (self.saves.every // self.copies.every)
        return max(0.0, self.saves.write_s - self.saves.every * self.step_s - copying)

    def down_s(self, *, from_disk: bool) -> float:
        """From a failure until the next step begins, if nothing fails meanwhile."""
        source = self.saves if from_disk or self.copies is None else self.copies
        return self.detection_s + self.restart_s + source.load_s
