"""Start the ranks of a run on this machine, watch them, and end them."""
