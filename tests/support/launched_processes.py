"""Start ranks as a launcher, a kubelet or a user would, and read what they print."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
LOOP = str(HERE / "launcher_loop.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TIMEOUT_S = 300.0  # Generous: a rank imports torch and transformers for itself, on a machine that others may be using

GRACE_S = 30.0  # From the first failure on, so that the others can say what they have to say

_LAUNCHER_VARIABLE = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_|GROUP_|ROLE_|MASTER_|TORCHELASTIC_|SLURM_|OMPI_|PMI|MPI_|PET_|JOB_COMPLETION_INDEX|RAY_)"
)
_LINE = re.compile(r"ranks (\d+) (\d+) (\d+) (\d+) losses((?: [\d.e+-]+)+)")

LossesByRank = dict[int, tuple[str, ...]]  # The losses of each rank, as printed


def build_clean_environment(**variables: str) -> dict[str, str]:
    """This process's environment without what any launcher has left in it."""
    plain = {name: value for name, value in os.environ.items() if not _LAUNCHER_VARIABLE.match(name)}
    return {**plain, "OMP_NUM_THREADS": "1", **variables}


def run_commands(*commands: tuple[Sequence[str], Mapping[str, str]]) -> list[tuple[int, str]]:
    """Run commands side by side until a while after one has failed; return exit codes and outputs."""
    texts = [tempfile.TemporaryFile("w+") for _ in commands]  # noqa: SIM115
    processes = [
        subprocess.Popen(command, env=environment, stdout=text, stderr=subprocess.STDOUT, start_new_session=True)
        for (command, environment), text in zip(commands, texts, strict=True)
    ]
    deadline_s = time.monotonic() + TIMEOUT_S
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline_s:
            if any(process.poll() for process in processes):
                deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
            time.sleep(0.1)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for text in texts:
        text.seek(0)
    return [(process.returncode, text.read()) for process, text in zip(processes, texts, strict=True)]


def parse_losses(*outcomes: tuple[int, str]) -> LossesByRank:
    """What all ranks of a run of LOOP have printed; fails where a process has failed."""
    texts = [text for code, text in outcomes]
    assert [code for code, text in outcomes] == [0] * len(outcomes), "\n".join(texts)[-6000:]
    lines = [match for text in texts for match in _LINE.findall(text)]
    found = {int(rank): tuple(values.split()) for rank, *_, values in lines}
    assert sorted(found) == list(range(len(lines))), "\n".join(texts)[-6000:]
    assert {int(size) for _, size, *_ in lines} == {len(lines)}, texts
    return found


def parse_local_ranks(*outcomes: tuple[int, str]) -> dict[int, tuple[int, int]]:
    """Of each rank: which it is on its node, and of how many."""
    lines = [match for _, text in outcomes for match in _LINE.findall(text)]
    return {int(rank): (int(local), int(size)) for rank, _, local, size, _ in lines}


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
