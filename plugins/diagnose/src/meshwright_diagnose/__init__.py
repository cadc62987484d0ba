"""Diagnosis of runs: replay steps, compare runs and profiles, and check machines."""
