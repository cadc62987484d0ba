"""Start a command as several ranks that share one GPU, each of which takes itself for the only one of its node.

    python benchmarks/gpu/ranks.py --ranks 2 -- meshwright train run.yaml

NCCL refuses two ranks on one device of one host. Each rank gets a host name of its own (NCCL_HOSTID), so that NCCL
talks over sockets; on a CPU the variables have no effect.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys

NCCL = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What a launcher tells this rank."""
    place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    reported = {name: str(value) for name, value in place.items()}
    return {**os.environ, **reported, "MASTER_ADDR": "127.0.0.1", "NCCL_HOSTID": f"rank-{rank}", **NCCL}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [subprocess.Popen(command, env=environment(rank, options.ranks, port)) for rank in range(options.ranks)]
    return max(abs(child.wait()) for child in children)


if __name__ == "__main__":
    sys.exit(main())
