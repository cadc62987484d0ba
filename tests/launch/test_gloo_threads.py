"""Processes whose collectives are over end as usual, however late gloo's threads get a core."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LATE = """
import ctypes, hashlib, os, threading
from meshwright import open_world
from meshwright._compat.torch import GLOO_THREAD

def let_go():
    ctypes.CDLL(None).prctl(15, GLOO_THREAD.encode(), 0, 0, 0)
    is_on.set()
    # Busy, without Python's lock.
    hashlib.sha256(bytes(200_000_000)).digest()
    os.write(1, b"has let go")

is_on = threading.Event()
open_world("cpu")
threading.Thread(target=let_go, daemon=True).start()
is_on.wait()
"""
RANKS = """
import os
from pathlib import Path
import torch
import torch.distributed as dist
from meshwright import open_world

open_world("cpu")
groups = [dist.new_group() for _ in range(2)]
for group in groups:
    dist.barrier(group=group)
for task in Path("/proc/self/task").iterdir():
    # All threads on one core, and those of gloo after all others.
    os.sched_setaffinity(int(task.name), {min(os.sched_getaffinity(0))})
    if "gloo_run" in (task / "comm").read_text():
        os.setpriority(os.PRIO_PROCESS, int(task.name), 19)
for index in range(40):
    dist.all_reduce(torch.ones(100_000), group=groups[index % 2], async_op=True).wait()
"""


def test_a_process_ends_once_threads_of_gloo_have_let_go():
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "has let go"), done.stderr


def test_ranks_that_have_done_their_work_are_not_aborted(tmp_path: Path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS, encoding="utf-8")
    starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run([*starter, str(script)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
