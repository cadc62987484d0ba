"""A rank that hangs is named soon, by what it does, and a run in which none does goes on; stragglers are named.

Who is a straggler is told by `StragglersConfig`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.commands import LAUNCHER_VARIABLES, write_run
from test_timeouts import _ended as ended_run
from test_timeouts import server as server

from meshwright import ConfigError
from meshwright.events.step import StepResult
from meshwright.launch.hang import Report, culprits, standing
from meshwright.launch.position import At
from meshwright.launch.progress import Progress
from meshwright.launch.signs import DONE, Sign
from meshwright.train.report import NewStragglers, as_record, read_metrics
from meshwright.train.run_file import load_run
from meshwright.train.run_sections import StragglersConfig
from meshwright.train.stragglers import Stragglers

WATCHDOG_S = 4.0
GRACE_S = 5.0
"""So long after `watchdog_s` no process is left."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "ddp": {"strategy": "ddp", "strategy_config": {}},
    "pipeline": {"pp_size": 2},
    "one rank": {"nproc": 1},
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("watchdog")
    write_run(directory)
    (directory / "original.yaml").write_bytes((directory / "run.yaml").read_bytes())
    return directory


def write(workplace: Path, **changes: Any) -> Path:
    """The run file with changes; where its results go."""
    values = yaml.safe_load((workplace / "original.yaml").read_text())
    values |= {"steps": 8, "watchdog_s": WATCHDOG_S, "resume": "never", "overwrite": True, "sample": None, **changes}
    (workplace / "run.yaml").write_text(yaml.safe_dump(values))
    return workplace / "out"


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (out / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


# -- runs


@pytest.mark.parametrize(
    ("place", "rank", "layout", "phase", "function"),
    [
        ("data", 1, "ddp", "data", "wait_long"),
        ("data lock", 0, "fsdp2", "data", "lock_forever"),
        ("callback", 1, "fsdp2", "callbacks", "wait_long"),
        ("forward", 1, "fsdp2", "forward_backward", "wait_long"),
        ("stage code", 0, "pipeline", "forward_backward", "wait_long"),
        ("data", 0, "one rank", "data", "wait_long"),
    ],
)
def test_a_rank_that_stands_still_is_named_and_all_stacks_are_kept(
    place, rank, layout, phase, function, server, workplace
):
    out = write(workplace, **LAYOUTS[layout])
    exit_code, errors = ended_run(server, workplace, place, rank)
    (hang,) = events(out, "hang")
    assert time.time() - hang["since"] < WATCHDOG_S + GRACE_S
    assert exit_code == 1
    found = rf"error: rank {rank} hangs: no progress for \d\.\d s in step \d, phase {phase}: rank {rank} \(\S+ process"
    assert re.match(found, errors), errors
    assert f"hang_targets.py:{hang['place'].split(':')[1]}" in errors
    assert errors.splitlines()[1:] == ["see docs/troubleshooting.md#rankerror"]
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
    ("place", "rank", "layout"), [("step", 0, "fsdp2"), ("step", 1, "ddp"), ("stage", 1, "pipeline")]
)
def test_a_rank_that_is_stopped_is_named_and_ended(place, rank, layout, server, workplace):
    out = write(workplace, **LAYOUTS[layout])
    exit_code, errors = ended_run(server, workplace, place, rank)
    assert exit_code == 1
    is_about_a_stopped_rank(out, rank, errors)
    assert errors.count("hangs") == 1
    assert errors.splitlines()[1:] == ["see docs/troubleshooting.md#rankerror"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_is_named_and_ended_under_torchrun(rank, workplace):
    out = write(workplace)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, *target("step", rank, workplace)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    is_about_a_stopped_rank(out, rank, done.stderr)


def test_a_first_rank_that_is_stopped_and_hosts_the_store_is_named_and_ended(workplace):
    out = write(workplace)
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, *target("step", 0, workplace)],
            env=clean_environment() | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    _, errors = ranks[1].communicate(timeout=120)
    ranks[0].communicate(timeout=GRACE_S)
    assert [each.returncode for each in ranks] == [-signal.SIGKILL, 1]
    is_about_a_stopped_rank(out, 0, errors)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


def target(place: str, rank: int, workplace: Path) -> list[str]:
    return [
        str(Path(__file__).parents[1] / "support" / "hang_targets.py"),
        place,
        str(rank),
        str(workplace / "run.yaml"),
    ]


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}


def test_slow_steps_and_evaluations_that_move_raise_no_alarm(server, workplace):
    # 1.2 s a step, and 3.6 s an evaluation, the second of which is not the first.
    out = write(workplace, watchdog_s=3.0, steps=4, eval={"every": 2, "sequences": 12})
    exit_code, errors = ended_run(server, workplace, "sleepy loss", -1)
    assert (exit_code, errors) == (0, "")
    told = events(out, "evaluation")
    assert [each["step"] for each in told] == [2, 4]
    assert min(each["seconds"] for each in told) > 3.0
    assert not events(out, "hang")


def test_a_first_step_that_is_long_raises_no_alarm(server, workplace):
    out = write(workplace, steps=3)
    exit_code, errors = ended_run(server, workplace, "long first step", 1)
    assert (exit_code, errors) == (0, "")
    first = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    assert first["seconds"] > WATCHDOG_S + 2


def test_a_rank_that_is_slow_by_itself_is_a_straggler_and_in_a_healthy_run_none_is(server, workplace):
    out = write(workplace, nproc=4, batch_size=8, steps=60, metrics={"stragglers": {"over": 10}})
    assert ended_run(server, workplace, "sleepy data", 2) == (0, "")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    named = [each for line in lines for each in line.get("stragglers", ())]
    assert {each["rank"] for each in named} == {2}
    assert len(named) > 10
    assert all(each["seconds"] > each["median"] + 0.03 and each["deviations"] > 5 for each in named)
    (told,) = events(out, "straggler")
    assert told["rank"] == 2
    read = read_metrics(out / "metrics.jsonl", until=60, steps=60)
    assert [each for result in read for each in result.stragglers] == named
    write(workplace, nproc=4, batch_size=8, steps=60)
    assert ended_run(server, workplace, "nothing", 2) == (0, "")
    assert "stragglers" not in (out / "metrics.jsonl").read_text()


def test_stragglers_that_are_not_asked_for_are_not_told(server, workplace):
    out = write(workplace, nproc=4, batch_size=8, steps=60, metrics={"stragglers": None})
    assert ended_run(server, workplace, "sleepy data", 2) == (0, "")
    assert "stragglers" not in (out / "metrics.jsonl").read_text()


# -- judging


def sign(step: int = 5, part: int = 2, *, still_s: float = 9.0, waits: bool = False, **more: Any) -> Sign:
    at = At(step, part, "forward_backward", more.pop("moves", 0), more.pop("settled", True), more.pop("patient", False))
    return Sign(more.pop("count", 7), "host, process 1", waits, "x.py:1 in f", 0.2, at, still_s, **more)


def test_the_ranks_at_the_earliest_position_stand_still_or_nobody_does():
    ahead, behind = sign(5, 3), sign(5, 2)
    assert standing({0: ahead, 1: behind}, 4.0) == [1]
    assert standing({0: ahead, 1: replace(behind, still_s=3.0)}, 4.0) == []
    assert standing({0: ahead, 1: behind, 2: sign(5, 2, still_s=1.0)}, 4.0) == []
    assert standing({0: sign(6, 1), 1: behind}, 4.0) == [1]
    # In what may be slow, before a step is done, or where all is done.
    assert standing({0: ahead, 1: sign(5, 2, patient=True)}, 4.0) == []
    assert standing({0: ahead, 1: sign(0, 1, settled=False)}, 4.0) == []
    assert standing({0: replace(ahead, count=DONE), 1: replace(behind, count=DONE)}, 4.0) == []


def test_of_ranks_at_one_place_the_one_is_named_that_does_not_wait_or_has_begun_less():
    assert culprits({0: Report(sign(waits=True)), 1: Report(sign()), 2: Report(sign(waits=True))}) == [1]
    assert culprits({0: Report(sign(5, 1, waits=True)), 1: Report(sign())}) == [0]
    # As with NCCL: all are in a wait for the device.
    counts = {"dp": (7, 7, 6)}
    reports = {rank: Report(sign(), counts) for rank in range(3)}
    assert culprits(reports) == [0, 1, 2]
    assert culprits(reports | {1: Report(sign(), {"dp": (7, 6, 6)})}) == [1]
    assert culprits(reports | {2: Report(sign(), {"other": (1, 1, 1)})}) == [0, 1, 2]
    assert culprits({0: Report(sign(moves=3)), 1: Report(sign(moves=2))}) == [1]


def test_progress_is_of_phases_and_microbatches_and_what_is_new_may_be_slow():
    progress = Progress()
    told = []
    for step in (1, 2):
        progress.begin(step, "data")
        told.append(progress.at)
        progress.enter("forward_backward")
        progress.move()
        told.append(progress.at)
    assert [(at.step, at.part, at.moves) for at in told] == [(1, 1, 0), (1, 2, 1), (2, 1, 0), (2, 2, 1)]
    assert [(at.settled, at.patient) for at in told] == [(False, True), (False, True), (True, False), (True, False)]
    for phase, patient in (("evaluation", True), ("callbacks", True), ("evaluation", False), ("save", True)):
        progress.enter(phase)
        assert (progress.at.phase, progress.at.patient) == (phase, patient)
    progress.enter("data")
    progress.enter("save")
    assert progress.at.patient


def test_a_sign_says_the_same_when_it_is_read():
    written = sign(stack=("a.py:1 in f", "b.py:2 in g"), own_s=0.5, step_s=1.0, steps=20)
    assert Sign.read(written.written()) == written


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


# -- stragglers


def owns(*seconds: float, steps: int = 20) -> dict[int, Sign]:
    return {rank: sign(own_s=own, step_s=0.2, steps=steps) for rank, own in enumerate(seconds)}


@pytest.mark.parametrize(
    ("signs", "config", "named"),
    [
        (owns(0.01, 0.011, 0.012, 0.06), {}, [3]),
        (owns(0.01, 0.011, 0.012, 0.06, steps=19), {}, []),
        (owns(0.01, 0.011, 0.012, 0.06, steps=5), {"over": 5}, [3]),
        (owns(0.01, 0.011, 0.012, 0.06), {"deviations": 100.0}, []),
        # Less than 5 % of a step, and fewer than four ranks.
        (owns(0.01, 0.01, 0.01, 0.018), {}, []),
        (owns(0.01, 0.011, 0.06), {}, []),
    ],
    ids=["slow", "few steps", "over=5", "deviations=100", "little of a step", "three ranks"],
)
def test_stragglers_are_judged_by_the_signs_of_all_ranks(signs, config, named):
    progress = Progress()
    asked = StragglersConfig(**config)
    watching = Stragglers(asked, progress)
    assert watching() == ()
    for step, expected in ((20, []), (20 + asked.over - 1, []), (20 + asked.over, named)):
        progress.signs = {rank: replace(each, at=At(step)) for rank, each in signs.items()}
        assert [each["rank"] for each in watching()] == expected
    # Who is fast for a moment is slow for as many steps before it is named again.
    progress.signs = owns(0.01, 0.01, 0.01, 0.01)
    assert watching() == ()
    progress.signs = {rank: replace(each, at=At(1000)) for rank, each in signs.items()}
    assert watching() == ()


def test_a_straggler_is_told_once_and_kept_in_the_metrics(tmp_path):
    slow = {"rank": 3, "seconds": 0.06, "median": 0.01, "deviations": float("inf")}
    result = StepResult(1, 2, 1.0, 1.0, 0.1, 10, 0.5, 0, stragglers=(slow,))
    new = NewStragglers()
    assert [len(new.of(each)) for each in (replace(result, stragglers=()), result, result)] == [0, 1, 0]
    record = as_record(result)
    assert record["stragglers"] == [slow | {"deviations": None}]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (read,) = read_metrics(tmp_path / "metrics.jsonl", until=2, steps=2)
    assert read.stragglers[0]["rank"] == 3
    assert as_record(read) == record
