"""Start the ranks of a run, join ranks that a launcher has started, watch them, and end them."""
