"""The training loop, which runs under any strategy. It does not depend on run files."""
