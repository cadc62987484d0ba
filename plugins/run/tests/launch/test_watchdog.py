"""A run in which a rank hangs ends soon and names it, with and without a watchdog; a run that moves continues."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import hang_targets
from support.case_server import start_case_server
from support.commands import copy_environment, write_run
from support.launched_processes import find_free_port

from meshwright import Checkpointer, ConfigError, from_config, optimizer_factory
from meshwright._compat.torch import get_group_timeout, list_process_groups
from meshwright.base.docs import format_docs_link
from meshwright.checkpoint.saving import temporary_group
from meshwright.testing import Case
from meshwright_run.run_file import OptimizerConfig, load_run
from meshwright_testing import pool
from meshwright_testing.models import build_tiny_model
from meshwright_testing.parity import train_steps
from meshwright_testing.workers import GROUP_TIMEOUT_S
from meshwright_testing.zoo import build_zoo_config

TARGETS = hang_targets.__file__
TIMEOUT_S = 8.0
WATCHDOG_S = 4.0
GRACE_S = 5.0
"""So long after `watchdog_s` no process is left."""
PATIENCE_S = 120
"""A run in which a rank hangs ends long before it; torch's own timeout is 1800 s."""
SEE = f"see {format_docs_link('troubleshooting.md', 'rankerror')}"
GROUPS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ddp in instances": (
        "ddp",
        {"engine": "bucketed", "use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2},
        {},
    ),
    "hsdp": ("fsdp2", {}, {"dp_replicate_size": 2}),
    "experts": ("fsdp2", {}, {"ep_size": 2}),
    "pipeline": ("fsdp2", {}, {"pp_size": 2}),
    "megatron_fsdp, tensor parallelism": ("megatron_fsdp", {}, {"tp_size": 2}),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp", "strategy_config": {}},
    "pipeline": {"pp_size": 2},
    "one rank": {"nproc": 1},
}


def _timeouts(root: str, layout: str) -> list[float]:
    """The timeout of each process group there is while a run trains and saves [s]."""
    strategy, config, sizes = GROUPS[layout]
    model = build_zoo_config("mixtral") if layout == "experts" else build_tiny_model().config
    manager = from_config(model, strategy, config=config, dtype="float32", device="cpu", **sizes)
    manager.build_optimizer(optimizer_factory(OptimizerConfig()))
    with Checkpointer(manager, root) as saver, temporary_group():
        train_steps(manager, Case(steps=1), range(1))
        saver.save(1)
        saver.wait()
        return [get_group_timeout(group).total_seconds() for group in list_process_groups()]


@pytest.mark.slow
@pytest.mark.parametrize("layout", GROUPS)
def test_every_process_group_waits_as_long_as_the_run_asks_for(layout, tmp_path):
    for found in pool(4).run(_timeouts, str(tmp_path), layout):
        # All ranks, those of checkpoints, and of axes with several ranks.
        assert len(found) > 4
        assert set(found) == {GROUP_TIMEOUT_S}


def test_the_places_where_ranks_are_made_to_hang_exist() -> None:
    for owner, name, _, _ in hang_targets.hang_points().values():
        assert callable(getattr(owner, name))


# -- runs


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hang")
    write_run(directory)
    (directory / "original.yaml").write_bytes((directory / "run.yaml").read_bytes())
    return directory


def write(workplace: Path, **changes: Any) -> Path:
    """The run file with changes; where its results go."""
    values = yaml.safe_load((workplace / "original.yaml").read_text())
    values |= {"steps": 8, "watchdog_s": WATCHDOG_S, "resume": "never", "overwrite": True, "sample": None, **changes}
    (workplace / "run.yaml").write_text(yaml.safe_dump(values))
    return workplace / "out"


def write_without_watchdog(workplace: Path) -> None:
    write(
        workplace,
        steps=2,
        timeout_s=TIMEOUT_S,
        watchdog_s=None,
        eval={"every": 1, "max_sequences": 2},
        checkpoint={"every": 2, "asynchronous": False},
    )


def environment(**more: str) -> dict[str, str]:
    return copy_environment() | more


Ended = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def ended(workplace: Path) -> Iterator[Ended]:
    """A function that runs a run in which a rank hangs at a place, and returns its exit code and stderr."""
    with start_case_server(TARGETS, log=workplace / "stderr", environment=environment(), timeout_s=PATIENCE_S) as run:

        def run_hanging(place: str, rank: int) -> tuple[int, str]:
            exit_code, _, errors = run(place, rank, workplace / "run.yaml")
            return exit_code, errors

        yield run_hanging


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (out / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


@pytest.mark.slow
@pytest.mark.parametrize(("place", "rank"), [("save", 1), ("step", 0)])
def test_a_rank_that_is_stopped_ends_the_run_and_is_named(place, rank, ended, workplace):
    write_without_watchdog(workplace)
    exit_code, errors = ended(place, rank)
    assert exit_code == 1
    assert re.match(rf"error: rank {rank} \(\S+ process \d+\) hangs: no heartbeat for ", errors), errors
    assert errors.splitlines()[1:] == [SEE]
    assert f"rank {1 - rank}" not in errors


@pytest.mark.slow
def test_a_rank_that_hangs_in_its_own_code_is_named_with_the_place(ended, workplace):
    write_without_watchdog(workplace)
    exit_code, errors = ended("code", 1)
    assert exit_code == 1
    assert "error: rank 1 did not reach the point where rank 0 waits: rank 1 (" in errors
    assert re.search(r"is at \S+hang_targets\.py:\d+ in sleep_forever\.", errors), errors
    assert errors.splitlines()[1:] == [SEE]


# -- with a watchdog


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "rank", "layout", "phase"),
    [
        ("data", 1, "ddp", "data"),
        ("stage code", 0, "pipeline", "forward_backward"),
        ("data", 0, "one rank", "data"),
    ],
)
def test_a_rank_that_stands_still_is_named_and_all_stacks_are_kept(place, rank, layout, phase, ended, workplace):
    out = write(workplace, **LAYOUTS[layout])
    exit_code, errors = ended(place, rank)
    (hang,) = events(out, "hang")
    assert time.time() - hang["since"] < WATCHDOG_S + GRACE_S
    assert exit_code == 1
    found = rf"error: rank {rank} hangs: no progress for \d\.\d s in step \d, phase {phase}: rank {rank} \(\S+ process"
    assert re.match(found, errors), errors
    assert f"hang_targets.py:{hang['location'].split(':')[1]}" in errors
    assert errors.splitlines()[1:] == [SEE]
    assert (hang["rank"], hang["phase"], hang["is_silent"]) == (rank, phase, False)
    assert hang["location"].endswith("in sleep_forever")
    faults = out / "faults"
    assert "in sleep_forever" in (faults / f"rank-{rank:05}-stacks.txt").read_text()
    for each in range(1 if layout == "one rank" else 2):
        assert "in run_steps" in (faults / f"rank-{each:05}-stacks.txt").read_text()
        reported = json.loads((faults / f"rank-{each:05}.json").read_text())
        assert (reported["fault"]["error_type"], reported["fault"]["rank"]) == ("Hang", each)
        assert reported["collectives"]["gloo"]["pg_status"]


def is_about_a_stopped_rank(out: Path, rank: int, errors: str) -> None:
    (hang,) = events(out, "hang")
    assert time.time() - hang["since"] < WATCHDOG_S + GRACE_S
    assert re.search(rf"error: rank {rank} \(\S+ process \d+\) hangs: no heartbeat for [45] s\.", errors), errors
    assert "raise watchdog_s. The stacks of all ranks are in " in errors
    assert (hang["rank"], hang["is_silent"]) == (rank, True)
    with pytest.raises(ProcessLookupError):
        os.kill(int(hang["process"].split()[-1]), 0)
    assert "as of the last heartbeat" in (out / "faults" / f"rank-{rank:05}-stacks.txt").read_text()
    assert "in train_step" in (out / "faults" / f"rank-{1 - rank:05}-stacks.txt").read_text()


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named_and_ended(ended, workplace):
    out = write(workplace)
    exit_code, errors = ended("step", 0)
    assert exit_code == 1
    is_about_a_stopped_rank(out, 0, errors)
    assert errors.count("hangs") == 1
    assert errors.splitlines()[1:] == [SEE]


@pytest.mark.slow
def test_a_first_rank_that_is_stopped_and_hosts_the_store_is_named_and_ended(workplace):
    out = write(workplace)
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(find_free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, TARGETS, "step", "0", str(workplace / "run.yaml")],
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **world),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    _, errors = ranks[1].communicate(timeout=120)
    ranks[0].communicate(timeout=GRACE_S)
    assert [each.returncode for each in ranks] == [-signal.SIGKILL, 1]
    is_about_a_stopped_rank(out, 0, errors)


@pytest.mark.slow
def test_slow_steps_and_evaluations_that_move_raise_no_alarm(ended, workplace):
    # 1.2 s a step, and 3.6 s an evaluation, the second of which is not the first.
    out = write(workplace, watchdog_s=3.0, steps=4, eval={"every": 2, "max_sequences": 12})
    assert ended("sleepy loss", -1) == (0, "")
    reported = events(out, "evaluation")
    assert [each["step"] for each in reported] == [2, 4]
    assert min(each["seconds"] for each in reported) > 3.0
    assert not events(out, "hang")


@pytest.mark.parametrize(
    ("assignment", "reported"),
    [
        ("watchdog_s=61", "watchdog_s=61 is more than timeout_s=60"),
        ("watchdog_s=1", "watchdog_s: Input should be greater than or equal to 2 (got 1)"),
        (
            "metrics.stragglers.window_steps=0",
            "metrics.stragglers.window_steps: Input should be greater than or equal to 1",
        ),
        ("metrics.stragglers.deviations=0", "metrics.stragglers.deviations: Input should be greater than 0"),
    ],
)
def test_bad_options_are_refused(assignment, reported, workplace):
    write(workplace, watchdog_s=None)
    with pytest.raises(ConfigError, match=re.escape(reported)):
        load_run(workplace / "run.yaml", [assignment])
