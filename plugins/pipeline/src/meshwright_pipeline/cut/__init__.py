"""How a model becomes stages: where it is cut, what crosses, and trial runs that find that out.

Nothing here trains, or knows when a stage runs.
"""
