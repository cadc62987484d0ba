"""What observers are told of a run: its beginning, steps, evaluations, checkpoints, faults and end; no torch."""
