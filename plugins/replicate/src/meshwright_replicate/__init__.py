"""Copies of a run's state in the memory of its nodes, which outlive the processes of its ranks.

[Note: keepers] On each node a small process, the keeper, holds the last steps of the node's ranks and of the ranks of
the node before it. It lives as long as the process that starts the ranks, so restarted ranks find it. What they resume
from is a checkpoint like any other, in a place of its own. See docs/reference/memory-replicas.md.
"""
