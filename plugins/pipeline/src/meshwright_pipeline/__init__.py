"""Pipeline parallelism over any strategy."""
