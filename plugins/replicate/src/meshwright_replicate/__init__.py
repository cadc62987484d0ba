"""Replicas of a run's state in the memory of its nodes, which outlive the processes of the ranks.

[Note: replica servers] On each node a small process, the replica server, holds the last steps of the node's ranks and
of the previous node's ranks. It lives as long as the process that starts the ranks, so restarted ranks find it. They
resume from a replica as from any other checkpoint, with a storage of its own. See docs/reference/memory-replicas.md.
"""
