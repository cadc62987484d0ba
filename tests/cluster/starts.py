"""Start ranks as a launcher, a kubelet or a user would, and read what they print."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
LOOP = str(HERE / "loop.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TIMEOUT_S = 300.0
"""Generous: a rank imports torch and transformers for itself, on a machine that others may be using."""

_OF_LAUNCHERS = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_|GROUP_|ROLE_|MASTER_|TORCHELASTIC_|SLURM_|OMPI_|PMI|MPI_|PET_|JOB_COMPLETION_INDEX|RAY_)"
)
_LINE = re.compile(r"ranks (\d+) (\d+) (\d+) (\d+) losses((?: [\d.e+-]+)+)")

Found = dict[int, tuple[str, ...]]
"""The losses of each rank, as printed."""


def clean(**variables: str) -> dict[str, str]:
    """This process's environment without what any launcher has left in it."""
    plain = {name: value for name, value in os.environ.items() if not _OF_LAUNCHERS.match(name)}
    return {**plain, "OMP_NUM_THREADS": "1", **variables}


def run(*started: tuple[Sequence[str], Mapping[str, str]]) -> list[tuple[int, str]]:
    """Run commands side by side, each with its environment; exit codes and what was written, errors too.

    None outlives the call.
    """
    processes = [
        subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for command, environment in started
    ]
    try:
        return [
            (process.returncode, text) for process in processes for text in process.communicate(None, TIMEOUT_S)[:1]
        ]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def losses(*outcomes: tuple[int, str]) -> Found:
    """What all ranks of a run of LOOP have printed; fails where a process has failed."""
    texts = [text for code, text in outcomes]
    assert [code for code, text in outcomes] == [0] * len(outcomes), "\n".join(texts)[-6000:]
    lines = [match for text in texts for match in _LINE.findall(text)]
    found = {int(rank): tuple(values.split()) for rank, *_, values in lines}
    assert sorted(found) == list(range(len(lines))), "\n".join(texts)[-6000:]
    assert {int(size) for _, size, *_ in lines} == {len(lines)}, texts
    return found


def places(*outcomes: tuple[int, str]) -> dict[int, tuple[int, int]]:
    """Of each rank: which it is on its node, and of how many."""
    lines = [match for _, text in outcomes for match in _LINE.findall(text)]
    return {int(rank): (int(local), int(size)) for rank, _, local, size, _ in lines}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
