"""A step of a run, done again, and held to what was written, to other ranks, and to the same step of another run."""
