"""A model as structure and values: its blocks, how it is made, filled, recomputed and compiled. Knows no mesh axis."""
