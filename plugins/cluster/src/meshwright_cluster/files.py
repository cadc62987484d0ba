"""The files of a job for each target, and the command that submits them."""

from __future__ import annotations

import shutil
import subprocess

from meshwright.plugin import ConfigError, as_yaml, write_whole

from . import Target, kubernetes, ray, skypilot, slurm
from .job import RUN_FILE, Job

_INSTALL = {
    "sbatch": "Submit from a login node of the cluster",
    "kubectl": "Install kubectl",
    "ray": "pip install 'ray[train]'",
    "sky": "pip install skypilot",
}


def files_of(job: Job, to: Target) -> dict[str, str]:
    """Return texts by file name, the submitted file first."""
    run = {RUN_FILE: as_yaml(dict(job.values))}
    if to == "slurm":
        return {slurm.SCRIPT: slurm.batch_script(job), **run}
    if to == "kubernetes":
        # The run file is in the manifest.
        return {kubernetes.MANIFEST: "---\n".join(as_yaml(each, blocks=True) for each in kubernetes.manifests(job))}
    if to == "ray":
        return {ray.DRIVER: ray.driver(job), **run}
    return {skypilot.TASK: as_yaml(skypilot.task(job), blocks=True), **run}


def submission(job: Job, to: Target) -> list[str]:
    """Return the command that submits the files."""
    if to == "slurm":
        return ["sbatch", str(job.directory / slurm.SCRIPT)]
    if to == "kubernetes":
        return ["kubectl", "apply", "-f", str(job.directory / kubernetes.MANIFEST)]
    if to == "ray":
        address = job.launch.ray.address
        at = [] if address is None else ["--address", address]
        run = ["--", job.launch.python, ray.DRIVER]
        return ["ray", "job", "submit", *at, "--no-wait", "--working-dir", str(job.directory), *run]
    return ["sky", "jobs", "launch", "--yes", "--detach-run", str(job.directory / skypilot.TASK)]


def write(job: Job, files: dict[str, str]) -> None:
    """Write the files into the job's directory; raise ConfigError if it cannot be written."""
    try:
        job.directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_whole(job.directory / name, text, mode=0o600 if job.has_secrets else 0o666)
    except OSError as error:
        raise ConfigError(f"--out={str(job.directory)!r} cannot be written: {error.strerror}. Name another.") from None


def submit(command: list[str]) -> int:
    """Run the command that submits and return its exit code; raise ConfigError if it is not installed."""
    check_can_submit(command)
    return subprocess.run(command, check=False).returncode


def check_can_submit(command: list[str]) -> None:
    """Raise ConfigError if the command is not installed."""
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"{command[0]} is not installed here, so the job cannot be submitted. {_INSTALL[command[0]]}; or leave "
            f"--submit out, and submit the files from where it is."
        )
