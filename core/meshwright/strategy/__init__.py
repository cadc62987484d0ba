"""The contract of strategies: hooks, specs, the registry that finds plugins, and stacks of strategies by name."""
