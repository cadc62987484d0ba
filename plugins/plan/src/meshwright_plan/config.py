"""Section `plan` of a run file, and device files. This module does not import torch.

Rates of devices are in floating-point operations or bytes per second; times are in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from meshwright.plugin import (
    ConfigError,
    FinitePositive,
    FrozenModel,
    parse_yaml,
    read_text,
    suggest_match,
    validate_config,
)

if TYPE_CHECKING:
    from meshwright_run.run_file import RunConfig

LLAMA_3_FAILURES = 419 / (54 * 24 * 16_384)  # Unexpected interruptions per GPU hour in the pre-training of Llama 3 405B
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class PlanConfig(FrozenModel):
    """Options of the plan that `meshwright train` makes before a run starts; see docs/reference/plan.md."""

    enabled: bool = Field(
        default=True,
        description="Plan memory, traffic and time before the ranks start, and compare them with the third step.",
    )
    device: str | None = Field(
        default=None,
        description="Device of the run: a name, such as h100-80gb, or your own YAML file; null: detect it. Times are "
        "reported only if a device file exists for it or is named here.",
    )
    on_oom: Literal["error", "warn"] = Field(
        default="error",
        description="What to do if a run would not fit into the memory of its device: stop it, or only warn.",
    )
    failures_per_rank_hour: float = Field(
        default=LLAMA_3_FAILURES,
        ge=0,
        allow_inf_nan=False,
        description="Failures per rank and hour, each of which stops the run; see docs/reference/goodput.md. Default: "
        "rate of Llama 3, 419 failures of 16,384 GPUs in 54 days (arXiv:2407.21783, section 3.3.4).",
    )
    detection_s: Seconds | None = Field(
        default=None,
        description="Seconds until a failure is detected. null: watchdog_s; without a watchdog 60, which is assumed.",
    )
    restart_s: Seconds = Field(
        default=300.0,
        description="Seconds from the detection until all ranks run again, without loading the checkpoint. Default: "
        "assumed; MegaScale detects and diagnoses failures in less than ten minutes (arXiv:2402.15627).",
    )
    disk_bandwidth: FinitePositive = Field(
        default=1e9,
        description="Bytes per second that a node writes to, or reads from, the storage of checkpoints. Default: "
        "disk_bandwidth_total divided by 2,048 nodes, rounded.",
    )
    disk_bandwidth_total: FinitePositive = Field(
        default=2e12,
        description="Bytes per second of all nodes together. Default: sustained bandwidth of Llama 3's storage "
        "(arXiv:2407.21783, section 3.3.1).",
    )
    device_to_host_bandwidth: FinitePositive = Field(
        default=4e9,
        description="Bytes per second that a rank copies from its device to host memory. Default: assumed.",
    )


def get_plan_config(config: RunConfig) -> PlanConfig:
    return config.get_section(PlanConfig) or PlanConfig()


DEVICE_DIRECTORY = Path(__file__).parent / "devices"
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
UnitFraction = Annotated[float, Field(ge=0, le=1)]
EXPECTED_RANGE_OF_EIGHT = 2.847  # Mean range of eight normally distributed numbers, in standard deviations


class LinkSpec(FrozenModel):
    """Bandwidth and latency of a link between devices."""

    bandwidth: Positive = Field(description="Bytes per second that one device sends while it receives as many.")
    efficiency: PositiveFraction = Field(description="Fraction of the bandwidth that large messages reach.")
    ring_step_latency_s: Positive = Field(description="Seconds of one step of a ring.")
    tree_step_latency_s: Positive = Field(description="Seconds of one step of a tree, for small messages.")

    @property
    def effective_bandwidth(self) -> float:
        return self.bandwidth * self.efficiency


class NodeSpec(FrozenModel):
    """A machine with several devices, and its links."""

    ranks: int = Field(ge=1, description="Devices per node; consecutive ranks fill a node.")
    intra_node: LinkSpec = Field(description="Link between devices of a node: NVLink, PCIe.")
    inter_node: LinkSpec = Field(description="Link of each device to other nodes: InfiniBand, RoCE, Ethernet.")
    ring_base_latency_s: Positive = Field(description="Seconds to start a collective on a ring.")
    tree_base_latency_s: Positive = Field(description="Seconds to start a collective on a tree.")
    slowdown_factors: Mapping[str, Positive] = Field(
        default={},
        description="By kind of collective: its transfer time relative to a ring, if a library uses another algorithm. "
        "For example, gloo implements reduce-scatter by an all-reduce.",
    )


class DeviceSpec(FrozenModel):
    """A kind of device, and the nodes that contain it."""

    name: str
    memory_bytes: int = Field(gt=0)
    bandwidth: Positive = Field(description="Memory bandwidth in bytes per second.")
    bandwidth_efficiency: PositiveFraction = Field(description="Fraction of the bandwidth that kernels reach.")
    flops: Mapping[str, Positive] = Field(description="Peak FLOP/s of matrix products, by dtype.")
    matmul_efficiency: Mapping[str, Mapping[int, PositiveFraction]] = Field(
        description="Fraction of the peak that matrix products reach, by dtype and by the smallest of their three "
        "dimensions. A dimension uses the largest entry that is not above it."
    )
    attention_efficiency: PositiveFraction = Field(
        description="Fraction of the peak that fused attention reaches in forward."
    )
    attention_backward_efficiency: PositiveFraction = Field(
        description="Fraction of the peak that fused attention reaches in backward."
    )
    spread: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Fraction by which the slowest of eight devices is slower than the fastest. All ranks wait for it.",
    )
    min_kernel_s: Positive = Field(description="Seconds of the shortest kernel.")
    launch_overhead_s: Positive = Field(description="Seconds that the host takes to issue an operator.")
    workspace_bytes: int = Field(
        ge=0, description="Bytes of the cuBLAS workspace of one handle, allocated by torch's allocator."
    )
    context_bytes: int = Field(
        default=2 << 30,
        ge=0,
        description="Bytes outside torch's allocator: CUDA context, kernels, communication buffers.",
    )
    driver_names: Sequence[str] = Field(default=(), description="Names that drivers report for the device.")
    is_host: bool = Field(
        default=False,
        description="Whether the device is the host itself, which issues no operators while it computes, and whose "
        "allocator returns freed memory.",
    )
    overlap_speed: UnitFraction = Field(
        default=1.0, description="Fraction of its full speed at which the device computes while a collective runs."
    )
    node: NodeSpec
    sources: Mapping[str, str] = Field(description="Sources of the values.")

    @property
    def library_bytes(self) -> int:
        """Bytes of cuBLAS workspaces: the threads of forward and of autograd have one handle each
        (CublasHandlePool.cpp, torch 2.11).
        """
        return 2 * self.workspace_bytes

    def straggler_speed(self, count: int) -> float:
        """Return the expected speed of the slowest of `count` devices relative to the mean: Blom's estimate."""
        return 1 - self.spread / EXPECTED_RANGE_OF_EIGHT * NormalDist().inv_cdf((count - 0.375) / (count + 0.25))

    def matmul_rate(self, dtype: str, smallest: int) -> float:
        """Return the FLOP/s of a matrix product in a dtype of `flops`, by the `smallest` of its three dimensions."""
        classes = self.matmul_efficiency[dtype]
        below = [size for size in classes if size <= smallest]
        least = min(classes)
        part = classes[max(below)] if below else classes[least] * smallest / least
        return self.flops[dtype] * part


def list_device_specs() -> list[str]:
    return sorted(path.stem for path in DEVICE_DIRECTORY.glob("*.yaml"))


def load_device_spec(name: str) -> DeviceSpec:
    """Load a device by its name in `devices`, or by the path of a YAML file (".yaml" or ".yml")."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else DEVICE_DIRECTORY / f"{name}.yaml"
    if not path.is_file():
        known = list_device_specs()
        raise ConfigError(
            f"there is no device {name!r}.{suggest_match(name, known)} Devices: {', '.join(known)}; or the path of a "
            "YAML file."
        )
    try:
        values = parse_yaml(read_text(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values, not {type(values).__name__}.")
    return validate_config(DeviceSpec, values, where=str(path))
