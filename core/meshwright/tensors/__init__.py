"""Sharded tensors: local chunks, gradient norms, high-precision sums, and state that moves between layouts."""
