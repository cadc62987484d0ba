"""State of a model in stages under the names of the whole one: parameters, optimizers, copies, pieces.

What a checkpoint looks like on disk is core's.
"""
