"""The version of all distributions of the project."""

__version__ = "0.1.0"
"""The version of all distributions of the project."""
