"""The mesh contract: sizes and degrees of the axes, the world of ranks, and each rank's place along every axis."""
