"""TODO: what is in this room, and what is not."""
