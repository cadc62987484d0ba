"""Runs in which a rank hangs, for test_timeouts.py, run as a script: `python hang_targets.py`.

For each "PLACE RANK RUN_FILE" that it reads from stdin, it starts the run of the file in which that rank hangs at that
place, and answers with "exit code N" on stdout. One fork server serves all.
"""

import os
import signal
import sys
import time

from meshwright.launch.local import launch, warm_up
from meshwright.train.run import run_rank
from meshwright.train.run_file import load_run


def stop():
    """As a debugger, an operator or a frozen machine does it: no thread runs any more."""
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_long():
    """As a file system that does not answer: the process lives."""
    time.sleep(10**6)


def places():
    """Where a rank can hang: the class and name of a method, on which of its calls, and how."""
    from meshwright.checkpoint.export import Export
    from meshwright.checkpoint.saving import Saving
    from meshwright.manager.data_parallel import DataParallelManager

    return {
        "step": (DataParallelManager, "forward_backward", 2, stop),
        "evaluation": (DataParallelManager, "eval_loss", 1, stop),
        "save": (Saving, "write", 1, stop),
        "export": (Export, "__init__", 1, stop),
        "code": (DataParallelManager, "clip_grad_norm", 2, wait_long),
    }


def run_and_hang(store, config, place, rank):
    if int(os.environ["RANK"]) == rank:
        owner, name, call, hang = places()[place]
        method, calls = getattr(owner, name), 0

        def hanging(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == call:
                hang()
            return method(*args, **kwargs)

        setattr(owner, name, hanging)
    run_rank(store, config)


def main():
    warm_up()
    for line in sys.stdin:
        place, rank, path = line.split()
        exit_code = launch(run_and_hang, (load_run(path), place, int(rank)), nproc=2)
        sys.stdout.write(f"exit code {exit_code}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
