"""The strategy contract: hooks, specs, the plugin registry, and stacks of strategies."""
