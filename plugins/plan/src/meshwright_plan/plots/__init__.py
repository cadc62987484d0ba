"""Plots of a plan, as an HTML page and as PNG files."""
