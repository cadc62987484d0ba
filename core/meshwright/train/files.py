"""What lies in the output directory of a run."""

METRICS, CURVE, MODEL, SUMMARY, RUN = "metrics.jsonl", "loss.png", "model", "summary.json", "run.yaml"
AVERAGED_MODEL = f"{MODEL}-ema"
"""The model with averaged weights."""
CHECKPOINTS = "checkpoints"
REFERENCE = "reference.npz"
LOCK, HOLDER = ".lock", ".lock.json"
"""The file that is locked, and another that says by whom: whoever tries to lock a file may empty it."""
