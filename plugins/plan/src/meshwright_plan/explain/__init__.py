"""Describe a run in sentences before it starts. Each sentence follows from the plan, the mesh or the run file."""
