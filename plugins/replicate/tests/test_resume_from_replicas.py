"""Ranks that are killed resume from memory: no step is lost, and no checkpoint is read."""

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
from support import network_namespaces
from support.kill_sweep import TrainingRun, end_session, find_ranks, make_run, run_to_end, wait_for_moment
from support.launched_processes import TORCHRUN, find_free_port
from support.replication import (
    TrainingProcess,
    assert_same_results,
    corrupt_copies,
    find_agent_ranks,
    find_anonymous_copies,
    find_replica_servers,
    output_path,
    read_events,
    start_training,
    step_reached,
    wait_for_no_servers,
)

pytestmark = pytest.mark.slow
MEMORY = re.compile(r"resuming from memory, after step (\d+)")
DISK = re.compile(r"resuming from \S+/step-(\d+), after step")
FAR = {"every": 1000, "replicate": "neighbor"}  # Checkpoints at the end alone
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
def whole(workplace: Path) -> Callable[[str], TrainingRun]:
    """Runs that nothing has happened to, by their layout."""
    made: dict[str, TrainingRun] = {}

    def of(layout: str) -> TrainingRun:
        if layout not in made:
            made[layout] = make_run(workplace, f"whole-{layout}", LAYOUTS[layout])
            run_to_end("train", str(made[layout].file))
        return made[layout]

    return of


@pytest.mark.parametrize(
    ("layout", "every"),
    [("pipeline", 2), *(pytest.param(layout, 1, marks=pytest.mark.zoo) for layout in ("fsdp2", "ddp"))],
)
def test_ranks_that_are_killed_resume_from_the_step_before(layout, every, whole, workplace):
    expected = whole(layout)
    copies = FAR | {"replicate": {"target": "neighbor", "every": every}}
    run = make_run(workplace, f"killed-{layout}", LAYOUTS[layout] | {"max_restarts": 3, "checkpoint": copies})
    dice, done = random.Random(28), [0]
    process = start_training(run)
    try:
        for step in (5, 14):
            assert wait_for_moment(process, step_reached(run, step)), process.output
            assert find_anonymous_copies(process.pid)
            os.kill(dice.choice(find_ranks(process)), signal.SIGKILL)
            done.append(run.count_steps())
            assert not run.checkpoints.exists() or not list(run.checkpoints.iterdir())
            assert wait_for_moment(process, lambda: len(MEMORY.findall(process.output)) == len(done) - 1)
        process.assert_succeeds()
        assert wait_for_no_servers(process.pid)
    finally:
        end_session(process)
    assert_same_results(run, expected)
    reported = [int(step) for step in MEMORY.findall(process.output)]
    assert ([line["start_step"] for line in read_events(run, "start")], len(reported)) == ([0, *reported], 2)
    assert not DISK.search(process.output)
    for at, resumed_at in zip(done[1:], reported, strict=True):
        # The step in flight, and the copy of the one before it, may be lost.
        assert at - 2 - (every - 1) <= resumed_at <= at + 1
        assert resumed_at % every == 0
    (reported_at_end,) = [each for each in read_events(run, "replication") if "step" not in each]
    assert reported_at_end["num_copied"] >= 8 / every
    lines = map(json.loads, (run.directory / "metrics.jsonl").read_text().splitlines())
    assert "replicate" in {name for line in lines for name in line["times"]}


@pytest.mark.parametrize("loss", ["disk", "keeper", "bytes"])
def test_memory_is_read_where_it_is_as_new_and_the_disk_where_too_much_is_lost(loss, whole, workplace):
    copies = {"every": 3, "keep_last": None, "replicate": "neighbor"}
    run = make_run(workplace, f"lost-{loss}", FSDP2 | {"max_restarts": 1, "checkpoint": copies})
    process = start_training(run)
    try:
        assert wait_for_moment(process, lambda: (run.checkpoints / "step-00000006").exists())
        assert wait_for_moment(process, step_reached(run, 8 if loss == "disk" else 7))
        (keeper,) = find_replica_servers(process.pid)
        if loss == "keeper":
            os.kill(keeper, signal.SIGKILL)
            # Training does not end with it.
            assert wait_for_moment(process, lambda: "state is no longer copied to memory" in process.output)
        os.kill(find_ranks(process)[0], signal.SIGKILL)
        if loss == "bytes":
            assert corrupt_copies(keeper)
        if loss == "disk":
            assert wait_for_moment(process, lambda: "restarting the run" in process.output)
            for path in run.checkpoints.rglob("*"):
                if path.is_file():
                    path.write_bytes(b"no longer what it was")
        process.assert_succeeds()
        assert wait_for_no_servers(process.pid)
    finally:
        end_session(process)
    assert "not whole" not in process.output or loss != "disk"
    assert bool(MEMORY.search(process.output)) == (loss == "disk")
    assert ("in memory cannot be used: " in process.output) == (loss == "bytes")
    if loss != "disk":
        (step,) = DISK.findall(process.output)
        assert int(step) >= 6
    assert_same_results(run, whole("fsdp2"))


def test_fewer_ranks_resume_from_the_memory_of_more(workplace: Path) -> None:
    settings = FSDP2 | {"strategy_config": {"reduce_dtype": "float64"}}
    expected = make_run(workplace, "whole-fewer", settings)
    run_to_end("train", str(expected.file), "--set", "model.attention_dropout=0.0")
    run = make_run(workplace, "fewer", settings | {"nproc": 4, "max_restarts": 3, "elastic": {}, "checkpoint": FAR})
    broken = workplace / "broken"  # four ranks do not get to the first step a second time
    code = "import restart_targets; restart_targets.main()"
    run.file.write_text(run.file.read_text().replace("attention_dropout: 0.2", "attention_dropout: 0.0"))
    command = [sys.executable, "-c", code, str(run.file), str(broken)]
    process = TrainingProcess(
        command, output_path(run), PYTHONPATH=str(Path(__file__).parents[3] / "tests" / "support")
    )
    try:
        assert wait_for_moment(process, step_reached(run, 6)), process.output
        broken.touch()
        os.kill(find_ranks(process)[-1], signal.SIGKILL)
        process.assert_succeeds()
    finally:
        end_session(process)
    assert "on 2 ranks instead of 4" in process.output
    (step,) = MEMORY.findall(process.output)
    assert int(step) >= 4
    before, since = expected.read_metrics(), run.read_metrics()
    for key in ("step", "loss", "learning_rate"):
        assert [each[key] for each in since] == [each[key] for each in before], key


def test_nothing_outlives_a_launcher_that_is_killed(workplace: Path) -> None:
    copies = {"every": 4, "replicate": "neighbor"}
    run = make_run(workplace, "launcher", FSDP2 | {"max_restarts": 1, "checkpoint": copies})
    process = start_training(run, "steps=12")
    try:
        assert wait_for_moment(process, lambda: run.count_steps() >= 6 and (run.checkpoints / "step-00000004").exists())
        (keeper,) = find_replica_servers(process.pid)
        # It holds no output open, and no scheduler ends it by a signal to all.
        assert {os.readlink(f"/proc/{keeper}/fd/{number}") for number in (0, 1, 2)} == {"/dev/null"}
        os.kill(keeper, signal.SIGTERM)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert wait_for_no_servers(process.pid)
    finally:
        end_session(process)
    second = start_training(run, "steps=12")
    second.assert_succeeds()
    assert DISK.search(second.output)
    assert not MEMORY.search(second.output)


# -- two nodes


@pytest.fixture
def nodes() -> Iterator[tuple[network_namespaces.NamespaceNode, ...]]:
    if reason := network_namespaces.find_missing_requirement():
        pytest.skip(reason)
    with network_namespaces.create_nodes() as found:
        yield found


def _on_nodes(nodes: Sequence[network_namespaces.NamespaceNode], run: TrainingRun) -> list[TrainingProcess]:
    port = find_free_port()
    return [
        TrainingProcess(
            node.command(
                *(*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}", "--max-restarts=3"),
                *(f"--master-addr={nodes[0].address}", f"--master-port={port}", "-m", "meshwright", "train"),
                str(run.file),
            ),
            output_path(run).with_suffix(f".{number}"),
            GLOO_SOCKET_IFNAME=network_namespaces.INTERFACE,
        )
        for number, node in enumerate(nodes)
    ]


def test_the_memory_of_another_node_has_the_state_of_one_that_is_lost(nodes, whole, workplace):
    run = make_run(workplace, "two-nodes", {"strategy": "fsdp2", "checkpoint": FAR})
    agents = _on_nodes(nodes, run)
    try:
        assert wait_for_moment(agents[0], step_reached(run, 6)), agents[0].output
        (keeper,) = find_replica_servers(agents[1].pid)
        for pid in (*find_agent_ranks(agents[1].pid), keeper):
            os.kill(pid, signal.SIGKILL)
        done, reported = run.count_steps(), read_events(run, "replication")
        for agent in agents:
            agent.assert_succeeds()
        assert all(wait_for_no_servers(agent.pid) for agent in agents)
    finally:
        for agent in agents:
            end_session(agent)
    (step,) = MEMORY.findall(agents[0].output)
    # Steps of a tiny model may be shorter than copies, some of which are left out, as is reported at powers of two.
    left_out = max((2 * each["num_skipped"] for each in reported), default=0)
    assert max(1, done - 2 - left_out) <= int(step) <= done + 1
    assert_same_results(run, whole("fsdp2"))


def test_what_is_sent_keeps_within_the_bandwidth(
    nodes: tuple[network_namespaces.NamespaceNode, ...], workplace: Path
) -> None:
    checkpoint = FAR | {"replicate": {"max_bandwidth": "80KB/s"}}
    run = make_run(workplace, "slow", {"strategy": "fsdp2", "checkpoint": checkpoint})
    for agent in _on_nodes(nodes, run):
        agent.assert_succeeds()
    # A part of about 100 kB takes more than a second, and the steps continue meanwhile.
    reported = read_events(run, "replication")
    assert reported[-1]["num_skipped"] > 0
    assert reported[-1]["num_copied"] + reported[-1]["num_skipped"] == 24
    assert [each["num_skipped"] for each in reported[:-1]][:2] == [1, 2]
