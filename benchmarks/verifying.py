"""What `verify_every` costs: a step whose memory is watched beside the same step without, alternated.

Watched: fingerprints of parameters and optimizer state before and after the optimizer's step, and of gradients after
clipping and before it; every `--every` steps ranks also compare what several hold, as a run does. The method is that of
`benchmarks/step.py`, whose README says how to read it.

    python benchmarks/verifying.py --json benchmarks/results/verifying-cpu.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import step as steps
import torch.distributed as dist
from contestants import Step, Work, built
from one_contest import compete

from meshwright.mesh.world import World
from meshwright.tensors.ops import make_event_recorder
from meshwright.training.loop.step import Stopwatch, train_step
from meshwright.training.loop.verifier import Verifier


@dataclass(frozen=True)
class Verified:
    """The contest; see `step.Contest`."""

    strategy: str
    every: int

    def by_hand(self, work: Work, world: World) -> Step:
        return self._step(work, world, watched=False)

    def ours(self, work: Work, world: World) -> Step:
        return self._step(work, world, watched=True)

    def _step(self, work: Work, world: World, *, watched: bool) -> Step:
        manager, loop = built(self.strategy, work, world)
        watch = Stopwatch(make_event_recorder(world.device), world.progress)
        verifier = Verifier(manager, self.every) if watched else None

        def look(moment: Any) -> None:
            if verifier is not None:
                verifier.on_gradients(moment)

        def step(index: int) -> tuple[float, float]:
            result = train_step(manager, loop, index, None, watch, on_gradients=look)
            if verifier is not None:
                verifier.process_result(result)
            return result.loss, result.grad_norm

        return step


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], add_help=False)
    parser.add_argument("--every", type=int, default=10, help="steps between comparisons")
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--json", type=Path)
    options, others = parser.parse_known_args(arguments)
    given = (options.strategy, options.every)
    about = {"verify_every": options.every, "strategy": options.strategy}
    return compete("verifying", "verified", arguments, others, _run_rank, given, options.json, lambda: about)


def _run_rank(store: dist.Store, plan: Any, strategy: str, every: int) -> None:
    steps.CONTESTS["verified"] = Verified(strategy, every)  # type: ignore[assignment]
    steps.run_rank(store, plan)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
