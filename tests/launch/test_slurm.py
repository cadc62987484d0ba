"""Tasks that srun started are one world; processes that cannot find each other are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from meshwright.base.errors import MeshError
from meshwright.launch.join import torchrun_variables
from meshwright.launch.slurm import devices_of_step

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2),1(x2)",
    "SLURM_STEP_NODELIST": "gpu[007-009,12],login1",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def test_a_task_of_a_step_gets_the_variables_of_torchrun() -> None:
    assert torchrun_variables(STEP) == {
        "RANK": "4",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "gpu007",
        "MASTER_PORT": str(10_000 + (4711 * 31 + 3) % 20_000),
    }
    assert torchrun_variables({**STEP, "SLURM_NODEID": "3"})["LOCAL_WORLD_SIZE"] == "1"


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("n1", "n1"), ("a-01,b-02", "a-01"), ("r[1-3]n[04-09],x", "r1n04"), ("c[5]-ib,d", "c5-ib"), ("n[10,2-4]", "n10")],
)
def test_the_first_node_hosts_the_rendezvous(nodes: str, host: str) -> None:
    assert torchrun_variables({**STEP, "SLURM_STEP_NODELIST": nodes})["MASTER_ADDR"] == host


def test_the_tasks_of_one_node_need_no_name_of_it() -> None:
    assert torchrun_variables({**STEP, "SLURM_STEP_NUM_NODES": "1"})["MASTER_ADDR"] == "127.0.0.1"


def test_what_the_user_has_set_stays() -> None:
    found = torchrun_variables({**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400"})
    assert sorted(found) == ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE"]


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({}, id="no Slurm"),
        pytest.param({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, id="batch script"),
        pytest.param({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, id="step of one task"),
        pytest.param({**STEP, "RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}, id="torchrun within a step"),
        pytest.param({"OMPI_COMM_WORLD_SIZE": "1"}, id="mpirun of one"),
    ],
)
def test_everything_else_is_left_alone(environment: dict[str, str]) -> None:
    assert torchrun_variables(environment) == {}


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({**STEP, "SLURM_HET_SIZE": "2"}, "a heterogeneous Slurm job"),
        (
            {name: value for name, value in STEP.items() if name != "SLURM_LOCALID"},
            "one of 8 tasks of a Slurm step, but SLURM_LOCALID is not set",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "one of 2 processes (OMPI_COMM_WORLD_SIZE)"),
        ({"PMI_SIZE": "16"}, "one of 16 processes (PMI_SIZE)"),
    ],
)
def test_several_processes_that_cannot_find_each_other_are_refused(environment: dict[str, str], text: str) -> None:
    with pytest.raises(MeshError) as caught:
        torchrun_variables(environment)
    assert text in str(caught.value)
    assert "torchrun" in str(caught.value)


def test_devices_are_those_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_STEP_GPUS", raising=False)
    assert devices_of_step() == 0
    monkeypatch.setenv("SLURM_STEP_GPUS", "0,1,3")
    assert devices_of_step() == 3


LOOP_AND_TRAIN = """
import os, sys
import meshwright as mw
from meshwright.cli import main as cli
with mw.open_world("cpu") as world:
    print(world.rank, world.size, world.reduce_ints([10 ** world.rank]), flush=True)
# A process is started once; as the next step it has to find the others anew.
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    del os.environ[name]
os.environ["SLURM_STEP_ID"] = "1"
cli.main()
"""


def tasks(*command: str, **variables: str) -> list[Any]:
    """Two processes, as `srun -n2` would start them on this node."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MASTER", "RANK"))}
    step = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "nowhere",
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
    }
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**plain, **step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    return [(*process.communicate(timeout=240), process.returncode) for process in started]


def test_two_tasks_of_a_step_are_a_world_of_two_in_a_loop_by_hand_and_in_meshwright_train(tmp_path: Any) -> None:
    from support.commands import write_run

    # nproc is of no use here, as under torchrun.
    train = ("train", str(write_run(tmp_path)), "--set", "nproc=5")
    (out, error, code), (other_out, _, other_code) = tasks("-c", LOOP_AND_TRAIN, *train)
    assert (code, other_code) == (0, 0), error
    assert out.startswith("0 2 [11]\n")
    assert "fsdp2 on dp_shard=2 (cpu)" in out
    assert other_out == "1 2 [11]\n"
    assert (tmp_path / "out" / "summary.json").exists()


def test_a_bad_run_file_is_told_once_by_the_tasks_of_a_step(tmp_path: Any) -> None:
    (tmp_path / "run.yaml").write_text("stratgy: ddp\n")
    found = tasks("-m", "meshwright", "train", str(tmp_path / "run.yaml"))
    assert [code for _, _, code in found] == [2, 2]
    assert [error.count("error: ") for _, error, _ in found] == [1, 0]
