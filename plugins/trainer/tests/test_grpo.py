"""GRPO over a mesh logs what trl's trainer logs on as many processes as there are data ranks, in float64; a server is
fed with the weights of each step."""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpo_cases
import pytest
import trainer_cases
import trl
from grpo_server import write_package

from meshwright.base.errors import ConfigError
from meshwright_trainer.grpo import check_generation, set_generation_batch_size

FOLDER = Path(__file__).parent
ALL = ("greedy", "dapo", "apart", "bnpo", "dr_grpo", "lora", "cispo", "luspo", "sapo", "vespo")
LAYOUTS: dict[str, tuple[int, int, dict[str, Any], tuple[str, ...]]] = {
    "fsdp2": (2, 2, {"strategy": "fsdp2"}, ALL),
    "tp2": (2, 1, {"strategy": "fsdp2", "tp_size": 2}, ("greedy", "dapo", "bnpo", "dr_grpo", "lora", "sapo")),
    "tp2 of two": (4, 2, {"strategy": "fsdp2", "tp_size": 2}, ("greedy", "dapo")),
    "ddp": (2, 2, {"strategy": "ddp"}, ("greedy", "dapo", "lora")),
    "cp2": (2, 1, {"strategy": "fsdp2", "cp_size": 2}, ("greedy",)),
}
"""Ranks, data ranks, a mesh, and what is trained on it."""
TOLERANCE, SMALL = 1e-6, 0.05
"""Relative, and where a number is small beside what it is the sum of: trl and Trainer add up in float32."""


def run(count: int, mesh: Any, directory: Path, kinds: tuple[str, ...], **environment: str) -> None:
    """Run the cases on so many processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), "--standalone"]
    directory.mkdir(parents=True, exist_ok=True)
    tests = FOLDER.parents[2] / "tests"
    paths = os.pathsep.join(
        [str(FOLDER), str(tests), environment.pop("PACKAGES", ""), os.environ.get("PYTHONPATH", "")]
    )
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "PYTHONPATH": paths, **environment}
    script = [str(FOLDER / "grpo_cases.py"), str(directory), json.dumps(mesh), *kinds]
    runner = command if count > 1 else [sys.executable]
    done = subprocess.run([*runner, *script], env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


@functools.cache
def plain(count: int, directory: Path) -> Path:
    run(count, None, directory / f"plain-{count}", ALL)
    return directory / f"plain-{count}"


def differences(wanted: Any, found: Any) -> list[str]:
    return trainer_cases.differences(wanted, found, TOLERANCE, SMALL)


def read(directory: Path, kind: str) -> Any:
    return json.loads((directory / f"{kind}.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_grpo_logs_what_trl_logs_on_as_many_processes(layout, tmp_path, tmp_path_factory):
    ranks, data_ranks, mesh, kinds = LAYOUTS[layout]
    run(ranks, mesh, tmp_path, kinds)
    wanted = plain(data_ranks, tmp_path_factory.getbasetemp())
    wrong = {kind: differences(read(wanted, kind), read(tmp_path, kind)) for kind in kinds}
    assert not {kind: texts for kind, texts in wrong.items() if texts}


@pytest.mark.slow
def test_greedy_completions_train_two_data_ranks_as_one_process(tmp_path, tmp_path_factory):
    run(2, {"strategy": "fsdp2"}, tmp_path, ("greedy",))
    wanted = read(plain(1, tmp_path_factory.getbasetemp()), "greedy")
    assert not differences(wanted, read(tmp_path, "greedy"))


# -- what is refused

WRONG = {
    "pp": ({"pp_size": 2}, {}, "pp_size=2: a rank has some stages"),
    "pp eval": (
        {"pp_size": 2},
        {"use_vllm": True, "vllm_mode": "server"},
        "per_device_eval_batch_size=8 with pp_size=2",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_honoured_is_refused_by_name_before_training(name, tmp_path):
    sizes, options, words = WRONG[name]
    with pytest.raises(ConfigError, match=re.escape(words)):
        grpo_cases.made("dapo", {"strategy": "fsdp2", **sizes}, tmp_path, 1, **{"num_generations": 4, **options})


def test_groups_are_of_data_ranks():
    args = SimpleNamespace(per_device_train_batch_size=4, steps_per_generation=1, do_eval=False, num_generations=8)
    set_generation_batch_size(args, 2)
    assert args.generation_batch_size == 8
    with pytest.raises(ConfigError, match=r"generation_batch_size=4 over 1 data ranks .* of the 8 completions"):
        set_generation_batch_size(args, 1)


def test_tools_and_rollouts_of_ones_own_are_refused():
    trainer = SimpleNamespace(args=trl.GRPOConfig(use_cpu=True, bf16=False, report_to=[]), rollout_func=print)
    with pytest.raises(ConfigError, match="rollout_func is not supported on a mesh"):
        check_generation(trainer)


# -- a server


@contextmanager
def server(packages: Path) -> Iterator[str]:
    write_package(packages)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, str(FOLDER / "grpo_server.py"), str(port)], env=environment)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def served(ranks: int, mesh: Any, directory: Path, kind: str) -> dict[str, Any]:
    """Train with a server; what it was fed with."""
    with server(directory / "packages") as url:
        run(ranks, mesh, directory, (kind,), SERVER=url, PACKAGES=str(directory / "packages"))
        with urllib.request.urlopen(f"{url}/updates") as answer:
            return json.loads(answer.read())


FED = {
    "fsdp2": (2, {"strategy": "fsdp2"}, "server"),
    "tp2": (2, {"strategy": "fsdp2", "tp_size": 2}, "server"),
    "tp2, lora": (2, {"strategy": "fsdp2", "tp_size": 2}, "server_lora"),
    "pp2": (2, {"strategy": "fsdp2", "pp_size": 2}, "server"),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", FED)
def test_a_server_is_fed_with_the_weights_of_each_step(layout, tmp_path):
    ranks, mesh, kind = FED[layout]
    fed = served(ranks, mesh, tmp_path / "mesh", kind)
    logged = read(tmp_path / "mesh", kind)
    assert not isinstance(logged, str), logged
    reported = [json.loads((tmp_path / "mesh" / kind / f"streamed-{rank}.json").read_text()) for rank in range(ranks)]
    updates, steps = fed["updates"], reported[0]["digests"]
    assert len({json.dumps(each, sort_keys=True) for each in updates}) > 2
    # Before the first step, after those behind which something is generated, and once more at the end.
    assert all(each in steps for each in updates[1:])
    assert updates[-1] == steps[-1]
    assert fed["resets"] == len(updates)
    for each in reported:
        # The largest parameter, the one before, which trl still holds, and a bucket; and where adapters are merged, a
        # layer with what is added to it.
        assert each["held"] <= (131 + 52 * (3 if "lora" in layout else 1)) * 36 * 8 + (1 << 13)
    if mesh.get("tp_size"):
        served(1, None, tmp_path / "plain", kind)
        assert not differences(read(tmp_path / "plain", kind), read(tmp_path / "mesh", kind))
