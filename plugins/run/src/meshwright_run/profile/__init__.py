"""Profiles of steps: recorded on chosen ranks, summarized, shown and compared; and what a fault leaves behind."""
