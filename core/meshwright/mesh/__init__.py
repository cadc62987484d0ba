"""The mesh: sizes and degrees of its axes, the world of ranks, and each rank's coordinates."""
