"""Tensors that are divided over ranks: pieces and their names, norms, exact sums, and state that moves between layouts.

Files are in `checkpoint`; how a strategy divides its parameters is the strategy's.
"""
