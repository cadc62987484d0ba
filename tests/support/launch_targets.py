"""Jobs for test_launch.py, run as a script: `python launch_targets.py CASE NPROC`, or `... serve`.

A script, so that ranks can import the functions again (as `__mp_main__`) and that stderr holds all that a user sees.
Under torchrun, which sets RANK, it runs the case as that rank. `serve` launches each "CASE NPROC" that it reads from
stdin, with one fork server for all, and answers with "exit code N" on stdout.
"""

import os
import signal
import sys
import time
from datetime import timedelta

from meshwright.base.errors import ModelError
from meshwright.base.processes import exit_process
from meshwright.launch.environment import is_launched
from meshwright_run.launch.local import launch_ranks, start_fork_server
from meshwright_run.launch.rank_process import run_guarded

GROUP_TIMEOUT_S = 300  # Far longer than any test may take: a test that has to wait for it fails


def join_world(store):
    """Form the process group and prove it by a collective; return the rank."""
    import torch
    from torch import distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit, store = timedelta(seconds=GROUP_TIMEOUT_S), dist.PrefixStore("world", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    total = torch.tensor(rank)
    dist.all_reduce(total)
    if total != world_size * (world_size - 1) // 2:
        raise RuntimeError(f"all_reduce over {world_size} ranks gave {total}")
    return rank


def reduce_forever(is_failing=False, fail=lambda: None):
    """Run collectives, in the middle of which this rank fails if it is to."""
    import torch
    from torch import distributed as dist

    for step in range(10**9):
        if step == 10 and is_failing:
            fail()
        dist.all_reduce(torch.ones(1000))


def start_and_finish(store, started_s):
    import torch
    from torch import distributed as dist

    rank = join_world(store)
    sys.stdout.write(f"rank {rank} ready after {time.time() - started_s:.1f} s, {torch.get_num_threads()} threads\n")
    dist.destroy_process_group()


def raise_value_error():
    raise ValueError("a bad value in step 10")


def raise_model_error():
    raise ModelError("no such model")


def value_error_on_rank_2(store, started_s):
    reduce_forever(join_world(store) == 2, raise_value_error)


def model_error_on_all_ranks(store, started_s):
    join_world(store)
    raise_model_error()


def model_error_on_rank_1(store, started_s):
    reduce_forever(join_world(store) == 1, raise_model_error)


def kill_rank_1(store, started_s):
    reduce_forever(join_world(store) == 1, lambda: os.kill(os.getpid(), signal.SIGKILL))


def rank_0_ignores_sigterm(store, started_s):
    if join_world(store) == 1:
        raise_value_error()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(GROUP_TIMEOUT_S)


def run_until_stopped(store, started_s):
    join_world(store)
    sys.stdout.write(f"pid {os.getpid()}\n")
    sys.stdout.flush()
    reduce_forever()


def peer_failure_without_cause(store, started_s):
    """Rank 1 closes its connections and says nothing: the peer's error is all that there is to tell."""
    if join_world(store) == 1:
        from torch import distributed as dist

        dist.destroy_process_group()
        time.sleep(GROUP_TIMEOUT_S)
    reduce_forever()


def serve():
    start_fork_server()
    for line in sys.stdin:
        name, nproc = line.split()
        exit_code = launch_ranks(globals()[name], (time.time(),), nproc=int(nproc))
        sys.stdout.write(f"exit code {exit_code}\n")
        sys.stdout.flush()


def main():
    # A shell starts what it runs in the background with SIGINT ignored, and so do we inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.argv[1] == "serve":
        return serve()
    case, nproc, started_s = globals()[sys.argv[1]], int(sys.argv[2]), time.time()
    if is_launched():
        exit_process(run_guarded(case, (started_s,)))
    start_fork_server()
    sys.stdout.write("warming up\n")
    sys.stdout.flush()
    sys.exit(launch_ranks(case, (started_s,), nproc=nproc))


if __name__ == "__main__":
    main()
