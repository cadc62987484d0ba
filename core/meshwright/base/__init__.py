"""Errors, types, checks of plain values and the version, used by every other room."""
