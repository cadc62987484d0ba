"""Calibration: measure this machine and write its device file."""
