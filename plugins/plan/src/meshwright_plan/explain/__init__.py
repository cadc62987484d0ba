"""Explain a run as text before it begins: every sentence follows from the plan, the mesh or the run file."""
