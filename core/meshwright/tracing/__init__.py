"""Observe the operations, memory and collectives of a piece of code with torch's dispatch modes."""
