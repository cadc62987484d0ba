"""Whoever starts the ranks, an unmodified loop trains on them, with the same losses to the last bit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import network_namespaces
from support.commands import write_run
from support.launched_processes import (
    HERE,
    LOOP,
    TORCHRUN,
    LossesByRank,
    build_clean_environment,
    find_free_port,
    parse_local_ranks,
    parse_losses,
    run_commands,
)

PYTHON = sys.executable
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe")
HALVES = {0: (0, 2), 1: (1, 2), 2: (0, 2), 3: (1, 2)}  # Four ranks on two nodes


def _of_open_mpi() -> str:
    """Why Open MPI cannot be tried here; empty if it can."""
    if shutil.which("mpirun") is None:
        return "mpirun is not installed (Debian: openmpi-bin)"
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout
    return "" if "Open MPI" in version else f"mpirun is not Open MPI's: {version.splitlines()[:1]}"


needs_open_mpi = pytest.mark.skipif(bool(_of_open_mpi()), reason=_of_open_mpi() or "-")
needs_mpich = pytest.mark.skipif(shutil.which("mpiexec.hydra") is None, reason="no mpiexec.hydra (Debian: mpich)")


@pytest.fixture(scope="module")
def expected() -> LossesByRank:
    outcome = run_commands(((*TORCHRUN, "--standalone", "--nproc-per-node", "4", LOOP), build_clean_environment()))
    return parse_losses(*outcome)


@pytest.fixture
def nodes() -> Iterator[tuple[network_namespaces.NamespaceNode, ...]]:
    if reason := network_namespaces.find_missing_requirement():
        pytest.skip(reason)
    with network_namespaces.create_nodes() as found:
        yield found


@pytest.mark.parametrize(
    "command",
    [
        pytest.param((PYTHON, str(HERE / "run_on_own_launcher.py")), id="ours", marks=pytest.mark.slow),
        pytest.param((*MPIRUN, "-np", "4", PYTHON, LOOP), id="Open MPI", marks=[needs_open_mpi, pytest.mark.slow]),
        pytest.param(("mpiexec.hydra", "-n", "4", PYTHON, LOOP), id="MPICH", marks=[needs_mpich, pytest.mark.zoo]),
    ],
)
def test_losses_are_those_of_other_launchers(expected: LossesByRank, command: tuple[str, ...]) -> None:
    if command[0] == "mpiexec.hydra":
        command = (*command[:3], "-genv", "MASTER_PORT", str(find_free_port()), *command[3:])
    assert parse_losses(*run_commands((command, build_clean_environment()))) == expected
    assert (len(expected), len(set(expected[0]))) == (4, 4)


@pytest.mark.slow
def test_losses_are_those_of_an_indexed_job_with_a_rank_in_each_pod(expected: LossesByRank) -> None:
    port = str(find_free_port())
    pods = [
        build_clean_environment(
            JOB_COMPLETION_INDEX=str(index), WORLD_SIZE="4", MASTER_ADDR="localhost", MASTER_PORT=port
        )
        for index in range(4)
    ]
    found = run_commands(*[((PYTHON, LOOP), pod) for pod in pods])
    assert (parse_losses(*found), parse_local_ranks(*found)) == (expected, dict.fromkeys(range(4), (0, 1)))


@pytest.mark.slow
def test_losses_are_those_of_two_nodes_under_torchrun(expected, nodes):
    """In pods, with the variables that Kubeflow's Trainer sets beside those of an indexed Job."""
    pods = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": nodes[0].address}
    pods |= {"PET_MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": network_namespaces.INTERFACE}
    started = []
    for index, node in enumerate(nodes):
        environment = build_clean_environment(JOB_COMPLETION_INDEX=str(index), PET_NODE_RANK=str(index), **pods)
        started.append((node.command(*TORCHRUN, LOOP), environment))
    found = run_commands(*started)
    assert (parse_losses(*found), parse_local_ranks(*found)) == (expected, HALVES)


@needs_open_mpi
@pytest.mark.zoo
def test_losses_are_those_of_two_nodes_under_open_mpi(expected, nodes, tmp_path):
    command = _mpirun_over(nodes, tmp_path, f"{nodes[0].address}:2,{nodes[1].address}:2")
    found = run_commands(
        (
            nodes[0].command(*command, "-np", "4", PYTHON, LOOP),
            build_clean_environment(GLOO_SOCKET_IFNAME=network_namespaces.INTERFACE),
        )
    )
    assert (parse_losses(*found), parse_local_ranks(*found)) == (expected, HALVES)


@needs_open_mpi
@pytest.mark.zoo
def test_rank_0_that_is_not_where_mpirun_runs_says_so_and_ends_its_peers(nodes, tmp_path):
    command = _mpirun_over(nodes, tmp_path, f"{nodes[1].address}:1,{nodes[0].address}:1")
    placed = ("-np", "2", "--rankfile", str(tmp_path / "ranks"))
    (tmp_path / "ranks").write_text(f"rank 0={nodes[1].address} slot=0\nrank 1={nodes[0].address} slot=0\n")
    ((code, text),) = run_commands((nodes[0].command(*command, *placed, PYTHON, LOOP), build_clean_environment()))
    assert code != 0
    assert f"rank 0 is not on {nodes[0].address}, where mpirun runs" in text
    assert "mpirun -x MASTER_ADDR=HOST" in text


@pytest.mark.zoo
@pytest.mark.parametrize("kind", ["torch", "plain"])
def test_losses_are_those_of_workers_of_ray_train(expected: LossesByRank, tmp_path: Path, kind: str) -> None:
    """A TorchTrainer's have a process group, those of a plain trainer ranks alone."""
    pytest.importorskip("ray.train")
    settings = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    # Ray's sockets are in its folder, and the path of a socket has to be short.
    with tempfile.TemporaryDirectory(prefix="mw-ray-") as short:
        command = (PYTHON, str(HERE / "run_on_ray.py"), kind, str(tmp_path), short)
        ((code, text),) = run_commands((command, build_clean_environment(**settings)))
    assert code == 0, text[-6000:]
    found = {int(path.stem): json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("*.json")}
    assert {rank: tuple(each["losses"]) for rank, each in found.items()} == expected
    assert {each["had_group"] for each in found.values()} == {kind == "torch"}


@needs_open_mpi
@pytest.mark.zoo
def test_a_run_file_under_open_mpi_leaves_what_our_own_launcher_leaves(tmp_path: Path) -> None:
    run_file = str(write_run(tmp_path))
    found = []
    for name, launcher in (("own", ()), ("mpi", (*MPIRUN, "-np", "2"))):
        out = tmp_path / name
        train = ("train", run_file, "--set", f"output_dir={out}", "--set", "timeout_s=240")
        ((code, text),) = run_commands(((*launcher, PYTHON, "-m", "meshwright", *train), build_clean_environment()))
        assert code == 0, text[-6000:]
        lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        found.append([json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)])
    assert (found[0], len(found[0])) == (found[1], 2)


def _mpirun_over(nodes: tuple[network_namespaces.NamespaceNode, ...], directory: Path, hosts: str) -> list[str]:
    """mpirun that reaches the other node as it would by ssh, under a host name of its own."""
    agent = directory / "agent"
    cases = "\n".join(f"{node.address}) node={node.name} ;;" for node in nodes)
    agent.write_text(
        f"#!/bin/sh\nhost=$1; shift\ncase $host in\n{cases}\nesac\n"
        f'exec ip netns exec $node unshare --uts sh -c "hostname node-$node; $*"\n',
        encoding="utf-8",
    )
    agent.chmod(0o755)
    return [*MPIRUN, "--mca", "plm_rsh_agent", str(agent), "-H", hosts]
