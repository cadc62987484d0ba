"""Start and end of the ranks of one node, their heartbeats, and reports of failures."""
