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

from meshwright.base.processes import exit_process
from meshwright_run.launch.local import launch_ranks, start_fork_server
from meshwright_run.launch.rank_process import run_guarded
from meshwright_run.run_file import load_run
from meshwright_run.run_rank import run_rank


def stop_process():
    """As a debugger, an operator or a frozen machine does it: no thread runs any more."""
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep_forever():
    """As a file system that does not answer: the process lives."""
    time.sleep(10**6)


def sleep_briefly():
    time.sleep(0.6)


def hang_points():
    """Where a rank can hang: the class and name of a method, on which of its calls (0: each), and how."""
    from meshwright.checkpoint.saving import CheckpointSave
    from meshwright.manager.data_parallel import DataParallelManager
    from meshwright.manager.forward_runner import ForwardRunner
    from meshwright_run.data.train_sampler import TrainSampler

    return {
        "data": (TrainSampler, "read_microbatches", 4, sleep_forever),
        "sleepy loss": (ForwardRunner, "compute_loss", 0, sleep_briefly),
        "step": (DataParallelManager, "forward_backward", 2, stop_process),
        "stage code": (DataParallelManager, "finish_gradients", 3, sleep_forever),
        "save": (CheckpointSave, "write", 1, stop_process),
        "code": (DataParallelManager, "clip_grad_norm", 2, sleep_forever),
    }


def run_and_hang(store, config, place, rank):
    if rank in (-1, int(os.environ["RANK"])):
        owner, name, call, hang = hang_points()[place]
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
        exit_process(run_guarded(run_and_hang, (load_run(path), place, int(rank))))
    start_fork_server()
    for line in sys.stdin:
        place, rank, path = line.rstrip("\n").rsplit(" ", 2)
        config = load_run(path)
        exit_code = launch_ranks(run_and_hang, (config, place, int(rank)), nproc=config.nproc)
        sys.stdout.write(f"exit code {exit_code}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
