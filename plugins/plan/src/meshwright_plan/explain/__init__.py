"""Explain a run in prose before it begins: every sentence follows from the plan, the mesh or the run file."""
