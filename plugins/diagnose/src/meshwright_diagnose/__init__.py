"""Diagnosis of meshwright runs: replay and compare steps, profiles, and a check of a machine or a run."""
