"""Execution of a step on one rank: its actions, its stages and the loss of the last stage."""
