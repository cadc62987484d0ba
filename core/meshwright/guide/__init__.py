"""Help for newcomers: a first run file, a check of the machine, and an explanation of a run before it begins."""
