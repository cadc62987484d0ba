"""Job files that run a run file on Slurm, Kubernetes, Ray or SkyPilot."""

from typing import Literal, get_args

Target = Literal["slurm", "kubernetes", "ray", "skypilot"]
TARGETS: tuple[Target, ...] = get_args(Target)
