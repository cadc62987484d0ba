"""Ranks that torchrun starts over meet only each other, though its store keeps what those before them have left."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from support import network_namespaces
from support.kill_sweep import TrainingRun, end_session, is_alive, make_run, run_to_end, wait_for_moment
from support.launched_processes import TORCHRUN, find_free_port
from support.replication import TrainingProcess, assert_same_results, find_agent_ranks, output_path, step_reached

from meshwright.base.errors import RankError
from meshwright.launch.store import agree_on_prefix
from meshwright_run.launch.rank_process import PEER_FAILURE_WAIT_S


def _side_by_side(store: dist.Store, size: int, late_s: dict[int, float], timeout_s: float = 20.0) -> list[str]:
    """What each rank finds, or its error; `late_s` has the ranks that come, and how late."""

    def ask(rank: int) -> str:
        time.sleep(late_s[rank])
        try:
            return agree_on_prefix(store, rank, size, timeout_s=timeout_s)
        except RankError as error:
            return f"error: {error}"

    with ThreadPoolExecutor(len(late_s)) as threads:
        return list(threads.map(ask, late_s))


@pytest.mark.parametrize("late", [0, 2])
def test_each_world_has_a_prefix_of_its_own_whoever_comes_last(late: int) -> None:
    store = dist.HashStore()
    worlds = [_side_by_side(store, 3, {rank: 0.2 if rank == late else 0.0 for rank in range(3)}) for _ in range(3)]
    assert all(len(set(found)) == 1 and not found[0].startswith("error") for found in worlds)
    assert len({found[0] for found in worlds}) == 3
    # A rank alone waits for nobody.
    assert agree_on_prefix(store, 0, 1, timeout_s=0.0) != agree_on_prefix(store, 0, 1, timeout_s=0.0)


def test_who_died_while_it_asked_holds_up_nobody_and_ranks_that_do_not_come_are_named() -> None:
    store = dist.HashStore()
    (reported,) = _side_by_side(store, 2, {1: 0.0}, timeout_s=0.2)
    assert reported.startswith("error: the rendezvous store is gone, or rank 0 did not answer within 0.2 s")
    # The first rank answers the word of the dead, too, and is confirmed by the one that lives.
    first, second = _side_by_side(store, 2, {0: 0.0, 1: 0.3})
    assert first == second
    assert not first.startswith("error")
    first, second = _side_by_side(dist.HashStore(), 4, {0: 0.0, 2: 0.0}, timeout_s=0.5)
    assert first == "error: ranks 1, 3 of 4 did not connect within 0.5 s."
    assert not second.startswith("error")


def test_a_store_that_has_gone_is_an_error_of_ours() -> None:
    for rank in (0, 1):
        host = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        store = dist.TCPStore("localhost", host.port, is_master=False)
        del host
        with pytest.raises(RankError, match="the rendezvous store is gone"):
            agree_on_prefix(store, rank, 2, timeout_s=5.0)


# -- runs under torchrun


def _train(run: TrainingRun) -> TrainingProcess:
    started = (*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=3", "-m", "meshwright", "train")
    return TrainingProcess((*started, str(run.file)), output_path(run))


def _run(workplace: Path, name: str, **settings: object) -> TrainingRun:
    return make_run(workplace, name, {"strategy": "fsdp2", "nproc": 2, **settings})


@pytest.mark.slow
def test_who_starts_over_after_a_hang_is_not_reported_it_again(tmp_path: Path) -> None:
    whole = _run(tmp_path, "whole")
    run_to_end("train", str(whole.file))
    run = _run(tmp_path, "hung", watchdog_s=4)
    process = _train(run)
    try:
        for step in (5, 13):
            assert wait_for_moment(process, step_reached(run, step)), process.output
            os.kill(find_agent_ranks(process.pid)[1], signal.SIGSTOP)
            steps = run.count_steps()
            assert wait_for_moment(
                process, lambda at=steps: process.output.count("hangs: no heartbeat") >= 1 + (at > 12)
            )
        process.assert_succeeds()
    finally:
        end_session(process)
    assert_same_results(run, whole)
    lines = map(json.loads, (run.directory / "events.jsonl").read_text().splitlines())
    # Twice, and by what has happened to each world, not by what is left of the one before.
    assert [line["event"] for line in lines if line["event"] in ("hang", "start")] == ["start", *["hang", "start"] * 2]


@pytest.mark.slow
def test_ranks_end_with_an_agent_that_is_killed(tmp_path: Path) -> None:
    run = _run(tmp_path, "alone", steps=2000)
    process = _train(run)
    try:
        assert wait_for_moment(process, step_reached(run, 3)), process.output
        ranks = find_agent_ranks(process.pid)
        assert len(ranks) == 2
        process.kill()
        process.wait()
        until_s = time.monotonic() + 3
        while any(map(is_alive, ranks)) and time.monotonic() < until_s:
            time.sleep(0.02)
        left = [pid for pid in ranks if is_alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left
    finally:
        end_session(process)


@pytest.mark.slow
def test_a_rank_whose_peer_was_killed_on_another_node_waits_for_no_word_of_it(tmp_path: Path) -> None:
    run = _run(tmp_path, "two nodes", steps=2000)
    run.file.write_text(run.file.read_text().replace("nproc: 2\n", ""))
    port = find_free_port()
    agents = []
    for node in (0, 1):
        options = ("--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1", f"--master-port={port}")
        command = (*TORCHRUN, *options, "--master-addr=127.0.0.1", "-m", "meshwright", "train", str(run.file))
        agents.append(TrainingProcess(command, output_path(run).with_suffix(f".{node}")))
    try:
        assert wait_for_moment(agents[0], step_reached(run, 3)), agents[0].output
        (mine,), (other,) = (find_agent_ranks(agent.pid) for agent in agents)
        os.kill(other, signal.SIGKILL)
        # Nobody here ends it, and nobody will say why: it need not wait as for a peer that does.
        until_s = time.monotonic() + PEER_FAILURE_WAIT_S - 1
        while is_alive(mine) and time.monotonic() < until_s:
            time.sleep(0.02)
        assert not is_alive(mine)
        assert "no rank has reported why: one may have been killed" in agents[0].output
    finally:
        for agent in agents:
            end_session(agent)


# -- nodes that are lost


def _on(
    node: network_namespaces.NamespaceNode,
    meets_at: network_namespaces.NamespaceNode,
    port: int,
    run: TrainingRun,
    said: str,
    nodes: str,
) -> TrainingProcess:
    """An agent with one rank, which continues with fewer nodes where others are lost."""
    rendezvous = f"is_host={int(node is meets_at)},keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=2"
    options = (f"--nnodes={nodes}", "--nproc-per-node=1", "--max-restarts=9", f"--local-addr={node.address}")
    meeting = ("--rdzv-backend=c10d", f"--rdzv-endpoint={meets_at.address}:{port}", f"--rdzv-conf={rendezvous}")
    command = (*TORCHRUN, *options, *meeting, "--rdzv-id=run", "-m", "meshwright", "train", str(run.file))
    return TrainingProcess(
        node.command(*command),
        output_path(run).with_suffix(f".{said}"),
        GLOO_SOCKET_IFNAME=network_namespaces.INTERFACE,
    )


def _end(node: network_namespaces.NamespaceNode) -> None:
    """All that runs there is gone at once."""
    for pid in node.find_pids():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_node_that_is_cut_off_from_the_store_ends_by_itself(tmp_path: Path) -> None:
    """Nobody on the other side can end it, and it would hold its accelerators until its collectives give up."""
    if reason := network_namespaces.find_missing_requirement():
        pytest.skip(reason)
    run = _run(tmp_path, "cut", steps=5000, watchdog_s=4)
    run.file.write_text(run.file.read_text().replace("nproc: 2\n", ""))
    with network_namespaces.create_nodes(2) as nodes:
        first, second = nodes
        port = find_free_port()
        agents = [_on(node, first, port, run, str(number), "2") for number, node in enumerate(nodes)]
        try:
            assert wait_for_moment(agents[0], step_reached(run, 5)), agents[0].output
            ranks = [rank for agent in agents for rank in find_agent_ranks(agent.pid)]
            assert len(ranks) == 2
            second.unplug()
            until_s = time.monotonic() + 4 + 5
            while any(map(is_alive, ranks)) and time.monotonic() < until_s:
                time.sleep(0.02)
            left = [rank for rank in ranks if is_alive(rank)]
            reported = [agent.output for agent in agents]
        finally:
            for node in nodes:
                _end(node)
            for agent in agents:
                end_session(agent)
    assert not left, reported
    cut, other = ("gets no answer from the rendezvous store for 4 s", "hangs: no heartbeat for 4 s")
    assert [cut in reported[0], cut in reported[1], other in reported[0], other in reported[1]] == [
        False,
        True,
        True,
        False,
    ]


@pytest.mark.zoo
def test_nodes_that_are_left_continue_whichever_is_lost(tmp_path: Path) -> None:
    """Two of three continue on their own. The node where they meet is lost, and the last one is where they meet."""
    if reason := network_namespaces.find_missing_requirement():
        pytest.skip(reason)
    settings = {"strategy_config": {"reduce_dtype": "float64"}, "batch_size": 6, "micro_batch_size": 1, "steps": 40}
    whole, run = _run(tmp_path, "whole", **settings), _run(tmp_path, "fewer", **settings)
    for each in (whole, run):
        # Dropout draws by data rank.
        each.file.write_text(each.file.read_text().replace("attention_dropout: 0.2", "attention_dropout: 0.0"))
    run.file.write_text(run.file.read_text().replace("nproc: 2\n", ""))
    run_to_end("train", str(whole.file))
    with network_namespaces.create_nodes(3) as nodes:
        first, second, third = nodes
        port = find_free_port()
        agents = [_on(node, first, port, run, name, "1:3") for node, name in zip(nodes, "abc", strict=True)]
        try:
            assert wait_for_moment(agents[0], step_reached(run, 5)), agents[0].output
            _end(third)
            # Those that are left meet again, and share the batch.
            assert wait_for_moment(agents[0], lambda: agents[0].output.count("resuming from") == 1), agents[0].output
            assert wait_for_moment(agents[0], step_reached(run, 12)), agents[0].output
            _end(first)
            agents[1].wait(120)
            assert agents[1].returncode
            agents.append(_on(second, second, port, run, "d", "1:3"))
            agents[-1].assert_succeeds()
        finally:
            for agent in agents:
                end_session(agent)
                agent.wait()
    assert "on dp_shard=3" in agents[0].output
    assert "on dp_shard=2" in agents[0].output
    before, since = whole.read_metrics(), run.read_metrics()
    for key in ("step", "loss", "learning_rate", "num_tokens"):
        assert [each[key] for each in since] == [each[key] for each in before], key
