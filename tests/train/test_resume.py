"""A run that is killed goes on from its newest checkpoint, with the numbers of one that was not. Real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.commands import LAUNCHER_VARIABLES, write_run

from meshwright.train.report import MEASURED

STEPS = 14
PATIENCE_S = 400


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("resume")
    write_run(directory)
    return directory


def _run_file(workplace: Path, name: str, **changes: Any) -> Path:
    values = yaml.safe_load((workplace / "run.yaml").read_text())
    # Dropout, so that random numbers are seen to go on, too.
    values["model"]["attention_dropout"] = 0.2
    values |= {"steps": STEPS, "sample": None, "eval": {"every": 5, "sequences": 4}}
    values |= {"checkpoint": {"every": 3}, "output_dir": str(workplace / name), "schedule": {"warmup_steps": 4}}
    values |= changes
    path = workplace / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def _start(run_file: Path) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return subprocess.Popen(
        [sys.executable, "-m", "meshwright", "train", str(run_file)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _finish(run_file: Path) -> str:
    process = _start(run_file)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    return output


def _numbers(directory: Path) -> list[dict[str, Any]]:
    """All that a step's numbers are, but for its duration."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in MEASURED} for line in lines]


def _when(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "the run did not get so far"
        time.sleep(0.001)


def _ranks(process: subprocess.Popen[str]) -> list[int]:
    """The processes of the ranks: those of the session that have a rank in their environment."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and os.getsid(int(path.name)) == process.pid:
                environment = (path / "environ").read_bytes()
                command = (path / "cmdline").read_bytes()
                if b"multiprocessing" in command or b"RANK=" in environment:
                    found.append(int(path.name))
        except (OSError, ProcessLookupError):
            continue
    return found


def _kill_all(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=PATIENCE_S)


def _steps_done(directory: Path) -> int:
    path = directory / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


@pytest.fixture(scope="module")
def uninterrupted(workplace: Path) -> list[dict[str, Any]]:
    _finish(_run_file(workplace, "whole"))
    numbers = _numbers(workplace / "whole")
    assert [each["step"] for each in numbers] == list(range(1, STEPS + 1))
    return numbers


def test_all_ranks_killed(workplace: Path, uninterrupted: list[dict[str, Any]]) -> None:
    run_file, directory = _run_file(workplace, "all"), workplace / "all"
    process = _start(run_file)
    _when(lambda: _steps_done(directory) >= 7)
    _kill_all(process)
    output = _finish(run_file)
    assert "going on from" in output
    assert _numbers(directory) == uninterrupted


def test_one_rank_killed(workplace: Path, uninterrupted: list[dict[str, Any]]) -> None:
    run_file, directory = _run_file(workplace, "one"), workplace / "one"
    process = _start(run_file)
    _when(lambda: _steps_done(directory) >= 7)
    os.kill(max(_ranks(process)), signal.SIGKILL)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0
    assert "killed" in errors.lower() or "signal" in errors.lower(), errors
    assert "going on from" in _finish(run_file)
    assert _numbers(directory) == uninterrupted


def test_killed_while_a_checkpoint_is_written(workplace: Path, uninterrupted: list[dict[str, Any]]) -> None:
    run_file, directory = _run_file(workplace, "saving"), workplace / "saving"
    process = _start(run_file)

    def stopped_in_a_save() -> bool:
        if not list((directory / "checkpoints").glob("step-0000000[6-9].writing")):
            return False
        os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(0.05)
        if list((directory / "checkpoints").glob("*.writing")):
            return True
        os.killpg(process.pid, signal.SIGCONT)
        return False

    _when(stopped_in_a_save)
    left = {path.name for path in (directory / "checkpoints").iterdir()}
    _kill_all(process)
    assert any(name.endswith(".writing") for name in left)
    output = _finish(run_file)
    assert "going on from" in output
    assert _numbers(directory) == uninterrupted
    assert not list((directory / "checkpoints").glob("*.writing"))


def test_killed_before_the_first_checkpoint(workplace: Path, uninterrupted: list[dict[str, Any]]) -> None:
    run_file, directory = _run_file(workplace, "early"), workplace / "early"
    process = _start(run_file)
    _when((directory / "run.yaml").is_file)
    _kill_all(process)
    assert "going on from" not in _finish(run_file)
    assert _numbers(directory) == uninterrupted


def test_another_strategy_and_world_size_go_on_with_the_same_data(workplace: Path) -> None:
    # Without dropout, whose masks differ between data ranks; sums in float64 do not depend on the layout.
    plain = yaml.safe_load((workplace / "run.yaml").read_text())["model"]
    changed = _run_file(workplace, "changed", model=plain, steps=6, schedule={"name": "constant"})
    constant = _run_file(workplace, "constant", model=plain, schedule={"name": "constant"})
    _finish(constant)
    expected = _numbers(workplace / "constant")
    _finish(changed)
    # The finished run is continued, from its checkpoint, under something else.
    source = str(workplace / "changed" / "checkpoints" / "step-00000006")
    more = {"steps": STEPS, "model": plain, "schedule": {"name": "constant"}, "resume": source}
    for name, layout in {
        "ddp": {"strategy": "ddp", "nproc": 4},
        "single": {"strategy": "single", "nproc": 1},
    }.items():
        _finish(_run_file(workplace, name, **more, **layout))
        found = _numbers(workplace / name)
        assert [each["step"] for each in found] == list(range(7, STEPS + 1))
        for mine, other in zip(found, expected[6:], strict=True):
            assert mine["loss"] == pytest.approx(other["loss"], abs=1e-6)
            assert mine["num_tokens"] == other["num_tokens"]


def test_a_finished_run_is_not_touched_and_another_run_not_continued(workplace: Path, uninterrupted: Any) -> None:
    def refused(run_file: Path) -> str:
        process = _start(run_file)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode not in (0, None)
        return errors

    assert "this run has finished" in _finish(_run_file(workplace, "whole"))
    assert "holds the results of an earlier run" in refused(_run_file(workplace, "whole", seed=3))
    source = str(workplace / "whole" / "checkpoints" / f"step-{STEPS:08d}")
    other = _run_file(workplace, "other", resume=source, batch_size=8, steps=20)
    told = refused(other)
    assert "the run differs" in told
    assert "batch_size" in told
    assert "Raise steps" in refused(_run_file(workplace, "other", resume=source))
    assert "is no checkpoint" in refused(_run_file(workplace, "other", resume=str(workplace)))
    assert not (workplace / "other").exists()
