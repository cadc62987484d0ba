"""The contract of strategies: hooks, specs, the registry that finds plugins, and stacks of strategies by name.

Whoever writes a strategy needs this room, `mesh` and `base` to register one. What strategies share is in `manager`.
"""
