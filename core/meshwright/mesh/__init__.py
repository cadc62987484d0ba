"""The mesh: sizes and degrees of the axes, the world of ranks, and the place of each rank along every axis."""
