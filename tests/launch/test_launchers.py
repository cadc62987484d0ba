"""What each launcher's variables are made into, which contradictions are refused; docs/launchers.md says the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshwright.base.errors import MeshError
from meshwright.cli import main as cli
from meshwright.launch import join as joining
from meshwright.launch.claim import Launcher
from meshwright.launch.join import LAUNCHERS, local_rank, torchrun_variables

PAGE = (Path(__file__).parents[2] / "docs" / "launchers.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if line.startswith("| ")]
EXAMPLES = [(row[0].strip("`"), row[1].rstrip(" |")) for row in ROWS if len(row) == 2 and "=" in row[0]]
STEP = (
    "SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=4 "
    "SLURM_STEP_NODELIST=gpu1"
)
OPEN_MPI = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=4"


def variables(text: str) -> dict[str, str]:
    return dict(each.split("=", 1) for each in text.split())


class Read(Mapping[str, str]):
    """An environment that remembers which variables were asked for."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values_, self.asked = values, set[str]()

    def __getitem__(self, name: str) -> str:
        self.asked.add(name)
        return self.values_[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


@pytest.mark.parametrize(("text", "outcome"), EXAMPLES, ids=[str(index) for index in range(len(EXAMPLES))])
def test_each_example_of_the_page_is_as_it_says(text: str, outcome: str) -> None:
    if outcome.startswith("refused: "):
        with pytest.raises(MeshError, match=re.escape(outcome.removeprefix("refused: "))):
            torchrun_variables(variables(text))
    else:
        found = " ".join(sorted(f"{name}={value}" for name, value in torchrun_variables(variables(text)).items()))
        assert found == ("" if outcome == "nothing" else " ".join(sorted(outcome.strip("`").split())))


def test_the_page_has_examples_of_all_kinds() -> None:
    outcomes = [outcome for _, outcome in EXAMPLES]
    assert len(EXAMPLES) > 30
    assert sum(outcome.startswith("refused: ") for outcome in outcomes) > 10
    assert sum(outcome.startswith("`") for outcome in outcomes) > 10


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_the_page_names_the_variables_of_each_launcher(launcher: Launcher) -> None:
    (row,) = [row for row in ROWS if row[0] == launcher.name]
    assert set(re.findall(r"`([A-Za-z_0-9]*_[A-Za-z_0-9]*|RANK)`", row[1])) == set(launcher.reads)


def test_the_page_has_the_launchers_in_the_order_in_which_they_count() -> None:
    names = [launcher.name for launcher in LAUNCHERS]
    assert [row[0] for row in ROWS if row[0] in names] == names


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_launchers_read_what_they_declare(launcher: Launcher) -> None:
    asked: set[str] = set()
    for text, _ in EXAMPLES:
        environment = Read(variables(text))
        try:
            claim = launcher.ask(environment)
            if claim is not None:
                claim.port()
                claim.address()
        except MeshError:
            pass
        asked |= environment.asked
    assert asked <= set(launcher.reads)
    # None is declared for nothing.
    assert set(launcher.reads) - asked <= {"SLURM_HET_SIZE", "PMIX_SIZE"}


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
        torchrun_variables(variables(text))
    for part in [*parts, "or SLURM_STEP_NUM_TASKS if" if "SLURM" in text else "or OMPI_COMM_WORLD_SIZE if"]:
        assert part in str(caught.value)


def test_each_rank_says_what_contradicts_whatever_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables(f"RANK=0 WORLD_SIZE=2 LOCAL_RANK=1 {OPEN_MPI}").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    result = CliRunner().invoke(cli.app, ["train", str(tmp_path / "none.yaml")])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: two say what rank this is: RANK=0 and WORLD_SIZE=2")


def test_ranks_of_open_mpi_get_their_places() -> None:
    found = torchrun_variables({**variables(OPEN_MPI), "OMPI_COMM_WORLD_LOCAL_RANK": "2"})
    places = [found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")]
    assert places == ["1", "4", "2", "4", "127.0.0.1"]


def test_worlds_side_by_side_have_ports_of_their_own_and_ranks_of_one_the_same() -> None:
    ports = {
        torchrun_variables({**variables(OPEN_MPI), "OMPI_COMM_WORLD_RANK": rank, "PMIX_NAMESPACE": job})["MASTER_PORT"]
        for job in ("1974337537", "1974403073")
        for rank in ("0", "3")
    }
    assert len(ports) == 2


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("RANK=1 WORLD_SIZE=16 PET_NODE_RANK=1 PET_NPROC_PER_NODE=8", "RANK=1 is the index of this pod"),
        ("PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=8", "torchrun has not started this process"),
        ("PET_NNODES=1:4", "torchrun has not started this process"),
        ("JOB_COMPLETION_INDEX=0", "nothing says of how many"),
        ("JOB_COMPLETION_INDEX=4 WORLD_SIZE=4 MASTER_ADDR=a", "pods are 0 to 3"),
    ],
    ids=["PyTorchJob", "TrainJob", "elastic", "indexed Job", "beyond"],
)
def test_a_pod_that_is_no_rank_is_not_taken_for_one(text: str, match: str) -> None:
    with pytest.raises(MeshError, match=match):
        torchrun_variables(variables(f"{text} MASTER_ADDR=a MASTER_PORT=1"))


def test_rank_0_that_is_not_where_mpirun_runs_says_what_to_set() -> None:
    away = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-login-1@1"}
    uri = {"PMIX_SERVER_URI2": "prterun-login-1@0.1;tcp4://127.0.0.1:50173"}
    with pytest.raises(MeshError, match=r"rank 0 is not on login, .* mpirun -x MASTER_ADDR=HOST"):
        torchrun_variables({**variables(OPEN_MPI), **away, **uri})
    assert torchrun_variables({**variables(OPEN_MPI), **away})["MASTER_ADDR"] == "login"


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("value", ["", "one", "-1", "1.0"])
def test_what_is_no_count_is_refused_by_name(name: str, value: str) -> None:
    start = STEP if name.startswith("SLURM") else OPEN_MPI
    given = {"RANK": "1", "WORLD_SIZE": "4"} if "SLURM" not in name and "OMPI" not in name else {}
    with pytest.raises(MeshError, match=f"{name}='{re.escape(value)}' is no count"):
        torchrun_variables({**variables(start), **given, name: value})


def test_a_store_of_the_caller_needs_no_address() -> None:
    assert torchrun_variables({"RANK": "1", "WORLD_SIZE": "4"}, has_store=True) == {}
    found = torchrun_variables(variables("JOB_COMPLETION_INDEX=1 WORLD_SIZE=2"), has_store=True)
    assert found == {"RANK": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def test_ranks_that_see_several_devices_have_to_know_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert local_rank(8) == 0
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert local_rank(1) == 0
    with pytest.raises(MeshError, match="which of the 8 devices here is its own"):
        local_rank(8)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_rank(8) == 3
    monkeypatch.setenv("LOCAL_RANK", "one")
    with pytest.raises(MeshError, match="LOCAL_RANK='one' is no count"):
        local_rank(8)


GROUP = """
import os
import torch.distributed as dist
import meshwright as mw
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
before = dict(os.environ)
with mw.open_world("cpu") as world:
    print(world.size, dict(os.environ) == before)
"""


@pytest.mark.parametrize("text", ["RANK=0 WORLD_SIZE=2", OPEN_MPI, "JOB_COMPLETION_INDEX=3", "RANK=1"])
def test_a_process_group_that_exists_is_used_whatever_launchers_say(text: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", GROUP],
        env={
            **{name: os.environ[name] for name in os.environ if name not in ("RANK", "WORLD_SIZE")},
            **variables(text),
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert found.stdout == "1 True\n", found.stderr


def test_a_process_group_that_a_launchers_ranks_have_made_learns_their_places() -> None:
    beside = joining._beside_group(variables(OPEN_MPI), 1, 4)
    assert beside == {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "RANK": "1", "WORLD_SIZE": "4"}
    assert joining._beside_group(variables(OPEN_MPI), 1, 2) == {}
