"""What lies in the output directory of a run."""

METRICS, CURVE, MODEL, SUMMARY, RUN = "metrics.jsonl", "loss.png", "model", "summary.json", "run.yaml"
AVERAGED_MODEL = f"{MODEL}-ema"
"""The model with averaged weights."""
CHECKPOINTS = "checkpoints"
EVENTS = "events.jsonl"
"""What has happened to the run, sitting by sitting; never cut short."""
RANKS = "ranks"
"""A file of each rank, with its times and memory, step by step."""
TIMELINE, PLANNED = "timeline", "planned.json"
"""A directory with a file of each rank of a pipeline, with when it has computed what in some steps, and the plan."""
REFERENCE = "reference.npz"
LOCK, HOLDER = ".lock", ".lock.json"
"""The file that is locked, and another that says by whom: whoever tries to lock a file may empty it."""
LISTED = ".written.json"
"""The names in the directory that runs have made: these may be replaced, and no others."""
ON_THE_WAY = (f"{MODEL}.checkpoint", f"{MODEL}.writing", f"{AVERAGED_MODEL}.writing")
"""Directories that become a model, or a checkpoint of which one is made."""
REPLACED = (CHECKPOINTS, MODEL, AVERAGED_MODEL, RANKS, TIMELINE, "profile", "faults", *ON_THE_WAY)
REPLACED_FILES = (METRICS, CURVE, EVENTS, REFERENCE, SUMMARY, RUN)
"""Directories and files that a run makes, and removes where it replaces another."""
