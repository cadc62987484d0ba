"""A driver for Ray Train: each of its workers is a rank.

Ray starts workers anew after a failure, on the machines that are there, and the run goes on from its newest checkpoint.
It runs a rank beside the main thread of a worker, where Python notes no signals: nothing is saved when a machine is
announced to be taken away.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.validation import validated
from ..train.run_file import RunConfig
from .job import RUN_FILE, Job

DRIVER = "job.py"


def train(values: Mapping[str, Any]) -> None:
    """Run a run file in a worker of Ray Train, whose process group is that of all ranks. Collective.

    Args:
        values: what the run file says.

    Raises:
        MeshwrightError: as `meshwright train` would say it.
    """
    from ..train.run import run_rank

    run_rank(None, validated(RunConfig, values, where="the run file"))


def driver(job: Job) -> str:
    """The text of the driver."""
    launch = job.launch
    resources = {} if launch.cpus_per_rank is None else {"CPU": launch.cpus_per_rank}
    backend = "cpu:gloo,cuda:nccl" if job.gpus_per_node else "gloo"
    storage = str(Path(job.config.output_dir).parent / f"{job.name}-ray")
    return f'''"""{job.name} on {job.world_size} ranks, by Ray Train; made by `meshwright launch`."""

from pathlib import Path

import ray
from meshwright.clusters.ray import train
from meshwright.train.run_file import read_values
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

ray.init(runtime_env={{"env_vars": {job.environment!r}}})
TorchTrainer(
    train,
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
