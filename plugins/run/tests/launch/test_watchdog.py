"""A run in which a rank hangs ends soon and names it, with and without a watchdog; a run that moves goes on."""

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
from support.commands import LAUNCHER_VARIABLES, write_run
from support.served import served
from support.starts import TORCHRUN, free_port

from meshwright import Checkpointer, ConfigError, from_config, optimizer_factory
from meshwright._compat.torch import group_timeout, live_groups
from meshwright.checkpoint.saving import own_group
from meshwright.testing import Case
from meshwright_run.report import read_metrics
from meshwright_run.run_file import OptimizerConfig, load_run
from meshwright_testing import pool
from meshwright_testing.models import tiny_model
from meshwright_testing.parity import train_steps
from meshwright_testing.workers import GROUP_TIMEOUT_S
from meshwright_testing.zoo import zoo_config

TARGETS = hang_targets.__file__
TIMEOUT_S = 8.0
WATCHDOG_S = 4.0
GRACE_S = 5.0
"""So long after `watchdog_s` no process is left."""
PATIENCE_S = 120
"""A run in which a rank hangs ends long before it; torch's own timeout is 1800 s."""
SEE = "see docs/troubleshooting.md#rankerror"
GROUPS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
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
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "ddp": {"strategy": "ddp", "strategy_config": {}},
    "pipeline": {"pp_size": 2},
    "one rank": {"nproc": 1},
}


def _timeouts(root: str, layout: str) -> list[float]:
    """The timeout of each process group there is while a run trains and saves [s]."""
    strategy, config, sizes = GROUPS[layout]
    model = zoo_config("mixtral") if layout == "experts" else tiny_model().config
    manager = from_config(model, strategy, config=config, dtype="float32", device="cpu", **sizes)
    manager.build_optimizer(optimizer_factory(OptimizerConfig()))
    with Checkpointer(manager, root) as saver, own_group():
        train_steps(manager, Case(steps=1), range(1))
        saver.save(1)
        saver.wait()
        return [group_timeout(group).total_seconds() for group in live_groups()]


@pytest.mark.slow
@pytest.mark.parametrize("layout", GROUPS)
def test_every_process_group_waits_as_long_as_the_run_asks_for(layout, tmp_path):
    for found in pool(4).run(_timeouts, str(tmp_path), layout):
        # All ranks, those of checkpoints, and of axes with several ranks.
        assert len(found) > 4
        assert set(found) == {GROUP_TIMEOUT_S}


def test_the_places_where_ranks_are_made_to_hang_exist() -> None:
    for owner, name, _, _ in hang_targets.places().values():
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
        eval={"every": 1, "sequences": 2},
        checkpoint={"every": 2, "asynchronous": False},
    )


def environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES} | more


Ended = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def ended(workplace: Path) -> Iterator[Ended]:
    """A function that runs a run in which a rank hangs at a place, and returns its exit code and stderr."""
    with served(TARGETS, log=workplace / "stderr", environment=environment(), patience_s=PATIENCE_S) as run:

        def run_hanging(place: str, rank: int) -> tuple[int, str]:
            exit_code, _, errors = run(place, rank, workplace / "run.yaml")
            return exit_code, errors

        yield run_hanging


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (out / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


STOPPED = [("save", 1), ("step", 0), ("save", 0), ("step", 1), ("evaluation", 1), ("export", 1)]


@pytest.mark.parametrize(
    ("place", "rank"),
    [pytest.param(*each, marks=pytest.mark.slow if each in STOPPED[:2] else pytest.mark.zoo) for each in STOPPED],
)
def test_a_rank_that_is_stopped_ends_the_run_and_is_named(place, rank, ended, workplace):
    write_without_watchdog(workplace)
    exit_code, errors = ended(place, rank)
    assert exit_code == 1
    assert re.match(rf"error: rank {rank} \(\S+ process \d+\) hangs: no sign of life for ", errors), errors
    assert errors.splitlines()[1:] == [SEE]
    assert f"rank {1 - rank}" not in errors


@pytest.mark.slow
def test_a_rank_that_hangs_in_its_own_code_is_named_with_the_place(ended, workplace):
    write_without_watchdog(workplace)
    exit_code, errors = ended("code", 1)
    assert exit_code == 1
    assert "error: rank 1 did not come to where rank 0 waits: rank 1 (" in errors
    assert re.search(r"is at \S+hang_targets\.py:\d+ in wait_long\.", errors), errors
    assert errors.splitlines()[1:] == [SEE]


# -- with a watchdog


@pytest.mark.parametrize(
    ("place", "rank", "layout", "phase", "function"),
    [
        pytest.param("data", 1, "ddp", "data", "wait_long", marks=pytest.mark.slow),
        pytest.param("data lock", 0, "fsdp2", "data", "lock_forever", marks=pytest.mark.zoo),
        pytest.param("callback", 1, "fsdp2", "callbacks", "wait_long", marks=pytest.mark.zoo),
        pytest.param("forward", 1, "fsdp2", "forward_backward", "wait_long", marks=pytest.mark.zoo),
        pytest.param("stage code", 0, "pipeline", "forward_backward", "wait_long", marks=pytest.mark.slow),
        pytest.param("data", 0, "one rank", "data", "wait_long", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_stands_still_is_named_and_all_stacks_are_kept(
    place, rank, layout, phase, function, ended, workplace
):
    out = write(workplace, **LAYOUTS[layout])
    exit_code, errors = ended(place, rank)
    (hang,) = events(out, "hang")
    assert time.time() - hang["since"] < WATCHDOG_S + GRACE_S
    assert exit_code == 1
    found = rf"error: rank {rank} hangs: no progress for \d\.\d s in step \d, phase {phase}: rank {rank} \(\S+ process"
    assert re.match(found, errors), errors
    assert f"hang_targets.py:{hang['place'].split(':')[1]}" in errors
    assert errors.splitlines()[1:] == [SEE]
    assert (hang["rank"], hang["phase"], hang["is_silent"]) == (rank, phase, False)
    assert hang["place"].endswith(f"in {function}")
    faults = out / "faults"
    assert f"in {function}" in (faults / f"rank-{rank:05}-stacks.txt").read_text()
    for each in range(1 if layout == "one rank" else 2):
        assert "in steps" in (faults / f"rank-{each:05}-stacks.txt").read_text()
        told = json.loads((faults / f"rank-{each:05}.json").read_text())
        assert (told["fault"]["kind"], told["fault"]["rank"]) == ("Hang", each)
        assert told["collectives"]["gloo"]["pg_status"]


def is_about_a_stopped_rank(out: Path, rank: int, errors: str) -> None:
    (hang,) = events(out, "hang")
    assert time.time() - hang["since"] < WATCHDOG_S + GRACE_S
    assert re.search(rf"error: rank {rank} \(\S+ process \d+\) hangs: no sign of life for [45] s\.", errors), errors
    assert "raise watchdog_s. The stacks of all ranks are in " in errors
    assert (hang["rank"], hang["is_silent"]) == (rank, True)
    with pytest.raises(ProcessLookupError):
        os.kill(int(hang["process"].split()[-1]), 0)
    assert "as of the last sign" in (out / "faults" / f"rank-{rank:05}-stacks.txt").read_text()
    assert "in train_step" in (out / "faults" / f"rank-{1 - rank:05}-stacks.txt").read_text()


@pytest.mark.parametrize(
    ("place", "rank", "layout"),
    [
        pytest.param("step", 0, "fsdp2", marks=pytest.mark.slow),
        pytest.param("step", 1, "ddp", marks=pytest.mark.zoo),
        pytest.param("stage", 1, "pipeline", marks=pytest.mark.zoo),
    ],
)
def test_a_rank_that_is_stopped_is_named_and_ended(place, rank, layout, ended, workplace):
    out = write(workplace, **LAYOUTS[layout])
    exit_code, errors = ended(place, rank)
    assert exit_code == 1
    is_about_a_stopped_rank(out, rank, errors)
    assert errors.count("hangs") == 1
    assert errors.splitlines()[1:] == [SEE]


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.zoo), pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_is_stopped_is_named_and_ended_under_torchrun(rank, workplace):
    out = write(workplace)
    target = [TARGETS, "step", str(rank), str(workplace / "run.yaml")]
    done = subprocess.run(
        [*TORCHRUN, "--standalone", "--nproc-per-node", "2", *target],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    is_about_a_stopped_rank(out, rank, done.stderr)


@pytest.mark.slow
def test_a_first_rank_that_is_stopped_and_hosts_the_store_is_named_and_ended(workplace):
    out = write(workplace)
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
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
    out = write(workplace, watchdog_s=3.0, steps=4, eval={"every": 2, "sequences": 12})
    assert ended("sleepy loss", -1) == (0, "")
    told = events(out, "evaluation")
    assert [each["step"] for each in told] == [2, 4]
    assert min(each["seconds"] for each in told) > 3.0
    assert not events(out, "hang")


@pytest.mark.slow
def test_a_first_step_that_is_long_raises_no_alarm(ended, workplace):
    out = write(workplace, steps=3)
    assert ended("long first step", 1) == (0, "")
    first = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    assert first["seconds"] > WATCHDOG_S + 2


@pytest.mark.zoo
def test_a_rank_that_is_slow_by_itself_is_a_straggler_if_that_is_asked_for(ended, workplace):
    run = {"nproc": 4, "batch_size": 8, "steps": 60}
    out = write(workplace, **run, metrics={"stragglers": {"over": 10}})
    assert ended("sleepy data", 2) == (0, "")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    named = [each for line in lines for each in line.get("stragglers", ())]
    assert {each["rank"] for each in named} == {2}
    assert len(named) > 10
    assert all(each["seconds"] > each["median"] + 0.03 and each["deviations"] > 5 for each in named)
    (told,) = events(out, "straggler")
    assert told["rank"] == 2
    read = read_metrics(out / "metrics.jsonl", until=60, steps=60)
    assert [each for result in read for each in result.stragglers] == named
    for place, changes in (("nothing", {}), ("sleepy data", {"metrics": {"stragglers": None}})):
        write(workplace, **run, **changes)
        assert ended(place, 2) == (0, "")
        assert "stragglers" not in (out / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("assignment", "told"),
    [
        ("watchdog_s=61", "watchdog_s=61 is more than timeout_s=60"),
        ("watchdog_s=1", "watchdog_s: Input should be greater than or equal to 2 (got 1)"),
        ("metrics.stragglers.over=0", "metrics.stragglers.over: Input should be greater than or equal to 1"),
        ("metrics.stragglers.deviations=0", "metrics.stragglers.deviations: Input should be greater than 0"),
    ],
)
def test_bad_options_are_refused(assignment, told, workplace):
    write(workplace, watchdog_s=None)
    with pytest.raises(ConfigError, match=re.escape(told)):
        load_run(workplace / "run.yaml", [assignment])
