"""What each launcher's variables are made into, as docs/reference/launchers.md says; tasks of a Slurm step are one
world."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.commands import write_run

from meshwright.base.errors import MeshError
from meshwright.launch import join as joining
from meshwright.launch.cluster_environment import ClusterEnvironment, Launcher
from meshwright.launch.join import BUILT_IN_LAUNCHERS, get_local_rank, resolve_torchrun_variables
from meshwright.launch.slurm import count_step_devices
from meshwright.strategy.hooks import hookimpl
from meshwright.strategy.registry import get_registry

PAGE = (Path(__file__).parents[4] / "docs" / "reference" / "launchers.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if line.startswith("| ")]
OF_PAGE = [(row[0].strip("`"), row[1].rstrip(" |").strip("`")) for row in ROWS if len(row) == 2 and "=" in row[0]]
MORE = (Path(__file__).parent / "launcher_examples.txt").read_text(encoding="utf-8").splitlines()[1:]
EXAMPLES = OF_PAGE + [(variables, outcome) for variables, _, outcome in (line.partition(" | ") for line in MORE)]
STEP = (
    "SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=4 "
    "SLURM_STEP_NODELIST=gpu1"
)
NODES = (
    "SLURM_JOB_ID=4711 SLURM_STEP_ID=3 SLURM_STEP_NUM_TASKS=8 SLURM_STEP_NUM_NODES=4 SLURM_PROCID=4 SLURM_LOCALID=1 "
    "SLURM_STEP_TASKS_PER_NODE=3(x2),1(x2) SLURM_STEP_NODELIST=gpu[007-009,12],login1 SLURM_NODEID=1"
)
"""A step on several nodes."""
OPEN_MPI = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=4"


def variables(text: str) -> dict[str, str]:
    return dict(each.split("=", 1) for each in text.split())


def test_each_example_is_as_it_says() -> None:
    assert len(OF_PAGE) > 5
    for text, outcome in EXAMPLES:
        if outcome.startswith("refused: "):
            with pytest.raises(MeshError, match=re.escape(outcome.removeprefix("refused: "))):
                resolve_torchrun_variables(variables(text))
        else:
            found = " ".join(
                sorted(f"{name}={value}" for name, value in resolve_torchrun_variables(variables(text)).items())
            )
            assert found == ("" if outcome == "nothing" else " ".join(sorted(outcome.split()))), text
    outcomes = [outcome for _, outcome in EXAMPLES]
    assert len(EXAMPLES) > 30
    assert sum(outcome.startswith("refused: ") for outcome in outcomes) > 10
    assert sum("=" in outcome and not outcome.startswith("refused: ") for outcome in outcomes) > 10


def test_the_page_has_the_launchers_in_their_order_and_their_variables() -> None:
    rows = {row[0]: row[1] for row in ROWS if row[0] in [launcher.name for launcher in BUILT_IN_LAUNCHERS]}
    assert list(rows) == [launcher.name for launcher in BUILT_IN_LAUNCHERS]
    for launcher in BUILT_IN_LAUNCHERS:
        found = re.findall(r"`([A-Za-z_0-9]*_[A-Za-z_0-9]*|RANK)`", rows[launcher.name])
        assert set(found) == set(launcher.variables)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            f"RANK=0 WORLD_SIZE=2 {STEP}",
            ["RANK=0 and WORLD_SIZE=2", "SLURM_PROCID=1 and SLURM_STEP_NUM_TASKS=4 (Slurm)"],
        ),
        (f"RANK=0 WORLD_SIZE=2 {OPEN_MPI}", ["OMPI_COMM_WORLD_SIZE=4 (Open MPI)", "Unset RANK and WORLD_SIZE if"]),
        (f"RANK=0 {OPEN_MPI}", ["RANK=0 (the environment)", "Unset RANK if"]),
        (f"{OPEN_MPI} {STEP}".replace("NUM_TASKS=4", "NUM_TASKS=2"), ["(Open MPI)", "SLURM_STEP_NUM_TASKS=2 (Slurm)"]),
    ],
    ids=["by hand in Slurm", "by hand in Open MPI", "one of them by hand", "Open MPI in Slurm"],
)
def test_a_contradiction_names_both_with_their_values_and_what_to_unset(text: str, parts: list[str]) -> None:
    with pytest.raises(MeshError) as caught:
        resolve_torchrun_variables(variables(text))
    for part in [*parts, "or SLURM_STEP_NUM_TASKS if" if "SLURM" in text else "or OMPI_COMM_WORLD_SIZE if"]:
        assert part in str(caught.value)


def test_worlds_side_by_side_have_ports_of_their_own_and_ranks_of_one_the_same() -> None:
    ports = {
        resolve_torchrun_variables({**variables(OPEN_MPI), "OMPI_COMM_WORLD_RANK": rank, "PMIX_NAMESPACE": job})[
            "MASTER_PORT"
        ]
        for job in ("1974337537", "1974403073")
        for rank in ("0", "3")
    }
    assert len(ports) == 2


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("PET_NNODES=1:4", "torchrun has not started this process"),
        ("JOB_COMPLETION_INDEX=4 WORLD_SIZE=4 MASTER_ADDR=a", "pods are 0 to 3"),
    ],
    ids=["elastic", "beyond"],
)
def test_a_pod_that_is_no_rank_is_not_taken_for_one(text: str, match: str) -> None:
    with pytest.raises(MeshError, match=match):
        resolve_torchrun_variables(variables(f"{text} MASTER_ADDR=a MASTER_PORT=1"))


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "LOCAL_WORLD_SIZE"])
def test_what_is_no_count_is_refused_by_name(name: str) -> None:
    start = STEP if name.startswith("SLURM") else OPEN_MPI
    given = {"RANK": "1", "WORLD_SIZE": "4"} if "SLURM" not in name and "OMPI" not in name else {}
    for value in ("", "one", "-1", "1.0"):
        with pytest.raises(MeshError, match=f"{name}='{re.escape(value)}' is not a count"):
            resolve_torchrun_variables({**variables(start), **given, name: value})


def test_a_store_of_the_caller_needs_no_address() -> None:
    assert resolve_torchrun_variables({"RANK": "1", "WORLD_SIZE": "4"}, has_store=True) == {}
    found = resolve_torchrun_variables(variables("JOB_COMPLETION_INDEX=1 WORLD_SIZE=2"), has_store=True)
    assert found == {"RANK": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def test_ranks_that_see_several_devices_have_to_know_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert get_local_rank(8) == 0
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert get_local_rank(1) == 0
    with pytest.raises(MeshError, match="which of the 8 devices on this node the rank uses"):
        get_local_rank(8)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert get_local_rank(8) == 3
    monkeypatch.setenv("LOCAL_RANK", "one")
    with pytest.raises(MeshError, match="LOCAL_RANK='one' is not a count"):
        get_local_rank(8)


def test_a_process_group_that_a_launchers_ranks_have_made_learns_their_places() -> None:
    beside = joining._variables_for_group(variables(OPEN_MPI), 1, 4)
    assert beside == {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "RANK": "1", "WORLD_SIZE": "4"}
    assert joining._variables_for_group(variables(OPEN_MPI), 1, 2) == {}


class Plugin:
    """A launcher of somebody else, whose processes Slurm has started."""

    @hookimpl
    def register_launchers(self) -> list[Launcher]:
        return [Launcher("Flux", ("FLUX_RANK",), self.ask)]

    def ask(self, environment: Mapping[str, str]) -> ClusterEnvironment | None:
        if "FLUX_RANK" not in environment:
            return None
        rank = int(environment["FLUX_RANK"])
        return ClusterEnvironment(
            "Flux", "", (), rank, 2, 0, 1, lambda: "here", lambda: 7, is_nested_in=lambda outer: True
        )


def test_a_plugin_adds_a_launcher() -> None:
    with get_registry().observing(Plugin()):
        found = resolve_torchrun_variables(variables(f"{STEP} FLUX_RANK=1"))
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"], found["MASTER_PORT"]) == ("1", "2", "here", "7")
    assert resolve_torchrun_variables(variables(f"{STEP} FLUX_RANK=1"))["WORLD_SIZE"] == "4"


# -- Slurm


def test_a_task_of_a_step_gets_the_variables_of_torchrun_but_what_the_user_has_set_stays() -> None:
    step = variables(NODES)
    assert resolve_torchrun_variables(step) == {
        "RANK": "4",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "gpu007",
        "MASTER_PORT": str(10_000 + (4711 * 31 + 3) % 20_000),
    }
    assert resolve_torchrun_variables({**step, "SLURM_NODEID": "3"})["LOCAL_WORLD_SIZE"] == "1"
    assert resolve_torchrun_variables({**step, "SLURM_STEP_NUM_NODES": "1"})["MASTER_ADDR"] == "127.0.0.1"
    found = resolve_torchrun_variables({**step, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400"})
    assert sorted(found) == ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE"]


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("n1", "n1"), ("a-01,b-02", "a-01"), ("r[1-3]n[04-09],x", "r1n04"), ("c[5]-ib,d", "c5-ib"), ("n[10,2-4]", "n10")],
)
def test_the_first_node_hosts_the_rendezvous(nodes: str, host: str) -> None:
    assert resolve_torchrun_variables({**variables(NODES), "SLURM_STEP_NODELIST": nodes})["MASTER_ADDR"] == host


@pytest.mark.parametrize("text", ["", "SLURM_JOB_ID=1 SLURM_NTASKS=8 SLURM_PROCID=0"], ids=["none", "batch script"])
def test_everything_else_is_left_alone(text: str) -> None:
    assert resolve_torchrun_variables(variables(text)) == {}


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        (f"{NODES} SLURM_HET_SIZE=2", "a heterogeneous Slurm job"),
        (NODES.replace("SLURM_LOCALID=1", ""), "one of 8 tasks of a Slurm step, but SLURM_LOCALID is not set"),
        ("PMI_SIZE=16", "one of 16 processes (PMI_SIZE)"),
    ],
)
def test_several_processes_that_cannot_find_each_other_are_refused(text: str, reported: str) -> None:
    with pytest.raises(MeshError, match=re.escape(reported)) as caught:
        resolve_torchrun_variables(variables(text))
    assert "torchrun" in str(caught.value)


def test_devices_are_those_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_STEP_GPUS", raising=False)
    assert count_step_devices() == 0
    monkeypatch.setenv("SLURM_STEP_GPUS", "0,1,3")
    assert count_step_devices() == 3


LOOP_AND_TRAIN = """
import os, sys
import meshwright as mw
from meshwright.cli import main as cli
with mw.open_world("cpu") as world:
    print(world.rank, world.size, world.reduce_ints([10 ** world.rank]), flush=True)
# A process is started once; as the next step it has to find the others again.
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    del os.environ[name]
os.environ["SLURM_STEP_ID"] = "1"
cli.main()
"""


def tasks(*command: str) -> list[Any]:
    """Two processes, as `srun -n2` would start them on this node."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MASTER", "RANK"))}
    step = variables(
        f"SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=1 SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NODELIST=nowhere "
        f"SLURM_NODEID=0 SLURM_JOB_ID={os.getpid()} SLURM_STEP_ID=0"
    )
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**plain, **step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    return [(*process.communicate(timeout=240), process.returncode) for process in started]


@pytest.mark.slow
def test_two_tasks_of_a_step_are_a_world_of_two_in_a_loop_by_hand_and_in_meshwright_train(tmp_path: Path) -> None:
    # nproc is of no use here, as under torchrun.
    train = ("train", str(write_run(tmp_path)), "--set", "nproc=5")
    (out, error, code), (other_out, _, other_code) = tasks("-c", LOOP_AND_TRAIN, *train)
    assert (code, other_code) == (0, 0), error
    assert out.startswith("0 2 [11]\n")
    assert "fsdp2 on dp_shard=2 (cpu)" in out
    assert other_out == "1 2 [11]\n"
    assert (tmp_path / "out" / "summary.json").exists()
