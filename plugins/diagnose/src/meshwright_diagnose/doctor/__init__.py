"""Check the machine: what is there, what is wrong with it, and how to fix it."""
