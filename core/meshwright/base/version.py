"""The version that all of the project's distributions carry."""

__version__ = "0.1.0"
"""The version of all distributions of the project."""
