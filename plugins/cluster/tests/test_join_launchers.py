"""Whoever starts the ranks, an unmodified loop trains on them, with the same losses to the last bit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import netns
from support.starts import HERE, LOOP, TORCHRUN, Found, clean, free_port, losses, places, run

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


@pytest.fixture(scope="module")
def expected() -> Found:
    outcome = run(((*TORCHRUN, "--standalone", "--nproc-per-node", "4", LOOP), clean()))
    return losses(*outcome)


@pytest.fixture
def nodes() -> Iterator[tuple[netns.Node, ...]]:
    if reason := netns.why_not():
        pytest.skip(reason)
    with netns.nodes() as found:
        yield found


@pytest.mark.slow
def test_losses_are_those_of_our_own_launcher(expected: Found) -> None:
    assert losses(*run(((PYTHON, str(HERE / "on_own_launcher.py")), clean()))) == expected
    assert (len(expected), len(set(expected[0]))) == (4, 4)


@needs_open_mpi
@pytest.mark.slow
def test_losses_are_those_of_open_mpi(expected: Found) -> None:
    assert losses(*run(((*MPIRUN, "-np", "4", PYTHON, LOOP), clean()))) == expected


@pytest.mark.zoo
@pytest.mark.skipif(shutil.which("mpiexec.hydra") is None, reason="mpiexec.hydra is not installed (Debian: mpich)")
def test_losses_are_those_of_mpich(expected: Found) -> None:
    command = ("mpiexec.hydra", "-n", "4", "-genv", "MASTER_PORT", str(free_port()), PYTHON, LOOP)
    assert losses(*run((command, clean()))) == expected


@pytest.mark.slow
def test_losses_are_those_of_an_indexed_job_with_a_rank_in_each_pod(expected: Found) -> None:
    port = str(free_port())
    pods = [
        clean(JOB_COMPLETION_INDEX=str(index), WORLD_SIZE="4", MASTER_ADDR="localhost", MASTER_PORT=port)
        for index in range(4)
    ]
    found = run(*[((PYTHON, LOOP), pod) for pod in pods])
    assert (losses(*found), places(*found)) == (expected, dict.fromkeys(range(4), (0, 1)))


@pytest.mark.parametrize("told_by", [pytest.param("arguments", marks=pytest.mark.zoo), "environment"])
@pytest.mark.slow
def test_losses_are_those_of_two_nodes_under_torchrun(expected, nodes, told_by):
    """By its arguments, or in pods, with the variables that Kubeflow's Trainer sets beside those of an indexed Job."""
    started = []
    for index, node in enumerate(nodes):
        settings = {
            "nnodes": "2",
            "nproc_per_node": "2",
            "node_rank": str(index),
            "master_addr": nodes[0].address,
            "master_port": "29500",
        }
        if told_by == "arguments":
            command = [*TORCHRUN, *(f"--{name.replace('_', '-')}={value}" for name, value in settings.items()), LOOP]
            environment = clean()
        else:
            command = [*TORCHRUN, LOOP]
            environment = clean(JOB_COMPLETION_INDEX=str(index))
            environment |= {f"PET_{name.upper()}": value for name, value in settings.items()}
        started.append((node.command(*command), {**environment, "GLOO_SOCKET_IFNAME": netns.CARD}))
    found = run(*started)
    assert (losses(*found), places(*found)) == (expected, HALVES)


@needs_open_mpi
@pytest.mark.zoo
def test_losses_are_those_of_two_nodes_under_open_mpi(expected, nodes, tmp_path):
    command = _mpirun_over(nodes, tmp_path, f"{nodes[0].address}:2,{nodes[1].address}:2")
    found = run((nodes[0].command(*command, "-np", "4", PYTHON, LOOP), clean(GLOO_SOCKET_IFNAME=netns.CARD)))
    assert (losses(*found), places(*found)) == (expected, HALVES)


@needs_open_mpi
@pytest.mark.zoo
def test_rank_0_that_is_not_where_mpirun_runs_says_so_and_ends_its_peers(nodes, tmp_path):
    command = _mpirun_over(nodes, tmp_path, f"{nodes[1].address}:1,{nodes[0].address}:1")
    placed = ("-np", "2", "--rankfile", str(tmp_path / "ranks"))
    (tmp_path / "ranks").write_text(f"rank 0={nodes[1].address} slot=0\nrank 1={nodes[0].address} slot=0\n")
    before_s = time.monotonic()
    ((code, text),) = run((nodes[0].command(*command, *placed, PYTHON, LOOP), clean()))
    assert code != 0
    assert f"rank 0 is not on {nodes[0].address}, where mpirun runs" in text
    assert "mpirun -x MASTER_ADDR=HOST" in text
    assert time.monotonic() - before_s < 120


@pytest.mark.zoo
@pytest.mark.parametrize("kind", ["torch", "plain"])
def test_losses_are_those_of_workers_of_ray_train(expected: Found, tmp_path: Path, kind: str) -> None:
    """A TorchTrainer's have a process group, those of a plain trainer ranks alone."""
    pytest.importorskip("ray.train")
    settings = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    # Ray's sockets are in its folder, and the path of a socket has to be short.
    with tempfile.TemporaryDirectory(prefix="mw-ray-") as short:
        command = (PYTHON, str(HERE / "on_ray.py"), kind, str(tmp_path), short)
        ((code, text),) = run((command, clean(**settings)))
    assert code == 0, text[-6000:]
    found = {int(path.stem): json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("*.json")}
    assert {rank: tuple(each["losses"]) for rank, each in found.items()} == expected
    assert {each["had_group"] for each in found.values()} == {kind == "torch"}


@needs_open_mpi
@pytest.mark.zoo
def test_a_run_file_under_open_mpi_leaves_what_our_own_launcher_leaves(tmp_path: Path) -> None:
    from support.commands import write_run

    run_file = str(write_run(tmp_path))
    found = []
    for name, launcher in (("own", ()), ("mpi", (*MPIRUN, "-np", "2"))):
        out = tmp_path / name
        train = ("train", run_file, "--set", f"output_dir={out}", "--set", "timeout_s=240")
        ((code, text),) = run(((*launcher, PYTHON, "-m", "meshwright", *train), clean()))
        assert code == 0, text[-6000:]
        lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        found.append([json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)])
    assert (found[0], len(found[0])) == (found[1], 2)


@needs_open_mpi
@pytest.mark.zoo
def test_a_contradiction_under_open_mpi_ends_at_once_with_the_exit_code_of_wrong_input() -> None:
    before_s = time.monotonic()
    wrong = ("-x", "RANK=0", "-x", "WORLD_SIZE=2")
    ((code, text),) = run(((*MPIRUN, *wrong, "-np", "4", PYTHON, "-m", "meshwright", "train", "none.yaml"), clean()))
    assert code == 2, text
    for each in ("RANK=0 and WORLD_SIZE=2", "OMPI_COMM_WORLD_SIZE=4 (Open MPI)", "Unset RANK and WORLD_SIZE"):
        assert each in text
    assert time.monotonic() - before_s < 60


def _mpirun_over(nodes: tuple[netns.Node, ...], directory: Path, hosts: str) -> list[str]:
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
