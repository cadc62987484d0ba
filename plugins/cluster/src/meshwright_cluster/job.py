"""A run as a cluster job: nodes and ranks, validated as `meshwright train` will validate them.

[Note: job requirements] A job may be stopped and restarted on other machines. So it must save checkpoints to storage
that all machines share, and the same command must resume from them. Violations are rejected before submission.
"""

from __future__ import annotations

import os
import re
import signal
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from meshwright.plugin import ConfigError, Degrees, MeshwrightError, resolve
from meshwright_run.data.order import check_batch_size
from meshwright_run.run_file import RunConfig, redact
from meshwright_run.secrets import REDACTED, FromEnvironment, is_secret, redact_assignments, resolve_environment

from . import Target
from .config import LaunchConfig

RUN_FILE = "run.yaml"
MASTER_PORT = 29500  # torchrun's default; the first machine listens on it
_NODE_LOCAL_PATHS = ("/tmp", "/var/tmp", "/dev/shm", "/run")
_LAUNCHER_STOP_S = 30  # Time for a launcher to exit, in addition to the grace period
_SLURM_SIGNAL_EARLY_S = 60  # Slurm may send the signal up to this much early (man sbatch)


@dataclass(frozen=True)
class ClusterJob:
    """A run file with the settings of its cluster job."""

    values: Mapping[str, Any]  # of the run file, with assignments; `config` is validated from them
    config: RunConfig
    launch: LaunchConfig
    ranks_per_node: int
    gpus_per_node: int
    degrees: Degrees
    name: str
    directory: Path  # absolute path for the job files
    is_redacted: bool = False  # whether files contain *** instead of secrets

    @property
    def world_size(self) -> int:
        return self.launch.nodes * self.ranks_per_node

    @property
    def threads_per_rank(self) -> int:
        threads = self.config.threads_per_rank
        return threads if threads != "auto" else self.launch.cpus_per_rank or 1

    @property
    def environment(self) -> dict[str, str]:
        defaults = {"OMP_NUM_THREADS": str(self.threads_per_rank), "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
        given: dict[str, str] = resolve_environment(self.launch.env, "launch.env")
        if self.is_redacted:
            given |= dict.fromkeys(self._find_secret_names(given), REDACTED)
        return {**defaults, **given}

    @property
    def has_secrets(self) -> bool:
        """Whether the job files contain secrets."""
        names = self._find_secret_names(resolve_environment(self.launch.env, "launch.env"))
        return bool(names) or redact(self.values) != dict(self.values)

    def _find_secret_names(self, env: Mapping[str, str]) -> list[str]:
        is_given = {name: isinstance(value, FromEnvironment) for name, value in self.launch.env.items()}
        return [name for name, value in env.items() if is_given[name] or is_secret(name, value)]

    def redact(self) -> ClusterJob:
        launch = self.launch.model_copy(update={"setup": [redact_assignments(each) for each in self.launch.setup]})
        return replace(self, values=redact(self.values), launch=launch, is_redacted=True)

    @property
    def termination_grace_s(self) -> int:
        """Seconds from the signal until all processes of a machine have exited, including the launcher."""
        return self.launch.grace_s + _LAUNCHER_STOP_S

    def build_torchrun_command(
        self, run_file: str, *, node_rank: str | None = None, address: str | None = None
    ) -> list[str]:
        """Return the torchrun command of one machine, which substitutes `node_rank` and `address`.

        If these are None, torchrun reads its PET_* environment variables.
        """
        command = [self.launch.python, "-m", "torch.distributed.run"]
        if node_rank is not None and address is not None:
            command += [f"--nnodes={self.launch.nodes}", f"--nproc-per-node={self.ranks_per_node}"]
            command += [f"--node-rank={node_rank}", f"--master-addr={address}", f"--master-port={MASTER_PORT}"]
        # By default, torchrun kills ranks while they save.
        command += ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
        command += [f"--shutdown-timeout={self.launch.grace_s}"]
        return [*command, "-m", "meshwright", "train", run_file]


def build_job(
    values: Mapping[str, Any], config: RunConfig, target: Target, directory: Path | None = None
) -> ClusterJob:
    """Validate a run as a job, and return the job; see [Note: job requirements]."""
    launch = config.get_section(LaunchConfig) or LaunchConfig()
    directory = directory and directory.absolute()
    problems: list[str] = []
    gpus = ranks = 0
    degrees: Degrees | None = None
    with _collect_errors(problems):
        gpus, ranks = _resolve_gpus_and_ranks(config, launch)
        options: dict[str, Any] = {"config": config.strategy_config, "wrapper_config": config.wrapper_config}
        degrees = resolve(config.strategy, config, launch.nodes * ranks, **options)[1]
        micro_batch_size = config.micro_batch_size or max(1, config.batch_size // degrees.dp)
        check_batch_size(config.batch_size, data_size=degrees.dp, micro_batch_size=micro_batch_size)
    with _collect_errors(problems):
        # Raises if a variable to copy from the environment is not set.
        resolve_environment(launch.env, "launch.env")
    problems += _find_resume_problems(config, launch, target)
    problems += _find_storage_problems(config, launch, target)
    problems += _find_text_problems(launch, target, directory)
    if problems or degrees is None:
        lines = "\n".join(f"  {each}" for each in problems)
        raise ConfigError(problems[0] if len(problems) == 1 else f"the job has {len(problems)} problems:\n{lines}")
    name = launch.name or _derive_name(config.output_dir)
    path = directory or Path("launch") / name
    # Without a launcher, a single rank would start one rank per device.
    alone = {"nproc": 1} if launch.nodes * ranks == 1 else {}
    values = {key: value for key, value in values.items() if key != "launch"} | alone
    return ClusterJob(values, config, launch, ranks, gpus, degrees, name, path.absolute())


def _resolve_gpus_and_ranks(config: RunConfig, launch: LaunchConfig) -> tuple[int, int]:
    ranks = launch.ranks_per_node or launch.gpus_per_node or (config.nproc if config.nproc != "auto" else None)
    if ranks is None:
        raise ConfigError(
            "the number of ranks per node is not set. Set launch.gpus_per_node or launch.ranks_per_node, such as "
            "--gpus-per-node 8."
        )
    on_cpu = config.device == "cpu"
    gpus = launch.gpus_per_node if launch.gpus_per_node is not None else 0 if on_cpu else ranks
    if on_cpu and gpus:
        raise ConfigError(f"launch.gpus_per_node={gpus}, but device=cpu. Remove one of them.")
    if not on_cpu and not gpus:
        raise ConfigError("launch.gpus_per_node=0, but device is not cpu. Set device=cpu, or request GPUs.")
    if gpus and ranks != gpus:
        raise ConfigError(
            f"launch.ranks_per_node={ranks}, but launch.gpus_per_node={gpus}: each rank has one GPU. "
            f"Set both to the same number."
        )
    return gpus, ranks


@contextmanager
def _collect_errors(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except MeshwrightError as error:
        problems.append(str(error))


def _find_resume_problems(config: RunConfig, launch: LaunchConfig, target: Target) -> Iterator[str]:
    saving = config.checkpoint
    if not saving.is_enabled:
        yield (
            "the run saves no checkpoints, so a restarted job would begin at step 0. Set "
            "checkpoint.every, such as 500 or 20m."
        )
    if config.resume_config.source == "never":
        yield "resume=never would discard all progress at each restart of the job. Set resume=auto."
    if target in ("ray", "skypilot") and not saving.has_scheduled_saves:
        yield (
            f"the run saves only after a signal, and {target} takes machines away without one. Set checkpoint.every."
        )
    if target in ("slurm", "kubernetes") and "SIGTERM" not in saving.stop_config.signals:
        yield (
            f"checkpoint.on_signal.signals={saving.stop_config.signals}, but {target} ends a job with SIGTERM. "
            "Add it, or leave on_signal out."
        )
    if target == "slurm" and saving.stop_config.exit_code in (0, 1, 2, 128 + signal.SIGKILL):
        yield (
            f"checkpoint.on_signal.exit_code={saving.stop_config.exit_code} is also the exit code of a run that has "
            "finished, failed or been killed, so the job could not decide whether to requeue. Leave it out; the "
            "default is 143."
        )
    if (
        target == "slurm"
        and launch.time_limit_s is not None
        and launch.time_limit_s <= launch.grace_s + _SLURM_SIGNAL_EARLY_S
    ):
        yield (
            f"launch.time_limit={launch.time_limit} leaves no time to train: the signal comes launch.grace_s="
            f"{launch.grace_s} s before the end, or up to {_SLURM_SIGNAL_EARLY_S} s earlier. Raise the limit or lower "
            f"grace_s."
        )


def _find_text_problems(launch: LaunchConfig, target: Target, directory: Path | None) -> Iterator[str]:
    texts = {"--out": str(directory or ""), "the current directory": os.getcwd(), "launch": launch.model_dump()}
    for where, text in _iter_texts(texts):
        if any(unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp") for each in text):
            yield f"{where}={text!r} has control characters, which job files cannot contain. Remove them."
    if target == "skypilot":
        mounted = {"--out": str(directory or ""), "launch.skypilot": launch.skypilot.model_dump()}
        for where, text in _iter_texts(mounted):
            if "$" in text:
                yield f"{where}={text!r} has a $, which SkyPilot takes for a variable. Remove it."


def _find_storage_problems(config: RunConfig, launch: LaunchConfig, target: Target) -> Iterator[str]:
    path = PurePosixPath(config.output_dir)
    shared = launch.nodes > 1 or target in ("kubernetes", "skypilot")
    why = "and checkpoints would be incomplete" if launch.nodes > 1 else "and the next one would not find checkpoints"
    # Ray runs a job in a temporary copy of the working directory.
    if (shared or target == "ray") and not path.is_absolute():
        yield (
            f"output_dir={config.output_dir!r} is relative, so each machine has its own, {why}. Set the "
            f"absolute path of a directory on shared storage."
        )
    if shared and is_node_local(config.output_dir):
        yield (f"output_dir={config.output_dir!r} is local to a machine, {why}. Set a directory on shared storage.")
    parents: Sequence[str] | None = None
    if target == "kubernetes":
        for name in ("image", "volume_claim"):
            if getattr(launch.kubernetes, name) is None:
                yield f"Kubernetes needs launch.kubernetes.{name}. Set it in the run file or with --set."
        parents, key = [launch.kubernetes.mount_path], "launch.kubernetes.mount_path"
    elif target == "skypilot":
        parents, key = list(launch.skypilot.mounts), "launch.skypilot.mounts"
    if parents is not None and not any(_is_below(path, each) for each in parents):
        yield (
            f"output_dir={config.output_dir!r} is not below {' or '.join(parents) or 'anything'} ({key}), so the "
            f"results would be lost with the job's machines. Set a directory below that path."
        )


def is_node_local(path: str) -> bool:
    """Return whether a directory is certainly local to one machine."""
    return any(_is_below(PurePosixPath(path), parent) for parent in _NODE_LOCAL_PATHS)


def _iter_texts(values: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield all strings in nested values, including keys, each with its dotted path."""
    if isinstance(values, str):
        yield where, values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield where or str(key), str(key)
            yield from _iter_texts(value, f"{where}.{key}" if where else str(key))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _iter_texts(value, where)


def _is_below(path: PurePosixPath, parent: str) -> bool:
    return PurePosixPath(parent) in (path, *path.parents)


def _derive_name(output_dir: str) -> str:
    """Return a name that every cluster accepts. The name of a Kubernetes service must start with a letter."""
    plain = re.sub(r"[^a-z0-9]+", "-", Path(output_dir).name.lower()).strip("-")
    named = plain if plain[:1].isalpha() else f"run-{plain}"
    return named[:40].strip("-")
