"""Devices, limits, backends and clocks of this machine."""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.plugin import usable_cores

from .finding import Finding

_DEVICES, _LIMITS, _BACKENDS, _CLOCKS = "devices", "limits", "backends", "clocks"
FILES = 4096
"""Open files of a process that reads many shards and is connected to each peer."""
SHARED_MEMORY = 1 << 30
"""Bytes of /dev/shm that suffice for NCCL and loaders."""
_DRIVER = Path("/proc/driver/nvidia/version")
_STILL_S, _DRIFT, _DAY_S = 0.05, 0.2, 86_400.0


def device_findings() -> Iterator[Finding]:
    """Cores, memory and accelerators."""
    own = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding(_DEVICES, "cpu", "ok", f"{usable_cores()} cores, {own / 2**30:,.1f} GiB of memory")
    if not torch.accelerator.is_available():
        if _DRIVER.is_file():
            said = f"a driver is there ({_DRIVER.read_text().splitlines()[0]}), but torch {torch.__version__} sees none"
            mend = "Install a build of torch for this driver's CUDA, and look at CUDA_VISIBLE_DEVICES."
            yield Finding(_DEVICES, "gpu", "warning", said, mend)
        else:
            yield Finding(_DEVICES, "gpu", "ok", "none: ranks run on the CPU")
        return
    kind = torch.accelerator.current_accelerator()
    for index in range(torch.accelerator.device_count()):
        said = str(kind)
        if torch.cuda.is_available():
            found = torch.cuda.get_device_properties(index)
            said = f"{found.name}, {found.total_memory / 2**30:,.1f} GiB, CUDA {torch.version.cuda}"
        yield Finding(_DEVICES, f"{kind}:{index}", "ok", said)


def limit_findings() -> Iterator[Finding]:
    """Open files, and memory that processes share."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    if soft != resource.RLIM_INFINITY and soft < FILES:
        mend = f"ulimit -n {FILES} before the command (the hard limit here is {allowed})."
        yield Finding(_LIMITS, "open files", "warning", f"{soft}; many ranks and shards need {FILES}", mend)
    else:
        yield Finding(_LIMITS, "open files", "ok", str(soft))
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        is_small = size < SHARED_MEMORY and torch.cuda.is_available()
        mend = "In a container: --shm-size=1g, or a larger emptyDir of medium Memory at /dev/shm." if is_small else ""
        yield Finding(_LIMITS, "/dev/shm", "warning" if is_small else "ok", f"{size / 2**30:,.1f} GiB", mend)


def backend_findings() -> Iterator[Finding]:
    """Backends of process groups."""
    if dist.is_available() and dist.is_gloo_available():
        yield Finding(_BACKENDS, "gloo", "ok", "available")
    else:
        mend = "Install a build of torch with it: every rank needs it for small agreements and checkpoints."
        yield Finding(_BACKENDS, "gloo", "wrong", "this build of torch has none", mend)
    has_nccl = dist.is_available() and dist.is_nccl_available()
    if has_nccl and torch.cuda.is_available():
        number = ".".join(map(str, torch.cuda.nccl.version()))
        yield Finding(_BACKENDS, "nccl", "ok", number)
    elif torch.cuda.is_available():
        mend = "Install a build of torch for CUDA with NCCL."
        yield Finding(_BACKENDS, "nccl", "wrong", "there are GPUs, but this build of torch has no NCCL", mend)
    else:
        yield Finding(_BACKENDS, "nccl", "ok", "not needed without GPUs")


def clock_findings() -> Iterator[Finding]:
    """Compare this machine's clocks with each other, and with the dates of installed files."""
    wall, steady = time.time(), time.monotonic()
    time.sleep(_STILL_S)
    passed, waited = time.time() - wall, time.monotonic() - steady
    today = datetime.fromtimestamp(wall, UTC).isoformat(timespec="seconds")
    mend = "Let the machine's clock be set by NTP (chrony, systemd-timesyncd)."
    installed = Path(__file__).stat().st_mtime
    if wall < installed - _DAY_S:
        since = datetime.fromtimestamp(installed, UTC).isoformat(timespec="seconds")
        yield Finding(_CLOCKS, "this machine", "warning", f"{today}, before the files here were made ({since})", mend)
    elif abs(passed - waited) > _DRIFT * waited:
        said = f"{waited:.3f} s were {passed:.3f} s by the wall clock, which is being set"
        yield Finding(_CLOCKS, "this machine", "warning", said, mend)
    else:
        yield Finding(_CLOCKS, "this machine", "ok", today)
