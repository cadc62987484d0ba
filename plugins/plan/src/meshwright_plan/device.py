"""Devices and the links between them, from files in `devices/` or of the user; each file names its `sources`.

Rates are per second, in floating-point operations and in bytes; times are in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Annotated

from pydantic import Field

from meshwright.plugin import ConfigError, FrozenModel, nearest, parse_yaml, read_text, validated

DEVICES = Path(__file__).parent / "devices"
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Part = Annotated[float, Field(gt=0, le=1)]
Speed = Annotated[float, Field(ge=0, le=1)]
RANGE_OF_EIGHT = 2.847
"""Mean range of eight normally distributed numbers, in standard deviations."""


class Link(FrozenModel):
    """A link between devices."""

    bandwidth: Positive = Field(description="Bytes a second that one device sends, while it receives as many.")
    efficiency: Part = Field(description="The part of it that large messages reach.")
    ring_s: Positive = Field(description="Seconds of a step of a ring.")
    tree_s: Positive = Field(description="Seconds of a step of a tree, which carries little.")

    @property
    def rate(self) -> float:
        return self.bandwidth * self.efficiency


class Node(FrozenModel):
    """A machine with its devices, and its links to others."""

    ranks: int = Field(ge=1, description="Devices in a node; ranks fill nodes in their order.")
    inside: Link = Field(description="Between devices of a node: NVLink, PCIe.")
    between: Link = Field(description="Between nodes, of each device: InfiniBand, RoCE, Ethernet.")
    ring_begin_s: Positive = Field(description="Seconds until a collective on a ring has begun.")
    tree_begin_s: Positive = Field(description="Likewise on a tree.")
    factors: Mapping[str, Positive] = Field(
        default={},
        description="How many times as long the bytes of a kind of collective take as on a ring, where a library does "
        "it in another way: gloo reduces and scatters by reducing all of it everywhere.",
    )


class Device(FrozenModel):
    """One kind of accelerator and the nodes that it is in."""

    name: str
    memory_bytes: int = Field(gt=0)
    bandwidth: Positive = Field(description="Bytes a second of its memory.")
    bandwidth_efficiency: Part = Field(description="The part of it that kernels reach.")
    flops: Mapping[str, Positive] = Field(description="Peak of matrix products, by dtype.")
    matmul_efficiency: Mapping[str, Mapping[int, Part]] = Field(
        description="The part of the peak that products reach, by dtype and by the smallest of their three sizes: of "
        "the largest class that is not larger."
    )
    attention_efficiency: Part = Field(description="The part that fused attention reaches in forward.")
    attention_backward_efficiency: Part = Field(description="Likewise in backward.")
    spread: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="By what part the slowest of eight devices computes less than the fastest. All wait for it.",
    )
    kernel_s: Positive = Field(description="The least that a kernel takes.")
    cpu_s: Positive = Field(description="What the host takes to issue an operator.")
    workspace_bytes: int = Field(
        ge=0, description="Memory that one handle of the library for matrix products holds, through torch's allocator."
    )
    context_bytes: int = Field(
        default=2 << 30,
        ge=0,
        description="Memory that others hold: the driver's context, kernels, buffers of communication.",
    )
    known_as: Sequence[str] = Field(default=(), description="What drivers call it.")
    is_host: bool = Field(
        default=False,
        description="Whether it is the host itself, which issues nothing while it computes, and whose allocator keeps "
        "nothing that is freed.",
    )
    speed_beside_communication: Speed = Field(
        default=1.0, description="The part of its speed at which it computes while a collective runs."
    )
    node: Node
    sources: Mapping[str, str] = Field(description="Where figures are from.")

    @property
    def library_bytes(self) -> int:
        """Bytes of cuBLAS workspaces in a training process: forward's thread and autograd's have a handle each.

        Source: aten/src/ATen/cuda/CublasHandlePool.cpp of torch 2.11; on an H200 peaks were 64 MiB above those of
        tensors alone.
        """
        return 2 * self.workspace_bytes

    def pace(self, count: int) -> float:
        """Return the speed of the slowest of `count` devices by that of one; see `spread`.

        Speeds are taken as normally distributed; the mean of the lowest is Blom's estimate.
        """
        return 1 - self.spread / RANGE_OF_EIGHT * NormalDist().inv_cdf((count - 0.375) / (count + 0.25))

    def matmul_rate(self, dtype: str, smallest: int) -> float:
        """Return the operations a second of a product in a dtype of `flops`, by the `smallest` of its three sizes."""
        classes = self.matmul_efficiency[dtype]
        below = [size for size in classes if size <= smallest]
        least = min(classes)
        part = classes[max(below)] if below else classes[least] * smallest / least
        return self.flops[dtype] * part


def devices() -> list[str]:
    """Return the names of the devices that come with the package."""
    return sorted(path.stem for path in DEVICES.glob("*.yaml"))


def find_device(name: str) -> Device:
    """Return a device by its name in `devices`, or by the path of its YAML file (".yaml" or ".yml").

    Raises:
        ConfigError: there is no such device or file, or the file is not valid.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else DEVICES / f"{name}.yaml"
    if not path.is_file():
        known = devices()
        raise ConfigError(
            f"there is no device {name!r}.{nearest(name, known)} Devices: {', '.join(known)}; or the path of a YAML "
            f"file."
        )
    try:
        values = parse_yaml(read_text(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values, not {type(values).__name__}.")
    return validated(Device, values, where=str(path))
