"""Errors, checks of plain values and the version: what every other room may use, and which uses none."""
