"""Sharded tensors: local rectangles and their names, norms, exact sums, and state that moves between layouts."""
