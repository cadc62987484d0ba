"""Runs of a run file: from the file to the output directory."""
