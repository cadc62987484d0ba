"""State of a model in stages under the names of the whole one: parameters, optimizers, gradients of copies."""
