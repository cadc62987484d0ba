"""Record profiles of steps on chosen ranks, summarize, render and compare them, and write files after a fault."""
