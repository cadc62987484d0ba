"""The training loop, which any strategy runs in. It knows no run file."""
