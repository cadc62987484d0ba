"""The strategy `single`: one rank without sharding, the reference for all other strategies."""
