"""The axes that any strategy may claim: tensor, context and expert parallelism, each in a room of its own."""
