"""A first run file, from five answers."""
