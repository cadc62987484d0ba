"""Find a backend that lets several ranks share one GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ranks import prepare, try_collectives

from meshwright.testing import WorkerPool

PROBE_LIMIT_S = 25


def backend_that_works(
    ways: Mapping[str, Mapping[str, str]], ranks: int, device: str
) -> tuple[str | None, dict[str, Any]]:
    """The first of the ways, which are environments of ranks, under which all collectives give the right numbers.

    Returns:
        Its name, or None, and what became of each way that was tried.
    """
    tried: dict[str, Any] = {}
    for way, environment in ways.items():
        # Of its own, since NCCL reads its variables once in the life of a process.
        workers = WorkerPool(ranks)
        try:
            workers.run(prepare, environment)
            answers = workers.run(try_collectives, device, device=device, timeout_s=PROBE_LIMIT_S)
            backend, outcomes = answers[0]
            right = all(outcome == "ok" for _, found in answers for outcome in found.values())
            as_meant = device == "cpu" or way.startswith(backend)
            tried[way] = {"backend": backend, "collectives": outcomes, "works": right and as_meant}
        except Exception as error:
            tried[way] = {"works": False, "error": f"{type(error).__name__}: {str(error)[-1500:]}"}
        finally:
            workers.close()
        if tried[way]["works"]:
            return way, tried
    return None, tried
