"""How a model becomes stages: where it is cut, what crosses, and trial runs that find that out."""
