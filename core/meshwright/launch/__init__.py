"""Join the ranks that a launcher has started, and open their world."""
