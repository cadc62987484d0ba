"""A look at the machine: what is there, what is wrong with it, and how to mend it."""
