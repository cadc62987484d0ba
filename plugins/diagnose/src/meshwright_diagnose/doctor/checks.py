"""Checks of one process: devices, limits, backends, clocks, versions, plugins, settings, and a directory."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from meshwright.plugin import MeshwrightError, RankError, Registry, count_usable_cores

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class CheckResult:
    """Result of one check."""

    category: str  # such as "versions"; findings of one area are shown together
    name: str
    status: Status  # with "warning", training works, perhaps not as well as it could
    message: str
    fix: str = ""  # how to fix it; empty if ok
    exit_code: int = MeshwrightError.exit_code


def make_failure(category: str, name: str, message: str, fix: str) -> CheckResult:
    """Return a finding about something that failed when it was tried."""
    return CheckResult(category, name, "error", message, fix, RankError.exit_code)


def find_exit_code(findings: Iterable[CheckResult]) -> int:
    return max((each.exit_code for each in findings if each.status == "error"), default=0)


def to_dict(findings: Iterable[CheckResult]) -> dict[str, Any]:
    found = list(findings)
    rows = [{name: value for name, value in asdict(each).items() if name != "exit_code"} for each in found]
    return {"exit_code": find_exit_code(found), "findings": rows}


def format_results(findings: Iterable[CheckResult]) -> list[str]:
    """Return a line for each finding, below its area, and one for how to fix it."""
    found = list(findings)
    lines: list[str] = []
    for area in dict.fromkeys(each.category for each in found):
        lines.append(area)
        for each in found:
            if each.category == area:
                lines.append(f"  {each.status:<8} {each.name}: {each.message}")
                lines += [f"           {each.fix}"] if each.fix else []
    counts = {state: sum(each.status == state for each in found) for state in ("error", "warning", "ok")}
    return [*lines, ", ".join(f"{count} {state}" for state, count in counts.items())]


_DEVICES, _LIMITS, _BACKENDS, _CLOCKS = "devices", "limits", "backends", "clocks"
MIN_OPEN_FILES = 4096  # Open files of a process that reads many shards and is connected to each peer
MIN_SHARED_MEMORY = 1 << 30  # Bytes of /dev/shm that suffice for NCCL and loaders
_DRIVER = Path("/proc/driver/nvidia/version")
_STILL_S, _DRIFT, _DAY_S = 0.05, 0.2, 86_400.0


def check_devices() -> Iterator[CheckResult]:
    own = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield CheckResult(_DEVICES, "cpu", "ok", f"{count_usable_cores()} cores, {own / 2**30:,.1f} GiB of memory")
    if not torch.accelerator.is_available():
        if _DRIVER.is_file():
            said = f"a driver is there ({_DRIVER.read_text().splitlines()[0]}), but torch {torch.__version__} sees none"
            mend = "Install a build of torch for this driver's CUDA, and look at CUDA_VISIBLE_DEVICES."
            yield CheckResult(_DEVICES, "gpu", "warning", said, mend)
        else:
            yield CheckResult(_DEVICES, "gpu", "ok", "none: ranks run on the CPU")
        return
    kind = torch.accelerator.current_accelerator()
    for index in range(torch.accelerator.device_count()):
        said = str(kind)
        if torch.cuda.is_available():
            found = torch.cuda.get_device_properties(index)
            said = f"{found.name}, {found.total_memory / 2**30:,.1f} GiB, CUDA {torch.version.cuda}"
        yield CheckResult(_DEVICES, f"{kind}:{index}", "ok", said)


def check_limits() -> Iterator[CheckResult]:
    """Open files, and memory that processes share."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        mend = f"ulimit -n {MIN_OPEN_FILES} before the command (the hard limit here is {allowed})."
        yield CheckResult(
            _LIMITS, "open files", "warning", f"{soft}; many ranks and shards need {MIN_OPEN_FILES}", mend
        )
    else:
        yield CheckResult(_LIMITS, "open files", "ok", str(soft))
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        is_small = size < MIN_SHARED_MEMORY and torch.cuda.is_available()
        mend = "In a container: --shm-size=1g, or a larger emptyDir of medium Memory at /dev/shm." if is_small else ""
        yield CheckResult(_LIMITS, "/dev/shm", "warning" if is_small else "ok", f"{size / 2**30:,.1f} GiB", mend)


def check_backends() -> Iterator[CheckResult]:
    if dist.is_available() and dist.is_gloo_available():
        yield CheckResult(_BACKENDS, "gloo", "ok", "available")
    else:
        mend = "Install a build of torch with it: every rank needs it for small agreements and checkpoints."
        yield CheckResult(_BACKENDS, "gloo", "error", "this build of torch has none", mend)
    has_nccl = dist.is_available() and dist.is_nccl_available()
    if has_nccl and torch.cuda.is_available():
        yield CheckResult(_BACKENDS, "nccl", "ok", ".".join(map(str, torch.cuda.nccl.version())))
    elif torch.cuda.is_available():
        mend = "Install a build of torch for CUDA with NCCL."
        yield CheckResult(_BACKENDS, "nccl", "error", "there are GPUs, but this build of torch has no NCCL", mend)
    else:
        yield CheckResult(_BACKENDS, "nccl", "ok", "not needed without GPUs")


def check_clocks() -> Iterator[CheckResult]:
    """Compare this machine's clocks with each other, and with the dates of installed files."""
    wall, steady = time.time(), time.monotonic()
    time.sleep(_STILL_S)
    passed, waited = time.time() - wall, time.monotonic() - steady
    today = datetime.fromtimestamp(wall, UTC).isoformat(timespec="seconds")
    mend = "Let the machine's clock be set by NTP (chrony, systemd-timesyncd)."
    installed = Path(__file__).stat().st_mtime
    if wall < installed - _DAY_S:
        since = datetime.fromtimestamp(installed, UTC).isoformat(timespec="seconds")
        yield CheckResult(
            _CLOCKS, "this machine", "warning", f"{today}, before the files here were made ({since})", mend
        )
    elif abs(passed - waited) > _DRIFT * waited:
        said = f"{waited:.3f} s were {passed:.3f} s by the wall clock, which is being set"
        yield CheckResult(_CLOCKS, "this machine", "warning", said, mend)
    else:
        yield CheckResult(_CLOCKS, "this machine", "ok", today)


PROJECT_PREFIX = "meshwright"
_VERSIONS, _PLUGINS, _SETTINGS = "versions", "plugins", "settings"
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def check_versions() -> Iterator[CheckResult]:
    """Check Python and the requirements of each of our distributions."""
    ours = {found.name: found for found in distributions() if found.name and found.name.split("-")[0] == PROJECT_PREFIX}
    yield from _check_python(ours)
    for name, found in sorted(ours.items()):
        yield CheckResult(_VERSIONS, name, "ok", found.version)
    # A package that is needed in several ranges is checked for each.
    for needed, extra in dict.fromkeys(each for found in ours.values() for each in _list_requirements(found)):
        yield from _check_requirement(Requirement(needed), extra)


def _check_python(ours: Mapping[str, Distribution]) -> Iterator[CheckResult]:
    own = platform.python_version()
    for name, found in ours.items():
        (wanted, *_) = found.metadata.get_all("Requires-Python") or [""]
        if not SpecifierSet(wanted).contains(own, prereleases=True):
            yield CheckResult(
                _VERSIONS, "python", "error", f"{own}, but {name} needs {wanted}", f"Use Python {wanted}."
            )
            return
    yield CheckResult(_VERSIONS, "python", "ok", own)


def _list_requirements(distribution: Distribution) -> Iterator[tuple[str, bool]]:
    """Requirements that apply here, and whether each is of an extra."""
    for text in distribution.requires or ():
        needed = Requirement(text)
        if needed.name.split("-")[0] == PROJECT_PREFIX:
            continue
        extras = [extra for extra in distribution.metadata.get_all("Provides-Extra") or () if extra != "dev"]
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            yield f"{needed.name}{needed.specifier}", False
        elif any(needed.marker.evaluate({"extra": extra}) for extra in extras):
            yield f"{needed.name}{needed.specifier}", True


def _check_requirement(needed: Requirement, is_optional: bool) -> Iterator[CheckResult]:
    mend = f"pip install '{needed.name}{needed.specifier}'"
    try:
        own = version(needed.name)
    except PackageNotFoundError:
        if not is_optional:
            yield CheckResult(_VERSIONS, needed.name, "error", "not installed", mend)
        return
    wanted = f" ({needed.specifier})" if needed.specifier else ""
    if needed.specifier.contains(own, prereleases=True):
        yield CheckResult(_VERSIONS, needed.name, "ok", f"{own}{wanted}")
    else:
        said = f"{own}, which is outside of {needed.specifier}"
        yield CheckResult(_VERSIONS, needed.name, "warning" if is_optional else "error", said, mend)


def check_plugins(registry: Registry) -> Iterator[CheckResult]:
    """List the strategies, and what is broken."""
    yield CheckResult(_PLUGINS, "strategies", "ok", ", ".join(registry.strategies))
    for failure in registry.failures:
        name = failure.strategy or failure.plugin
        mend = f"Install it again, or remove the package that brings {name}."
        yield CheckResult(_PLUGINS, name, "error", str(failure), mend)


def check_settings(environment: Mapping[str, str], ranks: int) -> Iterator[CheckResult]:
    """Check variables that change how ranks run; `ranks` is how many this machine would start."""
    yield _check_threads(environment, ranks)
    offline = [f"{name}={environment[name]}" for name in _OFFLINE if environment.get(name)]
    cache = Path(environment.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    said = f"{', '.join(offline)}: only what is in {cache}" if offline else f"a hub id is downloaded to {cache}"
    if os.access(next(path for path in (cache, *cache.absolute().parents) if path.exists()), os.W_OK):
        yield CheckResult(_SETTINGS, "hub", "ok", said)
    else:
        mend = "Set HF_HOME to a directory that can be written, or give models as local directories."
        yield CheckResult(_SETTINGS, "hub", "warning", f"{said}, which cannot be written", mend)


def _check_threads(environment: Mapping[str, str], ranks: int) -> CheckResult:
    name, cores = "OMP_NUM_THREADS", count_usable_cores()
    value = environment.get(name)
    if value is None:
        return CheckResult(_SETTINGS, name, "ok", f"not set: each rank takes its share of {cores} cores")
    if not value.isdecimal() or not int(value):
        mend = f"Unset {name}, or set it to a number of threads."
        return CheckResult(_SETTINGS, name, "error", f"{value!r} is no number of threads", mend)
    if int(value) * ranks > cores > 1 and int(value) > 1:
        mend = f"Unset {name}, or set threads_per_rank in the run file."
        said = f"{value} threads of {ranks} ranks are more than {cores} cores, and wait for each other"
        return CheckResult(_SETTINGS, name, "warning", said, mend)
    return CheckResult(_SETTINGS, name, "ok", value)


_AREA = "directory"
MIN_FREE_BYTES = 10 * 2**30  # Bytes; a checkpoint may not fit into less
TEST_FILE_BYTES = 64 * 2**20  # Bytes of the test file
MIN_WRITE_SPEED = 50e6  # Bytes per second; below this a checkpoint takes long


@contextmanager
def scratch_directory(directory: Path) -> Iterator[Path]:
    """Make a temporary directory in it; raise OSError if that fails."""
    directory.mkdir(parents=True, exist_ok=True)
    own = directory / f".meshwright-doctor-{uuid.uuid4().hex[:12]}"
    own.mkdir()
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


def check_directory(directory: Path) -> Iterator[CheckResult]:
    """Check a directory as one rank; see `together` for several."""
    try:
        with scratch_directory(directory) as own:
            yield CheckResult(_AREA, "writable", "ok", str(directory))
            yield _check_renames(own)
            yield _check_locks(own)
            yield _check_free_space(own)
            yield _check_write_speed(own)
    except OSError as error:
        mend = "Name a directory that this user may write to, on a disk that is not full."
        yield CheckResult(_AREA, "writable", "error", f"{directory}: {error.strerror or error}", mend)


def _check_renames(directory: Path) -> CheckResult:
    """Rename a file over another, and a directory, as checkpoints and summaries are published."""
    new, old = directory / "new", directory / "old"
    new.write_text("new", encoding="utf-8")
    old.write_text("old", encoding="utf-8")
    os.replace(new, old)
    (directory / "writing").mkdir()
    (directory / "writing" / "file").write_text("whole", encoding="utf-8")
    os.rename(directory / "writing", directory / "written")
    if old.read_text(encoding="utf-8") == "new" and (directory / "written" / "file").is_file() and not new.exists():
        return CheckResult(_AREA, "renaming", "ok", "files and directories appear at once")
    mend = "Use a file system with POSIX renames, such as NFS or Lustre; mounted object stores have none."
    return make_failure(_AREA, "renaming", "what was renamed is not there under its new name", mend)


def _check_locks(directory: Path) -> CheckResult:
    mend = "Mount it with locks (NFS: without nolock; Lustre: with flock), or use another file system."
    path = directory / "lock"
    try:
        with FileLock(path, timeout=5):
            try:
                with FileLock(path, timeout=0):
                    return make_failure(_AREA, "locks", "two have the same lock", mend)
            except Timeout:
                return CheckResult(_AREA, "locks", "ok", "a second one waits")
    except (OSError, NotImplementedError, Timeout) as error:
        return make_failure(_AREA, "locks", f"none can be had: {error}", mend)


def _check_free_space(directory: Path) -> CheckResult:
    free = shutil.disk_usage(directory).free
    said = f"{free / 2**30:,.1f} GiB"
    if free < MIN_FREE_BYTES:
        mend = "Free some, or keep fewer checkpoints (checkpoint.keep_last): one takes 12 bytes for each parameter."
        return CheckResult(_AREA, "free", "warning", said, mend)
    return CheckResult(_AREA, "free", "ok", said)


def _check_write_speed(directory: Path) -> CheckResult:
    path, part = directory / "large", os.urandom(1 << 20)
    began = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(TEST_FILE_BYTES // len(part)):
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    rate = TEST_FILE_BYTES / (time.perf_counter() - began)
    said = f"{rate / 1e6:,.0f} MB/s to write and keep {TEST_FILE_BYTES >> 20} MiB"
    if rate < MIN_WRITE_SPEED:
        mend = "Checkpoints are written while training continues; save them less often, or use a faster disk."
        return CheckResult(_AREA, "speed", "warning", said, mend)
    return CheckResult(_AREA, "speed", "ok", said)
