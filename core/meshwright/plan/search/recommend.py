"""The fastest layouts of a run on so many devices, as values of JSON and as a run file."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import yaml

from ...base.errors import ConfigError, TrainingError
from ...base.validation import validated
from ...launch.cores import usable_cores
from ...launch.local import warm_up
from ...model.size import model_size
from ...parallel.expert.find import find_experts
from ...train.run_file import RunConfig
from ..asked import NO_END, read_job
from ..device import Device, find_device
from ..job import job_of
from .candidates import SIZES, Candidate, Space, assigned
from .search import Found, Search

WANTED = 10
LIMIT_S = 105.0
MOST_PROCESSES = 8
"""That trace at once, where there are as many cores; each holds about half a GiB."""
SHOWN = 5
"""Of what is open."""
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def recommend(
    run_file: Path,
    assignments: Sequence[str],
    gpus: int,
    device: str,
    *,
    batch_tokens: str | None = None,
    max_nodes: int | None = None,
    expert_imbalance: float = 1.0,
    wanted: int = WANTED,
    limit_s: float = LIMIT_S,
    processes: int | None = None,
) -> dict[str, Any]:
    """Search for the fastest layouts that fit.

    Args:
        run_file: what it says of layout is where the search begins; see [Note: what stays] in `candidates`.
        assignments: as --set gives them; these stay.
        gpus: devices, all of which are used.
        device: see `find_device`.
        batch_tokens: tokens of a step, see `tokens_of`; None: the run file's batch.
        max_nodes: no more nodes of the device's size are used, and so perhaps fewer devices.
        wanted: how many layouts.
        limit_s: after so many seconds nothing new is looked at.
        processes: that trace at once; 1: this one; None: one for each core, at least 2.

    Returns:
        Plain values: `best`, each with `assignments` (lines for --set), `run` (of a run file) and `plan`, which is None
        where time allowed none and the numbers are nearly those of one; `layouts`, seconds and bytes of all that was
        traced, and whether they fit; `open`, what could be as good for all that is known, with the seconds that are
        expected of each; `lost`, why others are not among the best; and `deviation`, how far what was expected lay
        from what was then traced, as a part (root of the mean square).

    Raises:
        ConfigError: nothing fits, or what is given is not valid.
        TrainingError: a process that traces has died.
        MeshwrightError: as training does.
    """
    on = find_device(device)
    world = _world(gpus, max_nodes, on)
    values = _values(run_file, assignments, batch_tokens)
    processes = processes or min(MOST_PROCESSES, max(2, usable_cores()))
    with _executor(processes) as executor:
        space = _space(values, assignments, world, on)
        search = Search(space, executor, processes, wanted, limit_s, expert_imbalance)
        try:
            search.run()
            search.settle()
        except BrokenExecutor as error:
            raise TrainingError(
                f"one of the {processes} processes that trace layouts has died, perhaps for lack of memory: each takes "
                f"about half a GiB, and more for many experts or long sequences. Free some, or keep what you know, "
                f"such as --set pp_size=1."
            ) from error
    if not search.found:
        raise ConfigError(_nothing(search))
    return _report(search, assignments, batch_tokens)


def write_run(found: Mapping[str, Any], file: Path) -> None:
    """Write a layout of `recommend` as a run file.

    Args:
        found: one of `best`.
    """
    text = yaml.safe_dump(found["run"], sort_keys=False, allow_unicode=True)
    file.write_text(text, encoding="utf-8")


def tokens_of(text: str) -> int:
    """A number of tokens: digits, and perhaps K, M or G, which are 2**10, 2**20 and 2**30.

    Raises:
        ConfigError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.strip().upper())
    tokens = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if tokens < 1 or tokens != int(tokens):
        raise ConfigError(
            f"--batch-tokens {text!r} is no number of tokens. Give digits, or digits with K, M or G, such as 4M for "
            f"4 * 2**20 = 4194304."
        )
    return int(tokens)


def _world(gpus: int, max_nodes: int | None, device: Device) -> int:
    for name, value in (("--gpus", gpus), ("--max-nodes", max_nodes)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value} must be at least 1.")
    return gpus if max_nodes is None else min(gpus, max_nodes * device.node.ranks)


def _values(run_file: Path, assignments: Sequence[str], batch_tokens: str | None) -> dict[str, Any]:
    values = read_job(run_file, assignments)
    if batch_tokens is not None:
        values.setdefault("batch_size", 1)
        length = validated(RunConfig, values, where=str(run_file)).data.seq_len
        tokens = tokens_of(batch_tokens)
        if tokens % length:
            near = max(1, round(tokens / length)) * length
            raise ConfigError(
                f"--batch-tokens {batch_tokens} is {tokens} tokens, which do not divide into sequences of "
                f"data.seq_len={length}. Use {near}, for instance."
            )
        values["batch_size"] = tokens // length
    validated(RunConfig, values, where=str(run_file))
    return values


def _space(values: Mapping[str, Any], assignments: Sequence[str], world: int, device: Device) -> Space:
    """The model, looked at on the meta device."""
    whole = {**values, **dict.fromkeys(SIZES, 1), "strategy": "single", "strategy_config": {}, "wrapper_config": {}}
    job = job_of(validated(RunConfig, whole, where="the run file"), 1)
    model = job.model()
    kept = tuple(each.partition("=")[0] for each in assignments)
    return Space(values, kept, world, device, job.layers, job.length, model_size(model), bool(find_experts(model)))


@contextmanager
def _executor(processes: int) -> Iterator[Executor]:
    if processes == 1:
        yield _Here()
        return
    others = active_children()
    warm_up()
    pool = ProcessPoolExecutor(processes, get_context("forkserver"), initializer=_begin)
    try:
        for _ in range(processes):
            pool.submit(_begin)
        yield pool
    finally:
        # What is still traced is of no use any more.
        pool.shutdown(wait=False, cancel_futures=True)
        for each in {*active_children()} - {*others}:
            each.terminate()


def _begin() -> None:
    """Load what tracing needs, while candidates are enumerated."""
    import torch
    import transformers.models.auto.modeling_auto  # noqa: F401

    torch.set_num_threads(1)
    # A run that is planned or trained warns itself.
    warnings.simplefilter("ignore")


class _Here(Executor):
    """Answers in this process, at once."""

    def submit(self, work: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def _report(search: Search, assignments: Sequence[str], batch_tokens: str | None) -> dict[str, Any]:
    space, best, still_open = search.space, search.best(), search.open()
    return {
        "device": space.device.name,
        "memory_bytes": space.device.memory_bytes,
        "world_size": space.world,
        "batch_size": space.values["batch_size"],
        "best": [_told(each, space, assignments, batch_tokens) for each in best],
        "layouts": [
            *(_point(each, fits=True) for each in search.ranked()),
            *(_point(each, fits=False) for each in search.crowded),
        ],
        "lost": _lost(search, best, len(still_open)),
        "is_certain": not still_open,
        "open": [_left(seconds, each, assignments) for seconds, each in still_open[:SHOWN]],
        "open_layouts": len(still_open),
        "deviation": search.deviation,
        "enumerated": space.enumerated,
        "traced": search.traced,
        "planned": search.planned,
        "seconds": search.elapsed,
    }


def _point(found: Found, *, fits: bool) -> dict[str, Any]:
    candidate = found.candidate
    recomputed = candidate.recomputation or "nothing"
    label = f"{candidate.degrees}, {candidate.rows} rows, {recomputed} recomputed, {candidate}"
    numbers = {key: found.plan[key] for key in ("step_seconds", "peak_reserved_bytes")}
    return {"label": label, **numbers, "fits": fits}


def _told(found: Found, space: Space, assignments: Sequence[str], batch_tokens: str | None) -> dict[str, Any]:
    candidate = found.candidate
    run = assigned(space.values, candidate.values.items())
    if run.get("steps") == NO_END:
        del run["steps"]
    lines = list(assignments) if batch_tokens is None else [*assignments, f"batch_size={space.values['batch_size']}"]
    keys = ("step_seconds", "tokens_per_second_per_device", "peak_reserved_bytes", "mesh", "strategy")
    return {
        **{key: found.plan[key] for key in keys},
        "micro_batch_size": candidate.rows,
        "recomputation": candidate.recomputation,
        "options": str(candidate),
        "assignments": [*lines, *candidate.lines],
        "run": run,
        "plan": dict(found.plan) if found.is_planned else None,
    }


def _left(seconds: float, candidate: Candidate, assignments: Sequence[str]) -> dict[str, Any]:
    return {
        "expected_seconds": seconds,
        "mesh": str(candidate.degrees),
        "micro_batch_size": candidate.rows,
        "recomputation": candidate.recomputation,
        "options": str(candidate),
        "assignments": [*assignments, *candidate.lines],
    }


def _lost(search: Search, best: Sequence[Found], still_open: int) -> list[dict[str, Any]]:
    """Why others are not among the best: counts by reason, the most first."""
    space = search.space
    rows = [{"layouts": count, "reason": space.examples[key]} for key, count in space.refused.items()]
    if search.too_large:
        rows.append({"layouts": search.too_large, "reason": f"do not fit: {_too_much(search)} too much at best"})
    without = search.left_out()
    if without:
        rows.append({"layouts": without, "reason": "are expected not to fit, by the traces of others"})
    slower = len(search.found) - len(best)
    if slower > 0:
        rows.append({"layouts": slower, "reason": f"slower: {search.ranked()[len(best)].seconds:.4g} s at least"})
    expected = search.left() - still_open
    if expected > 0:
        rows.append({"layouts": expected, "reason": "are expected to be slower, by the traces of others"})
    return sorted(rows, key=lambda row: -int(row["layouts"]))


def _too_much(search: Search) -> str:
    device, (size, _) = search.space.device, search.nearest
    return f"{(size - device.memory_bytes + device.context_bytes) / 2**30:.3g} GiB"


def _nothing(search: Search) -> str:
    size, candidate = search.nearest
    space = search.space
    if search.open():
        return (
            f"no layout was planned within {search.limit_s:.0f} s, of {space.enumerated}. Keep some of it, such as "
            f"--set strategy=fsdp2 or --set pp_size=1."
        )
    if candidate is None:
        told = "\n".join(f"  {count} x {space.examples[key]}" for key, count in space.refused.most_common(8))
        return f"no layout of {space.world} devices can be trained:\n{told}"
    return (
        f"nothing fits on {space.world} x {space.device.name}. The nearest is {_nearest(candidate)}: it takes "
        f"{size / 2**30:.4g} GiB at least, {_too_much(search)} too much. Use more devices, or such with more "
        f"memory; or shorten data.seq_len, or make the model smaller."
    )


def _nearest(candidate: Candidate) -> str:
    recomputed = "" if candidate.recomputation is None else f", activation_checkpointing={candidate.recomputation}"
    return f"{candidate} on {candidate.degrees}, micro_batch_size={candidate.rows}{recomputed}"
