"""Job files with which Slurm, Kubernetes, Ray and SkyPilot run a run file."""

from typing import Literal, get_args

Target = Literal["slurm", "kubernetes", "ray", "skypilot"]
TARGETS: tuple[Target, ...] = get_args(Target)
