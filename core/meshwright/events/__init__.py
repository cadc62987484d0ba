"""What observers get to know of a run: its start, steps, evaluations, checkpoints, faults and end; no torch."""
