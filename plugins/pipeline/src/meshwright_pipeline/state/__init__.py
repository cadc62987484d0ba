"""State of a model in stages under the names of the full model: parameters, optimizers, shared parameters."""
