"""Observe the operations, memory and collectives of a piece of code, by dispatch modes of torch."""
