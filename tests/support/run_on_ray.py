"""LOOP, as it is, on four workers of Ray Train: `python run_on_ray.py torch|plain DIRECTORY`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer


def train_worker(config: dict[str, Any]) -> None:
    import launcher_loop
    import torch.distributed as dist
    from ray.train import get_context

    found = {"losses": [format(loss, ".17g") for loss in launcher_loop.train()], "had_group": dist.is_initialized()}
    Path(config["directory"], f"{get_context().get_world_rank()}.json").write_text(json.dumps(found), encoding="utf-8")


def main(kind: str, directory: str) -> None:
    # The workers import what this folder has.
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}}
    ray.init(num_cpus=4, include_dashboard=False, runtime_env=environment, _temp_dir=sys.argv[3])
    settings: dict[str, Any] = {
        "train_loop_config": {"directory": directory},
        "scaling_config": ScalingConfig(num_workers=4),
        "run_config": RunConfig(storage_path=directory),
    }
    if kind == "torch":
        TorchTrainer(train_worker, torch_config=TorchConfig(backend="gloo"), **settings).fit()
    else:
        DataParallelTrainer(train_worker, **settings).fit()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
