"""Ranks that are killed go on from memory: no step is lost, and no checkpoint is read."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import netns
from support.kill_sweep import Run, await_moment, end_session, finish, make_run, ranks_of
from support.launched_processes import TORCHRUN, free_port
from support.replication import (
    Training,
    after,
    assert_same,
    copies_without_a_name,
    events,
    keepers_of,
    nothing_is_left,
    ranks_of_agent,
    said_of,
    spoil,
    train,
)

pytestmark = pytest.mark.slow
MEMORY = re.compile(r"going on from memory, after step (\d+)")
DISK = re.compile(r"going on from \S+/step-(\d+), after step")
FAR = {"every": 1000, "replicate": "neighbour"}  # Checkpoints at the end alone
FSDP2: dict[str, Any] = {"strategy": "fsdp2", "nproc": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": FSDP2,
    "ddp": FSDP2 | {"strategy": "ddp", "strategy_config": {"engine": "bucketed", "use_distributed_optimizer": True}},
    "pipeline": FSDP2 | {"nproc": 4, "pp_size": 2},
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("copies")


@pytest.fixture(scope="module")
def whole(workplace: Path) -> Callable[[str], Run]:
    """Runs that nothing has happened to, by their layout."""
    made: dict[str, Run] = {}

    def of(layout: str) -> Run:
        if layout not in made:
            made[layout] = make_run(workplace, f"whole-{layout}", LAYOUTS[layout])
            finish("train", str(made[layout].file))
        return made[layout]

    return of


@pytest.mark.parametrize(
    ("layout", "every"),
    [("pipeline", 2), *(pytest.param(layout, 1, marks=pytest.mark.zoo) for layout in ("fsdp2", "ddp"))],
)
def test_ranks_that_are_killed_go_on_from_the_step_before(layout, every, whole, workplace):
    expected = whole(layout)
    copies = FAR | {"replicate": {"to": "neighbour", "every": every}}
    run = make_run(workplace, f"killed-{layout}", LAYOUTS[layout] | {"max_restarts": 3, "checkpoint": copies})
    dice, done = random.Random(28), [0]
    process = train(run)
    try:
        for step in (5, 14):
            assert await_moment(process, after(run, step)), process.said
            assert copies_without_a_name(process.pid)
            os.kill(dice.choice(ranks_of(process)), signal.SIGKILL)
            done.append(run.count_steps())
            assert not run.checkpoints.exists() or not list(run.checkpoints.iterdir())
            assert await_moment(process, lambda: len(MEMORY.findall(process.said)) == len(done) - 1)
        process.ended()
        assert nothing_is_left(process.pid)
    finally:
        end_session(process)
    assert_same(run, expected)
    told = [int(step) for step in MEMORY.findall(process.said)]
    assert ([line["start"] for line in events(run, "start")], len(told)) == ([0, *told], 2)
    assert not DISK.search(process.said)
    for at, go_on in zip(done[1:], told, strict=True):
        # The step in flight, and the copy of the one before it, may be lost.
        assert at - 2 - (every - 1) <= go_on <= at + 1
        assert go_on % every == 0
    (told_at_end,) = [each for each in events(run, "copies") if "step" not in each]
    assert told_at_end["copied"] >= 8 / every
    lines = map(json.loads, (run.directory / "metrics.jsonl").read_text().splitlines())
    assert "copy" in {name for line in lines for name in line["times"]}


@pytest.mark.parametrize("loss", ["disk", "keeper", "bytes"])
def test_memory_is_read_where_it_is_as_new_and_the_disk_where_too_much_is_lost(loss, whole, workplace):
    copies = {"every": 3, "keep_last": None, "replicate": "neighbour"}
    run = make_run(workplace, f"lost-{loss}", FSDP2 | {"max_restarts": 1, "checkpoint": copies})
    process = train(run)
    try:
        assert await_moment(process, lambda: (run.checkpoints / "step-00000006").exists())
        assert await_moment(process, after(run, 8 if loss == "disk" else 7))
        (keeper,) = keepers_of(process.pid)
        if loss == "keeper":
            os.kill(keeper, signal.SIGKILL)
            # Training does not end with it.
            assert await_moment(process, lambda: "state is no longer copied to memory" in process.said)
        os.kill(ranks_of(process)[0], signal.SIGKILL)
        if loss == "bytes":
            assert spoil(keeper)
        if loss == "disk":
            assert await_moment(process, lambda: "beginning anew" in process.said)
            for path in run.checkpoints.rglob("*"):
                if path.is_file():
                    path.write_bytes(b"no longer what it was")
        process.ended()
        assert nothing_is_left(process.pid)
    finally:
        end_session(process)
    assert "not whole" not in process.said or loss != "disk"
    assert bool(MEMORY.search(process.said)) == (loss == "disk")
    assert ("in memory is of no use: " in process.said) == (loss == "bytes")
    if loss != "disk":
        (step,) = DISK.findall(process.said)
        assert int(step) >= 6
    assert_same(run, whole("fsdp2"))


def test_fewer_ranks_go_on_from_the_memory_of_more(workplace: Path) -> None:
    settings = FSDP2 | {"strategy_config": {"reduce_dtype": "float64"}}
    expected = make_run(workplace, "whole-fewer", settings)
    finish("train", str(expected.file), "--set", "model.attention_dropout=0.0")
    run = make_run(workplace, "fewer", settings | {"nproc": 4, "max_restarts": 3, "elastic": {}, "checkpoint": FAR})
    broken = workplace / "broken"  # four ranks do not get to the first step a second time
    code = "import restart_targets; restart_targets.main()"
    run.file.write_text(run.file.read_text().replace("attention_dropout: 0.2", "attention_dropout: 0.0"))
    command = [sys.executable, "-c", code, str(run.file), str(broken)]
    process = Training(command, said_of(run), PYTHONPATH=str(Path(__file__).parents[3] / "tests" / "support"))
    try:
        assert await_moment(process, after(run, 6)), process.said
        broken.touch()
        os.kill(ranks_of(process)[-1], signal.SIGKILL)
        process.ended()
    finally:
        end_session(process)
    assert "on 2 ranks instead of 4" in process.said
    (step,) = MEMORY.findall(process.said)
    assert int(step) >= 4
    before, since = expected.read_metrics(), run.read_metrics()
    for key in ("step", "loss", "learning_rate"):
        assert [each[key] for each in since] == [each[key] for each in before], key


def test_nothing_outlives_a_launcher_that_is_killed(workplace: Path) -> None:
    copies = {"every": 4, "replicate": "neighbour"}
    run = make_run(workplace, "launcher", FSDP2 | {"max_restarts": 1, "checkpoint": copies})
    process = train(run, "steps=12")
    try:
        assert await_moment(process, lambda: run.count_steps() >= 6 and (run.checkpoints / "step-00000004").exists())
        (keeper,) = keepers_of(process.pid)
        # It holds no output open, and no scheduler ends it by a signal to all.
        assert {os.readlink(f"/proc/{keeper}/fd/{number}") for number in (0, 1, 2)} == {"/dev/null"}
        os.kill(keeper, signal.SIGTERM)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert nothing_is_left(process.pid)
    finally:
        end_session(process)
    second = train(run, "steps=12")
    second.ended()
    assert DISK.search(second.said)
    assert not MEMORY.search(second.said)


# -- two nodes


@pytest.fixture
def nodes() -> Iterator[tuple[netns.Node, ...]]:
    if reason := netns.why_not():
        pytest.skip(reason)
    with netns.nodes() as found:
        yield found


def _on_nodes(nodes: Sequence[netns.Node], run: Run) -> list[Training]:
    port = free_port()
    return [
        Training(
            node.command(
                *(*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}", "--max-restarts=3"),
                *(f"--master-addr={nodes[0].address}", f"--master-port={port}", "-m", "meshwright", "train"),
                str(run.file),
            ),
            said_of(run).with_suffix(f".{number}"),
            GLOO_SOCKET_IFNAME=netns.CARD,
        )
        for number, node in enumerate(nodes)
    ]


def test_the_memory_of_another_node_has_the_state_of_one_that_is_lost(nodes, whole, workplace):
    run = make_run(workplace, "two-nodes", {"strategy": "fsdp2", "checkpoint": FAR})
    agents = _on_nodes(nodes, run)
    try:
        assert await_moment(agents[0], after(run, 6)), agents[0].said
        (keeper,) = keepers_of(agents[1].pid)
        for pid in (*ranks_of_agent(agents[1].pid), keeper):
            os.kill(pid, signal.SIGKILL)
        done, told = run.count_steps(), events(run, "copies")
        for agent in agents:
            agent.ended()
        assert all(nothing_is_left(agent.pid) for agent in agents)
    finally:
        for agent in agents:
            end_session(agent)
    (step,) = MEMORY.findall(agents[0].said)
    # Steps of a tiny model may be shorter than copies, some of which are left out, as is told at powers of two.
    left_out = max((2 * each["left_out"] for each in told), default=0)
    assert max(1, done - 2 - left_out) <= int(step) <= done + 1
    assert_same(run, whole("fsdp2"))


def test_what_is_sent_keeps_within_the_bandwidth(nodes: tuple[netns.Node, ...], workplace: Path) -> None:
    checkpoint = FAR | {"replicate": {"bandwidth": "80KB/s"}}
    run = make_run(workplace, "slow", {"strategy": "fsdp2", "checkpoint": checkpoint})
    for agent in _on_nodes(nodes, run):
        agent.ended()
    # A part of about 100 kB takes more than a second, and the steps go on meanwhile.
    told = events(run, "copies")
    assert told[-1]["left_out"] > 0
    assert told[-1]["copied"] + told[-1]["left_out"] == 24
    assert [each["left_out"] for each in told[:-1]][:2] == [1, 2]
