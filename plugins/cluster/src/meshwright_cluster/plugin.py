"""Hooks and the command `meshwright launch`, which writes and submits cluster jobs. Imports no torch."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from meshwright.plugin import RunSection, TracebackOption, echo, exit_on_error, hookimpl

from . import TARGETS, Target
from .config import LaunchConfig, redact_launch


def launch(
    run_file: Annotated[Path, typer.Argument(help="A run file (YAML), with or without a section `launch`.")],
    target: Annotated[Target, typer.Option("--to", help=f"One of {', '.join(TARGETS)}.")],
    nodes: Annotated[int | None, typer.Option("--nodes", help="Number of nodes; sets launch.nodes.")] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option("--gpus-per-node", help="GPUs and ranks of each node; sets launch.gpus_per_node."),
    ] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option("--ranks-per-node", help="Ranks of each node without GPUs; sets launch.ranks_per_node."),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a value, such as launch.slurm.partition=gpu."),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option("--out", help="Directory for the files; default: launch/NAME.")
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Submit the job with the cluster's own command.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the files without writing them.")] = False,
    traceback: TracebackOption = False,
) -> None:
    """Write, check and submit the job files of a run for Slurm, Kubernetes, Ray or SkyPilot.

    \b
    Examples:
      meshwright launch run.yaml --to slurm --nodes 2 --gpus-per-node 8
      meshwright launch run.yaml --to kubernetes --dry-run
    """
    short = {"nodes": nodes, "gpus_per_node": gpus_per_node, "ranks_per_node": ranks_per_node}
    with exit_on_error(traceback):
        from meshwright_run.run_file import load_run
        from meshwright_run.run_file_values import read_values

        from . import job_files
        from .job import build_job, is_node_local

        given = [f"launch.{name}={value}" for name, value in short.items() if value is not None]
        changes = [*(assignments or []), *given]
        config = load_run(run_file, changes)
        job = build_job(read_values(run_file, changes), config, target, output_dir)
        files, command = job_files.render_job_files(job, target), job_files.build_submit_command(job, target)
        if dry_run:
            for name, text in job_files.render_job_files(job.redact(), target).items():
                echo(f"# {job.directory / name}\n{text}\n")
            return
        if is_node_local(config.output_dir):
            echo(f"note: {config.output_dir} is local to this machine; the job can resume only here\n", stderr=True)
        if submit:
            job_files.check_can_submit(command)
        job_files.write_job_files(job, files)
        echo(f"{job.launch.nodes} x {job.ranks_per_node} ranks: {config.strategy} on {job.degrees}\n")
        echo(f"written {', '.join(str(job.directory / name) for name in files)}\n")
        if submit:
            raise SystemExit(job_files.run_submit_command(command))
        echo(f"submit  {shlex.join(command)}\n")


@hookimpl
def register_commands(app: typer.Typer) -> None:
    app.command()(launch)


@hookimpl
def register_run_sections() -> list[RunSection]:
    description = "Options of a cluster job, for `meshwright launch`."
    return [RunSection("launch", LaunchConfig, description, redact=redact_launch)]
