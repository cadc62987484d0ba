"""Search for the fastest layouts that fit into memory."""
