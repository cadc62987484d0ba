"""Errors, types, validation of configs, process helpers and the version, used by every other package."""
