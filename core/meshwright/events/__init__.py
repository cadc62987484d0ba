"""Events of a run for observers: start, steps, evaluations, checkpoints, faults and end. Imports no torch."""
