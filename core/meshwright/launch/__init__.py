"""Ways to start the ranks of a run, and what one rank does to begin, to be watched and to end.

What the ranks then compute is in `train`; how they find each other's places is in `mesh`.
"""
