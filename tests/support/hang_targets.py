"""Runs in which a rank hangs or is slow, for test_watchdog.py.

As a script, for each "PLACE RANK RUN_FILE" that it reads from stdin, it starts the run of the file in which that rank,
or with -1 each, hangs at that place, and answers with "exit code N" on stdout. One fork server serves all. Started by
torchrun it takes them as arguments, and is a rank.
"""

import functools
import os
import signal
import sys
import time

from meshwright.base.processes import leave
from meshwright_run.launch.local import launch, warm_up
from meshwright_run.launch.rank import guarded
from meshwright_run.run_file import load_run
from meshwright_run.run_rank import run_rank


def stop():
    """As a debugger, an operator or a frozen machine does it: no thread runs any more."""
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_long():
    """As a file system that does not answer: the process lives."""
    time.sleep(10**6)


def sleep():
    time.sleep(0.6)


def places():
    """Where a rank can hang: the class and name of a method, on which of its calls (0: each), and how."""
    from meshwright.checkpoint.saving import Saving
    from meshwright.manager.data_parallel import DataParallelManager
    from meshwright.manager.forward import Forward
    from meshwright_run.data.feed import Feed

    return {
        "data": (Feed, "microbatches", 4, wait_long),
        "sleepy loss": (Forward, "loss", 0, sleep),
        "step": (DataParallelManager, "forward_backward", 2, stop),
        "stage code": (DataParallelManager, "finish_gradients", 3, wait_long),
        "save": (Saving, "write", 1, stop),
        "code": (DataParallelManager, "clip_grad_norm", 2, wait_long),
    }


def run_and_hang(store, config, place, rank):
    if rank in (-1, int(os.environ["RANK"])):
        owner, name, call, hang = places()[place]
        method, calls = getattr(owner, name), 0

        @functools.wraps(method)
        def hanging(*args, **kwargs):
            nonlocal calls
            calls += 1
            if call in (0, calls):
                hang()
            return method(*args, **kwargs)

        setattr(owner, name, hanging)
    run_rank(store, config)


def main():
    if sys.argv[1:]:
        place, rank, path = sys.argv[1:]
        leave(guarded(run_and_hang, (load_run(path), place, int(rank))))
    warm_up()
    for line in sys.stdin:
        place, rank, path = line.rstrip("\n").rsplit(" ", 2)
        config = load_run(path)
        exit_code = launch(run_and_hang, (config, place, int(rank)), nproc=config.nproc)
        sys.stdout.write(f"exit code {exit_code}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
