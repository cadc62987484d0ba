"""How long ranks wait for each other, and who is named when one does not come."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import hang_targets
from support.commands import LAUNCHER_VARIABLES, write_run

from meshwright import Checkpointer, from_config, optimizer_factory
from meshwright._compat.torch import group_timeout, live_groups
from meshwright.checkpoint.saving import own_group
from meshwright.testing import Case, pool
from meshwright.testing.models import tiny_model
from meshwright.testing.parity import train_steps
from meshwright.testing.pool import GROUP_TIMEOUT_S
from meshwright.testing.zoo import zoo_config
from meshwright.train.run_file import OptimizerConfig

LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ddp": ("ddp", {}, {}),
    "ddp in instances": (
        "ddp",
        {"engine": "bucketed", "use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2},
        {},
    ),
    "hsdp": ("fsdp2", {}, {"dp_replicate_size": 2}),
    "tensor parallelism": ("fsdp2", {}, {"tp_size": 2}),
    "context parallelism": ("fsdp2", {}, {"cp_size": 2}),
    "experts": ("fsdp2", {}, {"ep_size": 2}),
    "pipeline": ("fsdp2", {}, {"pp_size": 2}),
    "megatron_fsdp": ("megatron_fsdp", {}, {"dp_replicate_size": 2}),
    "megatron_fsdp, tensor parallelism": ("megatron_fsdp", {}, {"tp_size": 2}),
}


def _timeouts(root: str, layout: str) -> list[float]:
    """How long each group waits that there is while a run trains and saves [s]."""
    strategy, config, sizes = LAYOUTS[layout]
    model = zoo_config("mixtral") if layout == "experts" else tiny_model().config
    manager = from_config(model, strategy, config=config, dtype="float32", device="cpu", **sizes)
    manager.build_optimizer(optimizer_factory(OptimizerConfig()))
    with Checkpointer(manager, root) as saver, own_group():
        train_steps(manager, Case(steps=1), range(1))
        saver.save(1)
        saver.wait()
        return [group_timeout(group).total_seconds() for group in live_groups()]


def test_the_places_where_ranks_are_made_to_hang_exist() -> None:
    for owner, name, _, _ in hang_targets.places().values():
        assert callable(getattr(owner, name))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_process_group_waits_as_long_as_the_run_asks_for(layout, tmp_path):
    for found in pool(4).run(_timeouts, str(tmp_path), layout):
        # All ranks, those of checkpoints, and of axes with several ranks.
        assert len(found) > 4
        assert set(found) == {GROUP_TIMEOUT_S}


TIMEOUT_S = 8.0
PATIENCE_S = 120
"""A run in which a rank hangs ends long before it; torch's own timeout is 1800 s."""
SEE = "see docs/troubleshooting.md#rankerror"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hang")
    values = yaml.safe_load(write_run(directory).read_text())
    values |= {"steps": 2, "timeout_s": TIMEOUT_S, "eval": {"every": 1, "sequences": 2}, "overwrite": True}
    values |= {"checkpoint": {"every": 2, "asynchronous": False}, "resume": "never", "sample": None}
    (directory / "run.yaml").write_text(yaml.safe_dump(values))
    return directory


@pytest.fixture(scope="module")
def server(workplace: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    with (
        (workplace / "stderr").open("w") as stderr,
        subprocess.Popen(
            [sys.executable, str(Path(__file__).parents[1] / "support" / "hang_targets.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
        ) as process,
    ):
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=PATIENCE_S)


def _ended(server: subprocess.Popen[str], workplace: Path, place: str, rank: int) -> tuple[int, str]:
    """Exit code and stderr of a run in which a rank hangs."""
    assert server.stdin is not None
    assert server.stdout is not None
    log = workplace / "stderr"
    start = log.stat().st_size
    server.stdin.write(f"{place} {rank} {workplace / 'run.yaml'}\n")
    server.stdin.flush()
    giving_up = threading.Timer(PATIENCE_S, server.kill)
    giving_up.start()
    for line in server.stdout:
        if line.startswith("exit code "):
            giving_up.cancel()
            return int(line.split()[2]), log.read_bytes()[start:].decode()
    pytest.fail(f"the run did not end; stderr: {log.read_bytes()[start:].decode()}")


@pytest.mark.parametrize(
    ("place", "rank"),
    [
        ("save", 1),
        ("step", 0),
        ("save", 0),
        ("step", 1),
        ("evaluation", 1),
        ("export", 1),
    ],
)
def test_a_rank_that_is_stopped_ends_the_run_and_is_named(place, rank, server, workplace):
    exit_code, errors = _ended(server, workplace, place, rank)
    assert exit_code == 1
    assert re.match(rf"error: rank {rank} \(\S+ process \d+\) hangs: no sign of life for ", errors), errors
    assert errors.splitlines()[1:] == [SEE]
    assert f"rank {1 - rank}" not in errors


def test_a_rank_that_hangs_in_its_own_code_is_named_with_the_place(server, workplace):
    exit_code, errors = _ended(server, workplace, "code", 1)
    assert exit_code == 1
    assert "error: rank 1 did not come to where rank 0 waits: rank 1 (" in errors
    assert re.search(r"is at \S+hang_targets\.py:\d+ in wait_long\.", errors), errors
    assert errors.splitlines()[1:] == [SEE]
