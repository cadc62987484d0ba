"""Shared implementation of strategies in which each rank runs the full model on its own micro-batches."""
