"""Cost of failures: how often ranks fail, how long a save takes, and the best interval between saves."""
