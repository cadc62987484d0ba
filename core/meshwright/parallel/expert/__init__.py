"""Expert parallelism, for any strategy that claims the axis `ep`.

A strategy calls `ExpertParallel.apply` before it shards the model further, and shards the modules that it names over
the expert mesh ([Note: axis, dim, degree] in `meshwright.mesh.sizes`), all other modules as before.
"""

from __future__ import annotations

from .find import Experts, check_expert_parallel, find_experts
from .parallel import ExpertParallel

__all__ = ["ExpertParallel", "Experts", "check_expert_parallel", "find_experts"]
