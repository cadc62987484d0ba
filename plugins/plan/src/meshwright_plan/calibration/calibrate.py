"""The device file of this machine: what its devices compute and its links carry, measured while all ranks work.

What cannot be measured is taken from the file of a similar device, and the file says what that is.
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
    as_yaml,
    find_device,
    open_world,
    started_by_launcher,
    usable_cores,
    validated,
)
from meshwright_run.launch.local import launch
from meshwright_run.launch.rank import guarded

from ..config import Device, Node, devices
from ..config import find_device as find_file
from . import measure
from .fit import Sample, deviation, fit
from .measure import Clock, Effort

DTYPES = ("bfloat16", "float16", "float32", "float64")
MOST_RANKS = 8  # Default ranks on a CPU, where it has as many cores


@dataclass(frozen=True)
class Rates:
    """What was measured of a device, per second; the last three as of `Device`."""

    products: Mapping[str, Mapping[int, float]]
    attention: tuple[float, float]
    attention_dtype: str
    streams: Mapping[str, float]
    kernel_s: float
    cpu_s: float
    beside: float


def calibrate_to(
    path: str | Path,
    *,
    base: str | None = None,
    ranks: int | None = None,
    device: str | None = None,
    effort: Effort | None = None,
    show_traceback: bool = False,
) -> int:
    """Measure this machine, write its device file, and return the exit code. Starts ranks, or joins those of a
    launcher.
    """
    path = Path(path)
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"a device file ends in .yaml or .yml, not as {str(path)!r} does. Give it such a name.")
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no directory {path.parent}. Make it, or name another.")
    chosen = find_device(device)
    base = base or _nearest_file(chosen)
    find_file(base)
    told = (str(path), base, chosen.type, effort)
    if started_by_launcher():
        size = int(os.environ["WORLD_SIZE"])
        if ranks is not None and ranks != size:
            raise MeshError(f"{ranks} ranks are asked for, but a launcher has started {size}. Leave the number out.")
        return guarded(_rank, told, show_traceback=show_traceback)
    return launch(_rank, told, nproc=_count(chosen, ranks), show_traceback=show_traceback)


def _rank(store: dist.Store | None, path: str, base: str, device: str, effort: Effort | None) -> None:

    def write() -> None:
        try:
            Path(path).write_text(written(found), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}. Name another file.") from None

    with open_world(device, store=store) as world:
        found = calibrate(world, base, effort)
        world.from_first(write)


def calibrate(world: World, base: str, effort: Effort | None = None) -> Device:
    """Measure the machines of a world; see `calibrate_to`. Collective."""
    file = find_file(base)
    effort = effort or Effort.of(world.device)
    clock = Clock(world, effort)
    ranks = _ranks_of_node(world)
    passes: list[Rates] = []
    times: dict[Sample, float] = {}
    for _ in range(effort.passes):
        passes.append(_rates(world, clock, effort))
        for each in measure.samples(world, clock, effort, ranks) if world.size > 1 else []:
            known = replace(each, seconds=0.0)
            times[known] = min(each.seconds, times.get(known, each.seconds))
    rates = best(passes)
    found = [replace(each, seconds=seconds) for each, seconds in times.items()]
    # Ranks agree on every number; the groups are those of the first.
    return world.from_first(lambda: device_of(world, file, base, rates, found, ranks, effort))


def best(passes: Sequence[Rates]) -> Rates:
    """Return the best of each number, and the median of `beside`, which is a ratio."""

    def largest(tables: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
        return {key: max(table.get(key, 0.0) for table in tables) for table in tables for key in table}

    return Rates(
        {dtype: largest([each.products[dtype] for each in passes]) for dtype in passes[0].products},
        (max(each.attention[0] for each in passes), max(each.attention[1] for each in passes)),
        passes[0].attention_dtype,
        largest([each.streams for each in passes]),
        min(each.kernel_s for each in passes),
        min(each.cpu_s for each in passes),
        sorted(each.beside for each in passes)[len(passes) // 2],
    )


def _rates(world: World, clock: Clock, effort: Effort) -> Rates:
    here = world.device
    dtype = torch.float32 if here.type == "cpu" else torch.bfloat16
    kernel_s = measure.least_kernel(clock, here)
    return Rates(
        {name: measure.products(clock, getattr(torch, name), here, effort) for name in DTYPES},
        measure.attention(clock, dtype, here, effort),
        str(dtype).removeprefix("torch."),
        measure.streams(clock, here, effort),
        kernel_s,
        measure.issuing(clock, here, kernel_s),
        measure.beside(clock, here, effort) if world.size > 1 else 1.0,
    )


# -- the file


def device_of(
    world: World, base: Device, base_name: str, rates: Rates, found: Sequence[Sample], ranks: int, effort: Effort
) -> Device:
    is_cpu = world.device.type == "cpu"
    flops, parts = dict(base.flops), dict(base.matmul_efficiency)
    for dtype, table in rates.products.items():
        if table:
            best = max(table.values())
            flops[dtype] = best if is_cpu else max(best, base.flops.get(dtype, best))
            parts[dtype] = {size: rate / flops[dtype] for size, rate in table.items()}
    streams = rates.streams.values()
    memory = max(streams) if is_cpu else max(base.bandwidth, *streams)
    stream = len(streams) / sum(1 / rate for rate in streams)
    of_attention = [min(1.0, rate / flops[rates.attention_dtype]) for rate in rates.attention]
    node = _node(base.node, found, ranks, is_cpu=is_cpu)
    values = {
        "name": hardware(world.device),
        "memory_bytes": _memory(world.device, ranks),
        "bandwidth": memory,
        "bandwidth_efficiency": stream / memory,
        "flops": flops,
        "matmul_efficiency": parts,
        "attention_efficiency": of_attention[0],
        "attention_backward_efficiency": of_attention[1],
        "kernel_s": rates.kernel_s,
        "cpu_s": rates.cpu_s,
        "workspace_bytes": base.workspace_bytes,
        "is_host": is_cpu,
        "speed_beside_communication": rates.beside,
        "node": node.model_dump(),
    }
    sources = _sources(world, base, base_name, rates, found, node, effort)
    return validated(Device, {**_rounded(values), "sources": sources}, where="what was measured")


def _node(base: Node, found: Sequence[Sample], ranks: int, *, is_cpu: bool) -> Node:
    if not found:
        return base
    made = fit(found, base.model_copy(update={"ranks": ranks, "factors": {}}))
    if any(len({rank // ranks for rank in each.ranks}) > 1 for each in found):
        return made
    # One node, of which perhaps not all devices were measured.
    return made.model_copy(update={"ranks": max(ranks, base.ranks if is_cpu else torch.accelerator.device_count())})


def written(device: Device) -> str:
    lines = ["# A device file of `meshwright plan --calibrate`. Rates are per second, in operations and bytes."]
    for name, value in device.model_dump().items():
        said = Device.model_fields[name].description
        lines += [f"# {said}"] if said else []
        lines.append(as_yaml({name: value}).rstrip())
    return "\n".join([*lines, ""])


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _sources(
    world: World, base: Device, base_name: str, rates: Rates, found: Sequence[Sample], node: Node, effort: Effort
) -> dict[str, str]:
    best = {dtype: max(table.values()) for dtype, table in rates.products.items() if table}
    left = [dtype for dtype in base.flops if dtype not in best]
    crosses = any(len({rank // node.ranks for rank in each.ranks}) > 1 for each in found)
    over = [f"products in {', '.join(left)}"] if left else []
    over += ["workspace_bytes"]
    over += [] if found else ["links inside of a node"]
    over += [] if crosses else ["links between nodes"]
    over += [] if world.device.type == "cpu" else ["peaks of products and of memory, where no more was reached"]
    backend = dist.distributed_c10d.get_backend_config() if world.size > 1 else "none"
    said = {
        "measured": f"{date.today().isoformat()}, {hardware(world.device)}, torch {torch.__version__}, {world.size} "
        f"ranks at the same time with {torch.get_num_threads()} threads each, over {backend}; the slowest rank's best "
        f"of {effort.passes} x {effort.windows} windows of {effort.window_s:g} s",
        "products": "forward and both gradients of a linear layer; best seen: "
        + ", ".join(f"{rate / 1e12:.3g} TFLOP/s in {dtype}" for dtype, rate in best.items()),
        "attention": f"causal, {effort.length} tokens, in {rates.attention_dtype}; other dtypes are taken to reach as "
        f"large a part of their peak",
        "bandwidth": f"tensors of {effort.stream_bytes / 2**20:g} MiB; "
        + ", ".join(f"{name} {rate / 1e9:.3g} GB/s" for name, rate in rates.streams.items()),
        "host": "the least kernel; operators of small blocks, forward and backward",
        "taken over": f"from {Path(base_name).name}: {', '.join(over)}",
    }
    if found:
        sizes = sorted({len(each.ranks) for each in found})
        off = deviation(found, node)
        said["links"] = (
            f"{len(found)} collectives of {' and '.join(map(str, sizes))} ranks, {min(effort.messages)} to "
            f"{max(each.bytes for each in found)} bytes; the links told here are {off:.0%} off them in the median"
        )
    return said


# -- this machine


def hardware(device: torch.device) -> str:
    """Return what a device is, without the name of the machine."""
    if device.type != "cpu":
        return str(torch.cuda.get_device_name(device))
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} cores of {names[0]}" if names else platform.machine()


def _memory(device: torch.device, ranks: int) -> int:
    if device.type != "cpu":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def _nearest_file(device: torch.device) -> str:
    """Return the device file whose name is in that of a device, with the nearest memory."""
    if device.type == "cpu":
        return "cpu"
    name, size = hardware(device).lower(), _memory(device, 1)
    known = {each: [part for part in each.split("-") if not part.endswith("gb")] for each in devices()}
    alike = [each for each, parts in known.items() if all(part in name for part in parts)]
    if not alike:
        raise ConfigError(
            f"no device file is known for {hardware(device)!r}, and not everything can be measured. Name the one that "
            f"is nearest as base: {', '.join(devices())}; or the path of a YAML file."
        )
    return min(alike, key=lambda each: abs(find_file(each).memory_bytes - size))


def _count(device: torch.device, ranks: int | None) -> int:
    if device.type == "cpu":
        most, here = 64, min(usable_cores(), MOST_RANKS)
    else:
        most = here = torch.accelerator.device_count()
    if ranks is not None and not 1 <= ranks <= most:
        raise MeshError(
            f"ranks={ranks} cannot be measured here: from 1 to {most} can on {device.type}. Leave the number out for "
            f"{here}."
        )
    return here if ranks is None else ranks


def _ranks_of_node(world: World) -> int:
    mine = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    _, (most, least) = world.exchange([], [mine, -mine])
    if most != -least:
        raise MeshError(
            f"nodes have {-least} to {most} ranks each, but a device file has nodes that are all alike. Start as many "
            f"on each."
        )
    return mine
