"""A driver for Ray Train, in which each worker is a rank.

After a failure, Ray restarts the workers on the remaining machines, and the run resumes from its newest checkpoint. Ray
runs a rank outside of the main thread, where Python handles no signals, so nothing is saved before a preemption.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.plugin import validate_config
from meshwright_run.run_file import RunConfig

from .job import RUN_FILE, ClusterJob

DRIVER_FILE = "job.py"


def train_worker(values: Mapping[str, Any]) -> None:
    """Train with the values of a run file on a Ray Train worker, in the process group of all ranks. Collective."""
    from meshwright_run.run_rank import run_rank

    run_rank(None, validate_config(RunConfig, values, where="the run file"))


def render_driver(job: ClusterJob) -> str:
    launch = job.launch
    resources = {} if launch.cpus_per_rank is None else {"CPU": launch.cpus_per_rank}
    backend = "cpu:gloo,cuda:nccl" if job.gpus_per_node else "gloo"
    storage = str(Path(job.config.output_dir).parent / f"{job.name}-ray")
    return f'''"""{job.name} on {job.world_size} ranks, with Ray Train; written by `meshwright launch`."""

from pathlib import Path

import ray
from meshwright_cluster.ray_train import train_worker
from meshwright_run.run_file_values import read_values
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

ray.init(runtime_env={{"env_vars": {job.environment!r}}})
TorchTrainer(
    train_worker,
    train_loop_config=read_values(Path(__file__).with_name({RUN_FILE!r})),
    torch_config=TorchConfig(backend={backend!r}, timeout_s={int(job.config.timeout_s)}),
    scaling_config=ScalingConfig(
        num_workers={job.world_size}, use_gpu={bool(job.gpus_per_node)}, resources_per_worker={resources or None!r}
    ),
    run_config=RunConfig(
        name={job.name!r},
        storage_path={storage!r},
        failure_config=FailureConfig(max_failures={launch.max_restarts}),
    ),
).fit()
'''
