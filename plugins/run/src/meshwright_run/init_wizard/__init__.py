"""Create a first run file from five answers."""
