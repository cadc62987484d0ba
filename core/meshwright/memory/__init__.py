"""Copies of a run's state in the memory of its nodes, which outlive the processes of its ranks.

[Note: keepers] On each node a small process, the keeper, holds the last steps of the ranks there, and those that ranks
of the node before it have sent. It lives as long as what has started the ranks; when these are begun anew, they find it
there. What they go on from is a checkpoint like any other, in a place of its own. See docs/memory-copies.md.
"""

from __future__ import annotations

__all__: list[str] = []
