"""The strategy `single`: one part on every rank, and the reference that every other one is compared with."""
