"""The fastest layouts of a run on a number of devices: as JSON values, as a run file, and as text."""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import yaml
from rich.text import Text

from meshwright.plugin import (
    ConfigError,
    TrainingError,
    compute_model_size,
    count_usable_cores,
    find_experts,
    validate_config,
)
from meshwright_run.launch.local import start_fork_server
from meshwright_run.run_file import UNBOUNDED_STEPS, RunConfig, read_unbounded_values

from ..config import DeviceSpec, load_device_spec
from ..planner import build_job
from ..tables import format_seconds, format_size, new_grid, new_table
from .candidates import SIZE_KEYS, Candidate, SearchSpace, set_dotted_keys
from .search import EvaluatedLayout, LayoutSearch

NUM_BEST = 10
TIME_LIMIT_S = 105.0
MAX_PROCESSES = 8  # Limit of worker processes; each takes about 0.5 GiB
NUM_OTHERS_SHOWN, NUM_UNTRACED_SHOWN, NUM_REASONS_SHOWN = 2, 5, 8  # Rows of the summary and of the tables
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_LEFT_ALIGNED = ("layout", "for instance")


def recommend_layouts(
    run_file: Path,
    assignments: Sequence[str],
    gpus: int,
    device: str,
    *,
    batch_tokens: str | None = None,
    max_nodes: int | None = None,
    expert_imbalance: float = 1.0,
    num_best: int = NUM_BEST,
    search_seconds: float | None = None,
    num_processes: int | None = None,
) -> dict[str, Any]:
    """Search for the fastest layouts that fit; return JSON values, see docs/reference/plan.md."""
    on = load_device_spec(device)
    for name, value in (("--gpus", gpus), ("--max-nodes", max_nodes)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value} must be at least 1.")
    world = gpus if max_nodes is None else min(gpus, max_nodes * on.node.ranks)
    values = _load_values(run_file, assignments, batch_tokens)
    num_processes = num_processes or min(MAX_PROCESSES, max(2, count_usable_cores()))
    with _open_executor(num_processes) as executor:
        search = LayoutSearch(
            _build_search_space(values, assignments, world, on),
            executor,
            num_processes,
            num_best,
            TIME_LIMIT_S if search_seconds is None else search_seconds,
            expert_imbalance,
        )
        try:
            search.run()
            search.plan_best()
        except BrokenExecutor as error:
            raise TrainingError(
                f"one of the {num_processes} processes that trace layouts has died, perhaps for lack of memory: each "
                "takes about 0.5 GiB, and more with many experts or long sequences. Free memory, or fix some "
                "options, such as --set pp_size=1."
            ) from error
    if not search.fitting:
        raise ConfigError(_format_no_layout_error(search))
    return _build_result(search, run_file, assignments, batch_tokens)


def write_run_file(best: Mapping[str, Any], file: Path) -> None:
    file.write_text(yaml.safe_dump(best["run"], sort_keys=False, allow_unicode=True), encoding="utf-8")


def parse_tokens(text: str) -> int:
    """Parse a number of tokens: digits, optionally with K (2**10), M (2**20) or G (2**30)."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.strip().upper())
    tokens = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if tokens < 1 or tokens != int(tokens):
        raise ConfigError(
            f"--batch-tokens {text!r} is not a number of tokens. Give digits, or digits with K, M or G, such as 4M for "
            f"4 * 2**20 = 4194304."
        )
    return int(tokens)


def _load_values(run_file: Path, assignments: Sequence[str], batch_tokens: str | None) -> dict[str, Any]:
    values = read_unbounded_values(run_file, assignments)
    if batch_tokens is not None:
        values.setdefault("batch_size", 1)
        length = validate_config(RunConfig, values, where=str(run_file)).data.seq_len
        tokens = parse_tokens(batch_tokens)
        if tokens % length:
            near = max(1, round(tokens / length)) * length
            raise ConfigError(
                f"--batch-tokens {batch_tokens} is {tokens} tokens, which is not a multiple of "
                f"data.seq_len={length}. Use {near}, for instance."
            )
        values["batch_size"] = tokens // length
    validate_config(RunConfig, values, where=str(run_file))
    return values


def _build_search_space(
    values: Mapping[str, Any], assignments: Sequence[str], world: int, device: DeviceSpec
) -> SearchSpace:
    unsharded = {
        **values,
        **dict.fromkeys(SIZE_KEYS, 1),
        "strategy": "single",
        "strategy_config": {},
        "wrapper_config": {},
    }
    job = build_job(validate_config(RunConfig, unsharded, where="the run file"), 1)
    model = job.build_model()
    kept = tuple(each.partition("=")[0] for each in assignments)
    return SearchSpace(
        values, kept, world, device, job.num_layers, job.seq_len, compute_model_size(model), bool(find_experts(model))
    )


@contextmanager
def _open_executor(processes: int) -> Iterator[Executor]:
    if processes == 1:
        yield _InlineExecutor()
        return
    others = active_children()
    start_fork_server()
    pool = ProcessPoolExecutor(processes, get_context("forkserver"), initializer=_init_worker)
    try:
        for _ in range(processes):
            pool.submit(_init_worker)
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # pending traces are not needed
        for each in {*active_children()} - {*others}:
            each.terminate()


def _init_worker() -> None:
    """Import the modules that tracing needs, while candidates are enumerated."""
    import torch
    import transformers.models.auto.modeling_auto  # noqa: F401

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # The same warnings are printed when a run is planned or trained


class _InlineExecutor(Executor):
    def submit(self, work: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


# -- values


def _build_result(
    search: LayoutSearch, run_file: Path, assignments: Sequence[str], batch_tokens: str | None
) -> dict[str, Any]:
    space, best, still_open = search.space, search.best(), search.list_untraced()
    points = [*((each, True) for each in search.ranked()), *((each, False) for each in search.not_fitting)]
    lines = list(assignments) if batch_tokens is None else [*assignments, f"batch_size={space.values['batch_size']}"]
    return {
        "run_file": str(run_file),
        "device": space.device.name,
        "memory_bytes": space.device.memory_bytes,
        "world_size": space.world_size,
        "batch_size": space.values["batch_size"],
        "best": [_describe_best(each, space, lines) for each in best],
        "layouts": [_summarize_layout(each, fits=fits) for each, fits in points],
        "rejected": _list_rejections(search, best, len(still_open)),
        "is_certain": not still_open,
        "untraced": [
            {"expected_seconds": seconds, "mesh": str(each.degrees), **_layout_options(each, space, assignments)}
            for seconds, each in still_open[:NUM_UNTRACED_SHOWN]
        ],
        "num_untraced": len(still_open),
        "rms_error": search.rms_error,
        "num_enumerated": space.num_enumerated,
        "num_traced": search.num_traced,
        "num_planned": search.num_planned,
        "seconds": search.elapsed,
        "search_seconds": search.time_limit_s,
    }


def _summarize_layout(layout: EvaluatedLayout, *, fits: bool) -> dict[str, Any]:
    candidate = layout.candidate
    recomputed = candidate.activation_checkpointing or "nothing"
    label = f"{candidate.degrees}, micro_batch_size={candidate.micro_batch_size}, {recomputed} recomputed, {candidate}"
    numbers = {key: layout.plan[key] for key in ("step_seconds", "peak_reserved_bytes")}
    return {"label": label, **numbers, "fits": fits}


def _describe_best(layout: EvaluatedLayout, space: SearchSpace, assignments: Sequence[str]) -> dict[str, Any]:
    run = set_dotted_keys(space.values, layout.candidate.values.items())
    if run.get("steps") == UNBOUNDED_STEPS:
        del run["steps"]
    keys = ("step_seconds", "tokens_per_second_per_device", "peak_reserved_bytes", "mesh", "strategy")
    return {
        **{key: layout.plan[key] for key in keys},
        **_layout_options(layout.candidate, space, assignments),
        "run": run,
        "plan": dict(layout.plan) if layout.is_planned else None,
    }


def _layout_options(candidate: Candidate, space: SearchSpace, assignments: Sequence[str]) -> dict[str, Any]:
    return {
        "micro_batch_size": candidate.micro_batch_size,
        "activation_checkpointing": candidate.activation_checkpointing,
        "options": str(candidate),
        "assignments": [*assignments, *candidate.format_assignments(space.values)],
    }


def _list_rejections(search: LayoutSearch, best: Sequence[EvaluatedLayout], still_open: int) -> list[dict[str, Any]]:
    """Return the number of the other layouts by reason, the most frequent first."""
    space = search.space
    reasons = [(count, space.refusal_examples[key]) for key, count in space.refusal_counts.items()]
    reasons.append((search.num_too_large, f"do not fit: the smallest exceeds memory by {_format_excess(search)}"))
    reasons.append((search.count_excluded(), "are not expected to fit, judging by traces of others"))
    slower = search.ranked()[len(best) :]
    reasons += [(len(slower), f"are slower: {format_seconds(slower[0].seconds)} or more")] if slower else []
    reasons.append((search.count_untraced() - still_open, "are expected to be slower, judging by traces of others"))
    rows = [{"layouts": count, "reason": reason} for count, reason in reasons if count > 0]
    return sorted(rows, key=lambda row: -int(row["layouts"]))


def _format_excess(search: LayoutSearch) -> str:
    device, (size, _) = search.space.device, search.nearest
    return format_size(size - device.memory_bytes + device.context_bytes)


def _format_no_layout_error(search: LayoutSearch) -> str:
    (size, candidate), space = search.nearest, search.space
    if search.list_untraced():
        return (
            f"none of {space.num_enumerated} layouts was planned within {search.time_limit_s:.0f} s. "
            "Raise --search-seconds, or fix some options, such as --set strategy=fsdp2 or --set pp_size=1."
        )
    if candidate is None:
        reported = "\n".join(
            f"  {count} x {space.refusal_examples[key]}" for key, count in space.refusal_counts.most_common(8)
        )
        return f"no layout on {space.world_size} devices is valid. Reasons:\n{reported}"
    recomputed = (
        ""
        if candidate.activation_checkpointing is None
        else f", activation_checkpointing={candidate.activation_checkpointing}"
    )
    nearest = f"{candidate} on {candidate.degrees}, micro_batch_size={candidate.micro_batch_size}{recomputed}"
    return (
        f"no layout fits on {space.world_size} x {space.device.name}. The smallest is {nearest}: it takes at least "
        f"{format_size(size)}, {_format_excess(search)} too much. Use more devices or devices with more memory, a "
        f"shorter data.seq_len, or a smaller model."
    )


# -- text


def build_search_summary(result: Mapping[str, Any], *, details: bool = False) -> list[Any]:
    """Return the best layout, the next best, the command that trains the best, and how many layouts were examined."""
    best, *others = result["best"]
    speed = best["tokens_per_second_per_device"]
    rows = {
        "best layout": best["mesh"],
        "strategy": best["options"],
        "micro-batch": f"{best['micro_batch_size']} sequences; {_format_recomputation(best)} recomputed",
        "step": f"{_format_step(best)}: {speed * result['world_size']:,.0f} tokens/s, {speed:,.0f} per device",
        "memory": f"{format_size(best['peak_reserved_bytes'])} of {format_size(result['memory_bytes'])} per rank",
    }
    for number, each in enumerate(() if details else others[:NUM_OTHERS_SHOWN], 2):
        name = each["options"].partition(",")[0]
        slower = each["step_seconds"] / best["step_seconds"] - 1
        rows[f"number {number}"] = f"{_format_step(each)} (+{slower:.1%}): {name} on {each['mesh']}"
    flags = " ".join(f"--set {shlex.quote(each)}" for each in best["assignments"])
    command = f"meshwright train {shlex.quote(result['run_file'])} {flags}"
    title = f"fastest layouts that fit on {result['world_size']:,} x {result['device']}\n"
    return [title, new_grid(rows), f"\n{_describe_search(result, details=details)}\n", Text(command, no_wrap=True)]


def _describe_search(result: Mapping[str, Any], *, details: bool) -> str:
    text = (
        f"{result['num_enumerated']:,} layouts are possible. In {result['seconds']:.0f} s, {result['num_traced']} of "
        f"them were simulated with few blocks and {result['num_planned']} in full; from these, the times of the others "
        f"were predicted, with a typical error of {result['rms_error']:.0%}."
    )
    if result["num_untraced"]:
        text += (
            f" {result['num_untraced']:,} others might be as fast: raise --search-seconds (now "
            f"{result['search_seconds']:g}), or fix options with --set."
        )
    return text + ("" if details else " --details lists more layouts, and why others are not listed.")


def build_tables(result: Mapping[str, Any]) -> list[Any]:
    """Return tables of the best layouts, of those that might be as fast, and of reasons to leave out the others."""
    best = new_table("the fastest layouts that fit", ("", "step", "memory", "layout"), _LEFT_ALIGNED)
    for number, each in enumerate(result["best"], 1):
        best.add_row(str(number), _format_step(each), format_size(each["peak_reserved_bytes"]), _format_layout(each))
    best.caption, best.caption_justify = "~: from a simulation with few blocks", "left"
    rejected = new_table("why other layouts are not listed", ("layouts", "for instance"), _LEFT_ALIGNED)
    for row in result["rejected"][:NUM_REASONS_SHOWN]:
        rejected.add_row(f"{row['layouts']:,}", row["reason"])
    if others := result["rejected"][NUM_REASONS_SHOWN:]:
        rejected.add_row(f"{sum(row['layouts'] for row in others):,}", f"{len(others)} other reasons")
    if not result["untraced"]:
        return [best, rejected]
    untraced = new_table("not simulated: might be as fast, the likeliest first", ("step", "layout"), _LEFT_ALIGNED)
    for each in result["untraced"]:
        untraced.add_row(f"~{format_seconds(each['expected_seconds'])}", _format_layout(each))
    return [best, rejected, untraced]


def _format_step(layout: Mapping[str, Any]) -> str:
    return f"{'' if layout['plan'] else '~'}{format_seconds(layout['step_seconds'])}"


def _format_recomputation(layout: Mapping[str, Any]) -> str:
    recomputed = layout["activation_checkpointing"]
    return "nothing" if recomputed in (False, None) else str(recomputed)


def _format_layout(layout: Mapping[str, Any]) -> str:
    return (
        f"{layout['mesh']}, micro_batch_size={layout['micro_batch_size']}, {_format_recomputation(layout)} recomputed, "
        f"{layout['options']}"
    )
