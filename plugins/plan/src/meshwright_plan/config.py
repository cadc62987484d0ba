"""The section `plan` of a run file, and device files, which name their `sources`. No torch in this module.

Rates of devices are per second, in floating-point operations and in bytes; times are in seconds.
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
    """What is known of a run before it begins; see docs/reference/plan.md."""

    enabled: bool = Field(
        default=True,
        description="Plan memory, traffic and time before the ranks start, and compare them with the third step.",
    )
    device: str | None = Field(
        default=None,
        description="What the run is on: a name, such as h100-80gb, or a YAML file of your own; null: what is found. "
        "Times are reported for devices that are known or named.",
    )
    on_oom: Literal["error", "warn"] = Field(
        default="error", description="What becomes of a run that would not fit into the memory of its device."
    )
    failures_per_rank_hour: float = Field(
        default=LLAMA_3_FAILURES,
        ge=0,
        allow_inf_nan=False,
        description="Failures of a rank in an hour, each of which ends the run; see docs/reference/goodput.md. "
        "Default: those of Llama 3's GPUs, 419 of 16,384 in 54 days (arXiv:2407.21783, section 3.3.4).",
    )
    detection_s: Seconds | None = Field(
        default=None, description="Seconds until a failure is noticed. null: watchdog_s, or 60, assumed, without one."
    )
    restart_s: Seconds = Field(
        default=300.0,
        description="Seconds from then until all ranks are there again, without reading. Default: assumed; MegaScale "
        "noticed and examined failures in less than ten minutes (arXiv:2402.15627).",
    )
    disk_bandwidth: FinitePositive = Field(
        default=1e9,
        description="Bytes a second that a node writes to, or reads from, the storage of checkpoints. Default: the "
        "next one, of 2,048 nodes.",
    )
    disk_bandwidth_total: FinitePositive = Field(
        default=2e12,
        description="Bytes a second of all nodes together. Default: what the storage of Llama 3 sustained "
        "(arXiv:2407.21783, section 3.3.1).",
    )
    device_to_host_bandwidth: FinitePositive = Field(
        default=4e9,
        description="Bytes a second that a rank copies from its device to the memory of the host. Default: assumed.",
    )


def get_plan_config(config: RunConfig) -> PlanConfig:
    return config.get_section(PlanConfig) or PlanConfig()


DEVICE_DIRECTORY = Path(__file__).parent / "devices"
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
UnitFraction = Annotated[float, Field(ge=0, le=1)]
EXPECTED_RANGE_OF_EIGHT = 2.847  # Mean range of eight normally distributed numbers, in standard deviations


class LinkSpec(FrozenModel):
    """A link between devices."""

    bandwidth: Positive = Field(description="Bytes a second that one device sends, while it receives as many.")
    efficiency: PositiveFraction = Field(description="The part of it that large messages reach.")
    ring_step_latency_s: Positive = Field(description="Seconds of a step of a ring.")
    tree_step_latency_s: Positive = Field(description="Seconds of a step of a tree, which carries little.")

    @property
    def effective_bandwidth(self) -> float:
        return self.bandwidth * self.efficiency


class NodeSpec(FrozenModel):
    """A machine with its devices, and its links to others."""

    ranks: int = Field(ge=1, description="Devices in a node; ranks fill nodes in their order.")
    intra_node: LinkSpec = Field(description="Between devices of a node: NVLink, PCIe.")
    inter_node: LinkSpec = Field(description="Between nodes, of each device: InfiniBand, RoCE, Ethernet.")
    ring_base_latency_s: Positive = Field(description="Seconds until a collective on a ring has started.")
    tree_base_latency_s: Positive = Field(description="As well on a tree.")
    slowdown_factors: Mapping[str, Positive] = Field(
        default={},
        description="How many times as long the bytes of a kind of collective take as on a ring, where a library does "
        "it in another way: gloo reduces and scatters by reducing all of it everywhere.",
    )


class DeviceSpec(FrozenModel):
    """One kind of accelerator and the nodes that it is in."""

    name: str
    memory_bytes: int = Field(gt=0)
    bandwidth: Positive = Field(description="Bytes a second of its memory.")
    bandwidth_efficiency: PositiveFraction = Field(description="The part of it that kernels reach.")
    flops: Mapping[str, Positive] = Field(description="Peak of matrix products, by dtype.")
    matmul_efficiency: Mapping[str, Mapping[int, PositiveFraction]] = Field(
        description="The part of the peak that products reach, by dtype and by the smallest of their three sizes: of "
        "the largest class that is not larger."
    )
    attention_efficiency: PositiveFraction = Field(description="The part that fused attention reaches in forward.")
    attention_backward_efficiency: PositiveFraction = Field(description="As well in backward.")
    spread: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="By what part the slowest of eight devices computes less than the fastest. All wait for it.",
    )
    min_kernel_s: Positive = Field(description="The least that a kernel takes.")
    launch_overhead_s: Positive = Field(description="What the host takes to issue an operator.")
    workspace_bytes: int = Field(
        ge=0, description="Memory that one handle of the library for matrix products holds, through torch's allocator."
    )
    context_bytes: int = Field(
        default=2 << 30,
        ge=0,
        description="Memory that others hold: the driver's context, kernels, buffers of communication.",
    )
    driver_names: Sequence[str] = Field(default=(), description="What drivers call it.")
    is_host: bool = Field(
        default=False,
        description="Whether it is the host itself, which issues nothing while it computes, and whose allocator keeps "
        "nothing that is freed.",
    )
    overlap_speed: UnitFraction = Field(
        default=1.0, description="The part of its speed at which it computes while a collective runs."
    )
    node: NodeSpec
    sources: Mapping[str, str] = Field(description="Where figures are from.")

    @property
    def library_bytes(self) -> int:
        """Bytes of cuBLAS workspaces: forward's thread and autograd's have a handle each (CublasHandlePool.cpp, torch
        2.11).
        """
        return 2 * self.workspace_bytes

    def straggler_speed(self, count: int) -> float:
        """Return the speed of the slowest of `count` devices relative to one: Blom's estimate, for normal speeds."""
        return 1 - self.spread / EXPECTED_RANGE_OF_EIGHT * NormalDist().inv_cdf((count - 0.375) / (count + 0.25))

    def matmul_rate(self, dtype: str, smallest: int) -> float:
        """Return the operations a second of a product in a dtype of `flops`, by the `smallest` of its three sizes."""
        classes = self.matmul_efficiency[dtype]
        below = [size for size in classes if size <= smallest]
        least = min(classes)
        part = classes[max(below)] if below else classes[least] * smallest / least
        return self.flops[dtype] * part


def list_device_specs() -> list[str]:
    return sorted(path.stem for path in DEVICE_DIRECTORY.glob("*.yaml"))


def load_device_spec(name: str) -> DeviceSpec:
    """Return a device by its name in `devices`, or by the path of its YAML file (".yaml" or ".yml")."""
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
