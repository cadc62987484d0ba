"""Write a device file for this machine: compute rates and link bandwidths, measured while all ranks work.

Values that cannot be measured are copied from the file of a similar device; the `sources` of the new file name them.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.plugin import (
    ConfigError,
    MeshError,
    World,
    count_usable_cores,
    find_device,
    is_launched,
    open_world,
    to_yaml,
    validate_config,
)
from meshwright_run.launch.local import launch_ranks
from meshwright_run.launch.rank_process import run_guarded

from ..config import DeviceSpec, NodeSpec, list_device_specs
from ..config import load_device_spec as find_file
from . import measure
from .fit import CollectiveSample, fit_node, median_relative_error
from .measure import CollectiveTimer, MeasurementBudget

DTYPES = ("bfloat16", "float16", "float32", "float64")
MAX_CPU_RANKS = 8  # Upper bound of the default number of ranks on a CPU


@dataclass(frozen=True)
class MeasuredRates:
    """Rates measured on a device, per second. The last three fields are those of `DeviceSpec`."""

    matmul: Mapping[str, Mapping[int, float]]
    attention: tuple[float, float]
    attention_dtype: str
    memory_bandwidth: Mapping[str, float]
    min_kernel_s: float
    launch_overhead_s: float
    overlap_speed: float


def calibrate_to_file(
    path: str | Path,
    *,
    base: str | None = None,
    ranks: int | None = None,
    device: str | None = None,
    effort: MeasurementBudget | None = None,
    show_traceback: bool = False,
) -> int:
    """Measure this machine, write its device file, and return the exit code. Start ranks, or join those of a
    launcher.
    """
    path = Path(path)
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"the name of a device file must end in .yaml or .yml, not {str(path)!r}. Rename it.")
    if not path.parent.is_dir():
        raise ConfigError(
            f"{path} cannot be written: there is no directory {path.parent}. Create it, or change the path."
        )
    chosen = find_device(device)
    base = base or _find_nearest_device_file(chosen)
    find_file(base)
    reported = (str(path), base, chosen.type, effort)
    if is_launched():
        size = int(os.environ["WORLD_SIZE"])
        if ranks is not None and ranks != size:
            raise MeshError(f"{ranks} ranks are requested, but a launcher has started {size}. Omit the number.")
        return run_guarded(_calibrate_rank, reported, show_traceback=show_traceback)
    return launch_ranks(
        _calibrate_rank, reported, nproc=_choose_num_ranks(chosen, ranks), show_traceback=show_traceback
    )


def _calibrate_rank(
    store: dist.Store | None, path: str, base: str, device: str, effort: MeasurementBudget | None
) -> None:

    def write() -> None:
        try:
            Path(path).write_text(format_device_file(spec), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}. Choose another path.") from None

    with open_world(device, store=store) as world:
        spec = calibrate(world, base, effort)
        world.run_on_first_rank(write)


def calibrate(world: World, base: str, effort: MeasurementBudget | None = None) -> DeviceSpec:
    """Measure the machines of a world and return their device spec; see `calibrate_to_file`. Collective."""
    file = find_file(base)
    effort = effort or MeasurementBudget.for_device(world.device)
    clock = CollectiveTimer(world, effort)
    ranks = _get_ranks_per_node(world)
    passes: list[MeasuredRates] = []
    times: dict[CollectiveSample, float] = {}
    for _ in range(effort.num_passes):
        passes.append(_measure_rates(world, clock, effort))
        for each in measure.measure_collectives(world, clock, effort, ranks) if world.size > 1 else []:
            known = replace(each, seconds=0.0)
            times[known] = min(each.seconds, times.get(known, each.seconds))
    rates = merge_passes(passes)
    found = [replace(each, seconds=seconds) for each, seconds in times.items()]
    # Ranks agree on every measurement; the groups of ranks are those of the first rank.
    return world.run_on_first_rank(lambda: build_device_spec(world, file, base, rates, found, ranks, effort))


def merge_passes(passes: Sequence[MeasuredRates]) -> MeasuredRates:
    """Return the best value of each rate, and the median of `overlap_speed`, which is a ratio."""

    def largest(tables: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
        return {key: max(table.get(key, 0.0) for table in tables) for table in tables for key in table}

    return MeasuredRates(
        {dtype: largest([each.matmul[dtype] for each in passes]) for dtype in passes[0].matmul},
        (max(each.attention[0] for each in passes), max(each.attention[1] for each in passes)),
        passes[0].attention_dtype,
        largest([each.memory_bandwidth for each in passes]),
        min(each.min_kernel_s for each in passes),
        min(each.launch_overhead_s for each in passes),
        sorted(each.overlap_speed for each in passes)[len(passes) // 2],
    )


def _measure_rates(world: World, clock: CollectiveTimer, effort: MeasurementBudget) -> MeasuredRates:
    here = world.device
    dtype = torch.float32 if here.type == "cpu" else torch.bfloat16
    kernel_s = measure.measure_min_kernel(clock, here)
    return MeasuredRates(
        {name: measure.measure_matmuls(clock, getattr(torch, name), here, effort) for name in DTYPES},
        measure.measure_attention(clock, dtype, here, effort),
        str(dtype).removeprefix("torch."),
        measure.measure_memory_bandwidth(clock, here, effort),
        kernel_s,
        measure.measure_launch_overhead(clock, here, kernel_s),
        measure.measure_overlap_speed(clock, here, effort) if world.size > 1 else 1.0,
    )


# -- device file


def build_device_spec(
    world: World,
    base: DeviceSpec,
    base_name: str,
    rates: MeasuredRates,
    samples: Sequence[CollectiveSample],
    ranks_per_node: int,
    effort: MeasurementBudget,
) -> DeviceSpec:
    is_cpu = world.device.type == "cpu"
    flops, parts = dict(base.flops), dict(base.matmul_efficiency)
    for dtype, table in rates.matmul.items():
        if table:
            best = max(table.values())
            flops[dtype] = best if is_cpu else max(best, base.flops.get(dtype, best))
            parts[dtype] = {size: rate / flops[dtype] for size, rate in table.items()}
    streams = rates.memory_bandwidth.values()
    memory = max(streams) if is_cpu else max(base.bandwidth, *streams)
    stream = len(streams) / sum(1 / rate for rate in streams)
    of_attention = [min(1.0, rate / flops[rates.attention_dtype]) for rate in rates.attention]
    node = _fit_node(base.node, samples, ranks_per_node, is_cpu=is_cpu)
    values = {
        "name": describe_hardware(world.device),
        "memory_bytes": _get_memory_bytes(world.device, ranks_per_node),
        "bandwidth": memory,
        "bandwidth_efficiency": stream / memory,
        "flops": flops,
        "matmul_efficiency": parts,
        "attention_efficiency": of_attention[0],
        "attention_backward_efficiency": of_attention[1],
        "min_kernel_s": rates.min_kernel_s,
        "launch_overhead_s": rates.launch_overhead_s,
        "workspace_bytes": base.workspace_bytes,
        "is_host": is_cpu,
        "overlap_speed": rates.overlap_speed,
        "node": node.model_dump(),
    }
    sources = _describe_sources(world, base, base_name, rates, samples, node, effort)
    return validate_config(DeviceSpec, {**_round_values(values), "sources": sources}, where="the measured device")


def _fit_node(base: NodeSpec, samples: Sequence[CollectiveSample], ranks_per_node: int, *, is_cpu: bool) -> NodeSpec:
    if not samples:
        return base
    node = fit_node(samples, base.model_copy(update={"ranks": ranks_per_node, "slowdown_factors": {}}))
    if any(len({rank // ranks_per_node for rank in each.ranks}) > 1 for each in samples):
        return node
    # A single node; perhaps not all of its devices were measured.
    return node.model_copy(
        update={"ranks": max(ranks_per_node, base.ranks if is_cpu else torch.accelerator.device_count())}
    )


def format_device_file(device: DeviceSpec) -> str:
    lines = ["# Device file, written by `meshwright plan --calibrate`. Rates are in operations or bytes per second."]
    for name, value in device.model_dump().items():
        description = DeviceSpec.model_fields[name].description
        lines += [f"# {description}"] if description else []
        lines.append(to_yaml({name: value}).rstrip())
    return "\n".join([*lines, ""])


def _round_values(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _round_values(each) for key, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _describe_sources(
    world: World,
    base: DeviceSpec,
    base_name: str,
    rates: MeasuredRates,
    samples: Sequence[CollectiveSample],
    node: NodeSpec,
    effort: MeasurementBudget,
) -> dict[str, str]:
    best = {dtype: max(table.values()) for dtype, table in rates.matmul.items() if table}
    left = [dtype for dtype in base.flops if dtype not in best]
    crosses = any(len({rank // node.ranks for rank in each.ranks}) > 1 for each in samples)
    over = [f"matrix products in {', '.join(left)}"] if left else []
    over += ["workspace_bytes"]
    over += [] if samples else ["links within a node"]
    over += [] if crosses else ["links between nodes"]
    over += [] if world.device.type == "cpu" else ["peak FLOP/s and bandwidth, unless the measured values are higher"]
    backend = dist.distributed_c10d.get_backend_config() if world.size > 1 else "none"
    sources = {
        "measured": f"{date.today().isoformat()}, {describe_hardware(world.device)}, torch {torch.__version__}, "
        f"{world.size} ranks at the same time with {torch.get_num_threads()} threads each, over {backend}; time of the "
        f"slowest rank, best of {effort.num_passes} x {effort.num_windows} windows of {effort.window_seconds:g} s",
        "products": "forward and both gradients of a linear layer; highest rates: "
        + ", ".join(f"{rate / 1e12:.3g} TFLOP/s in {dtype}" for dtype, rate in best.items()),
        "attention": f"causal, {effort.attention_seq_len} tokens, in {rates.attention_dtype}; other dtypes are assumed "
        "to reach the same fraction of their peak",
        "bandwidth": f"tensors of {effort.stream_bytes / 2**20:g} MiB; "
        + ", ".join(f"{name} {rate / 1e9:.3g} GB/s" for name, rate in rates.memory_bandwidth.items()),
        "host": "an operator on eight elements; operators of small blocks, forward and backward",
        "taken over": f"from {Path(base_name).name}: {', '.join(over)}",
    }
    if samples:
        sizes = sorted({len(each.ranks) for each in samples})
        off = median_relative_error(samples, node)
        sources["links"] = (
            f"{len(samples)} collectives of {' and '.join(map(str, sizes))} ranks, {min(effort.message_bytes)} to "
            f"{max(each.bytes for each in samples)} bytes; median relative error of the fitted links: {off:.0%}"
        )
    return sources


# -- this machine


def describe_hardware(device: torch.device) -> str:
    """Return a description of a device that does not contain the host name."""
    if device.type != "cpu":
        return str(torch.cuda.get_device_name(device))
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} cores of {names[0]}" if names else platform.machine()


def _get_memory_bytes(device: torch.device, ranks: int) -> int:
    if device.type != "cpu":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def _find_nearest_device_file(device: torch.device) -> str:
    """Return the device file whose name occurs in the name of a device and whose memory is nearest."""
    if device.type == "cpu":
        return "cpu"
    name, size = describe_hardware(device).lower(), _get_memory_bytes(device, 1)
    known = {each: [part for part in each.split("-") if not part.endswith("gb")] for each in list_device_specs()}
    alike = [each for each, parts in known.items() if all(part in name for part in parts)]
    if not alike:
        raise ConfigError(
            f"no device file matches {describe_hardware(device)!r}, and some values cannot be measured. Choose a "
            f"similar device as base: {', '.join(list_device_specs())}; or the path of a YAML file."
        )
    return min(alike, key=lambda each: abs(find_file(each).memory_bytes - size))


def _choose_num_ranks(device: torch.device, ranks: int | None) -> int:
    if device.type == "cpu":
        most, here = 64, min(count_usable_cores(), MAX_CPU_RANKS)
    else:
        most = here = torch.accelerator.device_count()
    if ranks is not None and not 1 <= ranks <= most:
        raise MeshError(
            f"ranks={ranks} cannot be measured here: {device.type} allows 1 to {most} ranks. Omit the number for "
            f"{here}."
        )
    return here if ranks is None else ranks


def _get_ranks_per_node(world: World) -> int:
    mine = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    _, (most, least) = world.reduce_sum_and_max([], [mine, -mine])
    if most != -least:
        raise MeshError(
            f"nodes have {-least} to {most} ranks each, but in a device file all nodes are alike. Start the same "
            f"number of ranks on each node."
        )
    return mine
