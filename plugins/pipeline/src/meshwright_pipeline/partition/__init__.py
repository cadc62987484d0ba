"""Splitting of a model into stages: the blocks of each, boundary tensors, and trial runs that determine both."""
