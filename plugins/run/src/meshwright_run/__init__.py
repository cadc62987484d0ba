"""Train from a run file: commands, checks, data, training and the output directory."""
