"""Explain a run in words before it begins: every sentence follows from the plan, the mesh or the run file."""
