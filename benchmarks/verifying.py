"""What `verify_every` costs: a step whose memory is watched beside the same step without, alternated.

Watched: fingerprints of parameters and optimizer state before and after the optimizer's step, and of gradients after
clipping and before it; every `--every` steps ranks also compare what several hold, as a run does. The method is that of
`benchmarks/step.py`, whose README says how to read it.

    python benchmarks/verifying.py --json benchmarks/results/verifying-cpu.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import step as steps
import torch.distributed as dist
from contestants import Step, Work, built

from meshwright.launch.local import launch
from meshwright.mesh.world import World
from meshwright.tensors.accelerator import moments_of
from meshwright.train.loop import train_step
from meshwright.train.stopwatch import Stopwatch
from meshwright.train.verifying import Verifier


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
        watch = Stopwatch(moments_of(world.device), world.progress)
        verifier = Verifier(manager, self.every) if watched else None

        def look(moment: str) -> None:
            if verifier is not None and moment == "clipped":
                verifier.note_clipped()

        def step(index: int) -> tuple[float, float]:
            result = train_step(manager, loop, index, None, watch, look=look)
            if verifier is not None and verifier.is_due(result.step):
                verifier.verify(result.step)
            return result.loss, result.grad_norm

        return step


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], add_help=False)
    parser.add_argument("--every", type=int, default=10, help="steps between comparisons")
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--json", type=Path)
    options, others = parser.parse_known_args(arguments)
    sizes = ["--hidden", "512", "--layers", "8", "--seq", "256", "--rounds", "36"]
    json_file = ["--json", str(options.json)] if options.json else []
    plan = steps.parse([*sizes, *others, "--strategies", "fsdp2", *json_file])
    plan = replace(plan, strategies=("verified",), command=" ".join(["python benchmarks/verifying.py", *arguments]))
    code = launch(_run_rank, (plan, options.strategy, options.every), nproc=plan.ranks)
    if options.json is not None and code == 0:
        report = json.loads(options.json.read_text(encoding="utf-8"))
        report |= {"benchmark": "verifying", "verify_every": options.every, "strategy": options.strategy}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return code


def _run_rank(store: dist.Store, plan: Any, strategy: str, every: int) -> None:
    steps.CONTESTS["verified"] = Verified(strategy, every)  # type: ignore[assignment]
    steps.run_rank(store, plan)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
