"""Checks that one process makes: devices, limits, backends, clocks, versions, plugins, settings, and a directory."""

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

    category: str  # such as "versions"; findings of one category are shown together
    name: str
    status: Status  # "warning": training works, but may be slow or unreliable
    message: str
    fix: str = ""  # how to fix it; empty if ok
    exit_code: int = MeshwrightError.exit_code


def make_failure(category: str, name: str, message: str, fix: str) -> CheckResult:
    """Return an error that was found by trying an operation; its exit code is that of `RankError`."""
    return CheckResult(category, name, "error", message, fix, RankError.exit_code)


def find_exit_code(findings: Iterable[CheckResult]) -> int:
    return max((each.exit_code for each in findings if each.status == "error"), default=0)


def to_dict(findings: Iterable[CheckResult]) -> dict[str, Any]:
    found = list(findings)
    rows = [{name: value for name, value in asdict(each).items() if name != "exit_code"} for each in found]
    return {"exit_code": find_exit_code(found), "findings": rows}


def format_results(findings: Iterable[CheckResult]) -> list[str]:
    """Return the lines of a report: findings under their category, each with its fix, and a last line with counts."""
    found = list(findings)
    lines: list[str] = []
    for category in dict.fromkeys(each.category for each in found):
        lines.append(category)
        for each in found:
            if each.category == category:
                lines.append(f"  {each.status:<8} {each.name}: {each.message}")
                lines += [f"           {each.fix}"] if each.fix else []
    counts = {state: sum(each.status == state for each in found) for state in ("error", "warning", "ok")}
    return [*lines, ", ".join(f"{count} {state}" for state, count in counts.items())]


_DEVICES, _LIMITS, _BACKENDS, _CLOCKS = "devices", "limits", "backends", "clocks"
MIN_OPEN_FILES = 4096  # Files and sockets that a rank opens with many shards and peers
MIN_SHARED_MEMORY = 1 << 30  # Bytes of /dev/shm that NCCL and data loaders need
_DRIVER = Path("/proc/driver/nvidia/version")
_STILL_S, _DRIFT, _DAY_S = 0.05, 0.2, 86_400.0


def check_devices() -> Iterator[CheckResult]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield CheckResult(_DEVICES, "cpu", "ok", f"{count_usable_cores()} cores, {memory / 2**30:,.1f} GiB of memory")
    if not torch.accelerator.is_available():
        if _DRIVER.is_file():
            message = f"driver {_DRIVER.read_text().splitlines()[0]}, but torch {torch.__version__} finds no GPU"
            fix = "Install a build of torch for this driver's CUDA version, and check CUDA_VISIBLE_DEVICES."
            yield CheckResult(_DEVICES, "gpu", "warning", message, fix)
        else:
            yield CheckResult(_DEVICES, "gpu", "ok", "none: ranks run on the CPU")
        return
    kind = torch.accelerator.current_accelerator()
    for index in range(torch.accelerator.device_count()):
        message = str(kind)
        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(index)
            message = f"{properties.name}, {properties.total_memory / 2**30:,.1f} GiB, CUDA {torch.version.cuda}"
        yield CheckResult(_DEVICES, f"{kind}:{index}", "ok", message)


def check_limits() -> Iterator[CheckResult]:
    """Check the limit on open files and the size of shared memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        fix = f"Run `ulimit -n {MIN_OPEN_FILES}` before the command (the hard limit here is {allowed})."
        yield CheckResult(_LIMITS, "open files", "warning", f"{soft}; many ranks and shards need {MIN_OPEN_FILES}", fix)
    else:
        yield CheckResult(_LIMITS, "open files", "ok", str(soft))
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        is_small = size < MIN_SHARED_MEMORY and torch.cuda.is_available()
        fix = "In a container: --shm-size=1g, or a larger emptyDir of medium Memory at /dev/shm." if is_small else ""
        yield CheckResult(_LIMITS, "/dev/shm", "warning" if is_small else "ok", f"{size / 2**30:,.1f} GiB", fix)


def check_backends() -> Iterator[CheckResult]:
    if dist.is_available() and dist.is_gloo_available():
        yield CheckResult(_BACKENDS, "gloo", "ok", "available")
    else:
        fix = "Install a build of torch with gloo: ranks need it for control messages and checkpoints."
        yield CheckResult(_BACKENDS, "gloo", "error", "this build of torch has no gloo", fix)
    has_nccl = dist.is_available() and dist.is_nccl_available()
    if has_nccl and torch.cuda.is_available():
        yield CheckResult(_BACKENDS, "nccl", "ok", ".".join(map(str, torch.cuda.nccl.version())))
    elif torch.cuda.is_available():
        fix = "Install a build of torch for CUDA with NCCL."
        yield CheckResult(_BACKENDS, "nccl", "error", "there are GPUs, but this build of torch has no NCCL", fix)
    else:
        yield CheckResult(_BACKENDS, "nccl", "ok", "not needed without GPUs")


def check_clocks() -> Iterator[CheckResult]:
    """Compare the wall clock with the monotonic clock, and with the modification time of an installed file."""
    wall, steady = time.time(), time.monotonic()
    time.sleep(_STILL_S)
    passed, waited = time.time() - wall, time.monotonic() - steady
    today = datetime.fromtimestamp(wall, UTC).isoformat(timespec="seconds")
    fix = "Set the machine's clock by NTP (chrony, systemd-timesyncd)."
    installed = Path(__file__).stat().st_mtime
    if wall < installed - _DAY_S:
        since = datetime.fromtimestamp(installed, UTC).isoformat(timespec="seconds")
        yield CheckResult(
            _CLOCKS, "this machine", "warning", f"{today}, before the files of meshwright were installed ({since})", fix
        )
    elif abs(passed - waited) > _DRIFT * waited:
        message = f"the wall clock moved {passed:.3f} s in {waited:.3f} s: it is being set"
        yield CheckResult(_CLOCKS, "this machine", "warning", message, fix)
    else:
        yield CheckResult(_CLOCKS, "this machine", "ok", today)


PROJECT_PREFIX = "meshwright"
_VERSIONS, _PLUGINS, _SETTINGS = "versions", "plugins", "settings"
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def check_versions() -> Iterator[CheckResult]:
    """Check Python and the requirements of every installed meshwright distribution."""
    ours = {found.name: found for found in distributions() if found.name and found.name.split("-")[0] == PROJECT_PREFIX}
    yield from _check_python(ours)
    for name, found in sorted(ours.items()):
        yield CheckResult(_VERSIONS, name, "ok", found.version)
    # Several version ranges of one package are checked separately.
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
    """Yield the requirements that apply here, and whether each belongs to an extra."""
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
    fix = f"pip install '{needed.name}{needed.specifier}'"
    try:
        installed = version(needed.name)
    except PackageNotFoundError:
        if not is_optional:
            yield CheckResult(_VERSIONS, needed.name, "error", "not installed", fix)
        return
    wanted = f" ({needed.specifier})" if needed.specifier else ""
    if needed.specifier.contains(installed, prereleases=True):
        yield CheckResult(_VERSIONS, needed.name, "ok", f"{installed}{wanted}")
    else:
        message = f"{installed}, outside of {needed.specifier}"
        yield CheckResult(_VERSIONS, needed.name, "warning" if is_optional else "error", message, fix)


def check_plugins(registry: Registry) -> Iterator[CheckResult]:
    """List the available strategies, and the plugins that fail to load."""
    yield CheckResult(_PLUGINS, "strategies", "ok", ", ".join(registry.strategies))
    for failure in registry.failures:
        name = failure.strategy or failure.plugin
        fix = f"Reinstall or remove the package that provides {name}."
        yield CheckResult(_PLUGINS, name, "error", str(failure), fix)


def check_settings(environment: Mapping[str, str], ranks: int) -> Iterator[CheckResult]:
    """Check environment variables that affect ranks; `ranks` is the number that this machine would start."""
    yield _check_threads(environment, ranks)
    offline = [f"{name}={environment[name]}" for name in _OFFLINE if environment.get(name)]
    cache = Path(environment.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    message = f"{', '.join(offline)}: only files in {cache}" if offline else f"models are downloaded to {cache}"
    if os.access(next(path for path in (cache, *cache.absolute().parents) if path.exists()), os.W_OK):
        yield CheckResult(_SETTINGS, "hub", "ok", message)
    else:
        fix = "Set HF_HOME to a writable directory, or give models as local directories."
        yield CheckResult(_SETTINGS, "hub", "warning", f"{message}, which is not writable", fix)


def _check_threads(environment: Mapping[str, str], ranks: int) -> CheckResult:
    name, cores = "OMP_NUM_THREADS", count_usable_cores()
    value = environment.get(name)
    if value is None:
        return CheckResult(_SETTINGS, name, "ok", f"not set: each rank uses its share of {cores} cores")
    if not value.isdecimal() or not int(value):
        fix = f"Unset {name}, or set it to a number of threads."
        return CheckResult(_SETTINGS, name, "error", f"{value!r} is not a number of threads", fix)
    if int(value) * ranks > cores > 1 and int(value) > 1:
        fix = f"Unset {name}, or set threads_per_rank in the run file."
        message = f"{value} threads for each of {ranks} ranks are more than {cores} cores can run at once"
        return CheckResult(_SETTINGS, name, "warning", message, fix)
    return CheckResult(_SETTINGS, name, "ok", value)


_AREA = "directory"
MIN_FREE_BYTES = 10 * 2**30  # Bytes; less may be too small for a checkpoint
TEST_FILE_BYTES = 64 * 2**20  # Size of the test file
MIN_WRITE_SPEED = 50e6  # Bytes per second; checkpoints are slow below this


@contextmanager
def scratch_directory(directory: Path) -> Iterator[Path]:
    """Create a temporary directory in `directory`, and delete it afterwards. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    own = directory / f".meshwright-doctor-{uuid.uuid4().hex[:12]}"
    own.mkdir()
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


def check_directory(directory: Path) -> Iterator[CheckResult]:
    """Check a directory from one process; `rank_checks` checks it from several nodes."""
    try:
        with scratch_directory(directory) as own:
            yield CheckResult(_AREA, "writable", "ok", str(directory))
            yield _check_renames(own)
            yield _check_locks(own)
            yield _check_free_space(own)
            yield _check_write_speed(own)
    except OSError as error:
        fix = "Choose a directory that this user can write to, on a disk that is not full."
        yield CheckResult(_AREA, "writable", "error", f"{directory}: {error.strerror or error}", fix)


def _check_renames(directory: Path) -> CheckResult:
    """Rename a file over another, and a directory, as is done to publish checkpoints and summaries."""
    new, old = directory / "new", directory / "old"
    new.write_text("new", encoding="utf-8")
    old.write_text("old", encoding="utf-8")
    os.replace(new, old)
    (directory / "writing").mkdir()
    (directory / "writing" / "file").write_text("whole", encoding="utf-8")
    os.rename(directory / "writing", directory / "written")
    if old.read_text(encoding="utf-8") == "new" and (directory / "written" / "file").is_file() and not new.exists():
        return CheckResult(_AREA, "renaming", "ok", "renamed files and directories have their new names")
    fix = "Use a file system with POSIX renames, such as NFS or Lustre; mounted object stores do not have them."
    return make_failure(_AREA, "renaming", "a renamed file or directory is missing", fix)


def _check_locks(directory: Path) -> CheckResult:
    fix = "Mount the file system with locks (NFS: without nolock; Lustre: with flock), or use another one."
    path = directory / "lock"
    try:
        with FileLock(path, timeout=5):
            try:
                with FileLock(path, timeout=0):
                    return make_failure(_AREA, "locks", "a lock was acquired twice", fix)
            except Timeout:
                return CheckResult(_AREA, "locks", "ok", "a held lock cannot be acquired again")
    except (OSError, NotImplementedError, Timeout) as error:
        return make_failure(_AREA, "locks", f"no lock can be acquired: {error}", fix)


def _check_free_space(directory: Path) -> CheckResult:
    free = shutil.disk_usage(directory).free
    message = f"{free / 2**30:,.1f} GiB"
    if free < MIN_FREE_BYTES:
        fix = "Free some space, or keep fewer checkpoints (checkpoint.keep_last): one takes 12 bytes per parameter."
        return CheckResult(_AREA, "free", "warning", message, fix)
    return CheckResult(_AREA, "free", "ok", message)


def _check_write_speed(directory: Path) -> CheckResult:
    path, chunk = directory / "large", os.urandom(1 << 20)
    began = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(TEST_FILE_BYTES // len(chunk)):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    rate = TEST_FILE_BYTES / (time.perf_counter() - began)
    message = f"{rate / 1e6:,.0f} MB/s to write and sync {TEST_FILE_BYTES >> 20} MiB"
    if rate < MIN_WRITE_SPEED:
        fix = "Save checkpoints less often (they are written while training continues), or use a faster disk."
        return CheckResult(_AREA, "speed", "warning", message, fix)
    return CheckResult(_AREA, "speed", "ok", message)
